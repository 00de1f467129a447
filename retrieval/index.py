# SPDX-License-Identifier: Apache-2.0
"""FAISS behind one interface: flat, inverted lists or HNSW; inner product of unit vectors; results without chance.

Shapes: `N` indexed vectors, `Q` queries, `E` vector size.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import faiss
import numpy as np

from kvcache.settings import RetrievalSettings

_POINTS_PER_LIST = 39
"""FAISS's own least number of training points per inverted list."""
_GPU_MAX_K = 2048
_ROUNDING = 1e-5
"""More than FAISS's float32 inner products of unit vectors differ between batch sizes and code paths."""


@dataclass(frozen=True)
class Hits:
    """Rows found for one query, best first: score descending, row ascending among equals.

    Attributes:
        rows: int64 `[n]`, at most as many as were asked for.
        scores: float32 `[n]`, inner products.
    """

    rows: np.ndarray
    scores: np.ndarray


class DenseIndex:
    """Nearest rows by inner product. Safe to search from several threads.

    FAISS leaves open which of equal scores it returns, and rounds the same product differently in batches of different
    size. Here the candidates are fetched past the cut, scored again row by row in one fixed order of summation, and
    sorted by (score, row): a query's result depends on the query and the vectors alone.
    """

    def __init__(self, index: faiss.Index, settings: RetrievalSettings) -> None:
        self._index = index
        self._settings = settings
        if isinstance(index, faiss.IndexIVF) and index.direct_map.no():
            index.make_direct_map()  # rows are read back to be scored again
        self._searcher = _on_gpus(index)
        self._gpu_lock = threading.Lock()  # FAISS's GPU indexes serve one thread at a time

    @classmethod
    def build(cls, embeddings: np.ndarray, settings: RetrievalSettings) -> DenseIndex:
        """Index unit vectors, float32 `[N, E]`; row numbers are their positions."""
        embeddings = np.ascontiguousarray(embeddings, dtype=np.float32)
        with _threads(settings.threads):
            index = _empty_index(*embeddings.shape, settings)
            if not index.is_trained:
                index.train(embeddings)
            if len(embeddings):
                index.add(embeddings)
        return cls(index, settings)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview, settings: RetrievalSettings) -> DenseIndex:
        """Read what `to_bytes` wrote. FAISS trusts its input: check the digest first."""
        return cls(faiss.deserialize_index(np.frombuffer(data, dtype=np.uint8)), settings)

    def to_bytes(self) -> memoryview:
        """The index in FAISS's own format."""
        return memoryview(faiss.serialize_index(self._index))

    @property
    def size(self) -> int:
        """Number of indexed vectors `N`."""
        return self._index.ntotal

    @property
    def dimension(self) -> int:
        """Vector size `E`."""
        return self._index.d

    def search(self, queries: np.ndarray, k: int) -> list[Hits]:
        """The `k` best rows of each query; fewer when the index holds fewer.

        Args:
            queries: unit vectors, float32 `[Q, E]`.
            k: how many, at least 1.
        """
        if k < 1:
            raise ValueError(f"k is {k}; want at least 1")
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        found: dict[int, Hits] = {}
        pending = np.arange(len(queries))
        k = min(k, self.size)
        width = min(k + 16, self.size)
        with _threads(self._settings.threads):
            while len(pending) and self.size:
                scores, rows = self._candidates(queries[pending], width)
                for query, query_scores, query_rows in zip(pending, scores, rows, strict=True):
                    hits = self._rescored(queries[query], query_rows[query_rows >= 0])
                    exhausted = len(hits.rows) < width or width == self.size
                    # Whatever was not fetched scores no more than the last that was.
                    if exhausted or query_scores[-1] + _ROUNDING < hits.scores[k - 1]:
                        found[query] = Hits(hits.rows[:k], hits.scores[:k])
                pending = np.array([query for query in pending if query not in found], dtype=np.int64)
                width = min(width * 4, self.size)
        nothing = Hits(np.empty(0, np.int64), np.empty(0, np.float32))
        return [found.get(query, nothing) for query in range(len(queries))]

    def _candidates(self, queries: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        """FAISS's scores and rows `[Q, width]`; row -1 where it found no more."""
        index = self._index if width > _GPU_MAX_K else self._searcher
        if isinstance(self._index, faiss.IndexHNSW):
            wanted = faiss.SearchParametersHNSW(efSearch=max(self._settings.hnsw_ef_search, width))
            return index.search(queries, width, params=wanted)
        if not isinstance(self._index, faiss.IndexIVF):
            return self._guarded_search(index, queries, width, None)
        wanted = faiss.SearchParametersIVF(nprobe=min(self._settings.ivf_nprobe, self._index.nlist))
        scores, rows = self._guarded_search(index, queries, width, wanted)
        short = np.flatnonzero(rows[:, -1] < 0)
        if len(short):  # the visited lists held too few: visit all of them
            everything = faiss.SearchParametersIVF(nprobe=self._index.nlist)
            scores[short], rows[short] = self._guarded_search(index, queries[short], width, everything)
        return scores, rows

    def _guarded_search(
        self, index: faiss.Index, queries: np.ndarray, width: int, params: faiss.SearchParameters | None
    ) -> tuple[np.ndarray, np.ndarray]:
        if index is self._index:
            return index.search(queries, width, params=params)
        with self._gpu_lock:
            return index.search(queries, width, params=params)

    def _rescored(self, query: np.ndarray, rows: np.ndarray) -> Hits:
        vectors = self._index.reconstruct_batch(rows) if len(rows) else np.empty((0, self.dimension), np.float32)
        scores = (vectors * query).sum(axis=1)
        order = np.lexsort((rows, -scores))
        return Hits(rows[order], scores[order])


def _empty_index(n: int, dimension: int, settings: RetrievalSettings) -> faiss.Index:
    if settings.index == "hnsw":
        return faiss.IndexHNSWFlat(dimension, settings.hnsw_m, faiss.METRIC_INNER_PRODUCT)
    flat = faiss.IndexFlatIP(dimension)
    if settings.index == "flat" or n == 0:
        return flat
    nlist = max(1, min(settings.ivf_nlist, n // _POINTS_PER_LIST))
    index = faiss.IndexIVFFlat(flat, dimension, nlist, faiss.METRIC_INNER_PRODUCT)
    index.cp.min_points_per_centroid = min(index.cp.min_points_per_centroid, n // nlist)  # tiny corpora: no warning
    return index


def _on_gpus(index: faiss.Index) -> faiss.Index:
    """A copy on the GPUs that FAISS sees; HNSW has no GPU form, and without GPUs it stays where it is."""
    if isinstance(index, faiss.IndexHNSW) or not getattr(faiss, "get_num_gpus", int)():
        return index
    return faiss.index_cpu_to_all_gpus(index)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    # OpenMP keeps this per calling thread, so it is set where the work is done, and put back.
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(count or os.cpu_count() or 1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)
