# SPDX-License-Identifier: Apache-2.0
"""Paired bootstrap intervals: requests are drawn, and both methods are looked at on the same draw."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

DRAWS = 10_000
SEED = 7
PERCENTILES = (2.5, 97.5)
_BLOCK = 500


@dataclass(frozen=True)
class Interval:
    """A difference and its 95 % interval."""

    difference: float
    low: float
    high: float
    requests: int


def paired_difference(
    method: Sequence[float], other: Sequence[float], statistic: Literal["mean", "median"] = "mean"
) -> Interval:
    """Interval of `statistic(method) - statistic(other)` over requests, as CacheRepair's paper has it: 10,000 draws,
    seed 7, 2.5 and 97.5 percentiles.

    Args:
        method, other: one value per request, in the same order; at least one.
        statistic: of the drawn requests.
    """
    a, b = np.asarray(method, dtype=np.float64), np.asarray(other, dtype=np.float64)
    if a.shape != b.shape or a.ndim != 1 or not len(a):
        raise ValueError(f"want two equally long, non-empty rows of numbers, got shapes {a.shape} and {b.shape}")
    if statistic == "mean":
        difference, drawn = float((a - b).mean()), _weights(len(a)) @ (a - b)
    else:
        difference = float(np.median(a) - np.median(b))
        chosen = _indices(len(a))
        drawn = np.concatenate(
            [
                np.median(a[part], axis=1) - np.median(b[part], axis=1)
                for part in np.array_split(chosen, -(-len(chosen) // _BLOCK))
            ]
        )
    low, high = np.percentile(drawn, PERCENTILES)
    return Interval(difference, float(low), float(high), len(a))


@functools.lru_cache(maxsize=4)
def _indices(requests: int) -> np.ndarray:
    """Which requests each draw holds, `[draws, requests]`: the same for every pair of methods."""
    return np.random.default_rng(SEED).integers(requests, size=(DRAWS, requests), dtype=np.int32)


@functools.lru_cache(maxsize=4)
def _weights(requests: int) -> np.ndarray:
    """Share of each request in each draw: the means of all draws are one matrix product."""
    flat = _indices(requests) + np.arange(DRAWS, dtype=np.int64)[:, None] * requests
    return np.bincount(flat.ravel(), minlength=DRAWS * requests).reshape(DRAWS, requests) / requests
