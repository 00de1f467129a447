# SPDX-License-Identifier: Apache-2.0
"""A KVShare-like deviation selector (methods, section 9): not KVShare, of which only the abstract is public."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import PositiveInt

from repair.base import RepairRequest
from repair.selective.deviation import DEVIATIONS, check_layer_in, recompute_deviating
from repair.selective.method import Mended, SelectiveRepairer, Stopwatch
from repair.selective.params import MethodParams, Ratio


class KVShareLikeParams(MethodParams):
    """Parameters of the KVShare-like selector."""

    ratio: Ratio = 0.2
    """Share of the reused tokens that are recomputed."""
    check_layer: PositiveInt = 1
    """Layer at which stale and fresh KV are compared."""


class KVShareLike(SelectiveRepairer[KVShareLikeParams]):
    """Recomputes the reused tokens whose keys and values together deviate most at an early layer.

    A reconstruction: the paper's abstract speaks of a dual-stage high-deviation selector in prefill and decode, without
    formulas. This is the prefill stage as one would guess it: CacheBlend's selection on K and V, among the tokens after
    the header chunk, refreshing only what was selected. Recomputing during decode would have to run inside the engine
    and is left out. Numbers made with it are not KVShare's.

    Method parameters:
        ratio: in (0, 1] (default 0.2, the setting that RelaxKV compares with).
        check_layer: 1 to the target's last layer (default 1).
        preset: "0.2".
    """

    name: ClassVar[str] = "kvshare-like"
    params: ClassVar[type[MethodParams]] = KVShareLikeParams
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"0.2": {"ratio": 0.2}}

    def check_target(self, params: KVShareLikeParams) -> None:
        check_layer_in(self.name, params.check_layer, self._target.geometry.n_layers)

    def mend(self, requests: Sequence[RepairRequest], params: KVShareLikeParams, watch: Stopwatch) -> list[Mended]:
        prefixes = self.assemble(requests, watch)
        headers = [prefix.lengths[0] for prefix in prefixes]
        rows = recompute_deviating(
            self._target,
            prefixes,
            [int((prefix.rows - header) * params.ratio) for prefix, header in zip(prefixes, headers, strict=True)],
            watch,
            check_layer=params.check_layer,
            deviation=DEVIATIONS["kv"],
            refresh_all=False,
            start=headers,
        )
        return [
            self.mended(request, prefix, layers, projected=prefix.rows - len(layers[-1]))
            for request, prefix, layers in zip(requests, prefixes, rows, strict=True)
        ]
