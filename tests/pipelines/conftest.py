# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from kvcache.settings import Settings
from kvcache.target import TargetLLM
from repair.network import SIZES, RepairConfig
from tests.pipelines.runs import recipe
from tests.tiny import tiny_model_dir, tiny_settings


@pytest.fixture
def tiny_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A size to train in a moment."""
    monkeypatch.setitem(SIZES, "tiny", RepairConfig(d_b=64, n_blocks=2, n_heads=2, d_seg=8))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny target."""
    return tiny_model_dir(tmp_path_factory.mktemp("training"))


@pytest.fixture(scope="module")
def target(directory: str) -> TargetLLM:
    return TargetLLM.load(settings=tiny_settings(directory))


@pytest.fixture
def settings(directory: str, tmp_path: Path) -> Settings:
    """Of a training run."""
    return recipe(directory, tmp_path)
