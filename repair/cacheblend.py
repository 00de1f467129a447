# SPDX-License-Identifier: Apache-2.0
"""CacheBlend: recompute the tokens whose KV deviates most in an early layer (methods, section 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import PositiveInt

from repair.base import RepairRequest
from repair.selective.deviation import DEVIATIONS, check_layer_in, recompute_deviating
from repair.selective.method import Mended, SelectiveRepairer, Stopwatch
from repair.selective.params import MethodParams, Ratio


class CacheBlendParams(MethodParams):
    """Parameters of CacheBlend."""

    ratio: Ratio = 0.15
    """Share of the prefix's tokens that are recomputed."""
    check_layer: PositiveInt = 1
    """Layer at which stale and fresh KV are compared; all tokens run through those below it."""
    deviation: Literal["v", "k", "kv", "k_l1"] = "v"
    """Squared difference of values, of keys, of both, or the absolute difference of keys."""
    refresh: Literal["all", "selected"] = "all"
    """Whose K and V are replaced in the check layer."""
    candidates: Literal["all", "documents"] = "all"
    """Which tokens compete: all, or those after the header chunk."""


class CacheBlend(SelectiveRepairer[CacheBlendParams]):
    """Recomputes the `ratio * N` tokens with the highest KV deviation ("HKVD") at the check layer.

    Every token runs through the layers below the check layer, so even a small ratio costs one or two whole layers. The
    question has no say. It is not part of the pass and does not compete: the engine computes all of it afterwards, over
    the mended prefix, which gives it the same KV as one combined pass would.

    Method parameters:
        ratio: in (0, 1] (default 0.15).
        check_layer: 1 to the target's last layer (default 1).
        deviation: "v" (default), "k", "kv", or "k_l1".
        refresh: "all" (default) or "selected".
        candidates: "all" (default) or "documents".
        preset: "0.1", "0.15", "0.2", "0.6"; the variants of implementations, as far as they fit: "demo" (the authors'
            code), "lmcache", "ucm", "kvpacket".

    Differs from the authors' demo in the mask, which is exact here and a lower triangle over the compacted rows there.
    Like all public code it has no gradual filtering over the layers, which the paper describes.
    """

    name: ClassVar[str] = "cacheblend"
    params: ClassVar[type[MethodParams]] = CacheBlendParams
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        **{str(ratio): {"ratio": ratio} for ratio in (0.1, 0.15, 0.2, 0.6)},
        "demo": {"ratio": 0.16},
        "lmcache": {"ratio": 0.15, "deviation": "k", "refresh": "selected"},
        "ucm": {"ratio": 0.2, "deviation": "k_l1", "refresh": "selected"},
        "kvpacket": {"ratio": 0.1, "deviation": "kv", "candidates": "documents"},
    }

    def check_target(self, params: CacheBlendParams) -> None:
        check_layer_in(self.name, params.check_layer, self._target.geometry.n_layers)

    def mend(self, requests: Sequence[RepairRequest], params: CacheBlendParams, watch: Stopwatch) -> list[Mended]:
        prefixes = self.assemble(requests, watch)
        rows = recompute_deviating(
            self._target,
            prefixes,
            [int(prefix.rows * params.ratio) for prefix in prefixes],
            watch,
            check_layer=params.check_layer,
            deviation=DEVIATIONS[params.deviation],
            refresh_all=params.refresh == "all",
            start=[prefix.lengths[0] if params.candidates == "documents" else 0 for prefix in prefixes],
        )
        return [
            self.mended(request, prefix, layers, projected=prefix.rows - len(layers[-1]))
            for request, prefix, layers in zip(requests, prefixes, rows, strict=True)
        ]
