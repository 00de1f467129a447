# SPDX-License-Identifier: Apache-2.0
"""One repair actor's work: fetch the chunks' stale KV, mend it, hand it off."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from kvcache.arena import ArenaFullError
from kvcache.chunk import ChunkKV, token_digest
from kvcache.handoff import HandoffIdentity, HandoffWriter, Transport
from kvcache.host_tier import HostTier, PinnedChunk
from kvcache.settings import Settings
from kvcache.store import ChunkMiss, ChunkStore
from kvcache.target import TargetLLM
from repair.base import RepairedPrefix, Repairer, RepairRequest, joined
from repair.batching import Batcher
from repair.registry import UnknownMethodError, create
from repair.types import MendRequest, MendResult

logger = logging.getLogger(__name__)

_RETRY_S = 0.005


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
        self._store = store
        self._transport = transport
        self._settings = settings
        self._tier = HostTier(settings.host_tier.bytes)
        self._repairers: dict[str, Repairer] = {
            name: create(name, target, settings) for name in settings.repair.methods
        }
        self._fetchers = ThreadPoolExecutor(settings.store.read_parallelism, thread_name_prefix="fetch")
        # One pass at a time on the device, and one write of a repaired chunk at a time.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="repair")
        self._batcher = Batcher(self._worker, settings.repair.batch_tokens)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._computing = threading.Lock()
        self._said: set[str] = set()

    @property
    def host_tier(self) -> HostTier:
        """The host-memory tier, for its statistics."""
        return self._tier

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
        if not repairer.needs_stale:
            return MendResult(request.method, joined(request.chunks), None)
        stages: dict[str, float] = {}
        misses: list[str] = []  # reasons; appended to by several threads
        begin = time.perf_counter()
        futures = [
            self._fetchers.submit(self._pin, ids, misses, durable=not (request.own_header and index == 0))
            for index, ids in enumerate(request.chunks)
        ]
        try:
            waiting = asyncio.gather(*map(asyncio.wrap_future, futures))
            waiting.add_done_callback(_retrieve)
            try:
                pinned = await asyncio.wait_for(asyncio.shield(waiting), self._settings.store.deadline_s)
            except TimeoutError:
                return self._fall_back(request, "fetch_deadline", stages, misses)
            stages["fetch"] = time.perf_counter() - begin
            computed = len(misses)
            hits = {"host": sum(p.hit for p in pinned), "store": sum(not p.hit for p in pinned) - computed}
            return await self._repair(request, repairer, [p.chunk for p in pinned], stages, hits, misses)
        finally:
            for future in futures:
                future.cancel()
                future.add_done_callback(_unpin)

    async def _repair(
        self,
        request: MendRequest,
        repairer: Repairer,
        stale: Sequence[ChunkKV],
        stages: dict[str, float],
        hits: dict[str, int],
        misses: list[str],
    ) -> MendResult:
        begin = time.perf_counter()
        work = RepairRequest(request.chunks, stale, request.question_ids, request.params)
        repaired = await asyncio.wrap_future(self._batcher.submit(repairer, work))
        prefix = repaired.prefix
        stages["repair_queue"] = time.perf_counter() - begin - repaired.seconds
        stages.update(prefix.stages or {"repair": repaired.seconds})
        begin = time.perf_counter()
        writer = await self._reserve(request, prefix)
        if isinstance(writer, str):
            return self._fall_back(request, writer, stages, misses)
        writing = self._worker.submit(self._write, prefix, writer)
        try:
            stages["rotary"] = await asyncio.shield(asyncio.wrap_future(writing))
        except BaseException:
            # Cancelled meanwhile: the memory may be given back only when nobody writes into it any more.
            writing.add_done_callback(lambda _: writer.abandon())
            raise
        ticket = writer.commit()
        stages["handoff"] = time.perf_counter() - begin - stages["rotary"]
        return MendResult(
            request.method,
            prefix.token_ids,
            ticket,
            prefix.rows,
            stages,
            {k: n for k, n in hits.items() if n},
            Counter(misses),
        )

    def _write(self, prefix: RepairedPrefix, writer: HandoffWriter) -> float:
        """Rotate straight into the hand-off's memory; returns seconds."""
        begin = time.perf_counter()
        prefix.write(self._target.rotary, writer.k, writer.v)
        return time.perf_counter() - begin

    async def _reserve(self, request: MendRequest, prefix: RepairedPrefix) -> HandoffWriter | str:
        """Memory for the hand-off, or why there is none."""
        identity = HandoffIdentity(
            request_id=request.request_id,
            rows=prefix.rows,
            token_digest=token_digest(prefix.token_ids),
            fingerprint=self._target.fingerprint,
            shape=self._target.geometry.kv_shape(prefix.rows),
            dtype=str(self._target.dtype).removeprefix("torch."),
        )
        deadline = time.monotonic() + self._settings.handoff.wait_s
        while True:
            try:
                return self._transport.reserve(identity)
            except ValueError:
                return "handoff_too_large"
            except ArenaFullError:
                if time.monotonic() > deadline:
                    return "handoff_full"
                await asyncio.sleep(_RETRY_S)

    def _fall_back(self, request: MendRequest, reason: str, stages: dict[str, float], misses: list[str]) -> MendResult:
        self._say(f"falling back to full prefill: {reason}", reason)
        return MendResult(
            request.method, joined(request.chunks), None, stages=stages, misses=Counter(misses), fallback=reason
        )

    def _pin(self, ids: Sequence[int], misses: list[str], durable: bool) -> PinnedChunk:
        form = self._store.format
        return self._tier.pin(form.key(ids), form.size(len(ids)), lambda: self._load(ids, misses, durable))

    def _load(self, ids: Sequence[int], misses: list[str], durable: bool) -> ChunkKV:
        try:
            return self._store.get(ids)
        except ChunkMiss as miss:
            misses.append(str(miss.reason))
            self._say(f"chunk cache miss ({miss.reason}), computing the chunk: {miss}", str(miss.reason))
        with self._computing:
            (chunk,) = self._target.stale_kv([ids])
        # As the store would give it back, so that the answer is that of an undamaged store.
        chunk = ChunkKV(chunk.token_ids, chunk.k.to(self._store.dtype), chunk.v.to(self._store.dtype))
        if durable:
            self._writer.submit(self._put, chunk)
        return chunk

    def _put(self, chunk: ChunkKV) -> None:
        try:
            self._store.put(chunk)
        except Exception as error:  # the answer does not depend on it; the next request counts a miss again
            self._say(f"a computed chunk could not be stored: {error}", "put")

    def _say(self, message: str, kind: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("%s (said once; see the metrics for counts)", message)

    def shutdown(self) -> None:
        """End the threads, when every computed chunk is stored."""
        for pool in (self._fetchers, self._worker):
            pool.shutdown(wait=True, cancel_futures=True)
        self._writer.shutdown(wait=True)


def _unpin(future: Future[PinnedChunk]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().release()


def _retrieve(waiting: asyncio.Future) -> None:
    # Nobody may be waiting any more; take the result so that asyncio does not complain.
    with suppress(Exception, asyncio.CancelledError):
        waiting.result()
