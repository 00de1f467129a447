# SPDX-License-Identifier: Apache-2.0
"""Training runs on a tiny target: recipe, groups, job, curve."""

from __future__ import annotations

from pathlib import Path
from random import Random

from kvcache.settings import Settings
from pipelines.training.curve import read_curve
from pipelines.training.groups import TokenGroup
from pipelines.training.trainer import CURVE_FILE, TrainingJob
from tests.tiny import tiny_settings

HEADER = (1, 77, 130, 201, 9)


def recipe(directory: str, folder: Path, **training: object) -> Settings:
    base = {
        "cache_dir": str(folder / "cache"),
        "groups_per_update": 2,
        "learning_rate": 3e-3,
        "min_learning_rate": 1e-4,
        "initial_gate": 1.0,
        "variants": 2,
        "checkpoint_every": 5,
        "validate_every": 10,
    }
    return tiny_settings(directory, training={**base, **training})


def random_groups(count: int, seed: int = 0) -> list[TokenGroup]:
    random = Random(seed)
    return [
        TokenGroup(
            f"g{seed}/{g}", tuple(tuple(random.choices(range(3, 384), k=random.randint(5, 24))) for _ in range(3))
        )
        for g in range(count)
    ]


def job(output: Path, updates: int, groups: int = 4) -> TrainingJob:
    return TrainingJob(random_groups(groups), random_groups(2, seed=1), HEADER, "tiny", updates, output)


def curve(output: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if k != "seconds"} for line in read_curve(output / CURVE_FILE)]
