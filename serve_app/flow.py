# SPDX-License-Identifier: Apache-2.0
"""One request from validated input to a stream of deltas: retrieve, mend, generate.

Whoever leaves early (a client, a deadline, an error) stops the work in every deployment: each call that is still
running is cancelled, and a hand-off that the engine did not get is released.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator

from kvcache.handoff import release
from kvcache.settings import Settings
from serve_app.bounds import check_context
from serve_app.messages import GenerateDelta, GenerateRequest, MendRequest, MendResult, RetrieveRequest, RetrieveResult
from serve_app.metrics import RequestMetrics
from serve_app.prompts import Prompts
from serve_app.replies import Citation, RagInfo
from serve_app.schemas import ChatRequest, CompletionRequest, RagOptions


@dataclass
class Answer:
    """An answer under way.

    Attributes:
        reply_id: unique id of the answer; also the request's id in every deployment.
        method: repair method, "none" when nothing was retrieved.
        prompt_tokens: tokens of the whole prompt.
        first: the first piece of the answer.
        rest: the pieces after it.
        rag: how the answer came about; None for a plain completion.
        stages: seconds by stage so far.
        began: `time.perf_counter()` when the request was read.
        handoff: ticket of the prefix's KV, if any.
        handoff_node: id of the node whose memory holds it, where that is known.
    """

    reply_id: str
    method: str = "none"
    prompt_tokens: int = 0
    first: GenerateDelta | None = None
    rest: DeploymentResponseGenerator[GenerateDelta] | None = None
    rag: RagInfo | None = None
    stages: dict[str, float] = field(default_factory=dict)
    began: float = field(default_factory=time.perf_counter)
    handoff: dict[str, Any] | None = None
    handoff_node: str = ""
    _whole: bool = False

    async def deltas(self) -> AsyncIterator[GenerateDelta]:
        """All pieces, the first included."""
        assert self.first is not None and self.rest is not None
        yield self._noted(self.first)
        async for delta in self.rest:
            yield self._noted(delta)
        self._whole = True

    def _noted(self, delta: GenerateDelta) -> GenerateDelta:
        self.stages |= delta.stages
        if delta.handoff_miss and self.rag is not None:
            self.rag.fallback = delta.handoff_miss
        return delta

    def close(self) -> None:
        """End the answer. When it is not whole, an engine at work on it stops, and its hand-off ends."""
        if not self._whole:
            if self.rest is not None:
                self.rest.cancel()
            # Nothing happens when the engine has loaded it: it is the one that could not that must not leak.
            release(self.handoff)
        self.stages["total"] = time.perf_counter() - self.began


class Flow:
    """Runs requests over the deployments' handles.

    Args:
        settings: bounds, defaults and deadlines.
        prompts: makes token ids of the texts.
        retriever, repairer, engine: handles of the deployments.
        metrics: where hits, misses and fallbacks are counted.
    """

    def __init__(
        self,
        settings: Settings,
        prompts: Prompts,
        retriever: DeploymentHandle,
        repairer: DeploymentHandle,
        engine: DeploymentHandle,
        metrics: RequestMetrics,
    ) -> None:
        self._settings = settings
        self._prompts = prompts
        self._retriever, self._repairer = retriever, repairer
        self._engine = engine.options(stream=True)
        self._metrics = metrics

    async def start(self, request: ChatRequest | CompletionRequest, answer: Answer) -> None:
        """Fill `answer` up to its first delta; the caller closes it, also when this raises.

        Raises:
            Exception: whatever `serve_app.errors.to_api_error` maps.
        """
        async with asyncio.timeout(self._settings.serve.first_token_timeout_s):
            prefix, question = await self._prefix(request, answer)
            prompt = (*prefix, *question)
            answer.prompt_tokens = len(prompt)
            max_tokens = check_context(request, len(prompt), self._settings)
            call = GenerateRequest(
                answer.reply_id, prompt, answer.handoff, request.sampling(max_tokens), answer.handoff_node
            )
            with _timed(answer.stages, "engine"):
                await self._generate(answer, call)
        assert answer.first is not None
        answer.stages |= answer.first.stages  # now, and not only when it is written: they are in the headers
        answer.stages["ttft"] = time.perf_counter() - answer.began

    async def _prefix(
        self, request: ChatRequest | CompletionRequest, answer: Answer
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Prefix ids and question ids; `answer` gets the hand-off that holds the prefix's KV."""
        rag = request.rag
        if rag is None and isinstance(request, CompletionRequest):
            return (), (await self._prompts.encode(request))[1]
        rag = rag or RagOptions()
        corpus = rag.corpus or self._settings.api.corpus
        answer.method = rag.method or self._settings.repair.default
        top_k = rag.top_k or self._settings.retrieval.top_k
        chunk_ids = tuple(rag.chunk_ids) if rag.chunk_ids is not None else None
        with _timed(answer.stages, "retrieve"):
            # Tokenising overlaps with the search: the call is on its way before it begins.
            call = RetrieveRequest(corpus, request.question, top_k, chunk_ids)
            search = asyncio.ensure_future(_resolve(self._retriever.retrieve.remote(call)))
            try:
                header, question = await self._prompts.encode(request)
                found: RetrieveResult = await search
            finally:
                search.cancel()
        answer.stages |= found.stages
        chunks = tuple(chunk.token_ids for chunk in found.chunks)
        check_context(request, len(header) + sum(map(len, chunks)) + len(question), self._settings)
        ids = (header, *chunks) if header else chunks
        own_header = isinstance(request, ChatRequest) and request.system is not None
        with _timed(answer.stages, "mend"):
            mended = await self._mend(
                MendRequest(answer.reply_id, answer.method, ids, question, dict(rag.method_params), own_header)
            )
        answer.handoff, answer.handoff_node = mended.handoff, mended.node
        answer.stages |= mended.stages
        answer.rag = _rag_info(corpus, found, mended)
        self._metrics.mended(mended.hits, mended.misses)
        return mended.prefix_ids, question

    async def _mend(self, request: MendRequest) -> MendResult:
        response = self._repairer.mend.remote(request)
        mending = asyncio.ensure_future(_resolve(response))
        try:
            return await asyncio.shield(mending)
        except asyncio.CancelledError:
            # A result that was already on its way carries a hand-off that nobody else will end.
            response.cancel()
            mending.add_done_callback(self._unused)
            raise

    def _unused(self, mending: asyncio.Future[MendResult]) -> None:
        if not mending.cancelled() and mending.exception() is None:
            mended = mending.result()
            release(mended.handoff)
            self._metrics.mended(mended.hits, mended.misses)

    async def _generate(self, answer: Answer, request: GenerateRequest) -> None:
        response = self._engine.generate.remote(request)
        try:
            answer.first = await anext(response)
        except BaseException:
            response.cancel()
            raise
        answer.rest = response


async def _resolve(response: DeploymentResponse[Any]) -> Any:
    try:
        return await response
    except asyncio.CancelledError:
        response.cancel()
        raise


def _rag_info(corpus: str, found: RetrieveResult, mended: MendResult) -> RagInfo:
    return RagInfo(
        corpus=corpus,
        generation=found.generation,
        method=mended.method,
        fallback=mended.fallback,
        chunk_hits=mended.hits,
        chunk_misses={str(reason): count for reason, count in mended.misses.items()},
        citations=[
            Citation(
                chunk_id=chunk.chunk_id,
                document_id=chunk.document_id,
                title=chunk.title,
                score=chunk.score,
                text=chunk.text,
            )
            for chunk in found.chunks
        ],
    )


def new_answer(kind: str) -> Answer:
    """An answer that nobody else has the id of: clients may repeat their X-Request-ID, engines may not."""
    return Answer(f"{kind}-{uuid.uuid4().hex}")


class _timed:
    """Adds the seconds of a block to `stages[name]`."""

    def __init__(self, stages: dict[str, float], name: str) -> None:
        self._stages, self._name = stages, name

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._stages[self._name] = time.perf_counter() - self._began
