# SPDX-License-Identifier: Apache-2.0
"""Selection by deviation: which rows' K or V, computed in the prompt, differ most from stale ones in an early layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvcache.target import TargetLLM
from repair.base import MethodParamsError
from repair.selective.kernel import RowPass, climb
from repair.selective.method import Stopwatch
from repair.selective.prefix import AssembledPrefix
from repair.selective.select import top

Deviation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Differences of K and of V, float32 `[N, H, D]` each, to one score per row `[N]`."""

DEVIATIONS: dict[str, Deviation] = {
    "v": lambda dk, dv: dv.square().sum(dim=(1, 2)),
    "k": lambda dk, dv: dk.square().sum(dim=(1, 2)),
    "kv": lambda dk, dv: (dk.square() + dv.square()).sum(dim=(1, 2)),
    "k_l1": lambda dk, dv: dk.abs().sum(dim=(1, 2)),
}
"""Keys are compared with their rotary undone, which changes no squared deviation."""


def recompute_deviating(
    target: TargetLLM,
    prefixes: Sequence[AssembledPrefix],
    counts: Sequence[int],
    watch: Stopwatch,
    *,
    check_layer: int,
    deviation: Deviation,
    refresh_all: bool,
    start: Sequence[int],
) -> list[list[torch.Tensor]]:
    """Run all rows up to the check layer, and from there on those that deviate most, in place.

    Args:
        target: the target LLM.
        prefixes: what to work on.
        counts: rows to select, per prefix.
        watch: gets the stages `select` and `repair`.
        check_layer: where K and V are compared, 1 to `L - 1`.
        deviation: how.
        refresh_all: whether every row's K and V of the check layer is replaced, or the selected ones' only.
        start: per prefix, the first row that may be selected.

    Returns:
        Of each prefix, the rows that ran through each layer; in the check layer, those selected.
    """
    with watch.stage("select"):
        whole = [torch.arange(prefix.rows, device=target.device) for prefix in prefixes]
        run = RowPass(target, prefixes, whole)
        while run.layer < check_layer:
            run.write(run.keys_values())
            run.advance()
        fresh = run.keys_values()
        selected = [
            top(
                deviation(
                    *(
                        new.float() - old[run.layer, : prefix.rows].float()
                        for new, old in zip(kv, (prefix.k, prefix.v), strict=True)
                    )
                ),
                count,
                first,
            )
            for prefix, kv, count, first in zip(prefixes, fresh, counts, start, strict=True)
        ]
    with watch.stage("repair"):
        if refresh_all:
            run.write(fresh)
        layers = target.geometry.n_layers
        rows = [
            [all_rows] * check_layer + [some] * (layers - check_layer)
            for all_rows, some in zip(whole, selected, strict=True)
        ]
        run.narrow(selected)
        climb(run, rows)
    return rows


def check_layer_in(method: str, check_layer: int, layers: int) -> None:
    """Raises MethodParamsError for a check layer that the target does not have."""
    if check_layer >= layers:
        raise MethodParamsError(f"method {method!r}: check_layer must be 1 to {layers - 1}, got {check_layer}")
