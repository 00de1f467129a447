# SPDX-License-Identifier: Apache-2.0
"""ProphetKV: recompute what the question attends to over all layers (methods, section 8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from repair.base import RepairRequest
from repair.selective.kernel import recompute
from repair.selective.method import Mended, SelectiveRepairer, Stopwatch
from repair.selective.params import MethodParams, Ratio
from repair.selective.probe import mean, probe
from repair.selective.select import top


class ProphetKVParams(MethodParams):
    """Parameters of ProphetKV."""

    ratio: Ratio = 0.2
    """Share of the tokens after the header chunk that are recomputed."""


class ProphetKV(SelectiveRepairer[ProphetKVParams]):
    """Two stages: the question runs through all layers over the stale prefix; the rows it looks at are recomputed.

    A token's score is the attention it gets, mean over question tokens, query heads and layers. The header chunk counts
    in the softmax but is not picked.

    Method parameters:
        ratio: in (0, 1] (default 0.2).
        preset: "0.1", "0.2", "0.3", "0.4", "0.5".

    A reconstruction: there is no code by the authors. Two independent ports agree on these steps; where they differ, in
    what the softmax runs over, this follows the one that has the prefix and the question up to the token itself.
    Everything that follows the prefix counts as the question.
    """

    name: ClassVar[str] = "prophetkv"
    needs_query: ClassVar[bool] = True
    params: ClassVar[type[MethodParams]] = ProphetKVParams
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        str(ratio): {"ratio": ratio} for ratio in (0.1, 0.2, 0.3, 0.4, 0.5)
    }

    def mend(self, requests: Sequence[RepairRequest], params: ProphetKVParams, watch: Stopwatch) -> list[Mended]:
        prefixes = self.assemble(requests, watch)
        layers = range(self._target.geometry.n_layers)
        with watch.stage("select"):
            rows = []
            for prefix, scores in zip(prefixes, probe(self._target, prefixes, layers, mean), strict=True):
                header = prefix.lengths[0]
                picked = top(scores.mean(dim=0), int((prefix.rows - header) * params.ratio), start=header)
                rows.append([picked] * len(layers))
        with watch.stage("repair"):
            recompute(self._target, prefixes, rows)
        return [
            self.mended(request, prefix, each, probe=self.probe_macs(len(request.question_ids), prefix, layers))
            for request, prefix, each in zip(requests, prefixes, rows, strict=True)
        ]
