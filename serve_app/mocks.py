# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the parts behind the ingress: fast tests and the framework benchmark run over real Serve with these.

They keep the contract (messages, errors, hand-offs in real shared memory) and leave out the work. A question may hold
instructions for them (`[[mend_s=5]]`), so that a test can make one request slow or failing among others. Each counts
what happened to its requests, so that a test can see that a client's leaving was heard.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvcache.arena import Arena
from kvcache.handoff import HandoffIdentity, SharedMemoryTransport, release
from kvcache.settings import Settings
from kvcache.target import load_tokenizer
from retrieval.errors import UnknownChunkError, UnknownCorpusError
from retrieval.types import RetrievedChunk
from serve_app.messages import (
    GenerateDelta,
    GenerateRequest,
    MendRequest,
    MendResult,
    RetrieveRequest,
    RetrieveResult,
)

CORPUS = "default"
CHUNKS = 8
CHUNK_TOKENS = 16
_SHAPE = (1, 1, 2)  # layers, KV heads, head size of the hand-offs: small, their size is not what is measured
_INSTRUCTION = re.compile(r"\[\[(\w+)=([\w.]+)\]\]")


class _Counting:
    """Counts requests by outcome."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter(started=0, finished=0, cancelled=0, failed=0)

    @contextmanager
    def _counted(self) -> Any:
        self._counts["started"] += 1
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            self._counts["cancelled"] += 1
            raise
        except BaseException:
            self._counts["failed"] += 1
            raise
        self._counts["finished"] += 1

    async def counts(self) -> dict[str, int]:
        """Requests by outcome since the start."""
        return dict(self._counts)

    async def ready(self) -> None:
        """Always."""


class MockRetriever(_Counting):
    """Knows one corpus of chunks `chunk-0` ... and finds the first `top_k` for every question."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._chunks = {
            f"chunk-{i}": RetrievedChunk(
                f"chunk-{i}", f"doc-{i}", f"Title {i}", f"Text {i}", tuple([i + 1] * CHUNK_TOKENS), "mock", 1.0 - i / 10
            )
            for i in range(CHUNKS)
        }

    async def retrieve(self, request: RetrieveRequest) -> RetrieveResult:
        """Chunks, at once or after `[[retrieve_s=...]]`."""
        with self._counted():
            if request.corpus != CORPUS:
                raise UnknownCorpusError(f"unknown corpus {request.corpus!r}; there is: {CORPUS}")
            unknown = [name for name in request.chunk_ids or () if name not in self._chunks]
            if unknown:
                raise UnknownChunkError(f"unknown chunks {unknown}; there are: {', '.join(self._chunks)}")
            await asyncio.sleep(float(_told(request.query).get("retrieve_s", 0)))
            names = request.chunk_ids or list(self._chunks)[: request.top_k]
            return RetrieveResult([self._chunks[name] for name in names], "000001", {"embed": 0.0, "search": 0.0})


class MockRepairer(_Counting):
    """Hands off a few bytes of real shared memory instead of KV."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._arena = Arena(settings.handoff.arena_bytes, settings.handoff.lease_s)
        self._transport = SharedMemoryTransport(self._arena)
        self._tokenizer = load_tokenizer(settings)

    async def mend(self, request: MendRequest) -> MendResult:
        """A hand-off, at once or after `[[mend_s=...]]`; `full` hands nothing off."""
        with self._counted():
            await asyncio.sleep(float(_told_in(self._tokenizer, request.question_ids).get("mend_s", 0)))
            prefix = tuple(token for ids in request.chunks for token in ids)
            if request.method == "full":
                return MendResult("full", prefix, None)
            layers, heads, size = _SHAPE
            shape = (layers, len(prefix), heads, size)
            identity = HandoffIdentity(request.request_id, len(prefix), "", "mock", shape, "float32")
            ticket = self._transport.reserve(identity).commit()
            stages = {"fetch": 0.0, "repair": 0.0, "handoff": 0.0}
            return MendResult(request.method, prefix, ticket, len(prefix), stages, {"host": len(request.chunks)})

    async def live_handoffs(self) -> int:
        """Hand-offs that nobody has ended yet."""
        return self._arena.stats()["live"]


class MockEngine(_Counting):
    """Says `word word word ...`, one token per piece."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._tokenizer = load_tokenizer(settings)
        self._dead = False

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        """Up to `max_tokens` pieces.

        Instructions: `[[first_s=...]]` and `[[token_s=...]]` are waits, `[[words=n]]` ends earlier, `[[fail=1]]`
        raises, `[[fail_late=1]]` raises after the first piece, `[[die=1]]` ends the process there, `[[lose=1]]` reports
        a lost hand-off.
        """
        with self._counted():
            try:
                told = _told_in(self._tokenizer, request.prompt_ids)
                await asyncio.sleep(float(told.get("first_s", 0)))
                if "fail" in told:
                    raise RuntimeError("told to fail")
                count = min(request.sampling["max_tokens"], int(told.get("words", 4)))
                cached = request.handoff["identity"]["rows"] if request.handoff else 0
                miss = "LeaseError" if "lose" in told else None
                for index in range(count):
                    last = index == count - 1
                    yield GenerateDelta(
                        "word" if index == 0 else " word",
                        (index,),
                        None if not last else "length" if count == request.sampling["max_tokens"] else "stop",
                        0 if miss else cached,
                        _logprobs(request.sampling.get("logprobs")),
                        {"queue": 0.0, "first_token": 0.0} if index == 0 else {"inject": 0.0} if last else {},
                        miss if last else None,
                    )
                    if "fail_late" in told:
                        raise RuntimeError("told to fail late")
                    if "die" in told:
                        os._exit(1)
                    await asyncio.sleep(float(told.get("token_s", 0)))
            finally:
                release(request.handoff)


def _told(text: str) -> dict[str, str]:
    return dict(_INSTRUCTION.findall(text))


def _told_in(tokenizer: Any, ids: Sequence[int]) -> dict[str, str]:
    return _told(tokenizer.decode(ids[-200:]))


def _logprobs(count: int | None) -> list[dict[str, Any]] | None:
    if count is None:
        return None
    entry = {"token": " word", "logprob": -0.5, "bytes": list(b" word")}
    return [{**entry, "top_logprobs": [entry] * count}]
