# SPDX-License-Identifier: Apache-2.0
"""Losses on the normalised residual.

An objective is a module: called with predicted and true normalised residual `[T, L, H, 2, D]` it gives the loss of each
element, same shape, without reduction. What it had to measure is in its buffers, which a training state keeps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from kvcache.geometry import Geometry
from kvcache.settings import TrainingSettings


class SquaredError(nn.Module):
    """The published default."""

    def forward(self, predicted: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
        return (predicted - true).square()


class Huber(nn.Module):
    """Squared near zero, linear beyond `delta`; scaled to agree with `SquaredError` for small errors."""

    def __init__(self, delta: float) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, predicted: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
        return 2 * F.huber_loss(predicted, true, reduction="none", delta=self.delta)


class ScoresAndValues(nn.Module):
    """QK/V: squared errors of what attention makes of keys, its scores, and of values.

    The published ablation names this objective and does not define it; this is our reading. An error `e` of a key is
    weighed by `E[(q e)^2]` over the queries `q` that may look at it: a quadratic form, so it is the squared length of
    `metric e`.

    Attributes:
        metric: float32 `[L, H, D, D]`, acts on normalised keys; the identity until measured (`scores.ScoreMoments`).
    """

    metric: torch.Tensor

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        eye = torch.eye(geometry.head_dim)
        self.register_buffer("metric", eye.repeat(geometry.n_layers, geometry.n_kv_heads, 1, 1))

    def forward(self, predicted: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
        keys, values = (predicted - true).unbind(3)
        scores = torch.einsum("lhed,tlhd->tlhe", self.metric, keys)
        return torch.stack([scores, values], dim=3).square()


def objective(recipe: TrainingSettings, geometry: Geometry) -> nn.Module:
    """The objective that a recipe names."""
    match recipe.objective:
        case "mse":
            return SquaredError()
        case "huber":
            return Huber(recipe.huber_delta)
        case "qkv":
            return ScoresAndValues(geometry)


def document_loss(
    predicted: torch.Tensor, true: torch.Tensor, weight: torch.Tensor, elementwise: nn.Module
) -> torch.Tensor:
    """Mean loss of one document over its tokens and the coordinates with weight.

    Args:
        predicted, true: normalised residual `[T, L, H, 2, D]`.
        weight: of each coordinate, `[L, H, 2, D]`.
        elementwise: the objective.
    """
    # Tokens are summed before weighing: one pass less over a tensor as large as the cache, and one less going back.
    return (elementwise(predicted, true).sum(0) * weight).sum() / (weight.sum() * len(true))
