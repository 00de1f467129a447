# SPDX-License-Identifier: Apache-2.0
"""Which rows: the highest scores, always the same ones."""

from __future__ import annotations

import torch


def top(scores: torch.Tensor, count: int, start: int = 0) -> torch.Tensor:
    """Rows with the `count` highest scores among `start` and those after it (all of them if there are fewer).

    Of equal scores the earlier row wins.

    Args:
        scores: `[N]`.
        count: rows wanted.
        start: rows before this one do not compete.

    Returns:
        int64, ascending.
    """
    order = torch.sort(scores[start:], descending=True, stable=True).indices
    return (start + order[:count]).sort().values
