# SPDX-License-Identifier: Apache-2.0
"""Batch question answering: a Ray Data job over a data set, with the classes that the service is made of.

Questions are answered by a pool of actors (`pipelines.qa.answerer`); rows are kept batch by batch, so that a killed job
started again computes only what is missing, and a job of another configuration is refused.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from kvcache.geometry import Geometry
from kvcache.settings import Settings
from kvcache.store import ChunkStore
from kvcache.target import load_config
from pipelines.embedding import EmbedderFactory
from pipelines.placement import for_workers
from pipelines.qa.answerer import QUESTIONS, SEED, Answerer, AnswerOptions
from pipelines.qa.contexts import QAPrompt, own_prompts, retrieved_prompts
from pipelines.qa.dataset import dataset_digest, read_dataset
from pipelines.qa.estimate import answer_actors, estimate
from pipelines.qa.results import Results, Row
from pipelines.qa.run_file import describe_run
from pipelines.qa.summary import MethodSummary, summarise
from pipelines.ray_data import JobStoppedError, Progress, run_in_actors
from repair.spec import MethodSpec, parse_methods
from retrieval.embedding import Embedder

MAX_TOKENS = 32
"""New tokens of an answer, as in the published evaluation."""
_MOST_TASKS = 1024
_PATIENCE_S = 3600.0
"""Of chunks that have to be computed and of hand-offs: nobody waits for an answer of a batch job."""


class AnswerError(RuntimeError):
    """The job cannot start, or stopped; rows that were kept stay, and the same command goes on from there."""


@dataclass
class AnswerPlan:
    """What there is to do.

    Attributes:
        questions: rows of the data set that are used.
        methods: how many.
        requests: questions times methods.
        missing: requests without a row yet.
        prompt_tokens: tokens of their prompts.
        seconds_estimate: about how long they take, from timed passes; 0 when nothing is missing.
        output: file of the rows.
    """

    questions: int
    methods: int
    requests: int
    missing: int
    prompt_tokens: int
    seconds_estimate: float
    output: str
    work: InitVar[_Work | None] = None
    """Not a field: a plan is shown and turned into JSON without it."""

    def __post_init__(self, work: _Work | None) -> None:
        self._work = work


@dataclass(frozen=True)
class AnswerReport:
    """What a run did.

    Attributes:
        output: file of the rows.
        requests: rows in it.
        computed: those that this run computed.
        seconds: of this run.
        methods: by label.
    """

    output: str
    requests: int
    computed: int
    seconds: float
    methods: dict[str, MethodSummary]


@dataclass(frozen=True)
class _Work:
    prompts: list[QAPrompt]
    options: AnswerOptions
    results: Results


def plan(
    dataset: str | Path,
    methods: str,
    output: str | Path,
    settings: Settings,
    *,
    limit: int = 0,
    corpus: str | None = None,
    top_k: int | None = None,
    max_tokens: int = MAX_TOKENS,
    concurrency: int = 1,
    embedder: EmbedderFactory = Embedder,
    progress: Progress | None = None,
) -> AnswerPlan:
    """Read the data set, make its prompts, and find out what is missing and what it costs.

    Args:
        dataset: see `pipelines.qa.dataset`.
        methods: as on a command line, see `repair.spec`.
        output: `.jsonl` or `.parquet`; a run file goes beside it.
        settings: target, store, repair, engine, prompt; retrieval and embedding for a corpus.
        limit: most questions; 0 takes all.
        corpus: where chunks are searched; None takes the rows' own.
        top_k: chunks searched; None takes `retrieval.top_k`.
        max_tokens: most new tokens of an answer.
        concurrency: questions in flight in each actor.
        embedder: makes the embedding model.
        progress: told (stage, done, total) for the stage `retrieve`.

    Raises:
        DatasetError, InputError: the data set cannot be used.
        AnswerError: a prompt that the engine cannot take, or two checkpoints of one method.
        MethodSpecError, UnknownMethodError, MethodParamsError, CheckpointError: a method that cannot be used.
        OutputError: the output is of another run.
        StoreMismatchError, StoreError: the store belongs to another target, or cannot be used.
    """
    specs = parse_methods(methods)
    settings = _for_job(for_workers(settings), specs)
    results = Results(str(output))
    ChunkStore.of(settings).check_target()
    rows = read_dataset(dataset, limit)
    generation, k = None, top_k or settings.retrieval.top_k
    if corpus is None:
        prompts = own_prompts(rows, settings)
    else:
        prompts, generation = retrieved_prompts(rows, corpus, k, settings, embedder, progress)
    _check_lengths(prompts, max_tokens, settings)
    options = AnswerOptions(
        {spec.label: spec for spec in specs},
        max_tokens,
        min(concurrency, settings.engine.max_num_seqs),
    )
    results.open(
        describe_run(
            settings,
            specs,
            dataset={"digest": dataset_digest(rows), "questions": len(rows)},
            corpus=None if corpus is None else {"name": corpus, "generation": generation, "top_k": k},
            max_tokens=max_tokens,
            concurrency=options.concurrency,
            seed=SEED,
        )
    )
    missing = [
        (label, prompt.tokens)
        for prompt in prompts
        for label in options.methods
        if not results.done(prompt.row.id, label)
    ]
    return AnswerPlan(
        questions=len(rows),
        methods=len(specs),
        requests=len(rows) * len(specs),
        missing=len(missing),
        prompt_tokens=sum(tokens for _, tokens in missing),
        seconds_estimate=estimate(missing, options, settings) if missing else 0.0,
        output=str(output),
        work=_Work(prompts, options, results),
    )


def answer(what: AnswerPlan, settings: Settings, progress: Progress | None = None) -> AnswerReport:
    """Answer what is missing, and write the output.

    Args:
        what: from `plan`.
        settings: as for `plan`.
        progress: told (stage, done, total) for the stage `answer`, in requests.

    Raises:
        AnswerError: an actor cannot work; says why.
        StoreMismatchError, StoreError: the store belongs to another target, or chunks or rows cannot be written.
    """
    begin, work = time.perf_counter(), what._work
    assert work is not None, "a plan comes from plan()"
    methods = work.options.methods
    settings = _for_job(for_workers(settings), list(methods.values()))
    ChunkStore.of(settings).claim()  # before a model is loaded anywhere: can this store be written to?
    work.results.begin()
    computed = 0
    if progress:
        progress("answer", what.requests - what.missing, what.requests)
    for rows in _run(work, settings):
        work.results.add(rows)
        computed += len(rows)
        if progress:
            progress("answer", what.requests - what.missing + computed, what.requests)
    rows = work.results.finish([(prompt.row.id, label) for prompt in work.prompts for label in methods])
    summaries = {label: summarise([row for row in rows if row["method"] == label]) for label in methods}
    return AnswerReport(what.output, len(rows), computed, time.perf_counter() - begin, summaries)


def _for_job(settings: Settings, methods: Sequence[MethodSpec]) -> Settings:
    """Nobody waits for these answers: chunks that are missing are computed, however long it takes."""
    lease_s = max(settings.handoff.lease_s, _PATIENCE_S)
    names = tuple(dict.fromkeys(spec.name for spec in methods))
    repair: dict[str, Any] = {"methods": names, "default": names[0]}
    for name in names:
        own = {spec.checkpoint for spec in methods if spec.name == name}
        if len(own) > 1:
            raise AnswerError(f"method {name!r} is named with two checkpoints: give each a run of its own")
        if name in type(settings.repair).model_fields:
            checkpoint = own.pop() or getattr(settings.repair, name)
            # As an absolute path, to mean the same in every worker.
            repair[name] = str(Path(checkpoint).absolute()) if checkpoint and Path(checkpoint).is_dir() else checkpoint
        elif own != {None}:
            raise AnswerError(f"method {name!r} has no checkpoint, so @{own.pop()} means nothing")
    return settings.model_copy(
        update={
            "repair": settings.repair.model_copy(update=repair),
            "store": settings.store.model_copy(update={"deadline_s": _PATIENCE_S}),
            "handoff": settings.handoff.model_copy(update={"lease_s": lease_s, "wait_s": _PATIENCE_S}),
        }
    )


def _check_lengths(prompts: Sequence[QAPrompt], max_tokens: int, settings: Settings) -> None:
    limit = min(settings.engine.max_model_len, Geometry.of(load_config(settings)).max_positions)
    longest = max(prompts, key=lambda prompt: prompt.tokens)
    if longest.tokens + max_tokens > limit:
        raise AnswerError(
            f"row {longest.row.id!r}: {longest.tokens} prompt tokens and {max_tokens} new ones are more than the "
            f"engine's {limit} (engine.max_model_len, and what the target can take)"
        )


def _run(work: _Work, settings: Settings) -> Iterator[list[Row]]:
    questions = [
        {
            "id": prompt.row.id,
            "question": prompt.row.question,
            "golds": prompt.row.answers,
            "chunks": prompt.chunks,
            "question_ids": prompt.question_ids,
            "methods": methods,
        }
        for prompt in work.prompts
        if (methods := [label for label in work.options.methods if not work.results.done(prompt.row.id, label)])
    ]
    if not questions:
        return
    # Twice what is in flight, so that an actor is busy most of the time; few, because a killed job loses a batch.
    per_task = max(2 * work.options.concurrency, math.ceil(len(questions) / _MOST_TASKS))
    tables = [
        pa.Table.from_pylist(questions[start : start + per_task], QUESTIONS)
        for start in range(0, len(questions), per_task)
    ]
    resources, actors = answer_actors(settings)
    arguments = (settings, work.options, int(resources["num_cpus"]))
    try:
        for part in run_in_actors(Answerer, arguments, tables, actors, resources):
            yield [json.loads(row) for row in part["row"].to_pylist()]
    except JobStoppedError as error:
        raise AnswerError(f"answering stopped: {error}") from error
