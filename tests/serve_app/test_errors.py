# SPDX-License-Identifier: Apache-2.0
"""What each failure of a request's flow becomes, also after it crossed a Ray handle."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve.exceptions import BackPressureError
from starlette.requests import Request

from repair.base import MethodParamsError
from repair.registry import UnknownMethodError
from retrieval.errors import UnknownChunkError, UnknownCorpusError
from serve_app.bounds import read_body
from serve_app.errors import ApiError, to_api_error, unavailable


class EngineDeadError(RuntimeError):
    """Like the engine's own, which only vLLM's process can import quickly."""


CASES = [
    (UnknownCorpusError("no corpus 'x'; there is: y"), 404, "corpus_not_found", "there is: y"),
    (UnknownChunkError("no chunk 'x'"), 404, "chunk_not_found", "no chunk 'x'"),
    (UnknownMethodError("unknown method"), 400, "unknown_method", "unknown method"),
    (MethodParamsError("takes no params"), 400, "invalid_value", "takes no params"),
    (BackPressureError(3, 2, 429, 7.2), 429, "overloaded", "later"),
    (EngineDeadError("gone"), 503, "unavailable", "gone"),
    (TimeoutError(), 503, "unavailable", "in time"),
    (ValueError("s3cret path"), 500, "internal", "x-request-id"),
    (ApiError(418, "teapot", code="t"), 418, "t", "teapot"),
]


@pytest.mark.parametrize("crossed", [False, True], ids=["local", "crossed"])
@pytest.mark.parametrize(("error", "status", "code", "words"), CASES, ids=[type(case[0]).__name__ for case in CASES])
def test_mapping(error: Exception, status: int, code: str, words: str, crossed: bool) -> None:
    if crossed:
        error = RayTaskError("f", "traceback", error).as_instanceof_cause()
    mapped = to_api_error(error)
    assert (mapped.status, mapped.code) == (status, code)
    assert words in mapped.message and "s3cret" not in mapped.message
    assert ("retry-after" in mapped.headers()) == (status in (429, 503))


def test_a_dead_replica_is_a_503() -> None:
    assert to_api_error(ActorDiedError()).status == 503


def test_retry_after_is_rounded_up() -> None:
    assert to_api_error(BackPressureError(3, 2, 429, 7.2)).headers() == {"retry-after": "8"}


def test_an_api_error_survives_pickling() -> None:
    error = unavailable("gone")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.status, copy.body(), copy.headers()) == (error.status, error.body(), error.headers())


async def test_a_client_that_leaves_before_the_end_of_its_body_is_no_fault_of_the_service() -> None:
    told = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(told)

    scope = {"type": "http", "method": "POST", "headers": [(b"content-type", b"application/json")]}
    with pytest.raises(ApiError) as error:
        await read_body(Request(scope, receive), 1000)
    assert (error.value.status, error.value.code) == (499, "client_gone")
