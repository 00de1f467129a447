# SPDX-License-Identifier: Apache-2.0
"""The Retriever deployment: questions in, chunks out."""

from __future__ import annotations

import asyncio
import functools
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

from kvcache.settings import Settings
from serve_app.messages import RetrieveRequest, RetrieveResult
from serve_app.metrics import IndexMetrics

MAX_BATCH = 32
"""Questions embedded and searched in one go."""
_LOADERS = 4
"""Corpora read, or found to be unknown, at the same time."""

_Waiting = tuple[RetrieveRequest, asyncio.Future[RetrieveResult]]


class RetrieverDeployment:
    """Searches corpora.

    Questions that arrive while a search is running share the next one. Nobody waits for company, which is why this
    is not `serve.batch`: that one either waits, or (without a wait) forms batches of one while another is running.

    Args:
        settings: embedding model, corpora and index.

    Raises:
        CorpusIntegrityError, CorpusMismatchError: a corpus that must not be served; the message says why.
    """

    def __init__(self, settings: Settings) -> None:
        # Here, not above: whoever only builds the application needs neither FAISS nor the embedding model's libraries.
        from retrieval.corpus import list_corpora
        from retrieval.embedding import Embedder
        from retrieval.retriever import Retriever

        self._retriever = Retriever(settings, Embedder(settings))
        self._metrics = IndexMetrics()
        self._list = functools.partial(list_corpora, settings.corpora_uri)
        for corpus in self._list():
            # Read now: a damaged corpus, or one of another tokenizer or embedding model, is refused at start.
            self._retriever.generation(corpus)
        # One thread: embedding and FAISS use all the cores they may within one call.
        self._thread = ThreadPoolExecutor(1, "retrieve")
        # Others, for what waits for storage: nobody's search stands behind the reading of another corpus.
        self._loaders = ThreadPoolExecutor(_LOADERS, "load-corpus")
        self._loading: dict[str, asyncio.Future[str]] = {}
        self._waiting: list[_Waiting] = []
        self._worker: asyncio.Task[None] | None = None

    async def retrieve(self, request: RetrieveRequest) -> RetrieveResult:
        """Chunks for a question, or the chunks that it names.

        Raises:
            UnknownCorpusError, UnknownChunkError: the message names what is known.
        """
        await self._loaded(request.corpus)
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await future

    async def ready(self) -> None:
        """Return when corpora can be listed. Raises whatever the file system raises."""
        await asyncio.get_running_loop().run_in_executor(self._loaders, self._list)

    async def check_health(self) -> None:
        """Serve's health check."""
        self._metrics.searched(self._retriever.generations())

    def __del__(self) -> None:
        if hasattr(self, "_retriever"):
            self._retriever.close()

    async def _loaded(self, corpus: str) -> None:
        """Return when that corpus is in memory; however many wait for it, one thread reads it."""
        if self._retriever.serves(corpus):
            return
        reading = self._loading.get(corpus)
        if reading is None:
            loop = asyncio.get_running_loop()
            reading = loop.run_in_executor(self._loaders, self._retriever.generation, corpus)
            self._loading[corpus] = reading
            reading.add_done_callback(lambda _: self._loading.pop(corpus))
        await asyncio.shield(reading)  # one that leaves must not take the others' corpus along

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch = [(request, future) for request, future in self._waiting[:MAX_BATCH] if not future.done()]
            del self._waiting[:MAX_BATCH]
            results = await loop.run_in_executor(self._thread, self._answer, [request for request, _ in batch])
            for (_, future), result in zip(batch, results, strict=True):
                if future.done():
                    continue
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)

    def _answer(self, requests: list[RetrieveRequest]) -> list[RetrieveResult | Exception]:
        """Results in the order of the requests; searches of one corpus and depth are one call."""
        groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            alone = index if request.chunk_ids is not None else None
            groups[request.corpus, request.top_k, alone].append(index)
        results: dict[int, RetrieveResult | Exception] = {}
        for indices in groups.values():
            try:
                results |= zip(indices, self._search([requests[i] for i in indices]), strict=True)
            except Exception as error:
                results |= dict.fromkeys(indices, error)
        return [results[index] for index in range(len(requests))]

    def _search(self, group: list[RetrieveRequest]) -> list[RetrieveResult]:
        corpus, top_k, chunk_ids = group[0].corpus, group[0].top_k, group[0].chunk_ids
        if chunk_ids is not None:
            found = self._retriever.lookup(corpus, chunk_ids)
        else:
            found = self._retriever.query(corpus, [request.query for request in group], top_k)
        return [RetrieveResult(chunks, found.generation, found.stages) for chunks in found.hits]
