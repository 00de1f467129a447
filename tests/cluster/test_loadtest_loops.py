# SPDX-License-Identifier: Apache-2.0
"""Load over real HTTP: what is measured when, what is counted as what, what is asked."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable

import pytest

from cluster.loadtest import run
from cluster.loadtest.loops import Driver
from cluster.loadtest.rows import Block, Load, Row
from cluster.loadtest.run import LoadTest, Plan, ServiceUnusableError
from cluster.loadtest.sender import Sender
from cluster.loadtest.summary import summarise
from cluster.loadtest.workload import Question, Workload
from tests.cluster.queueing_server import QueueingServer
from tests.cluster.virtual_time import SimulatedService, run_virtually

QUESTIONS = [Question(id=str(i), question=f"Who sang song {i}?", answers=("Rush",)) for i in range(5)]


async def measured(server: QueueingServer, workload: Workload | None = None, **plan: object) -> LoadTest:
    test = LoadTest(Plan(url=server.url, **{"methods": ["stale"], **plan}), workload or Workload(QUESTIONS))
    await test.run()
    return test


async def test_the_first_token_is_the_first_text_and_gaps_are_between_texts() -> None:
    with QueueingServer(first_s=0.4, gap_s=0.4, pieces=3).running() as server:
        test = await measured(server, concurrency=[1], requests=1, warm_up=1)
        (cell,) = test.report()["cells"]
    row = test.rows[-1]
    # The event before it has no text; the ones after it come 400 and 800 ms later.
    assert 400 <= cell["ttft_ms"]["p50"] < cell["e2e_ms"]["p50"] - 500
    assert cell["e2e_ms"]["p50"] >= 1200
    assert cell["itl_ms"]["mean"] == pytest.approx(400, rel=0.4)
    assert cell["tpot_ms"]["p50"] == pytest.approx(2 * cell["itl_ms"]["mean"] / 5, rel=1e-3)  # 6 tokens in 3 pieces
    assert (row.answer, len(row.token_s), row.completion_tokens, row.cached_tokens) == ("Rush Rush Rush", 3, 6, 90)
    assert row.stages_ms == {"mend": 3.0}
    assert row.f1 == pytest.approx(2 * (1 / 3) / (1 + 1 / 3))  # one word of three is gold


async def test_waiting_for_a_connection_counts() -> None:
    with QueueingServer(first_s=0.3, pieces=1).running() as server:
        async with Sender(server.url, connections=1) as sender:
            driver, block = Driver(sender, Workload(QUESTIONS)), Block(0, "stale", Load(rate=1.0))
            await asyncio.gather(*(driver.one(block, number, "counted") for number in range(3)))
    for waited, row in enumerate(sorted(block.rows, key=lambda row: row.ttft_ms), start=1):
        assert row.ttft_ms >= 300 * waited


async def test_a_client_keeps_its_connection() -> None:
    """A new one for each request would be in every time to first token, and over TLS a handshake with it."""
    with QueueingServer(first_s=0.0, gap_s=0.0).running() as server:
        await measured(server, concurrency=[2], requests=12)
    assert len(server.clients) >= 12
    assert len(set(server.clients)) == 2


async def test_a_refusal_is_of_its_kind_and_says_how_long_to_wait() -> None:
    with QueueingServer(slots=1, queue=0, first_s=1.0, pieces=1).running() as server:
        async with Sender(server.url, 3) as sender:
            driver, block = Driver(sender, Workload(QUESTIONS)), Block(0, "stale", Load(rate=1.0))
            await asyncio.gather(*(driver.one(block, number, "counted") for number in range(3)))
    assert sorted((str(row.error), row.wait_s) for row in block.rows) == [("429 overloaded", 1.0)] * 2 + [("None", 0.0)]


def test_warm_up_and_lead_in_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    service_s = itertools.chain([1.5, 1.5], itertools.repeat(0.02))  # a method's first request is slow
    monkeypatch.setattr(run, "Sender", lambda *_: SimulatedService(2, lambda: next(service_s)))
    plan = Plan(url="", concurrency=[2], requests=8, methods=["stale", "full"], warm_up=1)
    test = LoadTest(plan, Workload(QUESTIONS))
    run_virtually(test.run())
    phases = [row.phase for row in test.rows]
    assert [phases.count(name) for name in ("warm-up", "lead-in", "counted")] == [2, 2 * 2 * 2, 2 * 8]
    assert [row.e2e_ms for row in test.warm_up] == pytest.approx([1500, 1500])
    assert [cell["e2e_ms"]["p99"] for cell in test.report()["cells"]] == pytest.approx([20, 20])


def test_a_service_that_changes_its_speed_is_seen_by_a_request_that_stays_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four blocks of five requests, a reference before each and after; it gets slower in the third of them."""
    service_s = itertools.chain([0.1] * 14, itertools.repeat(0.2))
    monkeypatch.setattr(run, "Sender", lambda *_: SimulatedService(2, lambda: next(service_s), first_s=None))
    told: list[int] = []
    plan = Plan(url="", concurrency=[1], requests=16, methods=["stale"], warm_up=1)
    test = LoadTest(plan, Workload(QUESTIONS), tell=lambda _, count: told.append(count))
    run_virtually(test.run())
    (cell,) = test.report()["cells"]
    assert [row.ttft_ms for row in test.references] == pytest.approx([100, 100, 100, 200, 200])
    assert len({row.question_id for row in test.references}) == 1
    assert cell["slowness"] == pytest.approx((1 + 1 + 1.5 + 2) / 4)
    assert cell["requests"] == sum(row.phase == "counted" for row in test.rows) == 16
    assert len(told) == plan.requests_in_all() == len(test.rows) - 1


@pytest.mark.parametrize(
    ("references", "slowness"),
    [
        ([4.0, 4.0, 4.0, 8.0, 8.0, 8.0], [4 / 6, 4 / 6, 1.0, 8 / 6, 8 / 6]),
        ([4.0, 4.0, 40.0, 4.0, 4.0], [1.0, 1.0, 1.0, 1.0]),  # one of them was slow by chance
        ([4.0, None, 4.0, 4.0], [None, None, 1.0]),
        ([4.0, 4.0], [1.0, None]),  # stopped in the second block
        ([], [None]),
    ],
)
def test_a_cell_is_as_slow_as_the_references_around_it(
    references: list[float | None], slowness: list[float | None]
) -> None:
    blocks = []
    for number in range(len(slowness)):
        row = Row("stale", number + 1, None, number, "counted", 0, "q", "r", 0.0, 0.1, 0.2, 200)
        blocks.append(Block(number, "stale", Load(concurrency=number + 1), [row], (0.0, 1.0)))
    found = [cell["slowness"] for cell in summarise(blocks, references=references)]
    assert found == [pytest.approx(one, abs=1e-4) if one else None for one in slowness]


@pytest.mark.parametrize(("methods", "used"), [(["stale", "full"], "full"), (["stale", "epic"], "stale")])
def test_a_reference_is_full_prefill_where_that_is_measured(methods: list[str], used: str) -> None:
    assert Plan(url="", methods=methods).reference_method == used


def test_cells_are_reported_in_the_order_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "Sender", lambda *_: SimulatedService(2, lambda: 0.02))
    test = LoadTest(Plan(url="", concurrency=[8, 1, 2], requests=32, methods=["stale"]), Workload(QUESTIONS))
    run_virtually(test.run())
    assert test.blocks[0].load.concurrency == 1  # it has the most passes
    assert [cell["concurrency"] for cell in test.report()["cells"]] == [8, 1, 2]


async def test_a_clock_that_is_set_back_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    started = time.perf_counter()
    monkeypatch.setattr(time, "time", lambda: 1e9 - 60 * (time.perf_counter() - started))
    with QueueingServer(first_s=0.1, pieces=1).running() as server:
        test = await measured(server, concurrency=[1], requests=4)
        (cell,) = test.report()["cells"]
    # On the clock that is set back, times and windows would be negative, and the throughput zero.
    assert cell["e2e_ms"]["mean"] >= 100
    assert 0 < cell["throughput_rps"] <= 10
    assert 0.2 < cell["little_ratio"] <= 1.01


async def test_a_ramp_tells_replicas_when_the_service_does() -> None:
    metrics = (
        "# TYPE ray_serve_deployment_replica_healthy gauge\n"
        'ray_serve_deployment_replica_healthy{application="rag",deployment="Engine",replica="a"} 1.0\n'
        'ray_serve_deployment_replica_healthy{application="rag",deployment="Engine",replica="b"} 1.0\n'
        'ray_serve_deployment_replica_healthy{application="rag",deployment="Engine",replica="c"} 0.0\n'
        'ray_serve_deployment_replica_healthy{application="rag",deployment="Repairer",replica="d"} 1.0\n'
    )
    with QueueingServer(first_s=0.1, pieces=1, metrics=metrics).running() as server:
        report = (await measured(server, ramp=[1, 2], step_s=1.0)).report()
    assert [cell["concurrency"] for cell in report["cells"]] == [1, 2]
    assert list(dict.fromkeys(one["concurrency"] for one in report["timeline"])) == [1, 2]
    assert all(one["replicas"] == {"Engine": 2, "Repairer": 1} for one in report["timeline"])


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not happened():
            await asyncio.sleep(0.01)


async def test_replicas_are_told_again_after_metrics_that_did_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    def metrics(engines: int) -> str:
        return f'ray_serve_deployment_replica_healthy{{deployment="Engine"}} {engines}.0\n'

    monkeypatch.setattr(run, "SAMPLE_S", 0.02)
    with QueueingServer(first_s=0.02, pieces=1, metrics=metrics(1)).running() as server:
        test = LoadTest(Plan(url=server.url, methods=["stale"], ramp=[1], step_s=600.0), Workload(QUESTIONS))
        running = asyncio.create_task(test.run())
        await until(lambda: bool(test.samples))
        server.metrics, asked = None, server.metrics_asked
        await until(lambda: server.metrics_asked >= asked + 3)
        server.metrics = metrics(2)
        await until(lambda: test.samples[-1].replicas == {"Engine": 2})
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_watching_replicas_takes_no_connection_from_the_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(run, "Sender", lambda url, connections: seen.append(connections) or Sender(url, connections))
    with QueueingServer(first_s=0.02, pieces=1).running() as server:
        await measured(server, ramp=[1, 3, 2], step_s=0.2)
        await measured(server, concurrency=[1, 3], requests=4)
    assert seen == [4, 3]


async def test_a_service_without_metrics_is_asked_for_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SAMPLE_S", 0.02)
    with QueueingServer(first_s=0.02, pieces=1).running() as server:
        report = (await measured(server, ramp=[1], step_s=1.0)).report()
    assert server.metrics_asked == 1
    assert all("replicas" not in one for one in report["timeline"])


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
    assert [len(cell["samples_tokens"][name]) for name in ("prompt", "completion")] == [2, 2]
    assert {row.question_id for row in block.rows if row.error is None} == {"fine"}


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        ('{"error": "upstream timeout"}', "failed in stream", "upstream timeout"),
        ('{"error": {"code": 504, "message": null}}', "failed in stream 504", None),
        ('{"error": ["no", "such"]}', "not a stream", "error"),
        ('{"choices": ["stop"]}', "not a stream", "choices.0"),
        ('{"choices": [{"delta": "text"}]}', "not a stream", "choices.0.delta"),
        ('{"choices": [{"delta": {"content": 7}}]}', "not a stream", "choices.0.delta.content"),
        ('{"choices": [], "usage": {"prompt_tokens": "many"}}', "not a stream", "usage.prompt_tokens"),
        ('{"choices": [], "stages_ms": {"mend": "fast"}}', "not a stream", "stages_ms.mend"),
        ('{"choices": [], "stages_ms": [1]}', "not a stream", "stages_ms"),
        ('{"choices": [], "rag": "none"}', "not a stream", "rag"),
        ("[1]", "not a stream", "an event"),
        ("upstream timeout", "not a stream", "an event"),
        ("", "not a stream", "an event"),
    ],
)
async def test_an_event_that_is_none_of_ours_is_a_row_and_the_run_goes_on(
    words: str, kind: str, message: str | None
) -> None:
    with QueueingServer(first_s=0.0, gap_s=0.0, pieces=2).running() as server:
        test = LoadTest(Plan(url=server.url, methods=["stale"]), Workload(QUESTIONS))
        async with Sender(server.url, 1) as sender:
            block = Block(0, "stale", Load(concurrency=1))
            test.blocks.append(block)
            driver = Driver(sender, test.workload)
            server.last_words = words
            await driver.one(block, 0, "counted")
            server.last_words = None
            await driver.one(block, 1, "counted")
    odd, whole = block.rows
    assert (odd.error, whole.error) == (kind, None)
    assert odd.message is None if message is None else str(odd.message).startswith(message)
    (cell,) = test.report()["cells"]
    assert (cell["requests"], cell["errors"]) == (2, 1)


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
