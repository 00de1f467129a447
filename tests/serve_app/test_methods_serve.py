# SPDX-License-Identifier: Apache-2.0
"""Repair methods over HTTP: the real repairer between mocks. Each request has its method and parameters, in bounds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest
from ray import serve

from kvcache.target import TargetLLM
from repair.registry import REPAIRERS
from serve_app.app import Parts, bind
from serve_app.mocks import CHUNK_TOKENS, MockEngine, MockRetriever
from serve_app.repairer import RepairerDeployment
from tests.repair.methods import checkpoint
from tests.serve_app.conftest import Service
from tests.serve_app.test_methods import BAD, BOUNDS, GOOD, METHODS

GUIDED = {name for name in METHODS if REPAIRERS[name].needs_query}


@pytest.fixture(scope="module")
def repairing(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One more application on the folder's Serve, in which every method mends real KV of the tiny target."""
    repair = service.settings.repair.model_copy(
        update={
            "methods": METHODS,
            "cacherepair": checkpoint(TargetLLM.load(settings=service.settings), tmp_path_factory.mktemp("network")),
            "selective": type(service.settings.repair.selective)(**BOUNDS),
        }
    )
    settings = service.settings.model_copy(update={"repair": repair})
    application = bind(settings, Parts(MockRetriever, RepairerDeployment, MockEngine))
    serve.run(application, name="repairing", route_prefix="/repairing")
    yield replace(service, url=f"{service.url}/repairing", settings=settings)
    serve.delete("repairing")


def ask(service: Service, method: str, question: str = "Who?", **params: Any) -> httpx.Response:
    return service.ask(question, rag={"method": method, "top_k": 3, "method_params": params})


def test_a_request_chooses_its_method_and_parameters(repairing: Service) -> None:
    """All at once: what waits together is mended together, each request by its own method."""
    with ThreadPoolExecutor(len(GOOD)) as pool:
        answers = list(pool.map(lambda case: ask(repairing, case[0], **case[1]), GOOD))
    for (name, params), answer in zip(GOOD, answers, strict=True):
        assert answer.status_code == 200, (name, params, answer.text)
        body = answer.json()
        assert body["rag"]["method"] == name and "fallback" not in body["rag"]
        cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert (cached > 3 * CHUNK_TOKENS) if name != "full" else cached == 0
        assert ("select" in body["stages_ms"]) == (name in {*GUIDED, "cacheblend", "kvshare-like"})


@pytest.mark.parametrize("name", BAD)
def test_bad_parameters_are_refused(repairing: Service, name: str) -> None:
    method, params, words = BAD[name]
    answer = ask(repairing, method, **params)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == (
        "invalid_request_error",
        "invalid_value",
        "rag.method_params",
    )
    assert words in error["message"], error
    assert ask(repairing, method).status_code == 200


@pytest.mark.parametrize("method", sorted(GUIDED))
@pytest.mark.parametrize("question", ["", " \n"])
def test_a_method_guided_by_the_question_needs_one(repairing: Service, method: str, question: str) -> None:
    answer = ask(repairing, method, question)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "empty_question")


def test_parameters_that_json_has_no_number_for(repairing: Service) -> None:
    body = {"messages": [{"role": "user", "content": "Who?"}], "rag": {"method": "epic", "method_params": {"ratio": 1}}}
    text = json.dumps(body).replace('"ratio": 1', '"ratio": NaN')
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{repairing.url}/v1/chat/completions", content=text, headers=headers, timeout=30)
    assert answer.status_code == 400, answer.text
