# SPDX-License-Identifier: Apache-2.0
"""From rows to numbers: a cell per method and load."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from cluster.loadtest.rows import Block, Load, Row

PERCENTILES = (50, 95, 99)
_INSTANT_S = 1e-9


def summarise(
    blocks: Sequence[Block], slo_ttft_ms: float | None = None, references: Sequence[float | None] = ()
) -> list[dict[str, Any]]:
    """Cells in the order of their first blocks; times in milliseconds.

    Throughput is measured inside the blocks' windows and counts whole answers. A request that is only partly inside
    counts by the fraction of its time that is: nothing is gained or lost at the edges.

    Args:
        blocks: with their rows.
        slo_ttft_ms: objective for the time to first token; goodput is None without one.
        references: time of one and the same request alone before each block, by the block's number, and after the
            last; None where it failed. A cell's `slowness` is that of its blocks, relative to the run's median; a
            block's is the median of the four references around it, for one alone may be slow by chance.
    """
    slowness = _slowness(references)
    cells: dict[tuple[str, Load], list[Block]] = {}
    for block in blocks:
        if any(row.phase == "counted" for row in block.rows):
            cells.setdefault((block.method, block.load), []).append(block)
    return [
        {
            **_cell(method, load, own, blocks, slo_ttft_ms),
            "slowness": _mean([slowness[b.number] for b in own if b.number in slowness]),
        }
        for (method, load), own in cells.items()
    ]


def _slowness(references: Sequence[float | None]) -> dict[int, float]:
    """By block that has a reference on both sides."""
    known = [time or np.nan for time in references]
    around = {
        number: float(np.nanmedian(known[max(number - 1, 0) : number + 3]))
        for number, pair in enumerate(itertools.pairwise(references))
        if all(pair)
    }
    typical = float(np.nanmedian(known)) if around else 1.0
    return {number: time / typical for number, time in around.items()}


def _cell(
    method: str, load: Load, blocks: Sequence[Block], run: Sequence[Block], slo_ttft_ms: float | None
) -> dict[str, Any]:
    rows = [row for block in blocks for row in block.rows if row.phase == "counted"]
    # A step of a ramp begins with requests of the step before still outstanding: its window sees their ends.
    seen = blocks if load.step is None else [block for block in run if block.method == method]
    every = [row for block in seen for row in block.rows]
    answered = [row for row in every if row.error is None]
    whole = [row for row in rows if row.error is None]
    goodput = slo_met = None
    if slo_ttft_ms is not None:
        goodput = _rounded(rate_in_windows(blocks, [row for row in answered if row.ttft_ms <= slo_ttft_ms]))
        slo_met = _rounded(sum(row.ttft_ms <= slo_ttft_ms for row in whole) / len(rows))
    errors = Counter(row.error for row in rows if row.error is not None)
    throughput = rate_in_windows(blocks, answered)
    stages = sorted({stage for row in whole for stage in row.stages_ms})
    scores = [row.f1 for row in whole if row.f1 is not None]
    # Who sends at random times does not wait as long as a refusal asks for.
    residence = [row.e2e_ms / 1e3 + (0.0 if load.concurrency is None else row.wait_s) for row in rows]
    outstanding = rate_in_windows(blocks, every) * float(np.mean(residence))
    return {
        "method": method,
        "concurrency": load.concurrency,
        "rate_rps": load.rate,
        **({} if load.step is None else {"step": load.step}),
        "requests": len(rows),
        "errors": len(rows) - len(whole),
        "errors_by_kind": dict(errors.most_common()),
        "throughput_rps": _rounded(throughput),
        "goodput_rps": goodput,
        "slo_met": slo_met,
        "ttft_ms": spread([row.ttft_ms for row in whole]),
        "e2e_ms": spread([row.e2e_ms for row in whole]),
        "itl_ms": spread([gap for row in whole for gap in np.diff(row.token_s) * 1e3]),
        "tpot_ms": spread([per_token for row in whole if (per_token := tpot_ms(row)) is not None]),
        # X * (R + Z) = C, Z being the mean wait that refusals asked for; open loop has no C to compare with.
        "little_ratio": _rounded(outstanding / load.concurrency) if load.concurrency else None,
        "outstanding": _rounded(outstanding),
        "seconds": _rounded(sum(block.window[1] - block.window[0] for block in blocks)),
        "prompt_tokens": _mean([row.prompt_tokens for row in whole]),
        "completion_tokens": _mean([row.completion_tokens for row in whole]),
        "cached_tokens": _mean([row.cached_tokens for row in whole]),
        "fallbacks": sum(row.fallback is not None for row in whole),
        "f1": _mean(scores),
        "stages_ms": {name: spread([r.stages_ms[name] for r in whole if name in r.stages_ms]) for name in stages},
        "samples_tokens": {
            "prompt": [row.prompt_tokens for row in whole],
            "completion": [row.completion_tokens for row in whole],
        },
        "samples_ms": {
            "ttft": [_rounded(row.ttft_ms) for row in whole],
            "e2e": [_rounded(row.e2e_ms) for row in whole],
        },
    }


def rate_in_windows(blocks: Sequence[Block], rows: Sequence[Row]) -> float:
    """Requests per second of `rows` inside the blocks' windows; a request counts by the fraction of it inside."""
    windows = [block.window for block in blocks]
    seconds = sum(end - start for start, end in windows)
    if seconds <= 0:
        return 0.0
    count = 0.0
    for row in rows:
        inside = sum(max(0.0, min(row.end_s, end) - max(row.submit_s, start)) for start, end in windows)
        count += inside / max(row.end_s - row.submit_s, _INSTANT_S)
    return count / seconds


def tpot_ms(row: Row) -> float | None:
    """Milliseconds per token after the first; None for fewer than two tokens or pieces."""
    if len(row.token_s) < 2 or row.completion_tokens < 2:
        return None
    return (row.token_s[-1] - row.token_s[0]) * 1e3 / (row.completion_tokens - 1)


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Percentiles and mean; all None when there are no values."""
    if not len(values):
        return dict.fromkeys([*(f"p{one}" for one in PERCENTILES), "mean"])
    cuts = np.percentile(values, PERCENTILES)
    named = {f"p{one}": _rounded(float(cut)) for one, cut in zip(PERCENTILES, cuts, strict=True)}
    return {**named, "mean": _rounded(float(np.mean(values)))}


def _mean(values: Sequence[float]) -> float | None:
    return _rounded(float(np.mean(values))) if len(values) else None


def _rounded(value: float) -> float:
    return round(value, 4)
