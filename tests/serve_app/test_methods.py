# SPDX-License-Identifier: Apache-2.0
"""Parameters of repair methods, from the body of a request to the method that takes or refuses them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvcache.settings import Settings
from kvcache.target import TargetLLM
from repair import create
from repair.registry import REPAIRERS
from serve_app.bounds import parse
from serve_app.errors import ApiError, to_api_error
from serve_app.schemas import ChatRequest
from tests.repair.methods import checkpoint
from tests.tiny import tiny_settings

METHODS = tuple(REPAIRERS)
BOUNDS = {"max_ratio": 0.5, "max_window": 8}
LAYERS = 3
"""Of the tiny target."""


@pytest.fixture(scope="module")
def settings(tiny: TargetLLM, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    network = checkpoint(tiny, tmp_path_factory.mktemp("network"))
    repair = {"methods": METHODS, "selective": BOUNDS, "cacherepair": network}
    return tiny_settings(tiny.model.name_or_path, repair=repair)


def ask(settings: Settings, method: str, params: dict[str, Any], question: str = "Who?") -> ChatRequest:
    rag = {"method": method, "method_params": params}
    body = {"messages": [{"role": "user", "content": question}], "rag": rag}
    return parse(json.dumps(body).encode(), ChatRequest, settings)


GOOD: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in METHODS),
    ("cacheblend", {"ratio": 0.5, "check_layer": 2, "deviation": "kv"}),
    ("epic", {"preset": "8"}),
    ("epic", {"preset": "64", "window": 2}),
    ("infoflow", {"layers": [0, 2], "reorder": True}),
    ("relaxkv", {"preset": "g", "sinks": False}),
    ("cacherepair", {"parts": "k", "keep_first": True}),
]


@pytest.mark.parametrize(("method", "params"), GOOD)
def test_a_request_chooses_its_method_and_parameters(
    tiny: TargetLLM, settings: Settings, method: str, params: dict[str, Any]
) -> None:
    request = ask(settings, method, params)
    assert request.rag is not None and request.rag.method_params == params
    create(method, tiny, settings).check_params(request.rag.method_params)


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "ratio 0": ("cacheblend", {"ratio": 0}, "ratio: Input should be greater than 0"),
    "ratio below 0": ("infoflow", {"ratio": -0.1}, "ratio: Input should be greater than 0"),
    "ratio above 1": ("prophetkv", {"ratio": 1.01}, "ratio: Input should be less than or equal to 1"),
    "ratio a text": ("prophetkv", {"ratio": "0.2"}, "ratio: Input should be a valid number"),
    "more anchors than tokens": ("relaxkv", {"ratio": 1.5}, "ratio: Input should be less than or equal to 1"),
    "more targets than tokens": ("relaxkv", {"preset": "g", "target_ratio": 2}, "target_ratio: Input should be less"),
    "k 0": ("epic", {"window": 0}, "window: Input should be greater than 0"),
    "check layer 0": ("kvshare-like", {"check_layer": 0}, "check_layer: Input should be greater than 0"),
    "check layer out of range": ("cacheblend", {"check_layer": LAYERS}, "check_layer must be 1 to 2"),
    "layers out of range": ("infoflow", {"layers": [0, LAYERS]}, "layers must be different ones of 0 to 2"),
    "layers below 0": ("infoflow", {"layers": [-1]}, "layers.0: Input should be greater than or equal to 0"),
    "no layers": ("infoflow", {"layers": []}, "layers: Tuple should have at least 1 item"),
    "ratio above the operator's": ("cacheblend", {"ratio": 0.6}, "ratio 0.6 is above this service's 0.5"),
    "preset above the operator's": ("cacheblend", {"preset": "0.6"}, "ratio 0.6 is above this service's 0.5"),
    "window above the operator's": ("epic", {"window": 16}, "window 16 is above this service's 8"),
    "unknown preset": ("epic", {"preset": "7"}, "no preset '7'; choose one of '8', '16', '32', '64'"),
    "preset a number": ("epic", {"preset": 8}, "no preset 8; choose one of '8'"),
    "preset a list": ("epic", {"preset": [8]}, "no preset [8]; choose one of '8'"),
    "another method's parameter": ("epic", {"ratio": 0.1}, "it takes preset, window"),
    "parts unknown": ("cacherepair", {"parts": "q"}, "parts must be one of"),
    "keep_first a number": ("cacherepair", {"keep_first": 1}, "keep_first must be true or false"),
    "a parameter that CacheRepair has not": ("cacherepair", {"ratio": 0.1}, "takes parts and keep_first, not ratio"),
    "a method without parameters": ("stale", {"ratio": 0.1}, "takes no method_params, got ratio"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_parameters_are_a_400(tiny: TargetLLM, settings: Settings, name: str) -> None:
    method, params, words = BAD[name]
    request = ask(settings, method, params)
    assert request.rag is not None
    with pytest.raises(ValueError) as refused:
        create(method, tiny, settings).check_params(request.rag.method_params)
    error = to_api_error(refused.value)
    assert (error.status, error.code, error.param) == (400, "invalid_value", "rag.method_params")
    assert words in error.message


@pytest.mark.parametrize("method", [name for name in METHODS if REPAIRERS[name].needs_query])
@pytest.mark.parametrize("question", ["", " \n"])
def test_a_method_guided_by_the_question_needs_one(settings: Settings, method: str, question: str) -> None:
    with pytest.raises(ApiError) as refused:
        ask(settings, method, {}, question)
    assert (refused.value.status, refused.value.code) == (400, "empty_question")


def test_no_number_is_no_ratio(settings: Settings) -> None:
    with pytest.raises(ApiError) as refused:
        ask(settings, "cacheblend", {"ratio": float("nan")})
    assert refused.value.status == 400
