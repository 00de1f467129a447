# SPDX-License-Identifier: Apache-2.0
"""Methods as one writes them on a command line."""

from __future__ import annotations

import pytest

from kvcache.settings import load_settings
from repair.checkpoint_config import CheckpointError
from repair.registry import UnknownMethodError
from repair.relaxkv import RelaxKV
from repair.spec import MethodSpec, MethodSpecError, parse_methods


def test_commas_part_methods_and_parameters() -> None:
    assert parse_methods("full, cacherepair:parts=v,keep_first=true ,stale:ratio=0.15,k=8,layers=[1,2]") == [
        MethodSpec("full"),
        MethodSpec("cacherepair", {"parts": "v", "keep_first": True}),
        MethodSpec("stale", {"ratio": 0.15, "k": 8, "layers": [1, 2]}),
    ]


def test_a_preset_is_a_name() -> None:
    assert parse_methods("stale:preset=0.1") == [MethodSpec("stale", {"preset": "0.1"})]


def test_all_presets_of_a_method() -> None:
    specs = parse_methods("stale,epic:preset=all,infoflow:preset=0.1,relaxkv:sinks=false,preset=all")
    assert [spec.label for spec in specs[:6]] == [
        "stale",
        *(f"epic:preset={k}" for k in (8, 16, 32, 64)),
        "infoflow:preset=0.1",
    ]
    assert {spec.params["preset"] for spec in specs[6:]} == set(RelaxKV.presets)
    assert all(spec.params["sinks"] is False for spec in specs[6:])
    with pytest.raises(MethodSpecError, match="'stale' has no presets"):
        parse_methods("stale:preset=all")


def test_a_checkpoint_of_its_own() -> None:
    one, two = parse_methods("cacherepair@runs/m,cacherepair@runs/l:parts=k")
    assert (one.checkpoint, one.params) == ("runs/m", {})
    assert (two.checkpoint, two.params) == ("runs/l", {"parts": "k"})
    assert (two.family, two.label) == ("cacherepair@runs/l", "cacherepair@runs/l:parts=k")


@pytest.mark.parametrize("text", ["cacherepair:keep_first=true,parts=v", "stale@a/b:x=[1,2],y=0.5", "full"])
def test_a_label_reads_back_as_itself(text: str) -> None:
    (spec,) = parse_methods(text)
    assert parse_methods(spec.label) == [spec]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "want name"),
        ("full,,stale", "want name"),
        ("parts=v", "before any method"),
        ("cacherepair:parts", "want key=value, got 'parts'"),
        ("cacherepair:", "want key=value"),
        ("cacherepair:parts=", "want key=value"),
        ("cacherepair:=v", "want key=value"),
        ("cacherepair:parts=v,parts=k", "parts is given twice"),
        ("cacherepair@", "want name"),
        ("stale,full,stale", "stale: named twice"),
        ("cacherepair:a=1,b=2,cacherepair:b=2,a=1", "named twice"),
    ],
)
def test_what_is_not_a_method(text: str, said: str) -> None:
    with pytest.raises(MethodSpecError, match=said):
        parse_methods(text)


def test_an_unknown_method_names_the_known() -> None:
    with pytest.raises(UnknownMethodError, match=r"'cacherepar'; available: .*cacherepair.*full.*stale"):
        parse_methods("cacherepar:parts=v")


def test_the_checkpoint_takes_the_place_of_the_settings(tiny, tmp_path) -> None:
    settings = load_settings(repair={"cacherepair": str(tmp_path / "settings")})
    with pytest.raises(CheckpointError, match="own"):
        MethodSpec("cacherepair", checkpoint=str(tmp_path / "own")).create(tiny, settings)
    with pytest.raises(MethodSpecError, match="'stale' has no checkpoint"):
        MethodSpec("stale", checkpoint="own").create(tiny, settings)
