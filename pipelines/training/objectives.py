# SPDX-License-Identifier: Apache-2.0
"""Losses on the normalised residual."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

Objective = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Of predicted and true normalised residual, same shape, elementwise."""


def objective(name: str, huber_delta: float) -> Objective:
    """Look an objective up.

    Args:
        name: `mse` (the published default) or `huber`.
        huber_delta: where Huber turns linear.
    """
    if name == "mse":
        return lambda predicted, true: (predicted - true).square()
    # Scaled so that both agree for small errors.
    return lambda predicted, true: 2 * F.huber_loss(predicted, true, reduction="none", delta=huber_delta)


def document_loss(
    predicted: torch.Tensor, true: torch.Tensor, weight: torch.Tensor, elementwise: Objective
) -> torch.Tensor:
    """Mean loss of one document over its tokens and the coordinates with weight.

    Args:
        predicted, true: normalised residual `[T, L, H, 2, D]`.
        weight: of each coordinate, `[L, H, 2, D]`.
    """
    # Tokens are summed before weighing: one pass less over a tensor as large as the cache, and one less going back.
    return (elementwise(predicted, true).sum(0) * weight).sum() / (weight.sum() * len(true))
