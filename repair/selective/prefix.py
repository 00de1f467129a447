# SPDX-License-Identifier: Apache-2.0
"""One request's chunks side by side in memory that may be written, on the target's device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvcache.chunk import ChunkKV
from kvcache.geometry import Rotary
from kvcache.target import TargetLLM


@dataclass(frozen=True)
class AssembledPrefix:
    """The prefix's rows, `N` of them, and behind them room for those of the question; `T` in all.

    A row is known by its place, 0 .. T - 1, which is also its place in causal order.

    Attributes:
        lengths: rows of each chunk, header chunk first.
        token_ids: int64 `[T]`, the prefix's, then the question's.
        positions: int64 `[T]`, where the keys are rotated to: the places, unless chunks are looked at unmoved.
        k: canonical keys `[L, T, H, D]` in the target's dtype; those of the question are anything until they are made.
        v: values, likewise.
        turned: the same keys, rotated to `positions`: what is attended to. Turning all of them once, and then those
            that change, takes a fraction of turning in every layer what is looked at there.
    """

    lengths: tuple[int, ...]
    token_ids: torch.Tensor
    positions: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    turned: torch.Tensor

    @classmethod
    def of(
        cls,
        target: TargetLLM,
        chunks: Sequence[ChunkKV],
        question_ids: Sequence[int] = (),
        *,
        unmoved: bool = False,
    ) -> AssembledPrefix:
        """Copy the chunks' stale KV.

        Args:
            target: whose dtype and device they come to.
            chunks: stale KV in prompt order.
            question_ids: ids that follow.
            unmoved: leave each chunk at the positions 0, 1, ... that it was computed at.
        """
        lengths = tuple(len(chunk.token_ids) for chunk in chunks)
        rows = sum(lengths)
        ids = [token for chunk in chunks for token in chunk.token_ids] + list(question_ids)
        positions = torch.arange(len(ids))
        if unmoved:
            positions[:rows] = torch.cat([torch.arange(length) for length in lengths])
        positions = positions.to(target.device)
        k, v = (_side_by_side([getattr(chunk, part) for chunk in chunks], len(ids), target) for part in "kv")
        turned = target.rotary.rotate(k, positions)
        return cls(lengths, torch.tensor(ids, device=target.device), positions, k, v, turned)

    def put(self, layer: int, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary: Rotary) -> None:
        """Replace rows of a layer.

        Args:
            layer: which.
            rows: int64 `[n]`.
            k: canonical keys `[n, H, D]`.
            v: values, likewise.
            rotary: the target's.
        """
        self.k[layer, rows] = k
        self.v[layer, rows] = v
        self.turned[layer, rows] = rotary.rotate(k, self.positions[rows])

    @property
    def rows(self) -> int:
        """Rows of the prefix, `N`."""
        return sum(self.lengths)

    @property
    def question(self) -> torch.Tensor:
        """The question's rows, int64."""
        return torch.arange(self.rows, len(self.token_ids), device=self.k.device)

    def ids(self) -> tuple[int, ...]:
        """Ids that stand for the prefix's rows."""
        return tuple(self.token_ids[: self.rows].tolist())

    def kv(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Canonical keys and values of the prefix's rows `[L, N, H, D]`, in host memory."""
        return self.k[:, : self.rows].cpu(), self.v[:, : self.rows].cpu()


def _side_by_side(parts: Sequence[torch.Tensor], rows: int, target: TargetLLM) -> torch.Tensor:
    layers, _, heads, head_dim = parts[0].shape
    # Over the bus in the store's dtype, in one piece, from memory that the device reads by itself.
    pinned = target.device.type == "cuda"
    dtype = parts[0].dtype if pinned else target.dtype
    joined = torch.empty(layers, rows, heads, head_dim, dtype=dtype, pin_memory=pinned)
    start = 0
    for part in parts:
        joined[:, start : start + part.shape[1]].copy_(part)
        start += part.shape[1]
    return joined.to(target.device, target.dtype)
