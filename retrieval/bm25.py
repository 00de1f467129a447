# SPDX-License-Identifier: Apache-2.0
"""Lexical search: BM25 by the bm25s library, with Lucene's idf, k1 = 1.5 and b = 0.75."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import bm25s
import numpy as np

Words = Callable[[Sequence[str]], list[list[str]]]


class LexicalIndex:
    """BM25 over the texts of a corpus, row numbers as in the corpus table. Safe to search from several threads.

    Args:
        texts: a row each.
        words: splits texts into terms; None takes words of two characters and more, in lower case.
    """

    def __init__(self, texts: Sequence[str], words: Words | None = None) -> None:
        self._bm25: bm25s.BM25 | None = None
        self._words = words or _words
        tokens = self._words(texts)
        if any(tokens):
            self._bm25 = bm25s.BM25(k1=1.5, b=0.75, method="lucene")
            self._bm25.index(tokens, show_progress=False)

    def search(self, queries: Sequence[str], k: int) -> list[np.ndarray]:
        """Rows of each query, int64 `[<= k]`: score descending, row ascending; only rows that share a word."""
        return [self._ranked(words, k) for words in self._words(queries)]

    def _ranked(self, words: list[str], k: int) -> np.ndarray:
        known = [word for word in words if self._bm25 is not None and word in self._bm25.vocab_dict]
        if not known:
            return np.empty(0, dtype=np.int64)
        scores = self._bm25.get_scores(known)
        order = np.argsort(-scores, kind="stable")[:k]
        return order[scores[order] > 0]


def _words(texts: Sequence[str]) -> list[list[str]]:
    # No stop words: they are a matter of language, and BM25 gives frequent words little weight by itself.
    return bm25s.tokenize(list(texts), stopwords=None, return_ids=False, show_progress=False) if texts else []
