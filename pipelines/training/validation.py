# SPDX-License-Identifier: Apache-2.0
"""Validation: how far stale and repaired KV are from joint KV on groups that training never saw."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from pipelines.training.pairs import TrainingPair
from pipelines.training.statistics import Statistics
from repair.network import RepairNetwork

BOUNDARY_TOKENS = 8
"""Tokens at the start of each chunk but the first that count as its boundary."""
REGIONS = ("first", "boundary", "interior", "all")


@dataclass(frozen=True)
class KVError:
    """Errors of one kind of KV (stale or repaired) against joint KV.

    Attributes:
        nmse: mean square error over all tokens and weighted coordinates, each in units of its residual's RMS.
        k, v: relative RMS of keys and values, by region: RMS of the error over RMS of the joint KV; None where there
            are no tokens.
    """

    nmse: float
    k: dict[str, float | None] = field(default_factory=dict)
    v: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Validation:
    """Stale and repaired, on the same tokens."""

    stale: KVError
    repaired: KVError
    groups: int
    tokens: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


class _Errors:
    def __init__(self) -> None:
        self.normalised = 0.0
        self.squares = torch.zeros(len(REGIONS), 2, dtype=torch.float64)

    def add(self, error: torch.Tensor, statistics: Statistics, regions: torch.Tensor) -> None:
        self.normalised += float(
            ((error / statistics.sigma_delta).square() * statistics.weight).sum(dtype=torch.float64)
        )
        self.squares += by_region(error, regions)

    def result(self, joint: torch.Tensor, elements: float) -> KVError:
        rows = (self.squares / joint).sqrt().tolist()  # 0 / 0 is NaN, which JSON does not have
        k, v = (
            {name: None if math.isnan(row[kv]) else row[kv] for name, row in zip(REGIONS, rows, strict=True)}
            for kv in (0, 1)
        )
        return KVError(self.normalised / elements, k, v)


@torch.no_grad()
def validate(network: RepairNetwork, pairs: Iterable[TrainingPair], statistics: Statistics) -> Validation:
    """Compare stale and repaired KV with joint KV.

    Args:
        network: with the statistics' sigmas.
        pairs: of held-out groups.
        statistics: for the normalised error.

    Returns:
        Errors over all tokens of all pairs.
    """
    stale, repaired = _Errors(), _Errors()
    joint = torch.zeros(len(REGIONS), 2, dtype=torch.float64)
    groups = tokens = 0
    for pair in pairs:
        regions = region_masks(pair.lengths)
        predicted = network.forward_packed(pair.stale, pair.tokens, [pair.lengths]).cpu()
        stale.add(pair.residual, statistics, regions)
        repaired.add(pair.residual - predicted * statistics.sigma_delta, statistics, regions)
        joint += by_region(pair.stale + pair.residual, regions)
        groups, tokens = groups + 1, tokens + len(pair.tokens)
    elements = tokens * float(statistics.weight.sum())
    return Validation(stale.result(joint, elements), repaired.result(joint, elements), groups, tokens)


def region_masks(lengths: tuple[int, ...]) -> torch.Tensor:
    """Which tokens belong to which of `REGIONS`: float64 `[regions, T]`. The first chunk lacks nothing."""
    chunk_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    within_T = torch.cat([torch.arange(length) for length in lengths])
    first, start = chunk_T == 0, within_T < BOUNDARY_TOKENS
    return torch.stack([first, ~first & start, ~first & ~start, torch.ones_like(first)]).double()


def by_region(values: torch.Tensor, regions: torch.Tensor) -> torch.Tensor:
    """Sums of squares `[regions, (K, V)]` of `[T, L, H, 2, D]`."""
    per_token_T2 = values.square().sum(dim=(1, 2, 4), dtype=torch.float64)
    return regions @ per_token_T2
