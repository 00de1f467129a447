# SPDX-License-Identifier: Apache-2.0
"""The training job as a whole: plan, workers on Ray, a checkpoint that loads as a repairer, and the way back in."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvcache.prompt import PromptTemplate
from kvcache.settings import Settings
from kvcache.target import TargetLLM, load_tokenizer
from pipelines import train as job
from pipelines.training.state import StateError
from pipelines.training.trainer import STATE_FILE
from repair.checkpoint import load_repairer
from repair.checkpoint_config import CheckpointError, read_config
from tests.tiny import tiny_model_dir, tiny_settings

UPDATES = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("train-job")


@pytest.fixture(scope="module")
def directory(folder: Path) -> str:
    return tiny_model_dir(folder)


@pytest.fixture(scope="module")
def groups(folder: Path) -> Path:
    random = Random(5)
    path = folder / "groups.jsonl"
    rows = [{"chunks": [random.choices(range(3, 384), k=random.randint(5, 24)) for _ in range(3)]} for _ in range(8)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def settings(directory: str, folder: Path, **training: Any) -> Settings:
    recipe = {"cache_dir": str(folder / "cache"), "groups_per_update": 2, "held_out": 2, "variants": 2}
    return tiny_settings(
        directory, target={"threads": 1}, training={**recipe, "checkpoint_every": 2, "validate_every": 2, **training}
    )


@pytest.fixture(scope="module")
def alone(ray_alone: Any, directory: str, groups: Path, folder: Path) -> tuple[job.TrainPlan, job.TrainReport, list]:
    """A run of one worker."""
    told: list[dict[str, Any]] = []
    what = settings(directory, folder)
    plan = job.plan(groups, None, "S", UPDATES, folder / "alone", what)
    return plan, job.train(plan, what, told.append), told


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans without timed passes, each of which starts a process; `alone` was planned with them."""
    monkeypatch.setattr(job, "_timed", lambda settings, size: {"parameters": 0, "prefill": 0.0, "update": 0.0})


def test_the_plan_says_what_it_costs(alone: tuple[job.TrainPlan, job.TrainReport, list]) -> None:
    plan, _, _ = alone
    assert (plan.groups, plan.held_out, plan.updates) == (6, 2, UPDATES)
    assert plan.seconds_estimate > 0
    per_token = 2 * 3 * 2 * 32 * 2  # K and V, layers, heads, head size, float16
    assert plan.bytes == plan.prefill_tokens * per_token
    assert plan.tokens < plan.prefill_tokens


@pytest.mark.usefixtures("untimed")
def test_examples_may_come_without_a_header_chunk(
    alone: tuple[job.TrainPlan, job.TrainReport, list], directory: str, groups: Path, folder: Path
) -> None:
    what = settings(directory, folder, header_chunk=False)
    plan = job.plan(groups, None, "S", UPDATES, folder / "bare", what)
    header = PromptTemplate(load_tokenizer(what), what.prompt).header_ids()
    assert alone[0].tokens - plan.tokens == UPDATES * what.training.groups_per_update * len(header) > 0
    report = job.train(plan, what)
    assert read_config(report.output).training["header_chunk"] is False
    assert read_config(alone[1].output).training["header_chunk"] is True


@pytest.mark.usefixtures("untimed")
def test_an_example_without_a_chunk_is_found_out_before_training(directory: str, groups: Path, folder: Path) -> None:
    header = PromptTemplate(
        load_tokenizer(settings(directory, folder)), settings(directory, folder).prompt
    ).header_ids()
    for has_header, room in ((False, 4), (True, len(header) + 4)):
        what = settings(directory, folder, header_chunk=has_header, max_tokens=room)
        with pytest.raises(
            ValueError, match=rf"group .* none of the chunks chosen fits training.max_tokens \({room}\)"
        ):
            job.plan(groups, None, "S", UPDATES, folder / "none", what)


@pytest.mark.usefixtures("untimed")
def test_examples_longer_than_the_target_are_found_out_before_training(
    directory: str, groups: Path, folder: Path
) -> None:
    with pytest.raises(ValueError, match=r"training.max_tokens is 100000, the target has \d+ positions"):
        job.plan(groups, None, "S", UPDATES, folder / "long", settings(directory, folder, max_tokens=100_000))


def test_progress_is_the_curve(alone: tuple[job.TrainPlan, job.TrainReport, list]) -> None:
    _, report, told = alone
    assert [line["update"] for line in told if "loss" in line] == [1, 2, 3, 4]
    assert [line["update"] for line in told if "validation" in line] == [2, 4]
    assert report.validation == told[-1]["validation"]


def test_the_checkpoint_loads_as_a_repairer(alone: tuple[job.TrainPlan, job.TrainReport, list], directory: str) -> None:
    _, report, told = alone
    target = TargetLLM.load(settings=tiny_settings(directory))
    network = load_repairer(report.output, target)
    assert sum(p.numel() for p in network.parameters() if p.requires_grad) == alone[0].parameters
    config = read_config(report.output)
    checked = [line["validation"] for line in told if "validation" in line]
    best = min(found["repaired"]["nmse"] for found in checked)
    assert config.training["validation"]["normalized_mse"] == best
    assert config.training["validation"]["stale_normalized_mse"] == checked[0]["stale"]["nmse"]
    assert (config.capacity, config.key_coordinates) == ("S", "canonical")


def test_two_workers_do_the_work_of_one(
    untimed: None, alone: tuple[job.TrainPlan, job.TrainReport, list], directory: str, groups: Path, folder: Path
) -> None:
    what = settings(directory, folder, workers=2)
    job.train(job.plan(groups, None, "S", UPDATES, folder / "two", what), what)
    one, two = (load_file(folder / name / STATE_FILE) for name in ("alone", "two"))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        if name.startswith("network/"):
            torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-5)


def test_a_run_begins_with_a_checkpoint_named_as_the_shell_names_it(
    untimed: None,
    alone: tuple[job.TrainPlan, job.TrainReport, list],
    directory: str,
    groups: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    what = settings(directory, folder)
    monkeypatch.chdir(folder)  # workers run elsewhere
    report = job.train(job.plan(groups, None, "S", 2, Path("more"), what, init_from="alone"), what)
    assert report.output == str(folder / "more")
    account = read_config(folder / "more").training
    assert account["continues"]["training"] == read_config(folder / "alone").training
    with pytest.raises(CheckpointError, match=r"d_b is 256, and 512 is to be trained \(--size"):
        job.plan(groups, None, "M", 2, Path("new"), what, init_from="alone")


def test_a_run_that_is_done_is_not_done_again(
    untimed: None, alone: tuple[job.TrainPlan, job.TrainReport, list], directory: str, groups: Path, folder: Path
) -> None:
    before = (folder / "alone" / STATE_FILE).read_bytes()
    what = settings(directory, folder)
    report = job.train(job.plan(groups, None, "S", UPDATES, folder / "alone", what), what)
    assert report.validation == alone[1].validation
    assert (folder / "alone" / STATE_FILE).read_bytes() == before


def test_a_workers_error_is_told_as_it_is(
    untimed: None, alone: tuple[job.TrainPlan, job.TrainReport, list], directory: str, groups: Path, folder: Path
) -> None:
    what = settings(directory, folder)
    with pytest.raises(StateError, match=r"state\.safetensors belongs to a run with other"):
        job.train(job.plan(groups, None, "S", UPDATES + 1, folder / "alone", what), what)
    with pytest.raises(ValueError, match="size 'XL' is not one of S, M, L"):
        job.plan(groups, None, "XL", UPDATES, folder / "new", what)
