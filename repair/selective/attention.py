# SPDX-License-Identifier: Apache-2.0
"""Attention of chosen rows to the rows they may see, with exact masks and no more keys than that takes."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from repair.selective.prefix import AssembledPrefix

_TILE = 256
"""Rows that share one mask; in causal order, so that a tile's keys end with its last row."""


def attend(
    queries: torch.Tensor,
    prefix: AssembledPrefix,
    layer: int,
    rows: torch.Tensor,
    context: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Let `rows` attend in one layer.

    A row sees itself and every row of `context` that is not behind it: the mask goes by the rows' places, wherever
    they are. (A lower triangle over the compacted rows, as the CacheBlend demo has it, lets early rows see later ones.)

    Args:
        queries: `[n, Q, D]` of the `Q` query heads, rotated to the rows' positions.
        prefix: whose keys and values are seen, those of `rows` in this layer included.
        layer: which.
        rows: int64 `[n]`, ascending, at least one.
        context: int64 `[C]`, ascending; None is every row.
        scale: factor on the scores.

    Returns:
        `[n, Q * D]`.
    """
    tiles = range(0, len(rows), _TILE)
    last = rows[[min(start + _TILE, len(rows)) - 1 for start in tiles]]
    if context is None:
        ends = (last + 1).tolist()
        keys = torch.arange(ends[-1], device=rows.device)
        gathered = slice(0, ends[-1])
        admitted = None
    else:
        keys = gathered = torch.cat([context, rows]).unique()
        ends = torch.searchsorted(keys, last, right=True).tolist()
        admitted = torch.isin(keys, context)
    # [H, 1, C, D] against [H, Q / H, n, D]: the query heads of a KV head share its memory.
    k = prefix.turned[layer, gathered].transpose(0, 1)[:, None]
    v = prefix.v[layer, gathered].transpose(0, 1)[:, None]
    q = queries.unflatten(1, (k.shape[0], -1)).permute(1, 2, 0, 3)
    mixed = []
    for start, end in zip(tiles, ends, strict=True):
        own = rows[start : start + _TILE, None]
        mask = keys[:end] <= own
        if admitted is not None:
            mask &= admitted[:end] | (keys[:end] == own)
        seen = (x[:, :, :end].expand(-1, q.shape[1], -1, -1) for x in (k, v))
        mixed.append(F.scaled_dot_product_attention(q[:, :, start : start + _TILE], *seen, attn_mask=mask, scale=scale))
    return torch.cat(mixed, dim=2).permute(2, 0, 1, 3).flatten(1)
