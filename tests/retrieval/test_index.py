# SPDX-License-Identifier: Apache-2.0
"""One interface over FAISS's index kinds: right, complete and without chance."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache.settings import RetrievalSettings
from retrieval.index import DenseIndex

KINDS = ["flat", "ivf", "hnsw"]


def unit(n: int, dimension: int = 32, seed: int = 0) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((n, dimension)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def by_hand(vectors: np.ndarray, query: np.ndarray, k: int) -> list[int]:
    scores = vectors.astype(np.float64) @ query.astype(np.float64)
    return np.lexsort((np.arange(len(vectors)), -np.round(scores, 6)))[:k].tolist()


def test_flat_is_exact_and_scores_are_inner_products() -> None:
    vectors, queries = unit(500), unit(9, seed=1)
    for query, hits in zip(queries, DenseIndex.build(vectors, RetrievalSettings()).search(queries, 7), strict=True):
        assert hits.rows.tolist() == by_hand(vectors, query, 7)
        assert hits.scores == pytest.approx(vectors[hits.rows].astype(np.float64) @ query, abs=1e-6)


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
def test_approximate_kinds_find_what_flat_finds(kind: str) -> None:
    vectors, queries = unit(4000), unit(50, seed=1)
    exact = DenseIndex.build(vectors, RetrievalSettings()).search(queries, 10)
    settings = RetrievalSettings(index=kind, ivf_nlist=64, ivf_nprobe=48, hnsw_ef_search=256)
    found = DenseIndex.build(vectors, settings).search(queries, 10)
    recall = np.mean([len(set(a.rows) & set(b.rows)) / 10 for a, b in zip(exact, found, strict=True)])
    assert recall >= 0.98


def test_ivf_that_visits_every_list_is_exact() -> None:
    vectors, queries = unit(1000), unit(20, seed=1)
    exact = DenseIndex.build(vectors, RetrievalSettings()).search(queries, 10)
    settings = RetrievalSettings(index="ivf", ivf_nlist=16, ivf_nprobe=16)
    found = DenseIndex.build(vectors, settings).search(queries, 10)
    assert [hits.rows.tolist() for hits in found] == [hits.rows.tolist() for hits in exact]


def test_ivf_visits_fewer_lists_than_all() -> None:
    vectors, queries = unit(4000), unit(50, seed=1)
    exact = DenseIndex.build(vectors, RetrievalSettings()).search(queries, 10)
    settings = RetrievalSettings(index="ivf", ivf_nlist=64, ivf_nprobe=1)
    found = DenseIndex.build(vectors, settings).search(queries, 10)
    assert any(a.rows.tolist() != b.rows.tolist() for a, b in zip(exact, found, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_equal_scores_are_ordered_by_row_also_across_the_cut(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    twins = np.sort(rng.choice(600, 90, replace=False))
    vectors = unit(600, seed=seed)
    vectors[twins] = vectors[twins[0]]
    index = DenseIndex.build(vectors, RetrievalSettings(index=kind, hnsw_ef_search=600))
    for k in (1, 5, 40, 90):
        (hits,) = index.search(vectors[twins[:1]], k)
        assert hits.rows.tolist() == twins[:k].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_does_not_depend_on_the_batch_it_came_in(kind: str) -> None:
    vectors, queries = unit(2000), unit(64, seed=2)
    index = DenseIndex.build(vectors, RetrievalSettings(index=kind))
    together = index.search(queries, 10)
    for query, hits in zip(queries, together, strict=True):
        (alone,) = index.search(query[None], 10)
        assert alone.rows.tolist() == hits.rows.tolist()
        assert alone.scores.tolist() == hits.scores.tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [0, 1, 3, 50, 200])
def test_small_corpora_are_found_whole(kind: str, n: int) -> None:
    vectors = unit(n) if n else np.empty((0, 32), np.float32)
    index = DenseIndex.build(vectors, RetrievalSettings(index=kind))
    assert index.size == n
    for hits in index.search(unit(2, seed=5), 1000):
        assert sorted(hits.rows.tolist()) == list(range(n))


@pytest.mark.parametrize("kind", KINDS)
def test_an_index_read_back_finds_the_same(kind: str) -> None:
    vectors, queries = unit(700), unit(5, seed=1)
    settings = RetrievalSettings(index=kind)
    index = DenseIndex.build(vectors, settings)
    again = DenseIndex.from_bytes(index.to_bytes(), settings)
    for a, b in zip(index.search(queries, 9), again.search(queries, 9), strict=True):
        assert a.rows.tolist() == b.rows.tolist()
        assert a.scores.tolist() == b.scores.tolist()


def test_no_queries_give_no_results_and_k_below_one_is_refused() -> None:
    index = DenseIndex.build(unit(10), RetrievalSettings())
    assert index.search(np.empty((0, 32), np.float32), 3) == []
    with pytest.raises(ValueError, match="k is 0"):
        index.search(unit(1), 0)
