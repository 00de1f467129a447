# SPDX-License-Identifier: Apache-2.0
"""Precompute: the KV cache of every chunk of a corpus, one object each. A Ray Data job that only does what is missing.

A pool of actors holds one target LLM each. An actor writes to object storage itself, so that no KV passes through
Ray's object store. Whatever was stored is skipped by the next run, and a write is visible only when whole: the job
can be killed at any point and started again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import InitVar, dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import ray.data
import torch

from kvcache.chunk import ChunkKV
from kvcache.prompt import PromptTemplate
from kvcache.settings import Settings
from kvcache.store import ChunkStore, StoreError
from kvcache.target import TargetLLM, load_tokenizer
from pipelines.placement import for_workers, target_actors
from pipelines.ray_data import JobStoppedError, Progress, run_in_actors
from retrieval.chunking import tokenizer_digest
from retrieval.corpus import Corpus

_MOST_TASKS = 1024
"""Tasks of one job: enough to share out and to show progress, few enough to keep track of."""
BATCHES_PER_TASK = 4
"""Batches of a task, where there are enough: all writes but those of its last batch go on while others are computed."""
_LOOK_UPS = 1024
_BATCH = pa.list_(pa.list_(pa.int32()))


class PrecomputeError(RuntimeError):
    """The job stopped; what was stored stays stored, and the next run goes on from there."""


@dataclass(frozen=True)
class FailedChunk:
    """A chunk whose KV cannot be stored: requests compute it each time."""

    key: str
    tokens: int
    reason: str


@dataclass
class PrecomputePlan:
    """What there is to do.

    Attributes:
        corpus: name of the corpus.
        generation: its generation.
        chunks: distinct chunks, the header chunk included.
        missing: those that are not in the store.
        tokens: target tokens of the missing ones.
        bytes: what they will take in the store.
        seconds_estimate: about how long the job will take, from a batch that was timed; 0 when nothing is missing.
        failed: chunks that the target cannot take; not counted as missing.
    """

    corpus: str
    generation: str
    chunks: int
    missing: int
    tokens: int
    bytes: int
    seconds_estimate: float
    failed: list[FailedChunk] = field(default_factory=list)
    work: InitVar[list[list[np.ndarray]] | None] = None
    """Prefill batches of token ids. Not a field: a plan is shown and turned into JSON without it."""

    def __post_init__(self, work: list[list[np.ndarray]] | None) -> None:
        self._work = work or []


@dataclass(frozen=True)
class PrecomputeReport:
    """What a run did.

    Attributes:
        chunks: distinct chunks of the corpus, the header chunk included.
        computed: chunks computed and stored by this run.
        tokens: their tokens.
        bytes: bytes written.
        seconds: from start to end, loading the target included.
        failed: chunks that could not be stored, each with its reason.
    """

    chunks: int
    computed: int
    tokens: int
    bytes: int
    seconds: float
    failed: list[FailedChunk] = field(default_factory=list)


def plan(corpus: str, settings: Settings, progress: Progress | None = None) -> PrecomputePlan:
    """Find out what is missing, and about how long it will take (a batch is computed, and timed, on the cluster).

    Args:
        corpus: name of the corpus.
        settings: target, store, pipeline, location.
        progress: told (stage, done, total) for the stage `look up`.

    Raises:
        UnknownCorpusError, CorpusIntegrityError: there is no such corpus, or it is damaged.
        CorpusMismatchError: the corpus was cut with another tokenizer.
        StoreMismatchError: the store belongs to another target.
        StoreError: the store cannot be read.
    """
    settings = for_workers(settings)
    survey = _survey(corpus, settings, progress)
    seconds = _estimate(survey._work, survey.tokens, settings) if survey.missing else 0.0
    return replace(survey, seconds_estimate=seconds, work=survey._work)


def precompute(what: PrecomputePlan | str, settings: Settings, progress: Progress | None = None) -> PrecomputeReport:
    """Compute and store what is missing.

    Args:
        what: a plan, or the name of a corpus.
        settings: target, store, pipeline, location.
        progress: told (stage, done, total) for the stages `look up` and `compute`, in chunks.

    Raises:
        PrecomputeError: the store cannot be written to, or an actor cannot work; says why.
        StoreMismatchError, StoreError: the store belongs to another target or cannot be used.
        Exception: as `plan`, where it is given a name.
    """
    begin = time.perf_counter()
    settings = for_workers(settings)
    todo = what if isinstance(what, PrecomputePlan) else _survey(what, settings, progress)
    store = ChunkStore.of(settings)
    store.claim()  # before a model is loaded anywhere: can this store be written to?
    store.sweep()
    computed, tokens, written, failed = 0, 0, 0, list(todo.failed)
    if todo.missing and progress:
        progress("compute", 0, todo.missing)
    for rows in _run(todo._work, settings):
        for row in rows:
            if row["fatal"]:
                raise PrecomputeError(f"precompute stopped: {row['reason']}")
            if row["reason"]:
                failed.append(FailedChunk(row["key"], row["tokens"], row["reason"]))
            else:
                computed, tokens, written = computed + 1, tokens + row["tokens"], written + row["bytes"]
        if progress:
            progress("compute", computed + len(failed) - len(todo.failed), todo.missing)
    return PrecomputeReport(todo.chunks, computed, tokens, written, time.perf_counter() - begin, failed)


class ChunkWriter:
    """An actor of the job: one target LLM, and threads that write while the next batch is computed.

    Args:
        settings: target and store.
        threads: intra-op CPU threads.
    """

    def __init__(self, settings: Settings, threads: int) -> None:
        torch.set_num_threads(threads)
        self._target = TargetLLM.load(settings=settings)
        self._store = ChunkStore.of(settings)
        self._writers = ThreadPoolExecutor(settings.store.read_parallelism, thread_name_prefix="write")

    def __call__(self, table: pa.Table) -> Iterator[pa.Table]:
        """Compute and store the chunks of some prefill batches.

        Args:
            table: column `batch`, lists of chunks.

        Yields:
            A row per chunk: `key`, `tokens`, `bytes` written, `reason` why it was not stored (empty when it was), and
            whether that reason is `fatal` for the job. As a row, because an exception would reach the driver as text.
        """
        writing: Iterable[dict[str, Any]] = ()
        for batch in table["batch"].to_pylist():
            chunks = self._target.stale_kv(batch)
            # At most one batch waits in memory: its writes end before those of the next begin.
            yield from _rows(writing)
            writing = self._writers.map(self._put, chunks)
        yield from _rows(writing)

    def _put(self, chunk: ChunkKV) -> dict[str, Any]:
        row = {"key": self._store.format.key(chunk.token_ids), "tokens": len(chunk.token_ids), "bytes": 0}
        try:
            return {**row, "bytes": self._store.put(chunk), "reason": "", "fatal": False}
        except (ValueError, StoreError) as error:  # the chunk's own fault, or the store's
            return {**row, "reason": str(error), "fatal": isinstance(error, StoreError)}


def _rows(written: Iterable[dict[str, Any]]) -> Iterator[pa.Table]:
    if rows := list(written):
        yield pa.Table.from_pylist(rows)


def _survey(corpus: str, settings: Settings, progress: Progress | None) -> PrecomputePlan:
    """A plan without an estimate of its duration."""
    store, tokenizer = ChunkStore.of(settings), load_tokenizer(settings)
    store.check_target()
    snapshot = Corpus.open(settings.corpora_uri, corpus, columns=["token_ids"])
    owner = snapshot.manifest.owner
    mine = {"tokenizer_digest": tokenizer_digest(tokenizer), "target_model": settings.target.model}
    owner.check(corpus, owner.model_copy(update=mine))

    header = PromptTemplate(tokenizer, settings.prompt).header_ids()
    every = [np.asarray(header, dtype=np.int32), *_token_rows(snapshot.table["token_ids"])]
    chunks = {store.format.key(ids): ids for ids in every}
    longest = store.format.geometry.max_positions
    failed = [
        FailedChunk(key, len(ids), f"longer than the model's {longest} positions")
        for key, ids in chunks.items()
        if len(ids) > longest
    ]
    usable = [ids for ids in chunks.values() if len(ids) <= longest]
    missing = list(_missing(usable, store, settings, progress))
    return PrecomputePlan(
        corpus=corpus,
        generation=snapshot.generation,
        chunks=len(chunks),
        missing=len(missing),
        tokens=sum(map(len, missing)),
        bytes=sum(store.format.size(len(ids)) for ids in missing),
        seconds_estimate=0.0,
        failed=failed,
        work=list(length_batches(missing, settings.pipeline.batch_tokens)),
    )


def _token_rows(column: pa.ChunkedArray) -> Iterator[np.ndarray]:
    """Each row's ids, int32 `[T]`: views, because a corpus of Python integers would take ten times the memory."""
    for part in column.chunks:
        ids, offsets = part.flatten().to_numpy(), part.offsets.to_numpy()
        yield from np.split(ids, (offsets[1:-1] - offsets[0]))


def _missing(
    chunks: Sequence[np.ndarray], store: ChunkStore, settings: Settings, progress: Progress | None
) -> Iterator[np.ndarray]:
    with ThreadPoolExecutor(settings.store.read_parallelism) as pool:
        for done in range(0, len(chunks), _LOOK_UPS):
            part = chunks[done : done + _LOOK_UPS]
            for ids, there in zip(part, pool.map(store.contains, part), strict=True):
                if not there:
                    yield ids
            if progress:
                progress("look up", done + len(part), len(chunks))


def length_batches(chunks: Iterable[np.ndarray], batch_tokens: int) -> Iterator[list[np.ndarray]]:
    """Group chunks of like length, longest first, `batch_tokens` padded tokens at most (or a single chunk)."""
    batch: list[np.ndarray] = []
    for ids in sorted(chunks, key=len, reverse=True):
        if batch and (len(batch) + 1) * len(batch[0]) > batch_tokens:
            yield batch
            batch = []
        batch.append(ids)
    if batch:
        yield batch


def _run(batches: list[list[np.ndarray]], settings: Settings) -> Iterator[list[dict[str, Any]]]:
    if not batches:
        return
    resources, actors = target_actors(settings)
    per_task = max(math.ceil(len(batches) / _MOST_TASKS), min(BATCHES_PER_TASK, len(batches) // actors)) or 1
    tables = [
        pa.table({"batch": pa.array(batches[start : start + per_task], _BATCH)})
        for start in range(0, len(batches), per_task)
    ]
    try:
        for table in run_in_actors(ChunkWriter, (settings, int(resources["num_cpus"])), tables, actors, resources):
            yield table.to_pylist()
    except JobStoppedError as error:
        raise PrecomputeError(f"precompute stopped: {error}") from error


def _estimate(batches: list[list[np.ndarray]], tokens: int, settings: Settings) -> float:
    resources, actors = target_actors(settings)
    middle = batches[len(batches) // 2]
    timed = ray.remote(**resources)(_time_batch)
    ids = [row.tolist() for row in middle]
    loading, computing = ray.get(timed.remote(settings, ids, int(resources["num_cpus"])))
    return loading + computing / sum(map(len, middle)) * tokens / min(actors, len(batches))


def _time_batch(settings: Settings, batch: list[list[int]], threads: int) -> tuple[float, float]:
    """Seconds to load the target, and to compute one batch after a short warm-up."""
    begin = time.perf_counter()
    torch.set_num_threads(threads)
    target = TargetLLM.load(settings=settings)
    target.stale_kv([batch[0][:8]])
    loaded = time.perf_counter()
    target.stale_kv(batch)
    return loaded - begin, time.perf_counter() - loaded
