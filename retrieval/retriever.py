# SPDX-License-Identifier: Apache-2.0
"""Search over the current generation of each corpus."""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvcache.settings import Settings
from kvcache.target import load_tokenizer
from retrieval.bm25 import LexicalIndex
from retrieval.chunking import tokenizer_digest
from retrieval.corpus import Corpus, list_corpora, read_pointer
from retrieval.embedding import TextEmbedder
from retrieval.errors import CorpusIntegrityError, CorpusMismatchError, UnknownCorpusError
from retrieval.fusion import reciprocal_rank_fusion
from retrieval.manifest import Owner
from retrieval.types import RetrievedChunk

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""Seconds between looks at the `CURRENT` of each served corpus."""
_LISTING_S = 1.0
"""Seconds for which the names of the corpora in a message may be old."""
_WIDENING = 4
"""How many times more candidates are fetched when the limit per document leaves a result short."""

Ranking = list[tuple[int, float]]
"""(row, score), best first."""


@dataclass(frozen=True)
class SearchResult:
    """What one search found, all of it in one generation.

    Attributes:
        generation: the generation that answered.
        hits: chunks per query, best first.
        stages: seconds by stage: `embed`, `search`.
    """

    generation: str
    hits: list[list[RetrievedChunk]]
    stages: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Snapshot:
    corpus: Corpus
    lexical: LexicalIndex | None


class _Listing:
    """The corpora there are, for messages: whoever asks for unknown ones many times a second causes few listings."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: list[str] = []
        self._until = -math.inf

    def __call__(self, corpora_uri: str) -> list[str]:
        with self._lock:
            if time.monotonic() >= self._until:
                self._names = list_corpora(corpora_uri)
                self._until = time.monotonic() + _LISTING_S
            return self._names


class Retriever:
    """Finds chunks. Safe to call from several threads.

    A corpus is read when it is first asked for, while searches in others go on. From then on a background thread looks
    once a second for a newer generation and reads it while searches go on in the old one; no search waits for it, and a
    search that started in one generation ends in it. A newer generation that is damaged, or that belongs to another
    tokenizer or embedding model, is not taken: the old one stays and the reason is logged once.

    Args:
        settings: what to serve, and the target whose tokenizer the corpora must match.
        embedder: the embedding model the corpora must match.
    """

    def __init__(self, settings: Settings, embedder: TextEmbedder) -> None:
        self._settings = settings
        self._embedder = embedder
        self._owner = owner_of(settings, embedder)
        self._served: dict[str, _Snapshot] = {}
        self._refused: dict[str, str] = {}
        self._trouble: dict[str, str] = {}
        # One for each corpus that is being read; it goes with the last thread that holds or awaits it.
        self._loading: weakref.WeakValueDictionary[str, threading.Lock] = weakref.WeakValueDictionary()
        self._loading_guard = threading.Lock()
        self._listing = _Listing()
        self._closed = threading.Event()
        weakref.finalize(self, self._closed.set)
        threading.Thread(
            target=_poll, args=(weakref.ref(self), self._closed), name="corpus-generations", daemon=True
        ).start()

    def search(self, corpus: str, queries: Sequence[str], top_k: int) -> list[list[RetrievedChunk]]:
        """The `top_k` best chunks of each query; see `query`."""
        return self.query(corpus, queries, top_k).hits

    def query(self, corpus: str, queries: Sequence[str], top_k: int) -> SearchResult:
        """Search one corpus for several queries at once.

        Args:
            corpus: name of the corpus.
            queries: texts.
            top_k: most chunks per query; fewer when the corpus, or the limit per document, has no more.

        Raises:
            ValueError: `top_k` is below 1.
            UnknownCorpusError: there is no such corpus; those there are are named.
            CorpusIntegrityError: a file of the corpus is damaged; it is named.
            CorpusMismatchError: the corpus belongs to another tokenizer or embedding model; both are named.
        """
        if top_k < 1:
            raise ValueError(f"top_k is {top_k}; want at least 1")
        snapshot = self._snapshot(corpus)
        started = time.perf_counter()
        vectors = self._embedder.embed(queries)
        embedded = time.perf_counter()
        hits = [self._chunks(snapshot, ranking) for ranking in self._rank(snapshot, queries, vectors, top_k)]
        stages = {"embed": embedded - started, "search": time.perf_counter() - embedded}
        return SearchResult(snapshot.corpus.generation, hits, stages)

    def lookup(self, corpus: str, chunk_ids: Sequence[str]) -> SearchResult:
        """The chunks of these ids, in this order, with score 0: one list of hits.

        Raises:
            UnknownChunkError: some ids are not in the served generation.
            UnknownCorpusError, CorpusIntegrityError, CorpusMismatchError: as for `query`.
        """
        served = self._snapshot(corpus).corpus
        started = time.perf_counter()
        hits = served.chunks_at(served.rows_of(chunk_ids), [0.0] * len(chunk_ids))
        return SearchResult(served.generation, [hits], {"search": time.perf_counter() - started})

    def generation(self, corpus: str) -> str:
        """Id of the generation served now; raises like `query`."""
        return self._snapshot(corpus).corpus.generation

    def generations(self) -> dict[str, str]:
        """The generation in memory of each corpus that has been asked for."""
        return {name: served.corpus.generation for name, served in list(self._served.items())}

    def serves(self, corpus: str) -> bool:
        """Whether a generation of that corpus is in memory; if not, the first to ask for it waits until it is read."""
        return corpus in self._served

    def refresh(self) -> None:
        """Take the current generation of every served corpus now, rather than at the next look."""
        for name in list(self._served):
            self._refresh(name)

    def close(self) -> None:
        """Stop looking for newer generations."""
        self._closed.set()

    def _snapshot(self, corpus: str) -> _Snapshot:
        snapshot = self._served.get(corpus)
        if snapshot is None:
            with self._loading_of(corpus):
                snapshot = self._served.get(corpus) or self._load(corpus)
                self._served[corpus] = snapshot
        return snapshot

    def _loading_of(self, name: str) -> threading.Lock:
        with self._loading_guard:
            return self._loading.setdefault(name, threading.Lock())

    def _load(self, name: str) -> _Snapshot:
        retrieval = self._settings.retrieval
        corpus = Corpus.open(self._settings.corpora_uri, name, index_settings=retrieval, listing=self._listing)
        corpus.manifest.owner.check(name, self._owner)
        lexical = LexicalIndex(corpus.table["text"].to_pylist()) if retrieval.hybrid else None
        return _Snapshot(corpus, lexical)

    def _refresh(self, name: str) -> None:
        served = self._served.get(name)
        if served is None:
            return
        try:
            current = read_pointer(self._settings.corpora_uri, name, self._listing).generation
            if current in (served.corpus.generation, self._refused.get(name)):
                return
            try:
                with self._loading_of(name):
                    self._served[name] = self._load(name)
            except (CorpusIntegrityError, CorpusMismatchError):
                self._refused[name] = current  # it will not get better: a generation never changes
                raise
            logger.info("corpus %s: generation %s took over from %s", name, current, served.corpus.generation)
            self._trouble.pop(name, None)
        except UnknownCorpusError:
            logger.warning("corpus %s was removed", name)
            self._served.pop(name, None)
        except Exception as error:  # whatever it is, the old generation can be served and the next look may succeed
            if self._trouble.get(name) != str(error):
                logger.error("corpus %s: generation %s stays: %s", name, served.corpus.generation, error)
            self._trouble[name] = str(error)

    def _rank(self, snapshot: _Snapshot, queries: Sequence[str], vectors: np.ndarray, top_k: int) -> list[Ranking]:
        """The best rows of each query, after fusion and the limit per document."""
        rankings: dict[int, Ranking] = {}
        pending, depth = list(range(len(queries))), top_k
        while pending:
            found = self._candidates(snapshot, [queries[i] for i in pending], vectors[pending], depth)
            for i, ranking in zip(pending, found, strict=True):
                kept = self._limited(snapshot.corpus, ranking)[:top_k]
                if len(kept) == top_k or depth >= snapshot.corpus.table.num_rows:
                    rankings[i] = kept
            pending = [i for i in pending if i not in rankings]
            depth *= _WIDENING
        return [rankings[i] for i in range(len(queries))]

    def _candidates(
        self, snapshot: _Snapshot, queries: Sequence[str], vectors: np.ndarray, depth: int
    ) -> list[Ranking]:
        retrieval = self._settings.retrieval
        if snapshot.lexical is None:
            found = snapshot.corpus.index.search(vectors, depth)
            return [list(zip(hits.rows.tolist(), hits.scores.tolist(), strict=True)) for hits in found]
        # A fixed depth, whatever top_k: asking for more chunks must not reorder those that were already there.
        depth = max(depth, retrieval.max_top_k)
        dense = snapshot.corpus.index.search(vectors, depth)
        lexical = snapshot.lexical.search(queries, depth)
        return [
            reciprocal_rank_fusion([hits.rows, rows], retrieval.rrf_k)
            for hits, rows in zip(dense, lexical, strict=True)
        ]

    def _limited(self, corpus: Corpus, ranking: Ranking) -> Ranking:
        limit = self._settings.retrieval.max_per_document
        if not limit:
            return ranking
        documents, seen, kept = corpus.table["document_id"], Counter[str](), []
        for row, score in ranking:
            document = documents[row].as_py()
            seen[document] += 1
            if seen[document] <= limit:
                kept.append((row, score))
        return kept

    @staticmethod
    def _chunks(snapshot: _Snapshot, ranking: Ranking) -> list[RetrievedChunk]:
        return snapshot.corpus.chunks_at([row for row, _ in ranking], [score for _, score in ranking])


def owner_of(settings: Settings, embedder: TextEmbedder) -> Owner:
    """What a corpus made under these settings belongs to."""
    return Owner(
        target_model=settings.target.model,
        tokenizer_digest=tokenizer_digest(load_tokenizer(settings)),
        embedding_model=embedder.identity,
        embedding_dimension=embedder.dimension,
    )


def _poll(retriever: weakref.ref[Retriever], closed: threading.Event) -> None:
    # A weak reference: a retriever that nobody holds any more must not be kept alive by its own thread.
    while not closed.wait(POLL_S):
        live = retriever()
        if live is None:
            return
        live.refresh()
        del live
