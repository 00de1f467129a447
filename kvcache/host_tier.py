# SPDX-License-Identifier: Apache-2.0
"""A bounded host-memory tier in front of the object store."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType

from kvcache.chunk import ChunkKV


@dataclass
class _Entry:
    """A chunk that is loaded, or being loaded by the one pin that found it missing."""

    reserved: int = 0
    """Bytes counted against the capacity; 0 when it did not fit: the entry then lives only as long as its pins."""
    pins: int = 0
    loaded: Future[ChunkKV] = field(default_factory=Future)


class PinnedChunk:
    """A chunk that stays in memory until it is released. Use it as a context manager, or call `release`.

    Attributes:
        chunk: the chunk; do not write to its tensors, others read them too.
        hit: True when this pin ran no load.
    """

    def __init__(self, tier: HostTier, key: str, entry: _Entry, hit: bool) -> None:
        self.chunk = entry.loaded.result()
        self.hit = hit
        self._tier = tier
        self._key = key
        self._entry: _Entry | None = entry

    def release(self) -> None:
        """Give the pin back; a second call does nothing."""
        with self._tier._lock:
            entry, self._entry = self._entry, None
        if entry is not None:
            self._tier._unpin(self._key, entry)

    def __enter__(self) -> PinnedChunk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class HostTier:
    """Chunk KV in host memory: bounded, least recently used out first, each chunk loaded once. Thread-safe.

    Room is reserved before a load begins, so the bytes held never exceed the capacity. A chunk that cannot fit,
    because of its size or because too much is pinned, is loaded all the same, shared by those who want it at that
    moment, and not kept (a bypass).

    Args:
        capacity_bytes: most bytes held, pinned ones included.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # least recently used first
        self._used = 0
        self._pinned = 0
        self._counts = {"hits": 0, "misses": 0, "evictions": 0, "bypasses": 0}

    @property
    def used_bytes(self) -> int:
        """Bytes held or reserved by loads that run."""
        return self._used

    def pin(self, key: str, nbytes: int, load: Callable[[], ChunkKV]) -> PinnedChunk:
        """Get a chunk and keep it in memory until the pin is released.

        Args:
            key: the chunk's key.
            nbytes: bytes of memory the chunk will take; corrected when it turns out otherwise.
            load: called without a lock held, by one of the pins that ask for the key at the same time.

        Raises:
            BaseException: whatever `load` raises, in every pin that waited for it; nothing is kept.
        """
        with self._lock:
            entry = self._entries.get(key)
            hit = entry is not None
            if entry is None:
                entry = self._entries[key] = _Entry()
                self._fit(entry, nbytes)
                self._counts["misses"] += 1
            else:
                self._pinned += 0 if entry.pins else entry.reserved
                self._entries.move_to_end(key)
                self._counts["hits"] += 1
            entry.pins += 1
        try:
            if not hit:
                self._load(key, entry, load)
            return PinnedChunk(self, key, entry, hit)  # a hit may wait here for the load, or get its error
        except BaseException:
            self._unpin(key, entry)
            raise

    def stats(self) -> dict[str, int]:
        """Counts since the start, and what is held now.

        Returns:
            `hits` (waiting for a running load included), `misses` (loads), `evictions`, `bypasses` (loads whose chunk
            was not kept), `used_bytes`, `pinned_bytes`, `entries`.
        """
        with self._lock:
            return {
                **self._counts,
                "used_bytes": self._used,
                "pinned_bytes": self._pinned,
                "entries": len(self._entries),
            }

    def check_integrity(self) -> None:
        """Check the books.

        Raises:
            RuntimeError: they do not balance.
        """
        with self._lock:
            used = sum(entry.reserved for entry in self._entries.values())
            pinned = sum(entry.reserved for entry in self._entries.values() if entry.pins)
            if (used, pinned) != (self._used, self._pinned) or used > self.capacity_bytes:
                raise RuntimeError(
                    f"host tier: entries hold {used} bytes, {pinned} of them pinned; the books say {self._used} and"
                    f" {self._pinned}; the capacity is {self.capacity_bytes}"
                )
            for key, entry in self._entries.items():
                if entry.pins < 0 or (not entry.pins and not (entry.reserved and entry.loaded.done())):
                    raise RuntimeError(f"host tier: entry {key} has {entry.pins} pins, {entry.reserved} bytes reserved")

    def _load(self, key: str, entry: _Entry, load: Callable[[], ChunkKV]) -> None:
        try:
            chunk = load()
            nbytes = resident_bytes(chunk)
        except BaseException as error:
            with self._lock:  # out at once: the next pin tries anew, even while others still wait for this error
                self._used -= entry.reserved
                self._pinned -= entry.reserved
                entry.reserved = 0
                del self._entries[key]
            entry.loaded.set_exception(error)
            raise
        with self._lock:
            if entry.reserved and nbytes != entry.reserved:
                self._fit(entry, nbytes)
        entry.loaded.set_result(chunk)

    def _fit(self, entry: _Entry, nbytes: int) -> None:
        """Reserve `nbytes` for a pinned entry in place of what it has, evicting others; nothing when it cannot fit."""
        self._used -= entry.reserved
        self._pinned -= entry.reserved
        entry.reserved = 0
        if self._pinned + nbytes > self.capacity_bytes:
            self._counts["bypasses"] += 1
            return
        excess, victims = self._used + nbytes - self.capacity_bytes, []
        for key, other in self._entries.items():
            if excess <= 0:
                break
            if not other.pins and other is not entry:
                victims.append(key)
                excess -= other.reserved
        for key in victims:
            self._used -= self._entries.pop(key).reserved
            self._counts["evictions"] += 1
        entry.reserved = nbytes
        self._used += nbytes
        self._pinned += nbytes

    def _unpin(self, key: str, entry: _Entry) -> None:
        with self._lock:
            entry.pins -= 1
            if entry.pins:
                return
            self._pinned -= entry.reserved
            if not entry.reserved and self._entries.get(key) is entry:
                del self._entries[key]


def resident_bytes(chunk: ChunkKV) -> int:
    """Bytes of memory that a chunk keeps alive: its tensors may be views of a larger buffer."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in (chunk.k, chunk.v)}
    return sum(storages.values())
