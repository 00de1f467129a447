# SPDX-License-Identifier: Apache-2.0
"""Units of the normalised KV error: the residual's RMS per coordinate."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from kvcache.compile import pack
from kvcache.target import TargetLLM
from pipelines.evaluation.requests import EvaluationRequest
from pipelines.evaluation.stale import StaleSource
from pipelines.training.pairs import TrainingPair, joint_kv
from pipelines.training.statistics import Statistics, measure
from repair.base import Repairer
from repair.cacherepair import CacheRepair

MOST_REQUESTS = 32
"""Requests of the pass, evenly spread: a few ten thousand tokens say enough about an RMS."""


def of_network(repairers: Iterable[Repairer], floor: float) -> Statistics | None:
    """Those that the first CacheRepair network was trained with; None when there is none.

    Args:
        repairers: of the evaluation.
        floor: coordinates with less residual RMS than this share of the stale RMS have no weight.
    """
    for repairer in repairers:
        if isinstance(repairer, CacheRepair):
            network = repairer.network
            return Statistics(network.sigma_stale.cpu(), network.sigma_delta.cpu(), floor)
    return None


def digest(statistics: Statistics) -> str:
    """SHA-256 over units and weights."""
    parts = (statistics.sigma_delta, statistics.weight)
    return hashlib.sha256(b"".join(part.contiguous().numpy().tobytes() for part in parts)).hexdigest()


def of_requests(
    requests: Sequence[EvaluationRequest],
    target: TargetLLM,
    stale: StaleSource,
    floor: float,
    folder: Path,
    progress: Callable[[int, int], None],
) -> Statistics:
    """Measured over (some of) the requests, and kept in a file for the next run of the same.

    Args:
        requests: of the evaluation.
        target: the target LLM.
        stale: their stale KV.
        floor: see `of_network`.
        folder: of the file.
        progress: told (done, total).
    """
    chosen = requests[:: -(-len(requests) // MOST_REQUESTS)]
    parts = [target.fingerprint, stale.dtype, str(target.device), str(floor), *(request.digest for request in chosen)]
    path = folder / f"units-{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:16]}.safetensors"
    try:
        found = load_file(path)
        return Statistics(found["sigma_stale"], found["sigma_delta"], floor)
    except (FileNotFoundError, SafetensorError, KeyError):
        pass

    def pairs() -> Iterable[TrainingPair]:
        for index, request in enumerate(chosen):
            with stale.chunks(request.chunks) as chunks:
                packed = torch.cat([pack(chunk).float() for chunk in chunks])
            ids = [token for chunk in request.chunks for token in chunk]
            yield TrainingPair(packed, joint_kv(target, ids) - packed, torch.tensor(ids), request.lengths)
            progress(index + 1, len(chosen))

    g = target.geometry
    statistics = measure(pairs(), (g.n_layers, g.n_kv_heads, 2, g.head_dim)).statistics(floor)
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    save_file({"sigma_stale": statistics.sigma_stale, "sigma_delta": statistics.sigma_delta}, part)
    part.replace(path)
    return statistics
