# SPDX-License-Identifier: Apache-2.0
"""Service times from a load test: those with which the simulation shows what was measured.

Only the cells at one number of clients are used; the others are there to be predicted. Each time is a prior guess times
a factor; factors are found by least squares over the relative errors of all measured numbers, with a pull towards 1
that is weak against the measurement and decides where the measurement is silent. Times between tokens and of stages,
where the load test has them, tell apart what the totals do not: a slow step from slow loading.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np
from scipy.optimize import least_squares

from cluster.capacity.loadtest import Cell, LoadTest, LoadTestError, Percentiles
from cluster.capacity.model import Closed, Cluster, Method, Outcome, Stages, Workload
from cluster.capacity.simulation import simulate
from cluster.capacity.targets import Target

_TRUST = {
    "throughput_rps": 0.03,
    "ttft_ms.p50": 0.05,
    "e2e_ms.p50": 0.05,
    "itl_ms.p50": 0.05,
    "retrieve_ms.p50": 0.1,
    "mend_ms.p50": 0.1,
    "first_token_ms.p50": 0.1,
    "ttft_ms.p95": 0.1,
    "e2e_ms.p95": 0.1,
}
"""Relative standard deviation that each kind of number is taken to have in a single run."""
_SPREAD = 0.3
"""Standard deviation of the logarithm of a factor, a priori."""


@dataclass(frozen=True)
class Installation:
    """What was measured: target, requests and machine."""

    target: Target
    workload: Workload
    cluster: Cluster


@dataclass(frozen=True)
class Prediction:
    """One number of a load test, measured and simulated.

    Attributes:
        method: as the load test names it.
        concurrency: clients.
        name: which number, e.g. `ttft_ms.p95`.
        measured: requests per second or milliseconds.
        predicted: in the same unit.
        fitted: whether the fit saw it.
        spread: standard deviation of the simulated number between runs, relative: what chance alone makes of it with
            so many requests. An error within it says nothing about the model.
    """

    method: str
    concurrency: int
    name: str
    measured: float
    predicted: float
    fitted: bool
    spread: float = 0.0

    @property
    def error(self) -> float:
        """Relative error, signed."""
        return self.predicted / self.measured - 1


def fit(test: LoadTest, concurrency: int, installation: Installation, prior: Stages, seed: int = 7) -> Stages:
    """The service times that explain the cells at that many clients.

    Raises:
        LoadTestError: there are no such cells.
    """
    cells = test.at(concurrency)
    if not cells:
        raise LoadTestError(f"no cells at concurrency {concurrency}; there are {test.concurrencies}")
    guess = np.array(astuple(prior))
    free = guess > 0

    def stages(factors: np.ndarray) -> Stages:
        values = guess.copy()
        values[free] *= np.exp(factors)
        return Stages(*map(float, values))

    def errors(factors: np.ndarray) -> np.ndarray:
        found = list(_compare(test, cells, installation, stages(factors), seed, concurrency))
        measured = [np.log(one.predicted / one.measured) / _TRUST[one.name] for one in found]
        return np.array([*measured, *(factors / _SPREAD)])

    # Percentiles of a simulation are steps when looked at closely: slopes are taken over 2 %.
    return stages(least_squares(errors, np.zeros(free.sum()), x_scale=0.1, diff_step=0.02, max_nfev=30).x)


def predict(
    test: LoadTest, installation: Installation, stages: Stages, fitted_at: int, runs: int = 5
) -> list[Prediction]:
    """Every number of the load test beside the simulation's, the mean of that many runs with different seeds."""
    cells = [cell for cell in test.cells if cell.modelled]
    same: dict[tuple[str, int, str], list[Prediction]] = {}
    for seed in range(runs):
        for one in _compare(test, cells, installation, stages, seed, fitted_at):
            same.setdefault((one.method, one.concurrency, one.name), []).append(one)
    return [_over_runs(each) for each in same.values()]


def _over_runs(runs: Sequence[Prediction]) -> Prediction:
    predicted = [one.predicted for one in runs]
    spread = float(np.std(predicted, ddof=1) / np.mean(predicted)) if len(runs) > 1 else 0.0
    return replace(runs[0], predicted=float(np.mean(predicted)), spread=spread)


def guess_stages(test: LoadTest, installation: Installation) -> Stages:
    """A prior for `fit` from the load test itself, at its fewest clients.

    Full prefill's first token gives the engine's rate, what follows the first token gives the step. Loading and repair
    start from small shares of stale's and repaired's first token.

    Raises:
        LoadTestError: full prefill or a reuse method was not measured there, or without medians.
    """
    cells = {cell.modelled: cell for cell in test.at(test.concurrencies[0])}
    work, target = installation.workload, installation.target
    tokens = int(work.mean_tokens) + work.header_tokens
    full = _medians(cells, "full")
    stale = _medians(cells, "stale")
    token = max(full[1] - full[0], 1e-4) / max(work.output_tokens - 1, 1)
    length = tokens + work.question_tokens
    step = 0.8 * token
    repaired = cells.get("repaired") and _medians(cells, "repaired")[0]
    repair_s = max((repaired or 0) - stale[0], 0.05 * stale[0])
    outside = 0.2 * stale[0]
    return Stages(
        step_s=step,
        macs_per_s=target.prefill_macs(length, length) / max(full[0] - outside - step, 0.1 * full[0]),
        load_s_per_token=max(stale[0] - outside - step, 0.1 * stale[0]) / 2 / tokens,
        repair_macs_per_s=target.repair_macs(tokens) / repair_s,
        outside_s=outside / 2,
        retrieval_s=outside / 2,
        read_s_per_token=0.2 * token / length,
        assemble_s_per_token=0.1 * stale[0] / tokens,
        overlap=1.2,
    )


def _medians(cells: dict[Method | None, Cell], method: Method) -> tuple[float, float]:
    cell = cells.get(method)
    if cell is None or cell.ttft_ms.p50 is None or cell.e2e_ms.p50 is None:
        raise LoadTestError(
            f"the load test needs {method} with ttft_ms.p50 and e2e_ms.p50 at its lowest concurrency to be fitted"
        )
    return cell.ttft_ms.p50 / 1e3, cell.e2e_ms.p50 / 1e3


def _compare(
    test: LoadTest, cells: Sequence[Cell], installation: Installation, stages: Stages, seed: int, fitted_at: int
) -> Iterator[Prediction]:
    for cell in cells:
        seen = _replayed(cell, test.blocks(cell), installation, stages, seed)
        for name, measured, predicted in _numbers(cell, seen):
            yield Prediction(cell.method, cell.concurrency, name, measured, predicted, cell.concurrency == fitted_at)


def _replayed(cell: Cell, blocks: int, where: Installation, stages: Stages, seed: int) -> list[Outcome]:
    """The cell as it was measured: in so many blocks, each behind a lead-in of a request per client.

    Few requests per block are far from a steady state: their percentiles are those of the beginning.
    """
    assert cell.modelled and cell.concurrency  # the callers leave others out
    lead_in, blocks = (cell.concurrency, blocks) if blocks else (0, 1)
    counted = [cell.requests * (n + 1) // blocks - cell.requests * n // blocks for n in range(blocks)]
    return [
        simulate(
            cell.modelled,
            Closed(cell.concurrency),
            where.target,
            where.workload,
            stages,
            where.cluster,
            requests=lead_in + count,
            lead_in=lead_in,
            seed=seed * blocks + number,
        )
        for number, count in enumerate(counted)
    ]


def _numbers(cell: Cell, seen: Sequence[Outcome]) -> Iterator[tuple[str, float, float]]:
    """Names, what was measured, and what the model says of a machine as slow as it was then."""
    slowness = cell.slowness or 1.0
    yield "throughput_rps", cell.throughput_rps, float(np.mean([block.throughput_rps for block in seen])) / slowness
    for name, percentiles, blocks_s in _times(cell, seen):
        times_s = np.concatenate(blocks_s)
        for field, percent in (("p50", 50), ("p95", 95)):
            measured = getattr(percentiles, field)
            predicted = float(np.percentile(times_s, percent)) * 1e3 * slowness if times_s.size else 0.0
            if measured is not None and predicted:  # a stage that the model does not have takes it no time
                yield f"{name}.{field}", measured, predicted


def _times(cell: Cell, seen: Sequence[Outcome]) -> Iterator[tuple[str, Percentiles, list[np.ndarray]]]:
    yield "ttft_ms", cell.ttft_ms, [block.ttft_s for block in seen]
    yield "e2e_ms", cell.e2e_ms, [block.e2e_s for block in seen]
    itl, tpot = cell.itl_ms.p50, cell.tpot_ms.p50
    if itl and tpot and itl > tpot / 10:  # else its pieces are not tokens
        yield "itl_ms", Percentiles(p50=itl), [block.itl_s for block in seen]
    told = cell.stages_ms
    for name, stage, part in (
        ("retrieve_ms", told.retrieve, "retrievers"),
        ("mend_ms", told.mend, "repairers"),
        ("first_token_ms", told.first_token, "engines"),
    ):
        if (cell.modelled, part) != ("full", "repairers"):  # there is nothing to mend: the service only passes it on
            yield name, Percentiles(p50=stage.p50), [block.parts_s[part] for block in seen]
