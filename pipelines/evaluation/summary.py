# SPDX-License-Identifier: Apache-2.0
"""From rows to tables: each method's means, percentiles and intervals, and the half-budget table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from pipelines.evaluation.bootstrap import paired_difference
from pipelines.evaluation.kv_error import Sums, add, relative_rms

REFERENCE, FLOOR = "full", "stale"
"""Methods that every other one is compared with."""
MEANS = (
    "f1",
    "em",
    "gold_logprob",
    "gold_logprob_sum",
    "kl_to_full",
    "kv_mse_normalized",
    "k_rmse",
    "v_rmse",
    "attention_error",
    "token_agreement",
    "answer_equal",
    "macs",
)
"""Metrics whose mean over requests counts; see `measure.Meter.measure` for what each is."""
TIMES = ("ttft_ms", "repair_ms")
"""Metrics of which the median counts."""

Rows = Mapping[str, Sequence[Mapping[str, Any]]]
"""Per method, rows of the same requests in the same order."""


def summarise(rows: Rows, families: Mapping[str, str], parameter_bytes: Mapping[str, int]) -> dict[str, Any]:
    """Tables of one data set, or of several together.

    Args:
        rows: by method label; full and stale are among them.
        families: label to family: presets of one method.
        parameter_bytes: label to bytes of the repairer's weights.

    Returns:
        `{"requests", "methods": {label: {...}}, "intervals": {label: {metric: {"to_stale", "to_full"}}},
        "half_budget": {family: label or None}}`.
    """
    methods = {label: _method(own, families[label], parameter_bytes[label]) for label, own in rows.items()}
    joint = add(_sums(row["kv_joint"]) for row in rows[REFERENCE])
    for label, own in rows.items():
        errors = [row["kv_error"] for row in own]
        # Joint KV of the very requests whose error is summed; a method has rows of its own in all or in none.
        methods[label]["kv_error"] = None if None in errors else relative_rms(add(map(_sums, errors)), joint)
    return {
        "requests": len(rows[REFERENCE]),
        "methods": methods,
        "intervals": {label: _intervals(own, rows) for label, own in rows.items()},
        "half_budget": half_budget(methods),
    }


def half_budget(methods: Mapping[str, Mapping[str, Any]]) -> dict[str, str | None]:
    """Each family's largest preset that takes at most half of full prefill's median TTFT (CacheRepair, Table 3).

    Latency alone decides which presets may; the largest of those has the most MACs, and of equals the
    shortest label: an ablation costs what the whole costs.

    Args:
        methods: label to `{"family", "macs", "ttft_ms": {"p50"}}`.

    Returns:
        Family to label; None for a family that has no preset within the budget. Full prefill is not among them.
    """
    budget = 0.5 * methods[REFERENCE]["ttft_ms"]["p50"]
    chosen: dict[str, str | None] = {}
    for label, one in methods.items():
        if one["family"] == REFERENCE:
            continue
        best = chosen.setdefault(one["family"], None)
        if one["ttft_ms"]["p50"] <= budget and (best is None or _size(label, one) > _size(best, methods[best])):
            chosen[one["family"]] = label
    return chosen


def _size(label: str, method: Mapping[str, Any]) -> tuple[float, int]:
    return method["macs"], -len(label)


def _method(rows: Sequence[Mapping[str, Any]], family: str, parameter_bytes: int) -> dict[str, Any]:
    result: dict[str, Any] = {"family": family}
    for name in MEANS:
        values = _values(rows, name)
        result[name] = None if values is None else float(values.mean())
    for name in TIMES:
        p50, p90 = np.percentile(_values(rows, name), (50, 90))
        result[name] = {"p50": float(p50), "p90": float(p90)}
    kv_bytes = _values(rows, "kv_bytes")
    result["memory"] = {"kv_bytes": float(kv_bytes.mean()), "parameter_bytes": parameter_bytes}
    # What the repairer chose, see RepairedPrefix; a prefix that lacks nothing is passed through without any.
    shares = sorted({name for row in rows for name in row["shares"]})
    result["shares"] = {name: float(np.mean([row["shares"].get(name, 0.0) for row in rows])) for name in shares}
    result["attention_error_by_layer"] = np.mean([row["attention"] for row in rows], axis=0).tolist()
    return result


def _intervals(own: Sequence[Mapping[str, Any]], rows: Rows) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name in (*MEANS, *TIMES):
        for key, other in (("to_stale", FLOOR), ("to_full", REFERENCE)):
            a, b = _values(own, name), _values(rows[other], name)
            if a is not None and b is not None:
                interval = paired_difference(a, b, "median" if name in TIMES else "mean")
                result.setdefault(name, {})[key] = asdict(interval)
    return result


def _values(rows: Sequence[Mapping[str, Any]], name: str) -> np.ndarray | None:
    """A metric over the rows; None when it means nothing for one of them."""
    values = [row["metrics"][name] for row in rows]
    return None if None in values else np.array(values, dtype=np.float64)


def _sums(lists: Mapping[str, Any]) -> Sums:
    return {name: np.array(value) for name, value in lists.items()}
