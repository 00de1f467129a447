# SPDX-License-Identifier: Apache-2.0
"""An actor of the batch job: the service's mender and engine in one process, and what came of each question.

One process, so that hand-offs stay on one node, and so that there are never more of them than questions in flight: an
actor pool between two stages would let them queue up until their leases run out.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import torch

from engine.types import GenerateRequest
from kvcache.arena import Arena
from kvcache.chunk import chunk_key
from kvcache.handoff import HandoffReader, SharedMemoryTransport, release
from kvcache.settings import Settings
from kvcache.store import ChunkStore
from kvcache.target import TargetLLM
from pipelines.qa.metrics import exact_match, f1
from pipelines.qa.results import Row
from pipelines.qa.scoring import GoldScore, gold_ids, score_golds
from repair.mender import Mender
from repair.spec import MethodSpec
from repair.types import MendRequest, MendResult

SEED = 0

QUESTIONS = pa.schema(
    {
        "id": pa.string(),
        "question": pa.string(),
        "golds": pa.list_(pa.string()),
        "chunks": pa.list_(pa.list_(pa.int32())),
        "question_ids": pa.list_(pa.int32()),
        "methods": pa.list_(pa.string()),
    }
)
"""What the actors are given; `methods` are those whose row is missing."""


@dataclass(frozen=True)
class AnswerOptions:
    """How questions are answered.

    Attributes:
        methods: by label, in the order of answering.
        max_tokens: most new tokens.
        concurrency: questions in flight in each actor; above 1, times are those of a busy engine.
    """

    methods: Mapping[str, MethodSpec]
    max_tokens: int
    concurrency: int


@dataclass
class _Answer:
    text: str = ""
    token_ids: tuple[int, ...] = ()
    first_s: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    cached_tokens: int = 0
    miss: str | None = None


class Answerer:
    """Answers questions by every method, greedily.

    Args:
        settings: target, store, repair methods, hand-off and engine.
        options: how.
        threads: intra-op CPU threads of the target's own passes.

    Raises:
        UnsupportedTargetError: reuse is wrong for this target.
        MethodParamsError: parameters that a method does not take.
    """

    def __init__(self, settings: Settings, options: AnswerOptions, threads: int) -> None:
        torch.set_num_threads(threads)
        self._settings, self._options = settings, options
        self._target = TargetLLM.load(settings=settings)
        transport = SharedMemoryTransport(Arena(settings.handoff.arena_bytes, settings.handoff.lease_s))
        self._mender = Mender(self._target, ChunkStore.of(settings), transport, settings)
        for spec in options.methods.values():
            self._mender.check(spec.name, dict(spec.params))
        self._reader = HandoffReader(self._target.fingerprint, self._target.geometry, self._target.dtype)
        # Here, not above: importing vLLM takes seconds, and the driver of the job does not need it.
        from engine.engine import Engine

        self._engine = Engine(beside(self._target.device, settings))
        self._scoring = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._start())

    async def _start(self) -> None:
        from engine.proof import EngineProof

        proof = EngineProof(self._settings, self._target) if self._settings.engine.startup_proof else None
        await self._engine.start()
        if proof is not None:
            await proof.check(self._engine)

    def __call__(self, table: pa.Table) -> pa.Table:
        """Answer some questions.

        Args:
            table: of the schema `QUESTIONS`.

        Returns:
            Column `row`: a row of `pipelines.qa.results.SCHEMA` as JSON for each question and method.
        """
        slots = asyncio.Semaphore(self._options.concurrency)
        rows = self._loop.run_until_complete(_all([self._question(slots, question) for question in table.to_pylist()]))
        return pa.table({"row": [json.dumps(row) for group in rows for row in group]})

    async def _question(self, slots: asyncio.Semaphore, question: Mapping[str, Any]) -> list[Row]:
        async with slots:
            return [await self._answer(question, self._options.methods[label]) for label in question["methods"]]

    async def _answer(self, question: Mapping[str, Any], method: MethodSpec) -> Row:
        chunks, params = tuple(map(tuple, question["chunks"])), dict(method.params)
        request = MendRequest(uuid.uuid4().hex, method.name, chunks, tuple(question["question_ids"]), params)
        mended, computed, mend_s = await self._mend(request)
        try:
            kv = self._copy(mended)
            answer = await self._generate(request, mended)
        finally:
            release(mended.handoff)
        score = await self._score(question["golds"], request, mended, None if answer.miss else kv)
        return {
            "id": question["id"],
            "method": method.label,
            "params": params,
            "question": question["question"],
            "answer": answer.text,
            "answer_token_ids": answer.token_ids,
            "golds": question["golds"],
            "f1": f1(answer.text, question["golds"]),
            "em": exact_match(answer.text, question["golds"]),
            "gold": score.gold,
            "gold_logprob_mean": score.mean,
            "gold_logprob_sum": score.sum,
            "ttft_s": mend_s + answer.first_s,
            "stages": {**mended.stages, **answer.stages},
            "prompt_tokens": len(mended.prefix_ids) + len(request.question_ids),
            "cached_tokens": answer.cached_tokens,
            "chunk_ids": [chunk_key(self._target.fingerprint, ids) for ids in chunks],
            "computed_chunks": computed,
            "fallback": mended.fallback or answer.miss,
        }

    async def _mend(self, request: MendRequest) -> tuple[MendResult, int, float]:
        """The prefix, the chunks that had to be computed for it, and the seconds it takes when all are in memory."""
        computed, again = 0, False
        while True:
            begin = time.perf_counter()
            mended = await self._mender.mend(request)
            seconds, missing = time.perf_counter() - begin, sum(mended.misses.values())
            if again or not (missing or mended.hits.get("store")):
                return mended, computed, seconds
            # Once more, now that the chunks are there: TTFT leaves out what is done ahead of time, and must not be that
            # of the store for the first of a question's methods and that of memory for the others.
            computed, again = missing, True
            release(mended.handoff)

    def _copy(self, mended: MendResult) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys and values handed off; the engine frees the hand-off's own memory as soon as it has loaded it."""
        if mended.handoff is None:
            return None
        k_LTHD, v_LTHD = (kv.clone() for kv in self._reader.open(mended.handoff))
        self._reader.confirm(mended.handoff)
        return k_LTHD, v_LTHD

    async def _generate(self, request: MendRequest, mended: MendResult) -> _Answer:
        sampling = {"max_tokens": self._options.max_tokens, "temperature": 0.0, "seed": SEED}
        prompt = (*mended.prefix_ids, *request.question_ids)
        answer, begin = _Answer(), time.perf_counter()
        async for delta in self._engine.generate(GenerateRequest(request.request_id, prompt, mended.handoff, sampling)):
            answer.first_s = answer.first_s or time.perf_counter() - begin
            answer.text += delta.text
            answer.token_ids += delta.token_ids
            answer.stages |= delta.stages
            answer.cached_tokens = delta.cached_tokens
            answer.miss = delta.handoff_miss
        return answer

    async def _score(
        self,
        golds: Sequence[str],
        request: MendRequest,
        mended: MendResult,
        kv: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> GoldScore:
        with_ids = [(gold, gold_ids(self._target.tokenizer, gold, self._settings.prompt)) for gold in golds]
        following = (*mended.prefix_ids[mended.rows if kv is not None else 0 :], *request.question_ids)
        async with self._scoring:
            return await asyncio.to_thread(score_golds, self._target, kv, following, with_ids)


def beside(device: torch.device, settings: Settings) -> Settings:
    """Settings of an engine on a GPU where other things lie already, such as the target: its share is less by theirs.

    vLLM refuses to start where less than its share is free.
    """
    if device.type != "cuda":
        return settings
    free, total = torch.cuda.mem_get_info(device)
    share = settings.engine.gpu_memory_utilization - (1 - free / total)
    return settings.model_copy(update={"engine": settings.engine.model_copy(update={"gpu_memory_utilization": share})})


async def _all(work: Sequence[Coroutine[Any, Any, list[Row]]]) -> list[list[Row]]:
    """Results in order; the first error ends the others, and only then is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]
