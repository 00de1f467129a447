# SPDX-License-Identifier: Apache-2.0
"""How far a method's canonical KV is from joint KV: by layer, head, region and position, and as one number.

Shapes: `T` tokens, `L` layers, `H` KV heads, `D` head size; the axis of size 2 is (K, V).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from pipelines.training.statistics import Statistics
from pipelines.training.validation import REGIONS, region_masks

PARTS = REGIONS[:3]
"""Regions that cover each token once: first chunk, boundary (first 8 tokens of later chunks), interior."""
POSITION_BIN = 128
"""Tokens of the prefix that share a bin of `by_position`."""
DISTANCES = (0, 1, 2, 4, 8, 16, 32, 64, 128)
"""Least distance to the start of the own chunk, in tokens, of each bin of `by_distance`; without the first chunk."""

Sums = dict[str, np.ndarray]
"""Sums of squares, float64: `layer_head` `[PARTS, L, H, 2]`, `position` `[bins, 2]`, `distance` `[DISTANCES, 2]`."""


def square_sums(values: torch.Tensor, lengths: Sequence[int]) -> Sums:
    """Sums of squares of `[T, L, H, 2, D]`.

    Args:
        values: an error, or the joint KV that it is relative to.
        lengths: tokens per chunk, header chunk first.
    """
    per_token_TLH2 = values.square().sum(-1, dtype=torch.float64)
    chunk_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    within_T = torch.cat([torch.arange(length) for length in lengths])
    place_T = torch.arange(len(within_T)) // POSITION_BIN
    distance_T = torch.bucketize(within_T, torch.tensor(DISTANCES), right=True) - 1
    by_place = torch.zeros(int(place_T[-1]) + 1, 2, dtype=torch.float64)
    by_distance = torch.zeros(len(DISTANCES), 2, dtype=torch.float64)
    per_token_T2 = per_token_TLH2.sum((1, 2))
    later_T = chunk_T > 0
    return {
        "layer_head": torch.tensordot(region_masks(tuple(lengths))[:3], per_token_TLH2, 1).numpy(),
        "position": by_place.index_add_(0, place_T, per_token_T2).numpy(),
        "distance": by_distance.index_add_(0, distance_T[later_T], per_token_T2[later_T]).numpy(),
    }


def normalised_mse(error: torch.Tensor, statistics: Statistics) -> float:
    """Mean square of an error `[T, L, H, 2, D]`, each coordinate in units of its residual's RMS; weighted ones only."""
    scaled = (error / statistics.sigma_delta).square_().mul_(statistics.weight)
    return float(scaled.sum(dtype=torch.float64)) / (len(error) * float(statistics.weight.sum()))


def add(sums: Iterable[Sums]) -> Sums:
    """The sums of several requests together; prefixes of other lengths have other numbers of position bins."""
    total: Sums = {}
    for one in sums:
        for name, value in one.items():
            if name not in total:
                total[name] = value.copy()
                continue
            if len(value) > len(total[name]):
                total[name] = np.pad(total[name], [(0, len(value) - len(total[name])), (0, 0)])
            total[name][: len(value)] += value
    return total


def relative_rms(error: Sums, joint: Sums) -> dict[str, Any]:
    """RMS of the error over RMS of the joint KV.

    Returns:
        `{"k": ..., "v": ...}`, each `{"by_region": {region: x}, "by_layer_head": [L][H], "by_layer": [L], "by_head":
        [H], "by_position": [...], "by_distance": [...]}`; None where there is nothing.
    """
    result = {}
    for index, name in enumerate(("k", "v")):
        e, j = error["layer_head"][..., index], joint["layer_head"][..., index]
        regions = [*_ratio(e.sum((1, 2)), j.sum((1, 2))), *_ratio(e.sum(keepdims=True), j.sum(keepdims=True)).ravel()]
        result[name] = {
            "by_region": dict(zip(REGIONS, _plain(np.array(regions)), strict=True)),
            "by_layer_head": _plain(_ratio(e.sum(0), j.sum(0))),
            "by_layer": _plain(_ratio(e.sum((0, 2)), j.sum((0, 2)))),
            "by_head": _plain(_ratio(e.sum((0, 1)), j.sum((0, 1)))),
            "by_position": _plain(_ratio(error["position"][:, index], joint["position"][:, index])),
            "by_distance": _plain(_ratio(error["distance"][:, index], joint["distance"][:, index])),
        }
    return result


def _ratio(error: np.ndarray, joint: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.sqrt(error / joint)


def _plain(values: np.ndarray) -> list[Any]:
    # 0 / 0 is NaN, which JSON does not have
    return np.where(np.isnan(values), None, values.astype(object)).tolist()
