# SPDX-License-Identifier: Apache-2.0
"""A body as long as allowed is parsed, and refused, at a cost that grows with its length and not with its faults."""

from __future__ import annotations

import gc
import itertools
import string
import time
from collections.abc import Iterable, Iterator

import pytest

from kvcache.settings import load_settings
from serve_app.bounds import parse
from serve_app.errors import ApiError
from serve_app.schemas import MAX_MESSAGES, ChatRequest, CompletionRequest

SETTINGS = load_settings()
LIMIT = SETTINGS.api.max_body_bytes
SECONDS = 2.0  # what is quadratic takes minutes
ASK = '"messages":[{"role":"user","content":"x"}]'


def full(before: str, items: Iterable[str], after: str) -> bytes:
    """A body of as many items as there is room for."""
    room, taken = LIMIT - len(before) - len(after), []
    for item in items:
        room -= len(item) + 1
        if room < 0:
            break
        taken.append(item)
    return f"{before}{','.join(taken)}{after}".encode()


def names(value: str) -> Iterable[str]:
    return (f'"{"".join(name)}":{value}' for name in itertools.product(string.ascii_letters, repeat=4))


def many(item: str) -> Iterable[str]:
    return itertools.repeat(item)


BODIES: dict[str, tuple[type[ChatRequest] | type[CompletionRequest], bytes, str]] = {
    "prompt of lists": (CompletionRequest, full('{"prompt":[', many("[]"), "]}"), "prompt"),
    "prompt of ids": (CompletionRequest, full('{"prompt":[', many("7"), "]}"), "prompt"),
    "prompt of texts": (CompletionRequest, full('{"prompt":[', many('"a"'), "]}"), "prompt"),
    "prompt of negative ids": (CompletionRequest, full('{"prompt":[', many("-1"), "]}"), "prompt"),
    "messages": (ChatRequest, full('{"messages":[', many("{}"), "]}"), "messages"),
    "parts": (ChatRequest, full('{"messages":[{"role":"user","content":[', many("{}"), "]}]}"), "messages"),
    "parts in each message": (
        ChatRequest,
        full('{"messages":[', many(f'{{"role":"user","content":[{",".join(["{}"] * MAX_MESSAGES)}]}}'), "]}"),
        "messages",
    ),
    "chunk ids": (ChatRequest, full(f'{{{ASK},"rag":{{"chunk_ids":[', many("0"), "]}}"), "rag.chunk_ids"),
    "good chunk ids": (ChatRequest, full(f'{{{ASK},"rag":{{"chunk_ids":[', many('"a"'), "]}}"), "rag.chunk_ids"),
    "method params": (
        ChatRequest,
        full(f'{{{ASK},"rag":{{"method_params":{{', names("{}"), "}}}"),
        "rag.method_params",
    ),
    "a long method param": (
        ChatRequest,
        full(f'{{{ASK},"rag":{{"method_params":{{"layers":[', many("7"), "]}}}"),
        "rag.method_params.layers",
    ),
    "stops": (ChatRequest, full(f'{{{ASK},"stop":[', many("0"), "]}"), "stop"),
    "fields": (ChatRequest, full(f"{{{ASK},", names("0"), "}"), "is not a field"),
    "fields of rag": (ChatRequest, full(f'{{{ASK},"rag":{{', names("0"), "}}"), "is not a field"),
    "fields of a part": (
        ChatRequest,
        full('{"messages":[{"role":"user","content":[{"type":"text","text":"x",', names("0"), "}]}]}"),
        "is not a field",
    ),
    "a long name": (ChatRequest, full(f'{{{ASK},"', ["max_tokn" * 130_000], '":0}'), "did you mean"),
    "a long number": (ChatRequest, full(f'{{{ASK},"seed":', ["9" * 1_040_000], "}"), "JSON"),
    "a long list": (ChatRequest, full(f'{{{ASK},"seed":[', many("0"), "]}"), "seed"),
}


@pytest.fixture
def small_heap() -> Iterator[None]:
    """The objects of all other tests are not the collector's business while a test is timed."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize("name", BODIES)
def test_refused_quickly_and_briefly(name: str) -> None:
    model, body, words = BODIES[name]
    assert LIMIT - 20_000 < len(body) <= LIMIT
    started = time.process_time()
    with pytest.raises(ApiError) as refused:
        parse(body, model, SETTINGS)
    assert time.process_time() - started < SECONDS
    assert refused.value.status == 400 and words in refused.value.message
    assert len(refused.value.message) < 1000 and len(refused.value.param or "") < 300


def test_a_union_of_lists_and_texts_names_the_member_that_fits() -> None:
    with pytest.raises(ApiError) as refused:
        parse(b'{"prompt":[3,-1,[]]}', CompletionRequest, SETTINGS)
    assert refused.value.param == "prompt.1" and "string" not in refused.value.message


def test_faults_beyond_the_first_three_are_counted() -> None:
    with pytest.raises(ApiError, match="and 7 more"):
        parse(full(f"{{{ASK},", itertools.islice(names("0"), 10), "}"), ChatRequest, SETTINGS)
    with pytest.raises(ApiError, match="and many more"):
        parse(full(f"{{{ASK},", itertools.islice(names("0"), 1000), "}"), ChatRequest, SETTINGS)
