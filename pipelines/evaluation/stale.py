# SPDX-License-Identifier: Apache-2.0
"""Stale KV of the requests' chunks: from the project's chunk store where it is there, computed otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from kvcache.chunk import ChunkKV
from kvcache.host_tier import HostTier
from kvcache.settings import Settings
from kvcache.store import ChunkMiss, ChunkStore
from kvcache.target import TargetLLM


class StaleSource:
    """Reads and computes, and never writes: an evaluation's chunks have no business in the store that serves.

    Args:
        target: the target LLM.
        settings: `store` and `host_tier` count here.

    Raises:
        StoreMismatchError: the store belongs to another target.
    """

    def __init__(self, target: TargetLLM, settings: Settings) -> None:
        self._target = target
        self._store = ChunkStore.of(settings)
        self._store.check_target()
        self._tier = HostTier(settings.host_tier.bytes)

    @property
    def dtype(self) -> str:
        """Of the stale KV, stored or computed."""
        return str(self._store.dtype).removeprefix("torch.")

    @contextmanager
    def chunks(self, chunks: Sequence[Sequence[int]]) -> Iterator[list[ChunkKV]]:
        """Stale KV of chunks in host memory, for the length of the `with` block."""
        with ExitStack() as pins:
            form = self._store.format
            yield [
                pins.enter_context(
                    self._tier.pin(form.key(ids), form.size(len(ids)), lambda ids=ids: self._load(ids))
                ).chunk
                for ids in chunks
            ]

    def _load(self, ids: Sequence[int]) -> ChunkKV:
        try:
            return self._store.get(ids)
        except ChunkMiss:
            (chunk,) = self._target.stale_kv([ids])
            # As the store would give it back: a chunk is the same wherever it comes from.
            return ChunkKV(chunk.token_ids, chunk.k.to(self._store.dtype), chunk.v.to(self._store.dtype))
