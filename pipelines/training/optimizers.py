# SPDX-License-Identifier: Apache-2.0
"""Optimisers of a repair network."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcache.settings import TrainingSettings
from repair.network import RepairNetwork

_HEAD = "v_head."


def make_optimizers(network: RepairNetwork, recipe: TrainingSettings) -> list[torch.optim.Optimizer]:
    """AdamW on every trained parameter, as published; or Muon on the matrices and AdamW on the rest.

    Muon's steps are scaled to AdamW's size, so that one learning rate serves both. The head stays with AdamW: it is an
    output layer, and too wide to orthogonalise at every step.
    """
    trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
    inner = {name for name, p in trained.items() if p.ndim == 2 and not name.startswith(_HEAD)}
    by_muon = inner if recipe.optimizer == "muon" else set()
    adamw = torch.optim.AdamW(
        [p for name, p in trained.items() if name not in by_muon],
        lr=recipe.learning_rate,
        betas=recipe.betas,
        eps=recipe.epsilon,
        weight_decay=recipe.weight_decay,
        fused=True,
    )
    if not by_muon:
        return [adamw]
    muon = torch.optim.Muon(
        [p for name, p in trained.items() if name in by_muon],
        lr=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return [muon, adamw]


def owners(optimizers: Sequence[torch.optim.Optimizer]) -> dict[torch.nn.Parameter, torch.optim.Optimizer]:
    """Which optimiser moves which parameter."""
    return {p: optimizer for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
