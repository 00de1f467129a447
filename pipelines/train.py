# SPDX-License-Identifier: Apache-2.0
"""Train a repair network for a target LLM: a Ray Train job that can be killed at any point and started again.

Each worker holds the target and the network, and works on its share of every update's groups; gradients are averaged
over all workers. The first worker validates and writes checkpoint, state and loss curve into the output directory.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from kvcache.geometry import Geometry
from kvcache.prompt import PromptTemplate
from kvcache.settings import Settings, TrainingSettings
from kvcache.target import TargetLLM, load_config, load_tokenizer
from pipelines.placement import for_workers, target_actors
from pipelines.training.curve import CurveReader, read_curve
from pipelines.training.groups import Chunk, TokenGroup, arrange, read_groups, split
from pipelines.training.initial import find_parent, network_config
from pipelines.training.pairs import joint_kv
from pipelines.training.trainer import CURVE_FILE, Trainer, TrainingJob, visits
from repair.network import SIZES, RepairNetwork

Progress = Callable[[dict[str, Any]], None]
"""Told each line of the loss curve: of an update, or of a validation."""

_TIMED_TOKENS = 256
_POLL_S = 0.5


class TrainError(RuntimeError):
    """Training stopped; the same command goes on from the last state."""


@dataclass
class TrainPlan:
    """What a run will do and cost.

    Attributes:
        groups: groups to train on.
        held_out: groups to validate on.
        updates: updates of the run, those done included.
        tokens: tokens that the updates visit.
        prefill_tokens: tokens that the target reads, if nothing is cached.
        bytes: disk that the cached pairs take, within the bound.
        parameters: of the network.
        seconds_estimate: about how long all of it takes with an empty cache, from timed passes.
    """

    groups: int
    held_out: int
    updates: int
    tokens: int
    prefill_tokens: int
    bytes: int
    parameters: int
    seconds_estimate: float
    job: InitVar[TrainingJob | None] = None
    """Not a field: a plan is shown and turned into JSON without it."""

    def __post_init__(self, job: TrainingJob | None) -> None:
        self._job = job


@dataclass(frozen=True)
class TrainReport:
    """What a run came to.

    Attributes:
        output: directory of the best checkpoint.
        updates: updates done, in this run and before.
        seconds: of this run.
        validation: the last one, see `pipelines.training.validation.Validation`.
    """

    output: str
    updates: int
    seconds: float
    validation: dict[str, Any]


def plan(
    groups: Path,
    passages: Path | None,
    size: str,
    updates: int,
    output: Path,
    settings: Settings,
    limit: int = 0,
    init_from: str | None = None,
) -> TrainPlan:
    """Read the data and find out what the run costs.

    Args:
        groups, passages: see `pipelines.training.groups`.
        size: a key of `repair.network.SIZES`.
        updates: length of the run.
        output: where checkpoint, state and curve go; on a cluster, shared by all nodes.
        settings: target and `training`.
        limit: most groups to train on; 0 takes all.
        init_from: checkpoint to begin with, a folder or hub id, on a cluster seen by all nodes. The held-out groups
            follow from the group file: with another file than its own it may have been trained on some of them.

    Raises:
        ValueError: an unknown size, nothing to train on, an example without a chunk, or longer than the target takes.
        CheckpointError: `init_from` cannot be begun with.
        GroupError: a line of the data that cannot be used.
    """
    if size not in SIZES:
        raise ValueError(f"size {size!r} is not one of {', '.join(SIZES)}")
    settings, recipe = _for_workers(settings), settings.training
    tokenizer, geometry = load_tokenizer(settings), Geometry.of(load_config(settings))
    if recipe.max_tokens > geometry.max_positions:
        raise ValueError(
            f"training.max_tokens is {recipe.max_tokens}, the target has {geometry.max_positions} positions: lower it"
        )
    everything = read_groups(groups, passages, tokenizer, geometry, settings.chunking.max_tokens)
    training, validation = split(everything, recipe.held_out, limit, recipe.seed)
    header = PromptTemplate(tokenizer, settings.prompt).header_ids() if recipe.header_chunk else ()
    parent = find_parent(init_from, size, output, recipe) if init_from is not None else None
    job = TrainingJob(training, validation, header, size, updates, output.absolute(), parent)

    arranged: dict[tuple[int, int], int] = {}
    chunks, tokens = set[Chunk](), 0
    for index, variant in visits(0, updates * recipe.groups_per_update, len(training), recipe):
        if (index, variant) not in arranged:
            found = _arranged(training[index], header, variant, recipe)
            chunks.update(found)
            arranged[index, variant] = sum(map(len, found))
        tokens += arranged[index, variant]
    for group in validation:
        _arranged(group, header, 0, recipe)
    stale, joint = sum(map(len, chunks)), sum(arranged.values())
    per_token = geometry.kv_bytes(1, getattr(torch, recipe.cache_dtype))
    timed = _timed(settings, size)
    return TrainPlan(
        groups=len(training),
        held_out=len(validation),
        updates=updates,
        tokens=tokens,
        prefill_tokens=stale + joint,
        bytes=min(recipe.cache_bytes, (stale + joint) * per_token),
        parameters=timed["parameters"],
        seconds_estimate=((stale + joint) * timed["prefill"] + tokens * timed["update"]) / recipe.workers,
        job=job,
    )


def _arranged(group: TokenGroup, header: Chunk, variant: int, recipe: TrainingSettings) -> tuple[Chunk, ...]:
    found = arrange(group, header, recipe.seed, variant, recipe.max_tokens)
    if len(found) <= bool(header):  # found out now, not after hours of learning from headers
        raise ValueError(
            f"group {group.name!r}: none of the chunks chosen fits training.max_tokens ({recipe.max_tokens})"
        )
    return found


def train(what: TrainPlan, settings: Settings, progress: Progress | None = None) -> TrainReport:
    """Train, from the start or from where the same run stopped.

    Args:
        what: from `plan`.
        settings: as for `plan`.
        progress: told each line of the curve.

    Raises:
        StateError: the output directory holds another run's state, or a state cannot be written.
        TrainError: a worker failed otherwise.
    """
    settings, job, begin = _for_workers(settings), what._job, time.perf_counter()
    assert job is not None, "a plan comes from plan()"
    job.output.mkdir(parents=True, exist_ok=True)
    resources, workers = _workers(settings)
    with tempfile.TemporaryDirectory() as scratch, _told(job.output / CURVE_FILE, progress):
        trainer = TorchTrainer(
            _work,
            train_loop_config={"job": job, "settings": settings, "threads": int(resources["num_cpus"])},
            scaling_config=ScalingConfig(
                num_workers=workers,
                use_gpu="num_gpus" in resources,
                resources_per_worker={"CPU": resources["num_cpus"]},
            ),
            run_config=RunConfig(name="train", storage_path=scratch),
        )
        try:
            trainer.fit()
        except ray.train.TrainingFailedError as error:
            raise _cause(error) from error
    validation = [line["validation"] for line in read_curve(job.output / CURVE_FILE) if "validation" in line][-1]
    return TrainReport(str(job.output), job.updates, time.perf_counter() - begin, validation)


def _work(config: dict[str, Any]) -> None:
    settings: Settings = config["settings"]
    _set_up(settings, config["threads"])
    context = ray.train.get_context()
    target = TargetLLM.load(settings=settings)
    Trainer(target, config["job"], settings, context.get_world_rank(), context.get_world_size()).run()


def _set_up(settings: Settings, threads: int) -> None:
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(settings.training.matmul_precision)


def _for_workers(settings: Settings) -> Settings:
    settings = for_workers(settings)
    folder = str(Path(settings.training.cache_dir).expanduser().absolute())
    return settings.model_copy(update={"training": settings.training.model_copy(update={"cache_dir": folder})})


def _workers(settings: Settings) -> tuple[dict[str, float], int]:
    """Resources of a worker, and how many the cluster has room for."""
    pipeline = settings.pipeline.model_copy(update={"actors": settings.training.workers})
    return target_actors(settings.model_copy(update={"pipeline": pipeline}))


def _timed(settings: Settings, size: str) -> dict[str, Any]:
    resources, _ = _workers(settings)
    timed = ray.remote(max_calls=1, **resources)(_time_passes)  # the process, and its target, go with it
    return ray.get(timed.remote(settings, size, int(resources["num_cpus"])))


def _time_passes(settings: Settings, size: str, threads: int) -> dict[str, Any]:
    """Seconds per token of a pass of the target and of a pass of the network there and back."""
    _set_up(settings, threads)
    target = TargetLLM.load(settings=settings)
    config = network_config(size, settings.training)
    network = RepairNetwork(config, target.geometry, target.model.get_input_embeddings()).to(target.device)
    ids = list(range(min(_TIMED_TOKENS, target.geometry.vocab_size, target.geometry.max_positions)))
    stale = joint_kv(target, ids[:8])
    begin = time.perf_counter()
    stale = joint_kv(target, ids)
    prefilled = time.perf_counter()
    # cloned: autograd refuses what was made in inference mode
    network.forward_packed(stale.clone(), torch.tensor(ids), [[len(ids)]]).square().mean().backward()
    done = time.perf_counter()
    parameters = sum(p.numel() for p in network.parameters() if p.requires_grad)
    return {
        "parameters": parameters,
        "prefill": (prefilled - begin) / len(ids),
        "update": (done - prefilled) / len(ids),
    }


@contextmanager
def _told(curve: Path, progress: Progress | None) -> Iterator[None]:
    """Tell `progress` the curve's lines as they come."""
    if progress is None:
        yield
        return
    ended, reader = threading.Event(), CurveReader(curve)
    reader.new()  # of the run that this one goes on from: the worker begins the file again

    def follow() -> None:
        while True:
            last = ended.wait(_POLL_S)
            for line in reader.new():
                progress(line)
            if last:
                return

    thread = threading.Thread(target=follow, name="curve", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _cause(error: ray.train.TrainingFailedError) -> Exception:
    """What a worker raised."""
    for failure in getattr(error, "worker_failures", {}).values():
        found = getattr(failure, "cause", None) or failure
        if isinstance(found, ValueError | RuntimeError | ArithmeticError | OSError):
            return found
        return TrainError(f"{type(found).__name__}: {found}")
    return TrainError(str(error))
