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

    Raises:
        ValueError: no chunks, an empty one, an id outside the vocabulary, or more tokens than the target has positions.
    """
    if not chunks:
        raise ValueError("there are no chunks to compile")
    if (total := sum(map(len, chunks))) > target.geometry.max_positions:
        raise ValueError(f"the chunks have {total} tokens; the target has {target.geometry.max_positions} positions")
    target.check(chunks)
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


def from_hf_cache(cache: DynamicCache, rotary: Rotary, rows: int) -> torch.Tensor:
    """The way back: canonical KV, float32 `[B, T, L, H, 2, D]` in host memory, of a cache's positions 0 .. rows - 1."""
    positions_T = torch.arange(rows)
    batch, heads, _, head_dim = cache.layers[0].keys.shape
    result = torch.empty(batch, rows, len(cache.layers), heads, 2, head_dim)
    for index, layer in enumerate(cache.layers):
        keys_BTHD, values_BTHD = (x[:, :, :rows].transpose(1, 2) for x in (layer.keys, layer.values))
        result[:, :, index, :, 0].copy_(rotary.unrotate(keys_BTHD.float(), positions_T))
        result[:, :, index, :, 1].copy_(values_BTHD)
    return result
