# SPDX-License-Identifier: Apache-2.0
"""What a run needs to go on exactly where it stopped: one safetensors file, replaced whole.

Nothing random has a state of its own: order and arrangements follow from seed and update number. So weights, the
optimisers' moments, what the objective measured and the number of the next update are all there is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from pipelines.training.optimizers import owners

FORMAT = "cachemend-training-v1"


class StateError(RuntimeError):
    """A training state that cannot be written, read or continued; the text names file and reason."""


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        run: digest of all that decides its numbers; another run's state is refused.
        update: updates done.
        best: least validation error so far, None before the first validation.
    """

    run: str
    update: int
    best: float | None = None


def save_state(
    path: Path,
    network: nn.Module,
    objective: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    progress: Progress,
) -> None:
    """Write the state in place of the one before.

    Raises:
        StateError: it could not be written (disk full, permissions); the one before is intact.
    """
    tensors = dict(_kept(network, objective))
    owner = owners(optimizers)
    for name, parameter in _trained(network).items():
        for moment, value in owner[parameter].state.get(parameter, {}).items():
            tensors[f"optimizer/{name}/{moment}"] = value
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({k: v.detach().contiguous() for k, v in tensors.items()}, part, _metadata(progress))
        with open(part, "rb") as file:
            os.fsync(file.fileno())  # else a power loss may keep the new name and lose what it names
        part.replace(path)
    except (OSError, SafetensorError) as error:
        part.unlink(missing_ok=True)
        raise StateError(f"cannot write training state {path}: {error}") from error


def load_state(
    path: Path, network: nn.Module, objective: nn.Module, optimizers: Sequence[torch.optim.Optimizer], run: str
) -> Progress | None:
    """Put a saved state into network, objective and optimisers.

    Args:
        run: digest of the run that wants to go on.

    Returns:
        Where it stopped; None when there is no state.

    Raises:
        StateError: damaged, or of a run with other data, sizes or settings.
    """
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            progress = _progress(file.metadata() or {}, path, run)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise StateError(f"cannot read training state {path}: {error}") from error
    try:
        with torch.no_grad():
            for name, value in _kept(network, objective).items():
                value.copy_(tensors[name])
            owner = owners(optimizers)
            for name, parameter in _trained(network).items():
                prefix = f"optimizer/{name}/"
                moments = {  # a fused optimiser keeps `step`, too, where the parameter is
                    key.removeprefix(prefix): value.to(parameter.device)
                    for key, value in tensors.items()
                    if key.startswith(prefix)
                }
                if moments:
                    owner[parameter].state[parameter] = moments
    except (KeyError, RuntimeError) as error:
        raise StateError(f"training state {path} does not fit the network: {error}") from error
    return progress


def _kept(network: nn.Module, objective: nn.Module) -> Mapping[str, torch.Tensor]:
    parts = {"network": network.state_dict(), "objective": objective.state_dict()}
    found = {f"{part}/{name}": value for part, tensors in parts.items() for name, value in tensors.items()}
    return {name: value for name, value in found.items() if not name.startswith("network/tok_embed.")}  # the target's


def _trained(network: nn.Module) -> Mapping[str, nn.Parameter]:
    return {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}


def _metadata(progress: Progress) -> dict[str, str]:
    return {"format": FORMAT, "progress": json.dumps(asdict(progress))}


def _progress(metadata: Mapping[str, Any], path: Path, run: str) -> Progress:
    if metadata.get("format") != FORMAT:
        raise StateError(f"{path} is not a training state of format {FORMAT} (it says {metadata.get('format')!r})")
    progress = Progress(**json.loads(metadata["progress"]))
    if progress.run != run:
        raise StateError(
            f"{path} belongs to a run with other groups, size, target or settings: use another output directory, "
            "or remove it to begin again"
        )
    return progress
