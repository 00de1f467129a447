# SPDX-License-Identifier: Apache-2.0
"""Two runs, or two methods, compared: ratios with bootstrap intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field, ValidationError

DRAWS = 2_000
SEED = 7
PERCENTILES = (2.5, 97.5)
_SAME_WORK = ("model", "rag", "max_tokens", "questions_sha256", "seed", "requests")
"""Of a run's configuration: where it differs, times differ for that reason already."""
_TIMES = [(times, cut) for times in ("ttft", "e2e") for cut in (50, 95)]


class ReportError(ValueError):
    """A file is not a load test's report; the text names file and field."""


class _Samples(BaseModel):
    ttft: list[Annotated[float, Field(gt=0)]]
    e2e: list[Annotated[float, Field(gt=0)]]


class _Cell(BaseModel):
    method: str
    concurrency: int | None
    rate_rps: float | None
    step: int | None = None
    throughput_rps: float
    samples_ms: _Samples

    @property
    def key(self) -> tuple[Any, ...]:
        return self.method, self.concurrency, self.rate_rps, self.step


class Report(BaseModel):
    """What `--json` wrote, as far as it is compared."""

    cells: list[_Cell]
    config: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Report:
        """Read a report.

        Raises:
            ReportError: not one.
        """
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ReportError(f"{path} cannot be read: {error}") from None
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            raise ReportError(f"{path} is not a report of a load test: {field or 'file'}: {first['msg']}") from None


def differences(before: Report, after: Report) -> list[tuple[str, Any, Any]]:
    """What was asked, of what, that is not the same in both runs: name and values."""
    found = [(name, before.config.get(name), after.config.get(name)) for name in _SAME_WORK]
    return [(name, one, other) for name, one, other in found if one != other]


@dataclass(frozen=True)
class Comparison:
    """One number of one cell in two runs.

    Attributes:
        before, after: its value in the first and the second run.
        ratio: second through first, with its 95 % interval `low` to `high`; None where a run has no answers.
    """

    method: str
    concurrency: int | None
    rate_rps: float | None
    step: int | None
    metric: str
    before: float | None
    after: float | None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def differs(self) -> bool:
        """Whether the interval leaves out 1."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high


def compare(before: Report, after: Report) -> list[Comparison]:
    """Every cell that both runs have.

    Requests are drawn again, separately in both runs, 2,000 times, in stretches of neighbours, because requests that
    were outstanding together were slow or fast together: as long as the concurrency, in an open loop the square root of
    the number of requests. A closed loop's throughput is C / R, so its interval is that of the mean end-to-end time; an
    open loop's is set by its arrivals and has none.

    Raises:
        ReportError: the runs have no cell in common.
    """
    others = {cell.key: cell for cell in after.cells}
    pairs = [(cell, others[cell.key]) for cell in before.cells if cell.key in others]
    if not pairs:
        raise ReportError("the two runs have no method and load in common: nothing to compare")
    return [one for pair in pairs for one in _cell(*pair)]


def _cell(before: _Cell, after: _Cell) -> list[Comparison]:
    stretch = before.concurrency or math.isqrt(max(1, len(before.samples_ms.ttft)))
    samples = [
        {"ttft": np.array(cell.samples_ms.ttft), "e2e": np.array(cell.samples_ms.e2e)} for cell in (before, after)
    ]
    found = []
    ratios: Mapping[str, float] = {}
    # Lead-ins count towards the throughput: it may be above zero where no counted request was answered.
    answered = all(cell.throughput_rps and cell.samples_ms.e2e for cell in (before, after))
    if answered and before.concurrency is not None:
        slower, faster = (np.mean(_drawn(one["e2e"], stretch, run), axis=1) for run, one in enumerate(samples))
        ratios = _interval(after.throughput_rps / before.throughput_rps, slower / faster, recentre=True)
    found.append(Comparison(*before.key, "req/s", before.throughput_rps, after.throughput_rps, **ratios))
    for times, cut in _TIMES:
        a, b = (one[times] for one in samples)
        name = f"{'TTFT' if times == 'ttft' else 'e2e'} p{cut}, ms"
        values = [float(np.percentile(one, cut)) if len(one) else None for one in (a, b)]
        ratios = {}
        if len(a) and len(b):
            draws = [np.percentile(_drawn(one, stretch, run), cut, axis=1) for run, one in enumerate((a, b))]
            ratios = _interval(values[1] / values[0], draws[1] / draws[0])  # type: ignore[operator]
        found.append(Comparison(*before.key, name, *values, **ratios))
    return found


def _interval(ratio: float, draws: np.ndarray, recentre: bool = False) -> dict[str, float]:
    """The ratio and its interval; `recentre` moves draws of another estimate of the same ratio onto it."""
    scale = ratio / float(np.median(draws)) if recentre else 1.0
    low, high = np.percentile(draws * scale, PERCENTILES)
    return {"ratio": ratio, "low": float(low), "high": float(high)}


def _drawn(values: np.ndarray, stretch: int, run: int) -> np.ndarray:
    """Values drawn again in stretches of neighbours that wrap round, `[draws, values]`; each run in its own way."""
    count, random = len(values), np.random.default_rng([SEED, run])
    stretch = min(stretch, count)
    starts = random.integers(count, size=(DRAWS, -(-count // stretch)))
    chosen = (starts[:, :, None] + np.arange(stretch)) % count
    return values[chosen.reshape(DRAWS, -1)[:, :count]]


def ratios_to(cells: Sequence[Mapping[str, Any]], reference: str) -> dict[int, tuple[float, float]]:
    """By index of a cell: its throughput through the reference's, and the reference's p95 TTFT through its own."""
    base = {
        (cell["concurrency"], cell["rate_rps"], cell.get("step")): cell for cell in cells if cell["method"] == reference
    }
    found = {}
    for index, cell in enumerate(cells):
        other = base.get((cell["concurrency"], cell["rate_rps"], cell.get("step")))
        if (
            other
            and cell is not other
            and other["throughput_rps"]
            and cell["ttft_ms"]["p95"]
            and other["ttft_ms"]["p95"]
        ):
            found[index] = (
                cell["throughput_rps"] / other["throughput_rps"],
                other["ttft_ms"]["p95"] / cell["ttft_ms"]["p95"],
            )
    return found
