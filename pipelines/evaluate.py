# SPDX-License-Identifier: Apache-2.0
"""Compare repair methods on question-answering data: one process, the target in transformers, every method's repairer.

Rows are kept in a work file as they are made: a run that was killed, or that is asked for one more method or more
requests, measures only what is missing. Rows of other weights, units, devices or code do not count.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
import platform
import resource
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvcache.settings import Settings
from kvcache.target import TargetLLM
from pipelines.evaluation import bootstrap, units
from pipelines.evaluation.candidates import Candidate, make
from pipelines.evaluation.cuts import Cut
from pipelines.evaluation.kv_error import DISTANCES, POSITION_BIN
from pipelines.evaluation.measure import Meter
from pipelines.evaluation.passes import read_prompt
from pipelines.evaluation.requests import ANSWER_TOKENS, DataSet, EvaluationError, EvaluationRequest, read_requests
from pipelines.evaluation.stale import StaleSource
from pipelines.evaluation.summary import Rows, summarise
from pipelines.evaluation.work import WorkFile
from pipelines.qa.continuation import extend
from pipelines.qa.inputs import MAX_CHUNKS, MAX_TOKENS
from repair.base import RepairRequest
from repair.spec import MethodSpec

Progress = Callable[[str, int, int | None], None]
"""Told (stage, done, total)."""

_TIMED_TOKENS, _TIMED_STEPS = 256, 4
_VERSIONS = ("cachemend", "torch", "transformers", "numpy")
_DECIDING = ("torch", "transformers")


@dataclass(frozen=True)
class EvaluationJob:
    """What to evaluate.

    Attributes:
        methods: beside full and stale, which are always there.
        data: data sets, see `pipelines.qa.dataset`; each has a table of its own.
        limit: most requests per data set; 0 takes all.
        max_chunks, max_tokens: caps on a request's chunks.
        work: folder of work files.
        articles: corpus for rows without chunks, see `evaluation.requests.read_requests`.
        cuts: ways to cut the questions' texts anew, likewise.
        glue_header: whether the first chunk begins with the header, likewise.
    """

    methods: Sequence[MethodSpec]
    data: Sequence[str]
    limit: int = 0
    max_chunks: int = MAX_CHUNKS
    max_tokens: int = MAX_TOKENS
    work: Path = Path("data/evaluation")
    articles: str | None = None
    cuts: Sequence[Cut] = ()
    glue_header: bool = False


@dataclass(frozen=True)
class EvaluationPlan:
    """What there is to do.

    Attributes:
        requests: of all data sets.
        tokens: of their chunks.
        methods: labels.
        missing: pairs of request and method that have to be measured.
        seconds_estimate: about how long that takes, from timed passes, with no stale KV in the store.
    """

    requests: int
    tokens: int
    methods: list[str]
    missing: int
    seconds_estimate: float


class Evaluation:
    """An evaluation that is ready to run.

    Args:
        job: what to evaluate.
        settings: target, prompt, store, host tier, and each method's own.
        progress: told how far the measuring of units and methods is.

    Raises:
        MethodParamsError, MethodSpecError, CheckpointError: a method that cannot be made.
        DatasetError, EvaluationError: data that cannot be used.
        StoreMismatchError: the chunk store belongs to another target.
    """

    def __init__(self, job: EvaluationJob, settings: Settings, progress: Progress) -> None:
        if settings.target.threads:
            torch.set_num_threads(settings.target.threads)
        self._job, self._progress = job, progress
        self._target = target = TargetLLM.load(settings=settings)
        self._model, self._bounds = settings.target.model, settings.repair.selective
        self._session = uuid.uuid4().hex
        self._candidates = make(job.methods, target, settings)
        self._data = read_requests(
            job.data,
            target,
            settings,
            job.limit,
            job.max_chunks,
            job.max_tokens,
            job.articles,
            job.cuts,
            job.glue_header,
        )
        self._stale = StaleSource(target, settings)
        repairers = [candidate.repairer for candidate in self._candidates]
        floor = settings.training.residual_floor
        statistics = units.of_network(repairers, floor)
        self._units = "requests" if statistics is None else "checkpoint"
        if statistics is None:
            statistics = units.of_requests(
                self._requests, target, self._stale, floor, job.work, lambda *done: progress("units", *done)
            )
        self._meter = Meter(target, statistics)
        self._work = WorkFile(job.work, self._conditions(units.digest(statistics)))

    @property
    def _requests(self) -> list[EvaluationRequest]:
        return [request for data in self._data for request in data.requests]

    def plan(self) -> EvaluationPlan:
        """What there is to do; times a few passes for the estimate."""
        read, step = self._timed()
        missing, seconds = 0, 0.0
        for request in self._requests:
            pending = len(self._pending(request))
            if pending:
                # stale and joint KV; then each method: the question twice, two answers read, one written
                each = 2 * len(request.question_ids) + 2 * ANSWER_TOKENS
                seconds += (2 * request.prefix_tokens + pending * each) * read + pending * ANSWER_TOKENS / 2 * step
            missing += pending
        return EvaluationPlan(
            requests=len(self._requests),
            tokens=sum(request.prefix_tokens for request in self._requests),
            methods=[candidate.spec.label for candidate in self._candidates],
            missing=missing,
            seconds_estimate=seconds,
        )

    def run(self) -> dict[str, Any]:
        """Measure what is missing, and make the tables.

        Returns:
            `{"methods", "intervals", "half_budget", "requests"}` over all requests (see `evaluation.summary`),
            `"data_sets"`: the same per data set, and `"config"`.
        """
        warm = False
        for index, request in enumerate(self._requests):
            pending = self._pending(request)
            if pending:
                if not warm:
                    self._warm_up(request, pending)
                    warm = True
                self._measure(request, pending)
            self._progress("evaluate", index + 1, len(self._requests))
        return {
            **self._summary(self._data),
            "data_sets": {data.name: self._summary([data]) for data in self._data},
            "config": self._config(),
        }

    def _pending(self, request: EvaluationRequest) -> list[Candidate]:
        digest = request.digest
        return [each for each in self._candidates if self._work.get(digest, each.key) is None]

    def _warm_up(self, request: EvaluationRequest, pending: Sequence[Candidate]) -> None:
        with self._stale.chunks(request.chunks) as stale:
            full = self._candidates[0]
            for each in (full, *(other for other in pending if other is not full)):
                work = RepairRequest(request.chunks, stale, request.question_ids, dict(each.spec.params))
                read_prompt(self._target, each.repairer, work)

    def _measure(self, request: EvaluationRequest, pending: Sequence[Candidate]) -> None:
        names = {"request": request.digest, "data": request.data, "id": request.id, "session": self._session}
        with self._stale.chunks(request.chunks) as stale:
            reference = self._meter.reference(request, self._candidates[0].repairer)
            rows = [
                {
                    **names,
                    "method": each.key,
                    **self._meter.measure(request, reference, each.repairer, each.spec.params, stale),
                }
                for each in pending
            ]
        for each, row in zip(pending, rows, strict=True):
            for name, value in row["metrics"].items():
                if value is not None and not math.isfinite(value):
                    where = f"{request.data}, row {request.id!r}"
                    raise EvaluationError(f"{where}: method {each.spec.label} gives {name} = {value}")
        self._work.add(rows)

    def _summary(self, data: Sequence[DataSet]) -> dict[str, Any]:
        rows: Rows = {each.spec.label: self._rows(each, data) for each in self._candidates}
        return summarise(
            rows,
            {each.spec.label: each.spec.name for each in self._candidates},
            {each.spec.label: each.parameter_bytes for each in self._candidates},
        )

    def _rows(self, candidate: Candidate, data: Sequence[DataSet]) -> list[dict[str, Any]]:
        return [self._work.row(request.digest, candidate.key) for one in data for request in one.requests]

    def _conditions(self, unit: str) -> dict[str, Any]:
        """What decides a row beside its request and method."""
        return {
            "fingerprint": self._target.fingerprint,
            "device": self._device(),
            "threads": torch.get_num_threads(),
            "stale": self._stale.dtype,
            "units": unit,
            "bounds": self._bounds.model_dump(),
            "versions": {name: importlib.metadata.version(name) for name in _DECIDING},
        }

    def _device(self) -> str:
        device = self._target.device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()

    def _config(self) -> dict[str, Any]:
        own_header = not self._job.glue_header
        return {
            "data": {
                data.name: {
                    "source": data.source,
                    "sha256": data.digest,
                    "requests_sha256": hashlib.sha256("".join(r.digest for r in data.requests).encode()).hexdigest(),
                    "requests": len(data.requests),
                    "chunks": float(np.mean([len(request.chunks) - own_header for request in data.requests])),
                    "tokens": float(np.mean([request.prefix_tokens for request in data.requests])),
                }
                for data in self._data
            },
            "limits": {
                "limit": self._job.limit,
                "max_chunks": self._job.max_chunks,
                "max_tokens": self._job.max_tokens,
                "articles": self._job.articles,
                "glue_header": self._job.glue_header,
                "answer_tokens": ANSWER_TOKENS,
            },
            "target": {
                "model": self._model,
                "fingerprint": self._target.fingerprint,
                "dtype": str(self._target.dtype).removeprefix("torch."),
            },
            "weights": {each.spec.label: each.weights for each in self._candidates if each.weights},
            "units": self._units,
            "stale_dtype": self._stale.dtype,
            "device": self._device(),
            "threads": torch.get_num_threads(),
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "bootstrap": {"draws": bootstrap.DRAWS, "seed": bootstrap.SEED, "percentiles": bootstrap.PERCENTILES},
            "bins": {"position_tokens": POSITION_BIN, "distance_tokens": DISTANCES},
            "versions": {
                "python": platform.python_version(),
                **{name: importlib.metadata.version(name) for name in _VERSIONS},
            },
            "work_file": str(self._work.path),
            "sessions": len({row["session"] for each in self._candidates for row in self._rows(each, self._data)}),
        }

    def _timed(self) -> tuple[float, float]:
        """Seconds per token read, and per token written."""
        ids = list(
            range(min(_TIMED_TOKENS, self._target.geometry.vocab_size, self._target.geometry.max_positions // 2))
        )
        full = self._candidates[0].repairer
        read_prompt(self._target, full, RepairRequest((), (), ids[:8]))
        prompt = read_prompt(self._target, full, RepairRequest((), (), ids))
        begin = time.perf_counter()
        for token in ids[:_TIMED_STEPS]:
            int(extend(self._target, prompt.cache, [token])[-1].argmax())
        return prompt.ttft_s / len(ids), (time.perf_counter() - begin) / _TIMED_STEPS


def _processor() -> str:
    """What the CPU calls itself; Linux tells nothing by way of `platform.processor`."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
