# SPDX-License-Identifier: Apache-2.0
"""The methods of an evaluation, made and checked, with an identity that changes with their weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from kvcache.settings import Settings
from kvcache.target import TargetLLM
from pipelines.evaluation.summary import FLOOR, REFERENCE
from repair.base import Repairer
from repair.spec import MethodSpec


@dataclass(frozen=True)
class Candidate:
    """One method with its parameters.

    Attributes:
        spec: as it was written.
        repairer: shared by all presets of one method and checkpoint.
        weights: digest of the repairer's own weights; empty when it has none.
        parameter_bytes: weights that have to be held for it, the target's included when it runs the target's layers.
    """

    spec: MethodSpec
    repairer: Repairer
    weights: str
    parameter_bytes: int

    @property
    def key(self) -> str:
        """Of its rows in the work file."""
        return f"{self.spec.label}#{self.weights[:16]}" if self.weights else self.spec.label


def make(specs: Sequence[MethodSpec], target: TargetLLM, settings: Settings) -> list[Candidate]:
    """Make the methods; full and stale, which the others are compared with, come first and are always there.

    Raises:
        MethodParamsError: parameters that a method does not take.
        CheckpointError: a method's network cannot be loaded.
    """
    always = [MethodSpec(name) for name in (REFERENCE, FLOOR)]
    given = {spec.label for spec in always}
    repairers: dict[str, Repairer] = {}
    result = []
    for spec in (*always, *(spec for spec in specs if spec.label not in given)):
        if spec.family not in repairers:
            repairers[spec.family] = spec.create(target, settings)
        repairer = repairers[spec.family]
        repairer.check_params(spec.params)
        own = list(_own_tensors(repairer, target))
        weights = sum(tensor.nbytes for _, tensor in own)
        if repairer.needs_target:
            weights += sum(parameter.nbytes for parameter in target.model.parameters())
        result.append(Candidate(spec, repairer, _digest(own), weights))
    return result


def _own_tensors(repairer: Repairer, target: TargetLLM) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of the networks that a repairer holds, without those that it shares with the target."""
    shared = {tensor.data_ptr() for tensor in target.model.state_dict().values()}
    for name, value in vars(repairer).items():
        if isinstance(value, nn.Module):
            for key, tensor in value.state_dict().items():
                if tensor.data_ptr() not in shared:
                    yield f"{name}.{key}", tensor


def _digest(tensors: Sequence[tuple[str, torch.Tensor]]) -> str:
    if not tensors:
        return ""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(name.encode() + tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
