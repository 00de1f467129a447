# SPDX-License-Identifier: Apache-2.0
"""BM25 and reciprocal-rank fusion."""

from __future__ import annotations

import math

import pytest

from retrieval.bm25 import LexicalIndex
from retrieval.fusion import reciprocal_rank_fusion

TEXTS = ["the cat sat on the mat", "the dog", "a cat and a cat", "nothing to see", "the cat sat on the mat"]


def lucene_bm25(query: list[str], documents: list[list[str]], k1: float = 1.5, b: float = 0.75) -> list[float]:
    """Robertson's formula in Lucene's form, with that library's defaults."""
    average = sum(map(len, documents)) / len(documents)
    scores = []
    for document in documents:
        total = 0.0
        for word in query:
            containing = sum(word in other for other in documents)
            idf = math.log(1 + (len(documents) - containing + 0.5) / (containing + 0.5))
            frequency = document.count(word)
            total += idf * frequency / (frequency + k1 * (1 - b + b * len(document) / average))
        scores.append(total)
    return scores


@pytest.mark.parametrize("query", ["cat", "the dog", "mat cat see", "dog dog cat"])
def test_ranks_by_bm25_with_equal_scores_by_row(query: str) -> None:
    documents = [[word for word in text.split() if len(word) > 1] for text in TEXTS]
    scores = lucene_bm25(query.split(), documents)
    expected = sorted(
        (row for row in range(len(TEXTS)) if scores[row] > 0), key=lambda row: (-round(scores[row], 6), row)
    )
    (found,) = LexicalIndex(TEXTS).search([query], 10)
    assert found.tolist() == expected


@pytest.mark.parametrize("query", ["zebra", "", "!?", "a"])
def test_no_shared_word_finds_nothing(query: str) -> None:
    assert [rows.tolist() for rows in LexicalIndex(TEXTS).search([query], 3)] == [[]]


@pytest.mark.parametrize("texts", [[], [""], ["", "?"]])
def test_a_corpus_without_words_finds_nothing(texts: list[str]) -> None:
    assert [rows.tolist() for rows in LexicalIndex(texts).search(["cat"], 3)] == [[]]


def test_fusion_adds_reciprocal_ranks() -> None:
    fused = reciprocal_rank_fusion([[7, 3, 5], [3, 9]], k=60)
    assert [row for row, _ in fused] == [3, 7, 9, 5]
    assert dict(fused) == pytest.approx({3: 1 / 62 + 1 / 61, 7: 1 / 61, 9: 1 / 62, 5: 1 / 63})


def test_equal_fused_scores_are_ordered_by_row() -> None:
    assert [row for row, _ in reciprocal_rank_fusion([[9, 1], [2, 8]], k=60)] == [2, 9, 1, 8]
