# SPDX-License-Identifier: Apache-2.0
"""InfoFlow KV: recompute the tokens that the question attends to (methods, section 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, NonNegativeInt

from repair.base import MethodParamsError, RepairRequest
from repair.selective.kernel import recompute
from repair.selective.method import Mended, SelectiveRepairer, Stopwatch
from repair.selective.params import MethodParams, Ratio
from repair.selective.prefix import AssembledPrefix
from repair.selective.probe import l2_norm, probe
from repair.selective.select import top


class InfoFlowParams(MethodParams):
    """Parameters of InfoFlow KV."""

    ratio: Ratio = 0.15
    """Share of the prefix's tokens, header chunk included, that are recomputed; none of them in the header chunk."""
    layers: Annotated[tuple[NonNegativeInt, ...], Field(strict=False, min_length=1)] | None = None
    """Layers whose attention scores tokens."""
    reorder: bool = False
    """Put the chunk that the question looks at most next to the question."""


class InfoFlow(SelectiveRepairer[InfoFlowParams]):
    """Recomputes the `ratio * N` tokens with the highest attention norm, in every layer.

    The question runs over the stale prefix; a token's score is the L2 norm over question tokens of the attention it
    gets (mean over heads), mean over the scoring layers. The header chunk is never picked.

    With `reorder`, chunks are first scored where they were computed, each at the positions 0, 1, ..., the question
    behind all of them; those of which a larger share would be picked come later, and the scoring is repeated in the new
    order. The prompt's chunks change places then.

    Method parameters:
        ratio: in (0, 1] (default 0.15).
        layers: indices of the scoring layers. The published runs have 22 to 25 of a 40-layer target; the default is the
            same four in proportion, which is our reading.
        reorder: default false.
        preset: "0.1", "0.15", "0.25", "reorder".

    Differs from the published code: everything that follows the prefix counts as the question, not the bare question;
    question tokens do not see later ones; layer 0's KV, which cannot change, is not refreshed.
    """

    name: ClassVar[str] = "infoflow"
    needs_query: ClassVar[bool] = True
    params: ClassVar[type[MethodParams]] = InfoFlowParams
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        **{str(ratio): {"ratio": ratio} for ratio in (0.1, 0.15, 0.25)},
        "reorder": {"reorder": True},
    }

    def check_target(self, params: InfoFlowParams) -> None:
        last = self._target.geometry.n_layers - 1
        if params.layers is not None and (max(params.layers) > last or len(set(params.layers)) < len(params.layers)):
            raise MethodParamsError(
                f"method {self.name!r}: layers must be different ones of 0 to {last}, got {list(params.layers)}"
            )

    def mend(self, requests: Sequence[RepairRequest], params: InfoFlowParams, watch: Stopwatch) -> list[Mended]:
        layers = scoring_layers(self._target.geometry.n_layers) if params.layers is None else params.layers
        probes = 1
        if params.reorder:
            requests, probes = self._reordered(requests, params.ratio, layers, watch), 2
        prefixes = self.assemble(requests, watch)
        with watch.stage("select"):
            rows = [[picked] * self._target.geometry.n_layers for picked in self._pick(prefixes, params.ratio, layers)]
        with watch.stage("repair"):
            recompute(self._target, prefixes, rows)
        return [
            self.mended(
                request, prefix, each, probe=probes * self.probe_macs(len(request.question_ids), prefix, layers)
            )
            for request, prefix, each in zip(requests, prefixes, rows, strict=True)
        ]

    def _pick(self, prefixes: Sequence[AssembledPrefix], ratio: float, layers: Sequence[int]) -> list[torch.Tensor]:
        return [
            top(scores.mean(dim=0), max(1, int(prefix.rows * ratio)), start=prefix.lengths[0])
            for prefix, scores in zip(prefixes, probe(self._target, prefixes, layers, l2_norm), strict=True)
        ]

    def _reordered(
        self, requests: Sequence[RepairRequest], ratio: float, layers: Sequence[int], watch: Stopwatch
    ) -> list[RepairRequest]:
        with watch.stage("transfer"):
            prefixes = [
                AssembledPrefix.of(self._target, request.stale, request.question_ids, unmoved=True)
                for request in requests
            ]
        with watch.stage("select"):
            picked = self._pick(prefixes, ratio, layers)
            orders = [densest_last(prefix.lengths, rows) for prefix, rows in zip(prefixes, picked, strict=True)]
        return [
            replace(request, chunks=[request.chunks[i] for i in order], stale=[request.stale[i] for i in order])
            for request, order in zip(requests, orders, strict=True)
        ]


def scoring_layers(layers: int) -> tuple[int, ...]:
    """Four layers, or all of a target with fewer, beginning at 22/40 of the depth."""
    first = min(layers * 22 // 40, max(layers - 4, 0))
    return tuple(range(first, min(first + 4, layers)))


def densest_last(lengths: Sequence[int], picked: torch.Tensor) -> list[int]:
    """Order of the chunks by the share of their tokens that is picked, the header chunk first, ties as they were.

    Args:
        lengths: tokens per chunk.
        picked: int64, rows.
    """
    ends = torch.tensor(list(accumulate(lengths)), device=picked.device)
    counts = torch.bincount(torch.searchsorted(ends, picked, right=True), minlength=len(lengths)).tolist()
    return [0, *sorted(range(1, len(lengths)), key=lambda index: counts[index] / lengths[index])]
