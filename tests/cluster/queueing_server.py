# SPDX-License-Identifier: Apache-2.0
"""A service with known slots and service times, so that queueing theory says what a load test has to find."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn

Send = Callable[[dict[str, Any]], Awaitable[None]]


@dataclass
class QueueingServer:
    """Answers in `first_s` + (`pieces` - 1) * `gap_s` seconds, `slots` at a time, in order of arrival.

    A plain ASGI application: what a framework would take is not in the theory.

    Attributes:
        queue: requests that may wait; one more gets 429. None: any number.
        corpora: known ones; None: any.
        metrics: text of /metrics; None: there is none.
        metrics_asked: how often it was asked for.
        bodies: of all requests, as they came.
        clients: address and port that each came from.
        last_words: sent as the next event after the first text, in the place of the others.
    """

    slots: int = 1000
    first_s: float = 0.02
    gap_s: float = 0.01
    pieces: int = 4
    queue: int | None = None
    methods: tuple[str, ...] = ("full", "stale")
    corpora: tuple[str, ...] | None = None
    metrics: str | None = None
    metrics_asked: int = 0
    last_words: str | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    clients: list[tuple[str, int]] = field(default_factory=list)
    url: str = ""
    _inside: int = 0

    @property
    def service_s(self) -> float:
        return self.first_s + (self.pieces - 1) * self.gap_s

    async def __call__(self, scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Send) -> None:
        path = scope["path"]
        self.metrics_asked += path == "/metrics"
        if path == "/metrics" and self.metrics:
            await whole(send, 200, self.metrics)
        elif path != "/v1/chat/completions":
            await whole(send, 404, "no such page")
        else:
            message = await receive()
            data = message["body"]
            while message.get("more_body"):
                message = await receive()
                data += message["body"]
            self.bodies.append(json.loads(data))
            self.clients.append(tuple(scope["client"]))
            await self._answer(self.bodies[-1], send)

    async def _answer(self, body: dict[str, Any], send: Send) -> None:
        question, rag = body["messages"][-1]["content"], body["rag"]
        if self.corpora is not None and rag.get("corpus", "default") not in self.corpora:
            await whole(send, 404, refusal("corpus_not_found"))
        elif rag["method"] not in self.methods:
            await whole(send, 400, refusal("unknown_method"))
        elif "crash" in question:
            await whole(send, 500, "oh")
        elif self.queue is not None and self._inside >= self.slots + self.queue:
            await whole(send, 429, refusal("overloaded"), [(b"retry-after", b"1")])
        else:
            self._inside += 1
            await begin(send, 200, [(b"content-type", b"text/event-stream")])
            await part(send, event({"role": "assistant", "content": ""}))  # no token yet
            try:
                async with self._free:
                    await self._stream(question, rag["method"], send)
            finally:
                self._inside -= 1
            await part(send, b"", more=False)

    async def _stream(self, question: str, method: str, send: Send) -> None:
        began = time.perf_counter()
        for index in range(self.pieces):
            # To the instant, so that late timers do not add up.
            await asyncio.sleep(began + self.first_s + index * self.gap_s - time.perf_counter())
            if index and "break" in question:
                return
            if index and self.last_words is not None:
                await part(send, f"data: {self.last_words}\n\ndata: [DONE]\n\n".encode())
                return
            if index and "fail" in question:
                await part(send, b'data: {"error": {"message": "told to", "code": "internal"}}\n\n')
                return
            await part(send, event({"content": " Rush"[not index :]}, last=index == self.pieces - 1))
        usage = {"prompt_tokens": 100, "completion_tokens": 2 * self.pieces}
        details = {"prompt_tokens_details": {"cached_tokens": 0 if method == "full" else 90}}
        tail = b"data: " + json.dumps({"choices": [], "usage": {**usage, **details}}).encode() + b"\n\n"
        await part(send, tail + b"data: [DONE]\n\n")

    @contextmanager
    def running(self) -> Iterator[QueueingServer]:
        """Serve from a thread."""
        self._free = asyncio.Semaphore(self.slots)
        server = uvicorn.Server(uvicorn.Config(self, port=0, log_level="error", lifespan="off", timeout_keep_alive=60))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.should_exit = True
            thread.join()


async def begin(send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def part(send: Send, body: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def whole(send: Send, status: int, text: str, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    await begin(send, status, headers or [])
    await part(send, text.encode(), more=False)


def event(delta: dict[str, Any], last: bool = False) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": "length" if last else None}
    extra = {"stages_ms": {"mend": 3.0}, "rag": {"method": "x"}} if last else {}
    return b"data: " + json.dumps({"choices": [choice], **extra}).encode() + b"\n\n"


def refusal(code: str) -> str:
    return json.dumps({"error": {"message": f"it is {code}", "code": code}})
