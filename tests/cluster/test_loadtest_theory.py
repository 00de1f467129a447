# SPDX-License-Identifier: Apache-2.0
"""Load against simulated services whose throughput and latencies follow from queueing theory, in virtual time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cluster.loadtest.loops import Driver, schedule
from cluster.loadtest.rows import Block, Load
from cluster.loadtest.summary import summarise
from cluster.loadtest.timeline import timeline
from cluster.loadtest.workload import Question, Workload
from tests.cluster.virtual_time import SimulatedService, run_virtually

SERVICE_S, FIRST_S = 0.12, 0.08


def driver(service: SimulatedService) -> Driver:
    return Driver(service, Workload([Question(id="q", question="Who?")]))  # type: ignore[arg-type]


def measured(
    service: SimulatedService, load: Load, requests: int, **options: Any
) -> tuple[dict[str, Any], list[Block]]:
    blocks = []

    async def go() -> None:
        one = driver(service)
        for block, count, first in schedule(["stale"], [load], requests, seed=0):
            blocks.append(block)
            await (one.closed if load.concurrency else one.open)(block, count, first)

    run_virtually(go())
    (cell,) = summarise(blocks, **options)
    return cell, blocks


@pytest.mark.parametrize(("clients", "slots", "requests"), [(1, 2, 8), (2, 2, 16), (6, 2, 24), (8, 4, 32), (3, 8, 100)])
def test_a_closed_loop_finds_min_of_clients_and_slots_per_service_time(clients: int, slots: int, requests: int) -> None:
    service = SimulatedService(slots, lambda: SERVICE_S, FIRST_S)
    cell, _ = measured(service, Load(concurrency=clients), requests)
    throughput = min(clients, slots) / SERVICE_S
    assert cell["requests"] == requests
    assert cell["throughput_rps"] == pytest.approx(throughput, rel=1e-3)
    assert cell["e2e_ms"]["mean"] == pytest.approx(clients / throughput * 1e3, rel=1e-3)
    # What follows the first token does not queue.
    assert cell["ttft_ms"]["mean"] == pytest.approx(clients / throughput * 1e3 - (SERVICE_S - FIRST_S) * 1e3, rel=1e-3)
    assert cell["little_ratio"] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(("clients", "slots"), [(4, 4), (8, 2)])
def test_random_service_times_leave_no_bias_at_the_edges_of_short_blocks(clients: int, slots: int) -> None:
    cells = []
    for seed in range(100):
        draw = np.random.default_rng(seed)
        service = SimulatedService(slots, lambda draw=draw: float(draw.gamma(4, SERVICE_S / 4)))
        cells.append(measured(service, Load(concurrency=clients), 8 * clients)[0])
    # Requests through makespan would be 10 % low with four slots: the last run while others have nothing left to do.
    seconds_each = np.mean([1 / cell["throughput_rps"] for cell in cells])
    assert seconds_each == pytest.approx(SERVICE_S / slots, rel=0.025)
    assert np.mean([cell["little_ratio"] for cell in cells]) == pytest.approx(1, abs=0.03)


def test_exactly_c_are_outstanding() -> None:
    service = SimulatedService(2, lambda: SERVICE_S)
    measured(service, Load(concurrency=5), 20)
    assert max(count for _, count in service.outstanding) == 5
    assert [count for _, count in service.outstanding].count(5) >= 20


def test_an_open_loop_meets_the_waiting_time_of_theory() -> None:
    rate, service_s = 10.0, 0.05
    cell, _ = measured(SimulatedService(1, lambda: service_s), Load(rate=rate), 5_000)
    busy = rate * service_s
    wait_s = busy * service_s / (2 * (1 - busy))  # M/D/1
    assert cell["e2e_ms"]["mean"] == pytest.approx((service_s + wait_s) * 1e3, rel=0.05)
    assert cell["throughput_rps"] == pytest.approx(rate, rel=0.05)
    assert cell["outstanding"] == pytest.approx(rate * (service_s + wait_s), rel=0.08)
    assert cell["little_ratio"] is None


def test_an_open_loop_shows_the_collapse_that_a_closed_one_hides() -> None:
    cell, (block,) = measured(SimulatedService(1, lambda: 0.05), Load(rate=40.0), 400)
    assert cell["throughput_rps"] == pytest.approx(20, rel=0.02)
    last = max(block.rows, key=lambda row: row.submit_s)
    # It waits for all the work that came before it, less the time over which that came.
    assert last.e2e_ms / 1e3 == pytest.approx(400 * 0.05 - last.submit_s, abs=0.06)
    assert last.e2e_ms > 100 * 50


def test_all_methods_meet_the_same_arrivals() -> None:
    blocks: list[Block] = []

    async def go() -> None:
        one = driver(SimulatedService(1, lambda: 0.01))
        for block, count, first in schedule(["full", "stale"], [Load(rate=40.0)], 50, seed=0):
            blocks.append(block)
            await one.open(block, count, first)

    run_virtually(go())
    starts = [sorted(row.submit_s - block.window[0] for row in block.rows) for block in blocks]
    assert starts[0] == pytest.approx(starts[1])


def test_refused_clients_wait_as_told_and_accepted_ones_keep_their_latency() -> None:
    service = SimulatedService(1, lambda: 0.1, queue=1, wait_s=1.0)
    cell, blocks = measured(service, Load(concurrency=4), 60)
    assert cell["throughput_rps"] == pytest.approx(10, rel=0.02)  # the slot is never idle
    assert cell["e2e_ms"]["p99"] <= 200.001  # at most one before it
    # Two are served, the other two come back once a second.
    seconds = sum(block.window[1] - block.window[0] for block in blocks)
    assert set(cell["errors_by_kind"]) == {"429 overloaded"}
    assert cell["errors"] == pytest.approx(2 * seconds, abs=2 * len(blocks))
    assert cell["errors"] + len(cell["samples_ms"]["e2e"]) == cell["requests"] == 60


def test_a_ramp_follows_its_steps() -> None:
    steps = [Block(i, "stale", Load(concurrency=c, step=i)) for i, c in enumerate([1, 4, 1, 2])]

    async def go() -> None:
        await driver(SimulatedService(2, lambda: 0.1)).ramp(steps, 10.0)

    run_virtually(go())
    cells = summarise(steps)
    assert [cell["concurrency"] for cell in cells] == [1, 4, 1, 2]
    assert [cell["throughput_rps"] for cell in cells] == pytest.approx([10, 20, 10, 20], rel=0.02)
    assert [cell["e2e_ms"]["p50"] for cell in cells] == pytest.approx([100, 200, 100, 100], rel=0.01)
    assert [cell["little_ratio"] for cell in cells] == pytest.approx([1, 1, 1, 1], abs=0.04)
    bins = timeline(steps, [])
    assert [one["concurrency"] for one in bins] == [c for c in (1, 4, 1, 2) for _ in range(10)]
    assert [one["throughput_rps"] for one in bins[11:20]] == pytest.approx([20] * 9, rel=0.11)
    assert "replicas" not in bins[0]
