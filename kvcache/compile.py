# SPDX-License-Identifier: Apache-2.0
"""From chunks to one cache, in the packed order `[B, T, L, H, 2, D]` of the published repairers (CacheRepair)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import DynamicCache

from kvcache.chunk import ChunkKV
from kvcache.geometry import Rotary
from kvcache.target import TargetLLM


def compile_stale(
    target: TargetLLM, chunks: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute each chunk's KV alone and put the chunks side by side.

    Args:
        target: the target LLM.
        chunks: token ids per chunk, in order; chunk 0 is the header chunk.

    Returns:
        `stale` canonical KV `[1, T, L, H, 2, D]` in the target's dtype, `tokens` int64 `[1, T]`,
        `chunk_ids` int64 `[1, T]` (0 .. number of chunks - 1).
    """
    parts = [target.stale_kv([ids])[0] for ids in chunks]
    stale = torch.cat([pack(part) for part in parts])[None]
    tokens = torch.tensor([[token for ids in chunks for token in ids]])
    chunk_ids = torch.tensor([[index for index, ids in enumerate(chunks) for _ in ids]])
    return stale, tokens, chunk_ids


def pack(chunk: ChunkKV) -> torch.Tensor:
    """One chunk's KV as `[T, L, H, 2, D]`."""
    return torch.stack([chunk.k, chunk.v], dim=-2).transpose(0, 1)


def materialize(kv: torch.Tensor, rotary: Rotary, positions: torch.Tensor | None = None) -> torch.Tensor:
    """Turn canonical KV into global KV: keys rotated to their positions in the assembled prefix.

    Args:
        kv: canonical KV `[B, T, L, H, 2, D]`.
        rotary: the target's (`target.rotary`).
        positions: int `[T]`; None is 0 .. T - 1.

    Returns:
        Global KV, same shape and dtype, new memory.
    """
    positions = torch.arange(kv.shape[1]) if positions is None else positions
    result = kv.clone()
    keys_BLTHD = kv[..., 0, :].transpose(1, 2)
    result[..., 0, :] = rotary.rotate(keys_BLTHD, positions).transpose(1, 2)
    return result


def to_hf_cache(kv: torch.Tensor) -> DynamicCache:
    """A transformers cache, from which `generate` continues, of global KV `[B, T, L, H, 2, D]`."""
    cache = DynamicCache()
    for index in range(kv.shape[2]):
        keys, values = kv[:, :, index].permute(3, 0, 2, 1, 4)
        cache.update(keys.contiguous(), values.contiguous(), index)
    return cache
