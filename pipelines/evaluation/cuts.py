# SPDX-License-Identifier: Apache-2.0
"""The same text in other chunks: what a sweep over chunk length or chunk count compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipelines.qa.inputs import recut


@dataclass(frozen=True)
class Cut:
    """A way to cut a question's text; the prompt's tokens stay the same, only the chunks' borders move.

    Attributes:
        by: "tokens" of each chunk (the last one takes what is left), or number of "chunks" of equal length.
        value: how many.
    """

    by: Literal["tokens", "chunks"]
    value: int

    @property
    def name(self) -> str:
        """For titles and keys."""
        return f"{self.value} {self.by}" + (" a chunk" if self.by == "tokens" else "")

    def of(self, chunks: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        """Cut the text of `chunks`, ids each, anew."""
        if self.by == "chunks":
            return recut(chunks, self.value)
        flat = [token for ids in chunks for token in ids]
        return [tuple(flat[start : start + self.value]) for start in range(0, len(flat), self.value)]


def cut_name(data: str, cut: Cut | None) -> str:
    """Name of a data set whose text is cut anew."""
    return data if cut is None else f"{data}, {cut.name}"
