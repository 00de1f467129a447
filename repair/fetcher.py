# SPDX-License-Identifier: Apache-2.0
"""Stale KV of a request's chunks: from the host tier, from the object store, or computed on the spot."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass

import torch

from kvcache.chunk import ChunkKV
from kvcache.host_tier import HostTier, PinnedChunk
from kvcache.settings import Settings
from kvcache.store import ChunkMiss, ChunkStore
from kvcache.target import TargetLLM
from repair.admission import Admission

logger = logging.getLogger(__name__)

_OWN_HEADER_SHARE = 16
"""A client's own header chunk may take one part in so many of the host tier; a longer one is computed each time."""
_MOST_STORING = 16
"""Computed chunks that wait to be stored. More are not stored: a store that is down must not fill the memory."""


class FetchError(Exception):
    """The chunks are not to be had in time.

    Attributes:
        reason: what the fallback is counted under.
        misses: chunks that were not found as they should be until then, by reason.
    """

    def __init__(self, reason: str, misses: dict[str, int] | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.misses = misses or {}


@dataclass(frozen=True)
class Fetched:
    """A request's chunks.

    Attributes:
        chunks: stale KV in prompt order, in the store's dtype.
        hits: chunks by where they were found, `host` or `store`.
        misses: chunks computed on the spot, by reason.
    """

    chunks: Sequence[ChunkKV]
    hits: dict[str, int]
    misses: dict[str, int]


class Fetcher:
    """Fetches chunks; any number of requests at once. Use it from one event loop.

    Requests are admitted by the bytes of their chunks, so that what they hold together never exceeds the host tier's
    setting (one request larger than that goes alone).

    Args:
        target: computes what is missing.
        store: the chunk caches.
        settings: `host_tier` and `store` count here.
    """

    def __init__(self, target: TargetLLM, store: ChunkStore, settings: Settings) -> None:
        self._target = target
        self._store = store
        self._deadline_s = settings.store.deadline_s
        self.tier = HostTier(settings.host_tier.bytes)
        self._admission = Admission(settings.host_tier.bytes)
        self._readers = ThreadPoolExecutor(settings.store.read_parallelism, thread_name_prefix="fetch")
        # Apart from the readers: clients' own system prompts, however long, must not keep them from the corpus.
        self._own = ThreadPoolExecutor(1, thread_name_prefix="own-header")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._storing: set[str] = set()
        self._computing = threading.Lock()
        self._said: set[str] = set()
        self._leaving: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def fetch(self, chunks: Sequence[Sequence[int]], own_header: bool = False) -> AsyncIterator[Fetched]:
        """The chunks, kept in memory for the length of the `async with` block.

        Args:
            chunks: token ids.
            own_header: chunk 0 is the client's own: never written to the object store.

        Raises:
            FetchError: past the deadline.
            ValueError: a chunk that the target cannot take (empty, over-long, foreign ids).
        """
        deadline = asyncio.get_running_loop().time() + self._deadline_s
        nbytes = sum(self._store.format.size(len(ids)) for ids in chunks)
        try:
            async with asyncio.timeout_at(deadline):
                await self._admission.enter(nbytes)
        except TimeoutError:
            raise FetchError("host_memory_full") from None
        misses: list[str] = []  # reasons; appended to by several threads
        futures = [
            (self._own if own_header and not index else self._readers).submit(
                self._pin, ids, misses, own_header and not index
            )
            for index, ids in enumerate(chunks)
        ]
        try:
            try:
                async with asyncio.timeout_at(deadline):
                    pinned = await asyncio.gather(*map(_result, futures))
            except TimeoutError:
                raise FetchError("fetch_deadline", dict(Counter(misses))) from None
            in_host = sum(pin.hit for pin in pinned)
            hits = {"host": in_host, "store": len(pinned) - in_host - len(misses)}
            yield Fetched([pin.chunk for pin in pinned], {k: n for k, n in hits.items() if n}, dict(Counter(misses)))
        finally:
            self._leave(futures, nbytes)

    def _leave(self, futures: Sequence[Future[PinnedChunk]], nbytes: int) -> None:
        for future in futures:
            future.cancel()
        if all(future.done() for future in futures):
            self._release(futures, nbytes)
        else:  # given up early: threads still load, and what they load is held until they are done
            task = asyncio.ensure_future(self._leave_later(futures, nbytes))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def _leave_later(self, futures: Sequence[Future[PinnedChunk]], nbytes: int) -> None:
        await asyncio.gather(*map(_result, futures), return_exceptions=True)
        self._release(futures, nbytes)

    def _release(self, futures: Sequence[Future[PinnedChunk]], nbytes: int) -> None:
        for future in futures:
            if not future.cancelled() and future.exception() is None:
                future.result().release()
        self._admission.leave(nbytes)

    def _pin(self, ids: Sequence[int], misses: list[str], own: bool) -> PinnedChunk:
        form = self._store.format
        key, nbytes = form.key(ids), form.size(len(ids))
        if own and nbytes * _OWN_HEADER_SHARE > self.tier.capacity_bytes:
            return HostTier(0).pin(key, nbytes, lambda: self._load(ids, misses, own))
        return self.tier.pin(key, nbytes, lambda: self._load(ids, misses, own))

    def _load(self, ids: Sequence[int], misses: list[str], own: bool) -> ChunkKV:
        try:
            return self._store.get(ids)
        except ChunkMiss as miss:
            misses.append(str(miss.reason))
            self._say(f"chunk cache miss ({miss.reason}), computing the chunk: {miss}", str(miss.reason))
        with self._computing:
            (computed,) = self._target.stale_kv([ids])
        # As the store would give it back, so that the answer is that of an undamaged store.
        chunk = ChunkKV(computed.token_ids, computed.k.to(self._store.dtype), computed.v.to(self._store.dtype))
        if not (torch.isfinite(chunk.k).all() and torch.isfinite(chunk.v).all()):
            self._say(f"a chunk's KV overflows {self._store.dtype}: used as computed, not stored", "overflow")
            return computed
        if not own:
            self._store_later(chunk)
        return chunk

    def _store_later(self, chunk: ChunkKV) -> None:
        key = self._store.format.key(chunk.token_ids)
        if key in self._storing:
            return
        if len(self._storing) >= _MOST_STORING:
            self._say("the store takes computed chunks too slowly: some are not stored", "storing")
            return
        self._storing.add(key)
        self._writer.submit(self._put, key, chunk)

    def _put(self, key: str, chunk: ChunkKV) -> None:
        try:
            self._store.put(chunk)
        except Exception as error:  # the answer does not depend on it; the next request counts a miss again
            self._say(f"a computed chunk could not be stored: {error}", "put")
        finally:
            self._storing.discard(key)

    def _say(self, message: str, kind: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("%s (said once; see the metrics for counts)", message)

    def shutdown(self) -> None:
        """End the threads, when every computed chunk is stored."""
        for pool in (self._readers, self._own):
            pool.shutdown(wait=True, cancel_futures=True)
        self._writer.shutdown(wait=True)


async def _result(future: Future[PinnedChunk]) -> PinnedChunk:
    # Shielded: giving up on a load must not cancel it, or its pin would be lost.
    return await asyncio.shield(asyncio.wrap_future(future))
