# SPDX-License-Identifier: Apache-2.0
"""One repair actor's work: fetch the chunks' stale KV, mend it, hand it off."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvcache.arena import ArenaFullError
from kvcache.chunk import token_digest
from kvcache.handoff import HandoffError, HandoffIdentity, HandoffWriter, Transport, reserve
from kvcache.host_tier import HostTier
from kvcache.settings import Settings
from kvcache.store import ChunkStore
from kvcache.target import TargetLLM
from repair.base import RepairedPrefix, Repairer, RepairRequest, joined
from repair.batching import Batcher
from repair.fetcher import Fetched, Fetcher, FetchError
from repair.registry import UnknownMethodError, create, offered
from repair.types import MendRequest, MendResult

logger = logging.getLogger(__name__)


class Mender:
    """Fetches, mends and hands off; any number of requests at once. Use it from one event loop.

    A chunk that is missing or damaged is computed on the spot and stored again, counted with its reason. A request
    whose chunks are not there by `store.deadline_s`, or that finds no room to hand off within `handoff.wait_s`, falls
    back to full prefill and says so.

    Args:
        target: the target LLM.
        store: its chunk caches.
        transport: gives memory for hand-offs.
        settings: which methods are offered, and the bounds above.
    """

    def __init__(self, target: TargetLLM, store: ChunkStore, transport: Transport, settings: Settings) -> None:
        self._target = target
        self._transport = transport
        self._handoff_wait_s = settings.handoff.wait_s
        self._repairers: dict[str, Repairer] = {name: create(name, target, settings) for name in offered(settings)}
        self._fetcher = Fetcher(target, store, settings)
        # One pass at a time on the device, and one write of a repaired prefix at a time; a write waits for no pass.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="repair")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="handoff")
        self._batcher = Batcher(self._worker, settings.repair.batch_tokens)
        self._said: set[str] = set()

    @property
    def host_tier(self) -> HostTier:
        """The host-memory tier, for its statistics."""
        return self._fetcher.tier

    def check(self, method: str, params: dict) -> None:
        """Raises UnknownMethodError or MethodParamsError for a request that must not be worked on."""
        if method not in self._repairers:
            raise UnknownMethodError(f"method {method!r} is not offered; choose one of {', '.join(self._repairers)}")
        self._repairers[method].check_params(params)

    async def mend(self, request: MendRequest) -> MendResult:
        """Mend one request's prefix.

        Raises:
            UnknownMethodError, MethodParamsError: the request's fault.
            ValueError: a chunk that the target cannot take (empty, over-long, foreign ids).
        """
        self.check(request.method, request.params)
        repairer = self._repairers[request.method]
        if not repairer.needs_stale or not request.chunks:
            return MendResult(request.method, joined(request.chunks), None)
        stages: dict[str, float] = {}
        begin = time.perf_counter()
        try:
            async with self._fetcher.fetch(request.chunks, request.own_header) as fetched:
                stages["fetch"] = time.perf_counter() - begin
                return await self._repair(request, repairer, fetched, stages)
        except FetchError as error:
            return self._fall_back(request, error.reason, stages, {}, error.misses)

    async def _repair(
        self, request: MendRequest, repairer: Repairer, fetched: Fetched, stages: dict[str, float]
    ) -> MendResult:
        begin = time.perf_counter()
        work = RepairRequest(request.chunks, fetched.chunks, request.question_ids, request.params)
        repaired = await asyncio.wrap_future(self._batcher.submit(repairer, work))
        prefix = repaired.prefix
        stages["repair_queue"] = time.perf_counter() - begin - repaired.seconds
        stages.update(prefix.stages or {"repair": repaired.seconds})
        begin = time.perf_counter()
        try:
            writer = await reserve(self._transport, self._identity(request, prefix), self._handoff_wait_s)
        except (ArenaFullError, HandoffError) as error:
            reason = "handoff_full" if isinstance(error, ArenaFullError) else "handoff_too_large"
            return self._fall_back(request, reason, stages, fetched.hits, fetched.misses)
        writing = self._writer.submit(self._write, prefix, writer)
        try:
            ticket, written = await asyncio.shield(asyncio.wrap_future(writing))
        except BaseException:
            # Cancelled meanwhile: the memory may be given back only when nobody writes into it any more.
            writing.add_done_callback(lambda _: writer.abandon())
            raise
        stages |= {"handoff_queue": time.perf_counter() - begin - sum(written.values()), **written}
        return MendResult(request.method, prefix.token_ids, ticket, prefix.rows, stages, fetched.hits, fetched.misses)

    def _write(self, prefix: RepairedPrefix, writer: HandoffWriter) -> tuple[dict[str, Any], dict[str, float]]:
        """Rotate straight into the hand-off's memory; returns the ticket, and the seconds of both stages."""
        begin = time.perf_counter()
        prefix.write(self._target.rotary, writer.k, writer.v)
        rotated = time.perf_counter()
        ticket = writer.commit()
        return ticket, {"rotary": rotated - begin, "handoff": time.perf_counter() - rotated}

    def _identity(self, request: MendRequest, prefix: RepairedPrefix) -> HandoffIdentity:
        return HandoffIdentity(
            request_id=request.request_id,
            rows=prefix.rows,
            token_digest=token_digest(prefix.token_ids),
            fingerprint=self._target.fingerprint,
            shape=self._target.geometry.kv_shape(prefix.rows),
            dtype=str(self._target.dtype).removeprefix("torch."),
        )

    def _fall_back(
        self,
        request: MendRequest,
        reason: str,
        stages: dict[str, float],
        hits: dict[str, int],
        misses: dict[str, int],
    ) -> MendResult:
        if reason not in self._said:
            self._said.add(reason)
            logger.warning("falling back to full prefill: %s (said once; see the metrics for counts)", reason)
        prefix_ids = joined(request.chunks)
        return MendResult(request.method, prefix_ids, None, 0, stages, hits, misses, fallback=reason)

    @property
    def queued(self) -> int:
        """Requests that wait for their repair."""
        return self._batcher.queued

    def shutdown(self) -> None:
        """End the threads, when every computed chunk is stored."""
        for threads in (self._worker, self._writer):
            threads.shutdown(wait=True, cancel_futures=True)
        self._fetcher.shutdown()
