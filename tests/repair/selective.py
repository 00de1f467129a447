# SPDX-License-Identifier: Apache-2.0
"""What the tests of selective recomputation share: targets of every family, chunks and a question."""

from __future__ import annotations

from pathlib import Path

import torch

from kvcache.target import TargetLLM
from repair.selective.prefix import AssembledPrefix
from tests.tiny import Family, tiny_target

LAYERS = 4
LENGTHS = (7, 12, 1, 20)
ROWS = sum(LENGTHS)
QUESTION = (9, 8, 7, 301, 44)


def random_target(folder: Path, family: Family, rope: str = "default") -> TargetLLM:
    """A tiny target in which biases and norms count: transformers starts them at 0 and 1."""
    target = tiny_target(folder, family, rope, layers=LAYERS)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in target.model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return target


def stale_chunks(target: TargetLLM, lengths=LENGTHS, seed: int = 2):
    ids = torch.randint(3, 512, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    return [target.stale_kv([part.tolist()])[0] for part in ids.split(list(lengths))]


def global_kv(target: TargetLLM, prefix: AssembledPrefix):
    """Of all rows, the question's included: keys at their positions, and values, `[L, T, H, D]`."""
    return target.rotary.rotate(prefix.k, prefix.positions), prefix.v


def distance(got, want) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(got, want, strict=True))
