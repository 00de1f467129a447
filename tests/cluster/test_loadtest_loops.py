# SPDX-License-Identifier: Apache-2.0
"""Load against a service whose throughput and latencies follow from its slots and service time."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from cluster.loadtest.loops import Driver
from cluster.loadtest.rows import Block, Load, Row
from cluster.loadtest.run import LoadTest, Plan, ServiceUnusableError
from cluster.loadtest.sender import Sender
from cluster.loadtest.workload import Question, Workload
from tests.cluster.queueing_server import QueueingServer

QUESTIONS = [Question(id=str(i), question=f"Who sang song {i}?", answers=("Rush",)) for i in range(5)]
ROOM = 0.4
"""Relative: HTTP and a machine busy with other work. It can only be slower than theory, hardly faster."""


def about(theory: float) -> Any:
    """A time that is the theory's or, by `ROOM`, longer."""
    return pytest.approx(theory * (1 + ROOM / 2 - 0.02), abs=theory * ROOM / 2)


def rate_about(theory: float) -> Any:
    """A rate that is the theory's or, by `ROOM`, lower."""
    return pytest.approx(theory * (1 - ROOM / 2 + 0.02), abs=theory * ROOM / 2)


async def measured(server: QueueingServer, workload: Workload | None = None, **plan: object) -> LoadTest:
    test = LoadTest(Plan(url=server.url, **{"methods": ["stale"], **plan}), workload or Workload(QUESTIONS))
    await test.run()
    return test


@pytest.mark.parametrize(("clients", "slots", "requests"), [(1, 2, 8), (2, 2, 16), (6, 2, 24)])
async def test_a_closed_loop_finds_what_queueing_theory_says(clients: int, slots: int, requests: int) -> None:
    with QueueingServer(slots=slots, first_s=0.08, gap_s=0.02, pieces=3).running() as server:
        test = await measured(server, concurrency=[clients], requests=requests)
        (cell,) = test.report()["cells"]
    throughput = min(clients, slots) / server.service_s
    residence_ms = clients / throughput * 1e3
    assert cell["requests"] == requests
    assert cell["errors_by_kind"] == {}, [row.message for row in test.rows]
    assert cell["throughput_rps"] == rate_about(throughput)
    assert cell["e2e_ms"]["mean"] == about(residence_ms)
    # What is left of a request after its first token does not queue.
    assert cell["ttft_ms"]["mean"] == about(residence_ms - 2 * 20)
    assert cell["little_ratio"] == pytest.approx(1, abs=0.07)


async def test_the_first_token_is_the_first_text_and_gaps_are_between_texts() -> None:
    with QueueingServer(first_s=0.15, gap_s=0.05, pieces=4).running() as server:
        test = await measured(server, concurrency=[1], requests=3)
        (cell,) = test.report()["cells"]
    row = test.rows[-1]
    assert cell["ttft_ms"]["p50"] == about(150)
    assert cell["itl_ms"]["p50"] == pytest.approx(50, rel=ROOM)
    assert cell["tpot_ms"]["p50"] == pytest.approx(150 / 7, rel=ROOM)  # 8 tokens in 4 pieces
    assert (row.answer, len(row.token_s), row.completion_tokens, row.cached_tokens) == ("Rush Rush Rush Rush", 4, 8, 90)
    assert row.stages_ms == {"mend": 3.0}
    assert row.f1 == pytest.approx(2 * 0.25 / 1.25)  # one word of four is gold


async def test_waiting_for_a_connection_counts() -> None:
    with QueueingServer(first_s=0.1, pieces=1).running() as server:
        async with Sender(server.url, connections=1) as sender:
            driver, block = Driver(sender, Workload(QUESTIONS)), Block(0, "stale", Load(rate=1.0))
            await asyncio.gather(*(driver.one(block, number, "counted") for number in range(3)))
    assert sorted(row.ttft_ms for row in block.rows) == [about(100), about(200), about(300)]


async def test_an_open_loop_shows_the_queue_that_a_closed_one_hides() -> None:
    with QueueingServer(slots=1, first_s=0.05, pieces=1).running() as server:
        calm = (await measured(server, rates=[5.0], requests=6)).report()["cells"][0]
        test = await measured(server, rates=[40.0], requests=24, methods=["stale", "full"])
    cell = test.report()["cells"][0]
    over = [row for block in test.blocks for row in block.rows if row.method == cell["method"]]
    assert calm["ttft_ms"]["p50"] == about(50)
    assert cell["throughput_rps"] == rate_about(20)
    # The last one waits for all the work that came before it, less the time over which it came.
    last = max(over, key=lambda row: row.submit_s)
    first = min(row.submit_s for row in over)
    assert last.ttft_ms == about(24 * 50 - (last.submit_s - first) * 1e3)
    assert last.ttft_ms > 5 * 50
    assert cell["little_ratio"] is None
    starts = [sorted(row.submit_s - block.window[0] for row in block.rows) for block in test.blocks]
    assert starts[0] == pytest.approx(starts[1])  # the same arrivals for every method


async def test_failures_are_counted_by_kind_and_kept_out_of_the_latencies() -> None:
    texts = ["fine", "please crash", "please fail", "please break"]
    with QueueingServer().running() as server:
        workload = Workload([Question(id=text, question=text) for text in texts])
        test = LoadTest(Plan(url=server.url, methods=["stale"]), workload)
        async with Sender(server.url, 8) as sender:
            block = Block(0, "stale", Load(rate=100.0))
            test.blocks.append(block)
            await Driver(sender, workload).open(block, 8)
    (cell,) = test.report()["cells"]
    assert (cell["requests"], cell["errors"]) == (8, 6)
    assert cell["errors_by_kind"] == {"500": 2, "failed in stream internal": 2, "broken stream": 2}
    assert len(cell["samples_ms"]["ttft"]) == 2
    assert {row.question_id for row in block.rows if row.error is None} == {"fine"}


async def test_more_clients_than_the_service_queues_are_refused_and_wait_as_told() -> None:
    with QueueingServer(slots=1, queue=1, first_s=0.1, pieces=1).running() as server:
        test = await measured(server, concurrency=[4], requests=30)
        (cell,) = test.report()["cells"]
    refused = [row for row in test.rows if row.error == "429 overloaded"]
    assert set(cell["errors_by_kind"]) == {"429 overloaded"}
    assert {row.wait_s for row in refused} == {1.0}
    assert all(row.e2e_ms < 50 for row in refused)  # the wait is not the request's
    assert cell["ttft_ms"]["p95"] < 200 * (1 + ROOM)  # accepted: at most one before it
    # Back once a second, as told: two clients in about four seconds, not hundreds of times.
    assert 2 <= len(refused) <= 12


async def test_warm_up_and_lead_in_are_not_counted() -> None:
    with QueueingServer(first_s=0.02, pieces=1, cold_s=0.4).running() as server:
        test = await measured(server, concurrency=[2], requests=8, methods=["stale", "full"], warm_up=1)
        cells = test.report()["cells"]
    phases = [row.phase for row in test.rows]
    assert [phases.count(name) for name in ("warm-up", "lead-in", "counted")] == [2, 2 * 2 * 2, 2 * 8]
    assert max(cell["e2e_ms"]["p99"] for cell in cells) < 300
    assert [row.e2e_ms > 400 for row in test.warm_up] == [True, True]


async def test_every_request_is_unique_and_methods_get_the_same_questions() -> None:
    with QueueingServer(first_s=0.0, pieces=1).running() as server:
        test = await measured(server, concurrency=[2], requests=8, methods=["stale", "full"])
    texts = [body["messages"][0]["content"] for body in server.bodies]
    assert len(set(texts)) == len(texts)
    assert {len(text) for text in texts} == {len(QUESTIONS[0].question) + 11}
    asked = {
        name: sorted(
            (row.number, row.question_id) for block in test.blocks if block.method == name for row in block.rows
        )
        for name in ("stale", "full")
    }
    assert asked["stale"] == asked["full"]


async def test_a_clock_that_is_set_back_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    started = time.perf_counter()
    monkeypatch.setattr(time, "time", lambda: 1e9 - 60 * (time.perf_counter() - started))
    with QueueingServer(first_s=0.1, pieces=1).running() as server:
        test = await measured(server, concurrency=[1], requests=4)
        (cell,) = test.report()["cells"]
    assert cell["e2e_ms"]["mean"] == about(100)
    assert cell["little_ratio"] == pytest.approx(1, abs=0.07)


async def test_a_ramp_follows_its_steps_and_tells_replicas_when_the_service_does() -> None:
    metrics = (
        "# TYPE ray_serve_deployment_replica_healthy gauge\n"
        'ray_serve_deployment_replica_healthy{application="rag",deployment="Engine",replica="a"} 1.0\n'
        'ray_serve_deployment_replica_healthy{application="rag",deployment="Engine",replica="b"} 1.0\n'
        'ray_serve_deployment_replica_healthy{application="rag",deployment="Engine",replica="c"} 0.0\n'
        'ray_serve_deployment_replica_healthy{application="rag",deployment="Repairer",replica="d"} 1.0\n'
    )
    with QueueingServer(slots=2, first_s=0.1, pieces=1, metrics=metrics).running() as server:
        test = await measured(server, ramp=[1, 4, 1], step_s=2.0)
        report = test.report()
    cells = report["cells"]
    assert [cell["concurrency"] for cell in cells] == [1, 4, 1]
    assert [cell["throughput_rps"] for cell in cells] == [rate_about(one) for one in (10, 20, 10)]
    assert cells[1]["e2e_ms"]["p50"] == about(200)
    assert [cell["little_ratio"] for cell in cells] == pytest.approx([1, 1, 1], abs=0.25)
    assert [one["concurrency"] for one in report["timeline"]] == [1, 1, 4, 4, 1, 1]
    assert {str(one["replicas"]) for one in report["timeline"]} == {str({"Engine": 2, "Repairer": 1})}


async def test_the_corpus_of_the_examples_is_used_only_where_it_is_known() -> None:
    for known, used in (("demo", "demo"), ("default", None)):
        with QueueingServer(first_s=0.0, pieces=1, corpora=(known,)).running() as server:
            test = LoadTest(
                Plan(url=server.url, methods=["stale"], concurrency=[1], requests=1),
                Workload(QUESTIONS),
                ["demo", None],
            )
            await test.run()
        assert server.bodies[-1]["rag"].get("corpus") == used
        assert test.report()["cells"][0]["errors"] == 0


async def test_a_service_that_cannot_be_measured_is_named_before_anything_is() -> None:
    with QueueingServer().running() as server:
        with pytest.raises(ServiceUnusableError, match=r"method net: .*unknown_method"):
            await measured(server, concurrency=[1], methods=["stale", "net"])
        server.url += "/elsewhere"
        with pytest.raises(ServiceUnusableError, match=r"not the address of the service.*--url"):
            await measured(server, concurrency=[1])
    with pytest.raises(ServiceUnusableError, match=r"no service at .*serve run"):
        await measured(QueueingServer(url="http://127.0.0.1:9"), concurrency=[1])


async def test_a_service_that_dies_leaves_rows_with_errors() -> None:
    with QueueingServer(first_s=0.02, pieces=1).running() as server:
        workload = Workload(QUESTIONS)
    async with Sender(server.url, 1) as sender:
        block = Block(0, "stale", Load(concurrency=1))
        await Driver(sender, workload).closed(block, 3)
    rows: list[Row] = block.rows
    assert [row.error for row in rows] == ["no connection"] * 4
    assert block.window[1] - block.window[0] >= 3 * 0.2  # it waits between its tries
