# SPDX-License-Identifier: Apache-2.0
"""The statistics pass: the RMS of every coordinate of stale KV and of the residual."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from pipelines.training.pairs import TrainingPair

_LEAST_MEAN_SQUARE = 1e-12


@dataclass(frozen=True)
class Statistics:
    """What normalises input and target.

    Layer 0 sees no other chunk: its residual is zero but for rounding, and dividing by its RMS would turn noise into
    the hardest target of all. Such coordinates get a floor, at which the network's output is harmless, and no weight
    in the loss.

    Attributes:
        sigma_stale: RMS of stale KV, float32 `[L, H, 2, D]`.
        sigma_delta: RMS of the residual, not below `floor * sigma_stale`, float32 `[L, H, 2, D]`.
        floor: least residual RMS, relative to the stale RMS.
    """

    sigma_stale: torch.Tensor
    sigma_delta: torch.Tensor
    floor: float

    @property
    def weight(self) -> torch.Tensor:
        """Loss weight of each coordinate, float32 `[L, H, 2, D]`: 0 at the floor, else 1."""
        return (self.sigma_delta > self.floor * self.sigma_stale * (1 + 1e-5)).float()


class SquareSums:
    """Sums of squares over tokens, in float64; those of several workers can be added."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.stale = torch.zeros(shape, dtype=torch.float64)
        self.residual = torch.zeros(shape, dtype=torch.float64)
        self.tokens = torch.zeros((), dtype=torch.float64)

    def add(self, pair: TrainingPair) -> None:
        """Count one pair in; every token weighs the same."""
        for total, values in ((self.stale, pair.stale), (self.residual, pair.residual)):
            for part in values.split(64):  # float64 of a whole prefix would take twice its memory again
                total += part.double().square_().sum(0)
        self.tokens += len(pair.tokens)

    def statistics(self, floor: float) -> Statistics:
        """RMS of everything counted, without subtracting a mean.

        Args:
            floor: least residual RMS, relative to the stale RMS.
        """
        stale, residual = (
            (total / self.tokens).clamp_min(_LEAST_MEAN_SQUARE).sqrt() for total in (self.stale, self.residual)
        )
        return Statistics(stale.float(), torch.maximum(residual, floor * stale).float(), floor)


def measure(pairs: Iterable[TrainingPair], shape: tuple[int, ...]) -> SquareSums:
    """Run the pass over pairs."""
    sums = SquareSums(shape)
    for pair in pairs:
        sums.add(pair)
    return sums
