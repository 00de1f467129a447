# SPDX-License-Identifier: Apache-2.0
"""Mock repairer and mock engine that take the published times of a GPU, slowed down, by sleeping.

For showing how the application scales on a machine that cannot scale a real engine. Everything else is the real
application: ingress, flow, messages, hand-offs in shared memory, request router, autoscaling policy.

Times are CacheRepair's for Qwen2.5-3B on one A800 (Table 1, largest repairer; medians), times `SLOWER`: two cores have
to carry the framework for all replicas, which at full speed would be the bottleneck.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import replace

from kvcache.handoff import release
from kvcache.settings import Settings
from serve_app.app import Parts
from serve_app.messages import (
    GenerateDelta,
    GenerateRequest,
    MendRequest,
    MendResult,
    RetrieveRequest,
    RetrieveResult,
)
from serve_app.meter import ServiceMeter
from serve_app.mocks import MockEngine, MockRepairer, MockRetriever

SLOWER = 20.0
"""The one factor that all times are scaled by."""
TRANSFER_MS, MASK_MS, REPAIR_MS, ROTARY_MS, TTFT_MS = 6.30, 1.25, 12.55, 2.17, 43.41
"""Table 1: the repairer's stages, and the time to the first token."""
FIRST_TOKEN_MS = TTFT_MS - TRANSFER_MS - MASK_MS - REPAIR_MS - ROTARY_MS
"""What those leave of Table 1's TTFT to the engine, its write of 1.29 ms included."""
REPAIR_S = (TRANSFER_MS + MASK_MS + REPAIR_MS + ROTARY_MS) * SLOWER / 1e3
UNLOADED_TTFT_S = TTFT_MS * SLOWER / 1e3
ANSWER_MS = 1e3 / 11.35 - TTFT_MS
"""The rest of an answer: Table 21 has 11.35 requests per second at one client."""
FETCH_MS = 78.0
"""A prefix of 4,096 tokens (144 MiB) from object storage over 25 GbE: 30 ms to the first byte, then 48 ms. A part of a
prefix takes its part."""
ENGINE_SLOTS = 8
"""Requests that an engine serves at once: the largest concurrency of Table 21."""
PER_TOPIC = 5
TOPICS = 48
TIER_CHUNKS = 100
"""Chunks that a repairer's host tier holds, of `TOPICS * PER_TOPIC`."""


class PacedRetriever(MockRetriever):
    """Finds the five chunks of a topic: of the one named in the question (`topic-7`), else of one drawn by its text."""

    async def retrieve(self, request: RetrieveRequest) -> RetrieveResult:
        """Chunks, at once."""
        found = await super().retrieve(replace(request, top_k=PER_TOPIC))
        named = [word for word in request.query.split() if word.startswith("topic-")]
        topic = int(named[0].removeprefix("topic-")) if named else zlib.crc32(request.query.encode()) % TOPICS
        chunks = []
        for at, chunk in enumerate(found.chunks, start=topic * PER_TOPIC):
            ids = tuple([1 + at] * len(chunk.token_ids))
            chunks.append(replace(chunk, chunk_id=f"chunk-{at}", document_id=f"doc-{topic}", token_ids=ids))
        return RetrieveResult(chunks, found.generation, found.stages)


class PacedRepairer(MockRepairer):
    """One device, one request on it at a time; before that, chunks that its host tier does not hold are fetched."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._device = asyncio.Semaphore(1)
        self._tier: OrderedDict[tuple[int, ...], None] = OrderedDict()
        self._meter = ServiceMeter(settings.serve.autoscaling.slo_ttft_s)

    async def mend(self, request: MendRequest) -> MendResult:
        """A hand-off, after the published times."""
        self._meter.arrived()
        missing = self._pin(request.chunks)
        stages = {"fetch": await _pause(FETCH_MS * missing / len(request.chunks))}
        waits_since = time.perf_counter()
        async with self._device:
            stages["repair_queue"] = time.perf_counter() - waits_since
            for stage, ms in (("transfer", TRANSFER_MS), ("mask", MASK_MS), ("repair", REPAIR_MS)):
                stages[stage] = await _pause(ms)
            stages["rotary"] = await _pause(ROTARY_MS)
            result = await super().mend(request)
        work = sum(stages.values()) - stages["repair_queue"]
        self._meter.served(work, work, (work - stages["fetch"],))
        hits = {"host": len(request.chunks) - missing, "store": missing}
        return replace(result, stages=stages, hits=hits)

    def _pin(self, chunks: tuple[tuple[int, ...], ...]) -> int:
        """How many of the chunks were not there; now they are, and the least recently used are gone."""
        missing = 0
        for ids in chunks:
            missing += ids not in self._tier
            self._tier[ids] = None
            self._tier.move_to_end(ids)
        while len(self._tier) > TIER_CHUNKS:
            self._tier.popitem(last=False)
        return missing

    def record_autoscaling_stats(self) -> dict[str, float]:
        """For the autoscaling policy."""
        return self._meter.stats()

    def record_routing_stats(self) -> dict[str, int]:
        """For the request router."""
        return {"tier_chunks": TIER_CHUNKS}


class PacedEngine(MockEngine):
    """`ENGINE_SLOTS` requests at a time; others wait."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._slots = asyncio.Semaphore(ENGINE_SLOTS)
        self._meter = ServiceMeter(settings.serve.autoscaling.slo_ttft_s, ENGINE_SLOTS)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        """Up to four pieces, after the published times."""
        self._meter.arrived()
        waits_since = time.perf_counter()
        try:
            async with self._slots:
                began = time.perf_counter()
                first = await _pause(FIRST_TOKEN_MS)
                waited = {"queue": began - waits_since, "first_token": began - waits_since + first}
                async for delta in super().generate(request):
                    yield replace(delta, stages=waited if "first_token" in delta.stages else delta.stages)
                    await _pause(ANSWER_MS / 4)
                self._meter.served(time.perf_counter() - began, first)
        finally:
            release(request.handoff)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """For the autoscaling policy."""
        return self._meter.stats()


PACED = Parts(PacedRetriever, PacedRepairer, PacedEngine)


async def _pause(ms: float) -> float:
    """Sleep for published milliseconds; returns the seconds that took."""
    began = time.perf_counter()
    await asyncio.sleep(ms * SLOWER / 1e3)
    return time.perf_counter() - began
