# SPDX-License-Identifier: Apache-2.0
"""Which rows of a repair batch see which, and exact attention that follows from it.

Under each of the attention variants a row sees one contiguous run of rows. So no T x T mask is ever made: on CPU the
rows of a chunk go through unmasked attention over the keys they see, which is exact and skips what nobody sees; on GPU
FlexAttention gets its block mask from the runs' ends, tile by tile.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from kvcache.settings import Attention

_TILE = 128


@dataclass(frozen=True)
class Run:
    """Consecutive rows `start:stop` that see rows `first:last`; causal: of those, none after themselves."""

    start: int
    stop: int
    first: int
    last: int
    causal: bool = False


@dataclass(frozen=True)
class Visibility:
    """Who sees whom among `N` rows: the chunks of one or several requests laid end to end, without padding.

    Attributes:
        positions: token index of each row in its own prefix, int64 `[N]`, on the device of the rows.
        runs: every row once, in order.
    """

    positions: torch.Tensor
    runs: tuple[Run, ...]

    @classmethod
    def of(cls, requests: Sequence[Sequence[int]], attention: Attention, device: torch.device) -> Visibility:
        """Lay requests end to end.

        Args:
            requests: chunk lengths in tokens, per request, in prompt order.
            attention: block_causal: own chunk and all earlier ones; token_causal: own and earlier tokens;
                bidirectional: the whole prefix; block_diagonal: own chunk only.
            device: where the rows live.
        """
        runs: list[Run] = []
        begin = 0
        for lengths in requests:
            end = begin + sum(lengths)
            if attention in ("token_causal", "bidirectional"):
                runs.append(Run(begin, end, begin, end, causal=attention == "token_causal"))
            else:
                start = begin
                for length in lengths:
                    first = begin if attention == "block_causal" else start
                    runs.append(Run(start, start + length, first, start + length))
                    start += length
            begin = end
        positions = [torch.arange(sum(lengths), device=device) for lengths in requests]
        return cls(torch.cat(positions), tuple(run for run in runs if run.stop > run.start))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Exact attention; all arguments and the result `[1, heads, N, head size]`, in one dtype."""
        dtype = q.dtype
        if q.device.type == "cpu":  # PyTorch compiles CPU kernels of narrower dtypes for every length that it meets
            q, k, v = q.float(), k.float(), v.float()
        with torch.autocast(q.device.type, enabled=False):
            parts = [
                F.scaled_dot_product_attention(
                    q[:, :, run.start : run.stop],
                    k[:, :, run.first : run.last],
                    v[:, :, run.first : run.last],
                    is_causal=run.causal,
                )
                for run in self.runs
            ]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)).to(dtype)

    def attend_flex(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, flex: Callable[..., Any]) -> torch.Tensor:
        """The same by FlexAttention, padded to a bucket so that few shapes are compiled.

        Meant for CUDA and never run there by our tests, which compare it on CPU with FlexAttention's own reference.

        Args:
            flex: `torch.nn.attention.flex_attention.flex_attention`, or that compiled.
        """
        n = q.shape[2]
        padding = (0, 0, 0, self._bucket - n)
        q, k, v = (F.pad(x, padding) for x in (q, k, v))
        return flex(q, k, v, block_mask=self.block_mask)[:, :, :n]

    @property
    def _bucket(self) -> int:
        return max(_TILE, 1 << (len(self.positions) - 1).bit_length())

    @functools.cached_property
    def block_mask(self) -> Any:
        """FlexAttention's block mask, from the least and greatest ends of the runs in each tile of rows."""
        from torch.nn.attention.flex_attention import BlockMask

        device, size = self.positions.device, self._bucket
        rows = torch.arange(size, device=device)
        first, last = rows.clone(), rows + 1  # a padding row sees only itself
        for run in self.runs:
            first[run.start : run.stop] = run.first
            last[run.start : run.stop] = rows[run.start : run.stop] + 1 if run.causal else run.last
        tile_first, tile_last = first.view(-1, _TILE), last.view(-1, _TILE)
        edge = torch.arange(0, size, _TILE, device=device)
        every = (tile_first.amax(1)[:, None] <= edge) & (tile_last.amin(1)[:, None] >= edge + _TILE)
        some = (tile_first.amin(1)[:, None] < edge + _TILE) & (tile_last.amax(1)[:, None] > edge)

        def visible(b: Any, h: Any, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return (key >= first[row]) & (key < last[row])

        return BlockMask.from_kv_blocks(
            *_listed(some & ~every), *_listed(every), BLOCK_SIZE=_TILE, mask_mod=visible, seq_lengths=(size, size)
        )


def has_flex(x: torch.Tensor) -> bool:
    """Whether FlexAttention runs for this tensor: on a GPU, with a compiler for it, and no gradient wanted."""
    return x.is_cuda and not torch.is_grad_enabled() and importlib.util.find_spec("triton") is not None


def _listed(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts and indices, in FlexAttention's form, of a boolean tile matrix."""
    order = tiles.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return tiles.sum(1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


@functools.cache
def compiled_flex() -> Callable[..., Any]:
    """FlexAttention, compiled once per shape."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)
