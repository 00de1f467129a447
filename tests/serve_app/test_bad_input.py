# SPDX-License-Identifier: Apache-2.0
"""Whatever a client sends wrong is answered in OpenAI's shape, says what to change, and harms nobody else."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest

from tests.serve_app.conftest import MAX_MODEL_LEN, Service

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASK = {"role": "user", "content": "Who?"}


def chat(content: Any = "Who?", **fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content}], **fields}).encode()


def rag(**fields: Any) -> bytes:
    return chat(rag=fields)


def completion(prompt: Any = "Once", **fields: Any) -> bytes:
    return json.dumps({"prompt": prompt, **fields}).encode()


# name: (path, body, status, code, param, words of the message that tell what to change)
CASES: dict[str, tuple[str, bytes, int, str | None, str | None, str]] = {
    "empty question": (CHAT, chat(""), 400, "empty_question", "messages", "ask something"),
    "blank question": (CHAT, chat(" \n\t"), 400, "empty_question", "messages", "ask something"),
    "1 MB question": (CHAT, chat("x" * 2**20), 413, "body_too_large", None, "shorten"),
    "long question": (CHAT, chat("x" * 40_000), 400, "text_too_long", "messages", "32768"),
    "invalid UTF-8": (CHAT, chat("caf").replace(b"caf", b"caf\xe9"), 400, "invalid_encoding", None, "UTF-8"),
    "lone surrogate": (CHAT, chat("X").replace(b"X", rb"\ud800"), 400, "invalid_json", None, "JSON"),
    "NUL": (CHAT, chat("a\0b"), 400, "invalid_value", "messages.0.content", "NUL"),
    "NUL in a part": (CHAT, chat([{"type": "text", "text": "\0"}]), 400, "invalid_value", None, "NUL"),
    "NUL in a stop": (CHAT, chat(stop="\0"), 400, "invalid_value", "stop", "NUL"),
    "malformed JSON": (CHAT, b'{"messages": [', 400, "invalid_json", None, "not valid JSON"),
    "deep JSON": (CHAT, b'{"messages":' + b"[" * 100_000, 400, "invalid_json", None, "recursion"),
    "a list": (CHAT, b"[]", 400, "invalid_value", None, "object"),
    "no body": (CHAT, b"", 400, "invalid_json", None, "not valid JSON"),
    "no messages": (CHAT, b"{}", 400, "missing_field", "messages", "add it"),
    "zero messages": (CHAT, b'{"messages":[]}', 400, "invalid_value", "messages", "at least 1"),
    "answer last": (
        CHAT,
        json.dumps({"messages": [ASK, {"role": "assistant", "content": "I"}]}).encode(),
        400,
        "invalid_value",
        None,
        "the last of `messages` must have the role `user`",
    ),
    "two users": (CHAT, json.dumps({"messages": [ASK, ASK]}).encode(), 400, "invalid_value", "messages", "alternate"),
    "foreign role": (CHAT, b'{"messages":[{"role":"tool","content":"x"}]}', 400, "invalid_value", None, "role"),
    "an image": (
        CHAT,
        chat([{"type": "image_url", "image_url": {"url": "http://x"}}]),
        400,
        "invalid_value",
        "messages.0.content.0.type",
        "only text parts",
    ),
    "unknown field": (CHAT, chat(max_token=3), 400, "unknown_field", "max_token", "`max_tokens`"),
    "unknown rag field": (CHAT, rag(topk=3), 400, "unknown_field", "rag.topk", "`top_k`"),
    "unknown message field": (
        CHAT,
        b'{"messages":[{"role":"user","contents":"x"}]}',
        400,
        "missing_field",
        "messages.0.content",
        "`content`",
    ),
    "kv_transfer_params": (CHAT, chat(kv_transfer_params={}), 400, "forbidden_field", "kv_transfer_params", "remove"),
    "cache_salt": (CHAT, chat(cache_salt="x"), 400, "forbidden_field", "cache_salt", "remove it"),
    "extra_args": (COMPLETIONS, completion(extra_args={}), 400, "forbidden_field", "extra_args", "remove it"),
    "smuggled params": (CHAT, rag(kv_transfer_params={}), 400, "forbidden_field", "rag.kv_transfer_params", "remove"),
    "unknown method": (CHAT, rag(method="stail"), 400, "unknown_method", "rag.method", "stale"),
    "unknown corpus": (CHAT, rag(corpus="nowhere"), 404, "corpus_not_found", "rag.corpus", "default"),
    "corpus outside": (CHAT, rag(corpus="../../etc"), 400, "invalid_value", "rag.corpus", "match"),
    "unknown chunk": (CHAT, rag(chunk_ids=["chunk-99"]), 404, "chunk_not_found", "rag.chunk_ids", "chunk-99"),
    "chunk twice": (CHAT, rag(chunk_ids=["chunk-1"] * 2), 400, "invalid_value", "rag", "twice"),
    "no chunks": (CHAT, rag(chunk_ids=[]), 400, "invalid_value", "rag.chunk_ids", "at least 1"),
    "many chunks": (CHAT, rag(chunk_ids=[f"c{i}" for i in range(65)]), 400, "invalid_value", "rag.chunk_ids", "64"),
    "chunks and top_k": (CHAT, rag(chunk_ids=["chunk-1"], top_k=2), 400, "invalid_value", "rag", "either"),
    "top_k 0": (CHAT, rag(top_k=0), 400, "invalid_value", "rag.top_k", "greater than or equal to 1"),
    "top_k negative": (CHAT, rag(top_k=-1), 400, "invalid_value", "rag.top_k", "greater than or equal to 1"),
    "top_k huge": (CHAT, rag(top_k=10**9), 400, "invalid_value", "rag.top_k", "1 to 64"),
    "top_k beyond int64": (CHAT, rag(top_k=10**30), 400, "invalid_value", "rag.top_k", "1 to 64"),
    "top_k as text": (CHAT, rag(top_k="5"), 400, "invalid_value", "rag.top_k", "integer"),
    "top_k a bool": (CHAT, rag(top_k=True), 400, "invalid_value", "rag.top_k", "integer"),
    "nested params": (CHAT, rag(method_params={"a": {"b": 1}}), 400, "invalid_value", None, "method_params"),
    "texts in params": (
        CHAT,
        rag(method_params={"a": ["b"]}),
        400,
        "invalid_value",
        "rag.method_params.a.0",
        "integer",
    ),
    "max_tokens 0": (CHAT, chat(max_tokens=0), 400, "invalid_value", "max_tokens", "greater than or equal to 1"),
    "max_tokens beyond the context": (
        CHAT,
        chat(max_tokens=MAX_MODEL_LEN),
        400,
        "context_length_exceeded",
        "max_tokens",
        str(MAX_MODEL_LEN),
    ),
    "prompt and answer beyond the context": (
        CHAT,
        chat(max_tokens=MAX_MODEL_LEN - 50),
        400,
        "context_length_exceeded",
        "max_tokens",
        str(MAX_MODEL_LEN),
    ),
    "max_completion_tokens beyond the context": (
        CHAT,
        chat(max_completion_tokens=MAX_MODEL_LEN),
        400,
        "context_length_exceeded",
        "max_completion_tokens",
        "`max_completion_tokens` is",
    ),
    "two lengths": (CHAT, chat(max_tokens=3, max_completion_tokens=4), 400, "invalid_value", None, "one of them"),
    "prompt longer than the model": (
        CHAT,
        chat("whence? " * 500),
        400,
        "context_length_exceeded",
        "messages",
        str(MAX_MODEL_LEN),
    ),
    "n 2": (CHAT, chat(n=2), 400, "invalid_value", "n", "one answer per request"),
    "tools": (CHAT, chat(tools=[{"type": "function"}]), 400, "invalid_value", "tools", "not supported"),
    "json mode": (CHAT, chat(response_format={"type": "json_object"}), 400, "invalid_value", None, "plain text"),
    "temperature": (CHAT, chat(temperature=3), 400, "invalid_value", "temperature", "less than or equal to 2"),
    "temperature NaN": (CHAT, chat(temperature=float("nan")), 400, "invalid_value", "temperature", "finite"),
    "stream_options alone": (CHAT, chat(stream_options={}), 400, "invalid_value", None, "`stream`: true"),
    "top_logprobs alone": (CHAT, chat(top_logprobs=2), 400, "invalid_value", None, "`logprobs`: true"),
    "five stops": (CHAT, chat(stop=["a"] * 5), 400, "invalid_value", "stop", "at most 4"),
    "unknown model": (CHAT, chat(model="gpt-4"), 404, "model_not_found", "model", "tiny-llama-0"),
    "empty prompt": (COMPLETIONS, completion(""), 400, "empty_question", "prompt", "ask something"),
    "no ids": (COMPLETIONS, completion([]), 400, "invalid_value", "prompt", "at least 1"),
    "negative id": (COMPLETIONS, completion([1, -1]), 400, "invalid_value", "prompt.1", "greater than or equal to 0"),
    "id out of range": (COMPLETIONS, completion([1, 10**6]), 400, "invalid_token_id", "prompt", "0 to"),
    "id beyond int64": (COMPLETIONS, completion([10**30]), 400, "invalid_token_id", "prompt", "0 to"),
    "two prompts": (COMPLETIONS, completion(["a", "b"]), 400, "invalid_value", None, "one prompt"),
    "ids to search for": (COMPLETIONS, completion([1, 2], rag={}), 400, "invalid_value", None, "needs words"),
    "long ids": (COMPLETIONS, completion([5] * 500), 400, "context_length_exceeded", "prompt", "shorten the prompt or"),
    "echo": (COMPLETIONS, completion(echo=True), 400, "invalid_value", "echo", "not supported"),
    "best_of": (COMPLETIONS, completion(best_of=3), 400, "invalid_value", "best_of", "one answer"),
    "no such path": ("/v1/embeddings", b"{}", 404, "not_found", None, "no such path"),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_refused_and_the_next_request_answered(service: Service, name: str) -> None:
    path, body, status, code, param, words = CASES[name]
    mended, generated = service.counts("Repairer")["started"], service.counts("Engine")["started"]
    answer = httpx.post(service.url + path, content=body, headers={"content-type": "application/json"}, timeout=30)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert error["code"] == code, error
    assert param is None or error["param"] == param, error
    assert words in error["message"], error
    # Refused before anything costly happened, and what follows is answered.
    assert service.counts("Repairer")["started"] == mended and service.counts("Engine")["started"] == generated
    assert service.ask().status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "", "multipart/form-data; boundary=x"])
def test_only_json_is_read(service: Service, kind: str) -> None:
    answer = httpx.post(service.url + CHAT, content=chat(), headers={"content-type": kind})
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")


def test_the_limit_holds_for_bodies_of_unknown_length(service: Service) -> None:
    def endless():
        for _ in range(40):
            yield b" " * 2**16

    answer = httpx.post(service.url + CHAT, content=endless(), headers={"content-type": "application/json"}, timeout=30)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert service.ask().status_code == 200


def test_a_declared_length_over_the_limit_is_refused_unread(service: Service) -> None:
    host, port = service.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9999999999\r\n\r\n"
            "{".encode()
        )
        assert sock.recv(4096).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("request_id", ["a b", "x" * 129, "é".encode(), ""])
def test_request_ids_that_could_spoil_a_log_are_refused(service: Service, request_id: str | bytes) -> None:
    headers = {"content-type": "application/json", "x-request-id": request_id}
    answer = httpx.post(service.url + CHAT, content=chat(), headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-request-id")
