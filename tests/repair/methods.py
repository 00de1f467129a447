# SPDX-License-Identifier: Apache-2.0
"""The shared test matrix: one row per repair method, with the `repair` settings it needs for a target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvcache.target import TargetLLM
from repair.checkpoint import save_checkpoint
from repair.network import RepairConfig, RepairNetwork

TINY = RepairConfig(d_b=32, n_blocks=4, n_heads=2, d_seg=4)


def random_network(target: TargetLLM, config: RepairConfig = TINY, seed: int = 0) -> RepairNetwork:
    """A network far from fresh, whose every weight matters; like a trained one it leaves layer 0 alone."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = RepairNetwork(config, target.geometry, target.model.get_input_embeddings()).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        for sigma in (network.sigma_stale, network.sigma_delta):
            sigma.copy_(0.5 + torch.rand(sigma.shape, generator=generator))
        network.sigma_delta[0] = 1e-6
    return network


def checkpoint(target: TargetLLM, folder: Path, **kwargs: Any) -> str:
    """Save a random network for the target; returns the folder."""
    save_checkpoint(random_network(target), folder, target, target_model_id="tiny", capacity="tiny", **kwargs)
    return str(folder)


def _nothing(target: TargetLLM, folder: Path) -> dict[str, Any]:
    return {}


METHODS: dict[str, Callable[[TargetLLM, Path], dict[str, Any]]] = {
    "full": _nothing,
    "stale": _nothing,
    "cacherepair": lambda target, folder: {"cacherepair": checkpoint(target, folder / "cacherepair")},
    "cacheblend": _nothing,
    "epic": _nothing,
    "legolink-0": _nothing,
    "infoflow": _nothing,
    "prophetkv": _nothing,
    "relaxkv": _nothing,
    "kvshare-like": _nothing,
}
