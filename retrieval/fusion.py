# SPDX-License-Identifier: Apache-2.0
"""Reciprocal-rank fusion (Cormack, Clarke and Buettcher, SIGIR 2009): one ranking out of several."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence


def reciprocal_rank_fusion(rankings: Sequence[Iterable[int]], k: int) -> list[tuple[int, float]]:
    """Fuse rankings of rows.

    Args:
        rankings: rows, best first, no row twice in one ranking.
        k: the constant in 1 / (k + rank), ranks from 1.

    Returns:
        (row, score) by score descending, row ascending among equals.
    """
    scores: defaultdict[int, float] = defaultdict(float)
    for ranking in rankings:
        for rank, row in enumerate(ranking, start=1):
            scores[int(row)] += 1.0 / (k + rank)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))
