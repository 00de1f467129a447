# SPDX-License-Identifier: Apache-2.0
"""The network that a run begins with: a fresh one, or a checkpoint's."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvcache.settings import TrainingSettings
from kvcache.target import TargetLLM
from repair.checkpoint import WEIGHTS_FILE, load_repairer, locate
from repair.checkpoint_config import CONFIG_FILE, CheckpointError, read_config
from repair.network import SIZES, RepairConfig, RepairNetwork


@dataclass(frozen=True)
class Parent:
    """A checkpoint that a run begins with.

    Attributes:
        directory: its folder, absolute; every worker sees it.
        weights_sha256: which weights it had when the run was planned.
        training: the account of its own training.
    """

    directory: Path
    weights_sha256: str
    training: dict[str, Any]


def network_config(size: str, recipe: TrainingSettings) -> RepairConfig:
    """Sizes of a capacity and the variant that a recipe names."""
    return SIZES[size].model_copy(update={"attention": recipe.attention, "reinject": recipe.reinject})


def find_parent(directory_or_hub_id: str, size: str, output: Path, recipe: TrainingSettings) -> Parent:
    """Find a checkpoint that a run can begin with.

    Args:
        directory_or_hub_id: as for `repair.load_repairer`.
        size, recipe: what is to be trained.
        output: the run's own directory.

    Raises:
        CheckpointError: no checkpoint, one of another size or recipe, or the run would write over it.
    """
    local = Path(directory_or_hub_id).expanduser()
    directory = locate(local if local.is_dir() else directory_or_hub_id).absolute()
    path = directory / CONFIG_FILE
    if directory.resolve() == output.resolve():
        raise CheckpointError(f"{directory}: a run cannot begin with the checkpoint it writes: give another --output")
    found, want = read_config(directory), network_config(size, recipe)
    for name, value in want:
        if (has := getattr(found.network_config, name)) != value:
            raise CheckpointError(
                f"{path}: {name} is {has}, and {value} is to be trained (--size, training.attention, training.reinject)"
            )
    # What is below the floor has no weight: with another floor the sigmas would mean something else.
    floor = found.training.get("residual_floor", recipe.residual_floor)
    if floor != recipe.residual_floor:
        raise CheckpointError(f"{path}: training.residual_floor is {floor}, and the recipe's {recipe.residual_floor}")
    try:
        weights = (directory / WEIGHTS_FILE).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{directory / WEIGHTS_FILE}: cannot be read: {error.strerror}") from None
    return Parent(directory, hashlib.sha256(weights).hexdigest(), found.training)


def initial_network(target: TargetLLM, size: str, recipe: TrainingSettings, parent: Parent | None) -> RepairNetwork:
    """The network before the first update, on the target's device.

    A parent's network comes with its normalising sigmas: what it learned holds only with them.

    Raises:
        CheckpointError: the parent is damaged or of another target.
    """
    if parent is not None:
        return load_repairer(parent.directory, target).train()
    torch.manual_seed(recipe.initialization_seed)
    config = network_config(size, recipe)
    network = RepairNetwork(config, target.geometry, target.model.get_input_embeddings())
    with torch.no_grad():
        for block in network.blocks:
            for gate in block.ada.chunk(6)[2::3]:  # (shift, scale, gate) of attention, then of the MLP
                gate.fill_(recipe.initial_gate)
    return network.to(target.device)


def lineage(recipe: TrainingSettings, parent: Parent | None) -> dict[str, Any]:
    """Where a network comes from, for the account of its training."""
    if parent is None:
        return {"initialization_seed": recipe.initialization_seed, "initial_gate": recipe.initial_gate}
    return {"continues": {"weights_sha256": parent.weights_sha256, "training": parent.training}}
