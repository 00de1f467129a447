# SPDX-License-Identifier: Apache-2.0
"""Training that begins with a checkpoint: what it keeps of it, what it says of it, which ones it refuses."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvcache.settings import Settings
from kvcache.target import TargetLLM
from pipelines.training.groups import TokenGroup
from pipelines.training.initial import find_parent
from pipelines.training.state import StateError
from pipelines.training.trainer import STATE_FILE, Trainer, TrainingJob
from pipelines.training.validation import validate
from repair.checkpoint_config import CheckpointError
from tests.pipelines.runs import HEADER, curve, job, random_groups, recipe

pytestmark = pytest.mark.usefixtures("one_thread", "tiny_size")


def child(parent: Path, output: Path, updates: int, settings: Settings, groups: Sequence[TokenGroup]) -> TrainingJob:
    found = find_parent(str(parent), "tiny", output, settings.training)
    return TrainingJob(list(groups), random_groups(2, seed=1), HEADER, "tiny", updates, output, found)


def test_a_run_begins_with_a_checkpoint_and_its_normalisation(
    target: TargetLLM, settings: Settings, directory: str, tmp_path: Path
) -> None:
    Trainer(target, job(tmp_path / "first", 10), settings).run()
    still = recipe(directory, tmp_path, learning_rate=1e-30, min_learning_rate=0.0)
    Trainer(target, child(tmp_path / "first", tmp_path / "second", 1, still, random_groups(4, seed=2)), still).run()
    before, after = (load_file(tmp_path / run / "model.safetensors") for run in ("first", "second"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    first, second = (
        json.loads((tmp_path / run / "config.json").read_text())["training"] for run in ("first", "second")
    )
    weights = (tmp_path / "first" / "model.safetensors").read_bytes()
    assert second["continues"] == {"weights_sha256": hashlib.sha256(weights).hexdigest(), "training": first}
    assert {"initial_gate", "initialization_seed"}.isdisjoint(second)  # it has none of its own
    assert str(tmp_path) not in json.dumps(second)


@pytest.mark.parametrize("objective", ["mse", "qkv"])
def test_a_checkpoint_goes_on_learning(target: TargetLLM, directory: str, tmp_path: Path, objective: str) -> None:
    settings, found = recipe(directory, tmp_path, objective=objective), {}
    first = job(tmp_path / "first", 60)
    for what in (first, None):
        what = what or child(tmp_path / "first", tmp_path / "second", 60, settings, first.training)
        trainer = Trainer(target, what, settings)
        trainer.run()
        found[what.output.name] = validate(trainer.network, list(trainer.training_pairs()), trainer.statistics)
    assert found["second"].repaired.nmse < 0.9 * found["first"].repaired.nmse


def test_the_parent_is_kept_until_something_is_better(
    target: TargetLLM, settings: Settings, directory: str, tmp_path: Path
) -> None:
    Trainer(target, job(tmp_path / "first", 40), settings).run()
    wild = recipe(directory, tmp_path, learning_rate=0.5, min_learning_rate=0.5, clip_norm=1e6)
    Trainer(target, child(tmp_path / "first", tmp_path / "second", 10, wild, random_groups(4)), wild).run()
    checked = [line for line in curve(tmp_path / "second") if "validation" in line]
    assert [line["update"] for line in checked] == [0, 10]
    start, end = (line["validation"]["repaired"]["nmse"] for line in checked)
    assert end > start
    account = json.loads((tmp_path / "second" / "config.json").read_text())["training"]
    assert (account["checkpoint_step"], account["validation"]["normalized_mse"]) == (0, start)
    before, after = (load_file(tmp_path / run / "model.safetensors") for run in ("first", "second"))
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("kill_at", [2, 7])  # before the first state, after it
def test_a_run_with_a_parent_goes_on_where_it_stopped(
    target: TargetLLM, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill_at: int
) -> None:
    Trainer(target, job(tmp_path / "first", 10), settings).run()
    weights, update = [], Trainer._update

    def die(self: Trainer, number: int) -> dict:
        if number == kill_at:
            raise KeyboardInterrupt
        return update(self, number)

    for output in ("whole", "killed"):
        what = child(tmp_path / "first", tmp_path / output, 12, settings, random_groups(4))
        if output == "killed":
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(Trainer, "_update", die)
                Trainer(target, what, settings).run()
        Trainer(target, what, settings).run()
        weights.append(load_file(tmp_path / output / STATE_FILE))
    assert curve(tmp_path / "whole") == curve(tmp_path / "killed")
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_another_parent_is_another_run(target: TargetLLM, settings: Settings, tmp_path: Path) -> None:
    for updates, output in ((3, "first"), (4, "other")):
        Trainer(target, job(tmp_path / output, updates), settings).run()
    Trainer(target, child(tmp_path / "first", tmp_path / "second", 1, settings, random_groups(4)), settings).run()
    with pytest.raises(StateError, match="belongs to a run with other"):
        Trainer(target, child(tmp_path / "other", tmp_path / "second", 1, settings, random_groups(4)), settings).run()


@pytest.mark.parametrize(
    ("parent", "training", "reason"),
    [
        ("first", {"attention": "block_diagonal"}, "attention is block_causal, and block_diagonal is to be trained"),
        ("first", {"reinject": False}, "reinject is True, and False"),
        ("first", {"residual_floor": 0.0}, r"residual_floor is 0\.001, and the recipe's 0\.0"),
        ("second", {}, "give another --output"),
        ("none", {}, "no such folder"),
    ],
)
def test_not_every_checkpoint_is_a_beginning(
    target: TargetLLM, directory: str, tmp_path: Path, parent: str, training: dict[str, object], reason: str
) -> None:
    Trainer(target, job(tmp_path / "first", 1), recipe(directory, tmp_path)).run()
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    with pytest.raises(CheckpointError, match=reason):
        child(tmp_path / parent, tmp_path / "second", 1, recipe(directory, tmp_path, **training), random_groups(4))
