# SPDX-License-Identifier: Apache-2.0
"""EPIC's LegoLink: recompute the first few tokens of every chunk (methods, section 5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar

import torch
from pydantic import PositiveInt

from kvcache.settings import SelectiveSettings
from repair.base import RepairRequest
from repair.selective.kernel import recompute
from repair.selective.method import Mended, SelectiveRepairer, Stopwatch
from repair.selective.params import MethodParams


class EpicParams(MethodParams):
    """Parameters of EPIC."""

    window: PositiveInt = 16
    """Tokens recomputed at the start of each chunk, `k`; clamped to the chunk."""

    def limits(self, bounds: SelectiveSettings) -> dict[str, float]:
        return {"window": bounds.max_window}


class Epic(SelectiveRepairer[EpicParams]):
    """Recomputes the first `window` tokens of every chunk after the header chunk, in every layer.

    A chunk computed alone makes an attention sink of its beginning; recomputing it there takes the sink away. Static:
    no scoring, and neither the question nor the cache has a say.

    Method parameters:
        window: tokens per chunk, at least 1 (default 16). A window never reaches into the next chunk.
        preset: "8", "16", "32" or "64".

    Differs from the published code, which starts every chunk and the question with a BOS token and keeps them all in
    the prompt: here chunks have no special tokens of their own.
    """

    name: ClassVar[str] = "epic"
    params: ClassVar[type[MethodParams]] = EpicParams
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {str(k): {"window": k} for k in (8, 16, 32, 64)}

    def mend(self, requests: Sequence[RepairRequest], params: EpicParams, watch: Stopwatch) -> list[Mended]:
        prefixes = self.assemble(requests, watch)
        with watch.stage("repair"):
            rows = [
                [windows(prefix.lengths, params.window).to(self._target.device)] * self._target.geometry.n_layers
                for prefix in prefixes
            ]
            recompute(self._target, prefixes, rows)
        return [self.mended(*each) for each in zip(requests, prefixes, rows, strict=True)]


def windows(lengths: Sequence[int], window: int) -> torch.Tensor:
    """Rows of the first `window` tokens of each chunk but the first, int64, ascending."""
    starts = list(accumulate(lengths))[:-1]
    return torch.cat(
        [torch.arange(start, start + min(window, n)) for start, n in zip(starts, lengths[1:], strict=True)]
    )
