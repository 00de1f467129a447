# SPDX-License-Identifier: Apache-2.0
"""A small streaming client of the service, for `ask` and `demo`; it measures time as a user sees it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from kvcache.settings import Settings

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 300.0
WHOLES = ("retrieve", "mend", "engine")
"""Stages that the service splits into parts; it lists the parts right after their whole."""
SUMS = ("ttft", "total")
"""Stages that run over all others."""


class ServiceDownError(ConnectionError):
    """Nothing answers at the service's address; the message says what to run."""


class ServiceError(RuntimeError):
    """The service refused or failed a request; the message is the service's own."""


@dataclass
class Answer:
    """One answered question.

    Attributes:
        ttft_s: seconds from sending the request to the first piece of text.
        total_s: seconds from sending the request to the end of the stream.
        cached_tokens: prompt tokens whose KV was loaded, not computed.
        stages_ms: milliseconds by stage, as the service measured them.
        rag: the service's own account: method, fallback, chunk hits and misses, citations.
    """

    text: str = ""
    ttft_s: float = 0.0
    total_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    stages_ms: dict[str, float] = field(default_factory=dict)
    rag: dict[str, Any] = field(default_factory=dict)

    @property
    def citations(self) -> list[dict[str, Any]]:
        """The chunks the answer was given, in prompt order."""
        return self.rag.get("citations", [])

    def where_time_went(self, least_ms: float = 0.0) -> str:
        """The stages as one line, `whole 9 ms (part 5, part 3) · ...`; those under `least_ms` are left out."""
        groups: list[tuple[str, list[str]]] = []
        for name, ms in self.stages_ms.items():
            if name in SUMS or ms < least_ms:
                continue
            if name in WHOLES or not groups:
                groups.append((f"{name} {ms:.0f} ms", []))
            else:
                groups[-1][1].append(f"{name} {ms:.0f}")
        return " · ".join(f"{whole} ({', '.join(parts)})" if parts else whole for whole, parts in groups)


def default_url(settings: Settings) -> str:
    """Address of the service that these settings start."""
    return f"http://{settings.serve.host}:{settings.serve.port}"


class Client:
    """Talks to one service over HTTP."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._http = httpx.Client(base_url=self.url, timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S))

    def ready(self) -> bool:
        """Whether the service takes requests now."""
        try:
            return self._http.get("/readyz", timeout=CONNECT_TIMEOUT_S).status_code == 200
        except httpx.HTTPError:
            return False

    def ask(
        self,
        question: str,
        *,
        method: str | None = None,
        corpus: str | None = None,
        top_k: int | None = None,
        max_tokens: int | None = None,
        on_text: Callable[[str], None] = lambda _: None,
    ) -> Answer:
        """Ask one question and stream the answer; `on_text` sees every piece of it as it comes.

        Raises:
            ServiceDownError: nothing answers at the address.
            ServiceError: the service answered with an error, or the stream broke off.
        """
        rag = {"method": method, "corpus": corpus, "top_k": top_k}
        body = {
            "messages": [{"role": "user", "content": question}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "rag": {key: value for key, value in rag.items() if value is not None},
        }
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        answer, started = Answer(), time.perf_counter()
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise ServiceError(_error_message(response))
                for event in _events(response):
                    for choice in event.get("choices", []):
                        if piece := choice.get("delta", {}).get("content"):
                            answer.ttft_s = answer.ttft_s or time.perf_counter() - started
                            answer.text += piece
                            on_text(piece)
                    _note(answer, event)
        except httpx.ConnectError as error:
            raise ServiceDownError(
                f"no service at {self.url}: start one with `serve run serve_app:app` (or name another with --url)"
            ) from error
        except httpx.HTTPError as error:
            raise ServiceError(f"{self.url} broke off: {type(error).__name__} {error}".rstrip()) from error
        answer.total_s = time.perf_counter() - started
        # An empty answer has no first token; the end of the stream is when the user learns that.
        answer.ttft_s = answer.ttft_s or answer.total_s
        return answer


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise ServiceError(event["error"].get("message", "the service failed while answering"))
        yield event
    raise ServiceError("the stream broke off before the answer was whole")


def _note(answer: Answer, event: dict[str, Any]) -> None:
    if usage := event.get("usage"):
        answer.prompt_tokens = usage.get("prompt_tokens", 0)
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    answer.rag.update(event.get("rag") or {})
    answer.stages_ms.update(event.get("stages_ms") or {})


def _error_message(response: httpx.Response) -> str:
    try:
        return response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"the service answered {response.status_code}: {response.text[:200]}"
