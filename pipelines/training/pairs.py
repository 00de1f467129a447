# SPDX-License-Identifier: Apache-2.0
"""Training pairs: the stale KV of an arrangement of chunks, and what it lacks to the joint KV.

Stale KV comes from a chunk store, through the host tier, by the code that serves it: a chunk is computed once however
many groups use it. Residuals come from a cache of files. Both lie in one folder with a bound; past it pairs are
computed each time they are visited.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from kvcache.chunk import ChunkKV, chunk_key, token_digest
from kvcache.compile import from_hf_cache, pack
from kvcache.host_tier import HostTier, PinnedChunk
from kvcache.settings import Settings
from kvcache.store import ChunkMiss, ChunkStore, StoreError
from kvcache.target import TargetLLM

_RECOUNT = 64
"""Writes between two counts of the folder, which other workers write to as well."""


@dataclass(frozen=True)
class TrainingPair:
    """One arrangement's input and target.

    Attributes:
        stale: canonical stale KV `[T, L, H, 2, D]`, float32, rounded to the training store's dtype.
        residual: joint minus stale, `[T, L, H, 2, D]`, float32.
        tokens: int64 `[T]`.
        lengths: tokens per chunk.
    """

    stale: torch.Tensor
    residual: torch.Tensor
    tokens: torch.Tensor
    lengths: tuple[int, ...]


class PairSource:
    """Gives training pairs, from the cache where it has them.

    Args:
        target: the target LLM.
        settings: `settings.training` says where the cache is, its dtype and bound.
    """

    def __init__(self, target: TargetLLM, settings: Settings) -> None:
        self._target = target
        # Stale and joint KV must be rounded alike: where they should be equal, as in layer 0, their difference is zero.
        self._folder = Path(settings.training.cache_dir) / settings.training.matmul_precision
        self._dtype = getattr(torch, settings.training.cache_dtype)
        self._store = ChunkStore(
            str(self._folder.resolve() / "stale"),
            fingerprint=target.fingerprint,
            geometry=target.geometry,
            dtype=self._dtype,
            settings=settings.store,
            model=settings.target.model,
        )
        self._store.check_target()
        self._tier = HostTier(settings.host_tier.bytes)
        self._limit = settings.training.cache_bytes
        self._counted, self._until_count = 0, 0

    def pair(self, chunks: Sequence[Sequence[int]]) -> TrainingPair:
        """The pair of one arrangement.

        Args:
            chunks: token ids per chunk, header chunk first.

        Raises:
            ValueError: a chunk, or all together, that the target cannot take.
        """
        with ExitStack() as pins:
            stale = torch.cat([pack(pins.enter_context(self._pin(ids)).chunk).float() for ids in chunks])
        path = self._folder / "residual" / f"{self._name(chunks)}.safetensors"
        residual = self._read(path, stale.shape)
        if residual is None:
            joint = joint_kv(self._target, [token for ids in chunks for token in ids])
            # Through the cache's dtype either way: an interrupted run and a whole one see the same numbers.
            residual = (joint - stale).to(self._dtype)
            self._write(path, residual)
        tokens = torch.tensor([token for ids in chunks for token in ids])
        return TrainingPair(stale, residual.float(), tokens, tuple(map(len, chunks)))

    def _pin(self, ids: Sequence[int]) -> PinnedChunk:
        key = chunk_key(self._target.fingerprint, ids)
        nbytes = self._target.geometry.kv_bytes(len(ids), self._dtype)
        return self._tier.pin(key, nbytes, lambda: self._load(ids))

    def _load(self, ids: Sequence[int]) -> ChunkKV:
        try:
            return self._store.get(ids)
        except ChunkMiss:
            pass
        (chunk,) = self._target.stale_kv([ids])
        chunk = ChunkKV(chunk.token_ids, chunk.k.to(self._dtype), chunk.v.to(self._dtype))
        if self._has_room(chunk.nbytes):
            try:
                self._store.put(chunk)
            except StoreError:
                self._limit = 0  # the disk is full: go on without
        return chunk

    def _name(self, chunks: Sequence[Sequence[int]]) -> str:
        parts = [self._target.fingerprint, str(self._dtype), *map(token_digest, chunks)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def _read(self, path: Path, shape: torch.Size) -> torch.Tensor | None:
        try:
            residual = load_file(path)["residual"]
        except (FileNotFoundError, SafetensorError, KeyError):
            return None
        return residual if residual.shape == shape and residual.dtype == self._dtype else None

    def _write(self, path: Path, residual: torch.Tensor) -> None:
        if not self._has_room(residual.nbytes):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        try:
            save_file({"residual": residual}, part)
            part.replace(path)
        except (OSError, SafetensorError):
            part.unlink(missing_ok=True)
            self._limit = 0

    def _has_room(self, nbytes: int) -> bool:
        if not self._until_count:
            self._counted, self._until_count = folder_bytes(self._folder), _RECOUNT
        self._until_count -= 1
        if self._counted + nbytes > self._limit:
            return False
        self._counted += nbytes
        return True


@torch.inference_mode()
def joint_kv(target: TargetLLM, ids: Sequence[int]) -> torch.Tensor:
    """KV that one prefill of the whole prefix gives: canonical keys, float32 `[T, L, H, 2, D]`, in host memory.

    Raises:
        ValueError: no ids, or more than the target has positions for.
    """
    if not 0 < len(ids) <= target.geometry.max_positions:
        raise ValueError(f"a prefix of {len(ids)} tokens; want 1 to {target.geometry.max_positions}")
    cache = target.model.get_decoder()(input_ids=torch.tensor([ids], device=target.device), use_cache=True)
    return from_hf_cache(cache.past_key_values, target.rotary, len(ids))[0]


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder; files that vanish meanwhile count nothing."""
    total = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(directory, name)).st_size
            except FileNotFoundError:
                continue
    return total
