# SPDX-License-Identifier: Apache-2.0
"""RelaxKV: choose per layer what is recomputed, and what that may attend to (methods, section 10)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from repair.base import RepairRequest
from repair.selective.kernel import Context, recompute
from repair.selective.method import Mended, SelectiveRepairer, Stopwatch
from repair.selective.params import MethodParams, Ratio
from repair.selective.prefix import AssembledPrefix
from repair.selective.probe import mean, probe
from repair.selective.select import top


class RelaxKVParams(MethodParams):
    """Parameters of RelaxKV."""

    ratio: Ratio = 0.15
    """Anchors of each layer, as a share of the prefix's tokens."""
    targets: Literal["closed", "global"] = "closed"
    """What is recomputed: each layer's anchors and those of the layers above, or one set for all layers."""
    target_ratio: Ratio = 0.2
    """Size of the one set, as a share of the prefix's tokens; at most the union of the anchors."""
    context: Literal["union", "full", "global", "layer"] = "union"
    """What targets may attend to: the union of the anchors, everything before them, or as many rows as the union has,
    with the highest mean score, or with the highest score of each layer."""
    sinks: bool = True
    """Let targets attend to the header chunk as well."""


@dataclass(frozen=True)
class Plan:
    """What is recomputed in each layer, against what.

    Attributes:
        union: rows that are an anchor in some layer, int64, ascending.
        rows: targets of each layer.
        contexts: what they may attend to.
    """

    union: torch.Tensor
    rows: list[torch.Tensor]
    contexts: list[Context]


class RelaxKV(SelectiveRepairer[RelaxKVParams]):
    """Recomputes, in each layer, what the question attends to there or above, against a sparse context.

    The question runs through all layers over the stale prefix. Layer l's anchors are the `ratio * N` tokens with the
    highest attention there (mean over question tokens and heads). A token that is needed in layer l has to run through
    all layers below: the targets of layer l are the anchors of l and of every layer above, so layer 0 recomputes the
    union of all anchors, and rows drop out after their last anchor layer. Targets attend to that union, the same in
    every layer, not to the whole prefix.

    Method parameters:
        ratio: anchors, in (0, 1] (default 0.15); at most the tokens after the header chunk.
        targets: "closed" (default) or "global", one set of `target_ratio * N` tokens for all layers.
        target_ratio: in (0, 1] (default 0.2).
        context: "union" (default), or one of the paper's controls "full", "global", "layer".
        sinks: whether the header chunk is always part of the context (default true).
        preset: "0.15", "0.20", "g" (RelaxKV-G), "full-context", "global-sparse", "layer-sparse".

    A reconstruction: only the abstract and tables are public. That the layers' targets are closed downwards, that the
    header chunk is context and never target, and that the one set is ranked by the mean score are our reading.
    """

    name: ClassVar[str] = "relaxkv"
    needs_query: ClassVar[bool] = True
    params: ClassVar[type[MethodParams]] = RelaxKVParams
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "0.15": {"ratio": 0.15},
        "0.20": {"ratio": 0.2},
        "g": {"ratio": 0.2, "targets": "global", "target_ratio": 0.2},
        "full-context": {"context": "full"},
        "global-sparse": {"context": "global"},
        "layer-sparse": {"context": "layer"},
    }

    def mend(self, requests: Sequence[RepairRequest], params: RelaxKVParams, watch: Stopwatch) -> list[Mended]:
        prefixes = self.assemble(requests, watch)
        layers = range(self._target.geometry.n_layers)
        with watch.stage("select"):
            scores = probe(self._target, prefixes, layers, mean)
            plans = [plan(each, prefix, params) for each, prefix in zip(scores, prefixes, strict=True)]
        with watch.stage("repair"):
            recompute(self._target, prefixes, [each.rows for each in plans], [each.contexts for each in plans])
        return [
            self._account(request, prefix, each, layers)
            for request, prefix, each in zip(requests, prefixes, plans, strict=True)
        ]

    def _account(self, request: RepairRequest, prefix: AssembledPrefix, plan: Plan, layers: range) -> Mended:
        question = len(request.question_ids)
        keys = [prefix.rows + question if context is None else len(context) for context in plan.contexts]
        shares = {"context": len(plan.union) / prefix.rows}
        macs = self.probe_macs(question, prefix, layers)
        return self.mended(request, prefix, plan.rows, keys=keys, shares=shares, probe=macs)


def plan(scores: torch.Tensor, prefix: AssembledPrefix, params: RelaxKVParams) -> Plan:
    """Choose targets and contexts.

    Args:
        scores: attention of the question, `[L, N]`.
        prefix: whose rows they are of.
        params: how.
    """
    header = prefix.lengths[0]
    anchors = [top(layer, int(params.ratio * prefix.rows), header) for layer in scores]
    union = torch.cat(anchors).unique()
    overall = scores.mean(dim=0)
    if params.targets == "closed":
        rows = [torch.cat(anchors[layer:]).unique() for layer in range(len(anchors))]
    else:
        candidates = union[overall[union].sort(descending=True, stable=True).indices]
        rows = [candidates[: int(params.target_ratio * prefix.rows)].sort().values] * len(anchors)
    if params.context == "full":
        return Plan(union, rows, [None] * len(anchors))
    if params.context == "union":
        contexts = [union] * len(anchors)
    elif params.context == "global":
        contexts = [top(overall, len(union), header)] * len(anchors)
    else:
        contexts = [top(layer, len(union), header) for layer in scores]
    sinks = torch.arange(header if params.sinks else 0, device=union.device)
    return Plan(union, rows, [torch.cat([sinks, context]) for context in contexts])
