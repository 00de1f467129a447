# SPDX-License-Identifier: Apache-2.0
"""The network that a run begins with: a fresh one, or a checkpoint's."""

from __future__ import annotations

from typing import Any

import torch

from kvcache.settings import TrainingSettings
from kvcache.target import TargetLLM
from repair.checkpoint import load_repairer, locate
from repair.checkpoint_config import CheckpointError, read_config
from repair.network import SIZES, RepairConfig, RepairNetwork


def network_config(size: str, recipe: TrainingSettings) -> RepairConfig:
    """Sizes of a capacity and the variant that a recipe names."""
    return SIZES[size].model_copy(update={"attention": recipe.attention, "reinject": recipe.reinject})


def initial_network(target: TargetLLM, size: str, recipe: TrainingSettings) -> RepairNetwork:
    """The network before the first update, on the target's device.

    A checkpoint's network comes with its normalising sigmas, and what it learned holds only with them.

    Args:
        target: the target LLM.
        size: a key of `repair.network.SIZES`.
        recipe: `init_from` names the checkpoint; without one the network is fresh.

    Raises:
        CheckpointError: no such checkpoint, or one of another target, size or variant.
    """
    config = network_config(size, recipe)
    if recipe.init_from:
        network = load_repairer(recipe.init_from, target)
        differing = [
            f"{name} {getattr(network.config, name)}, not {want}"
            for name, want in config
            if getattr(network.config, name) != want
        ]
        if differing:
            raise CheckpointError(f"training.init_from {recipe.init_from} has {'; '.join(differing)}")
        return network.train()
    torch.manual_seed(recipe.initialization_seed)
    network = RepairNetwork(config, target.geometry, target.model.get_input_embeddings())
    with torch.no_grad():
        for block in network.blocks:
            for gate in block.ada.chunk(6)[2::3]:  # (shift, scale, gate) of attention, then of the MLP
                gate.fill_(recipe.initial_gate)
    return network.to(target.device)


def lineage(recipe: TrainingSettings) -> dict[str, Any]:
    """What is to be said of a network's beginning: how a checkpoint that it came from was trained."""
    if not recipe.init_from:
        return {"initial_gate": recipe.initial_gate}
    return {"continues": read_config(locate(recipe.init_from)).training}
