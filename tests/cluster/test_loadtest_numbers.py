# SPDX-License-Identifier: Apache-2.0
"""Order of the blocks, summary by hand, intervals, files."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.loadtest.compare import Report, ReportError, compare, differences, ratios_to
from cluster.loadtest.loops import schedule
from cluster.loadtest.rows import Block, Load, Row, write_rows
from cluster.loadtest.summary import summarise
from cluster.loadtest.timeline import replicas_in
from cluster.loadtest.workload import Question, QuestionsError, Workload, read_questions

METHODS = ["full", "stale", "cacherepair"]


def row(submit: float, first: float, end: float, block: int = 0, **more: Any) -> Row:
    made = Row("stale", 2, None, block, "counted", 0, "q", "r", submit, first, end, 200)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_methods_take_turns_forwards_and_backwards() -> None:
    blocks = schedule(METHODS, [Load(concurrency=1), Load(concurrency=8), Load(rate=2.0)], 32, seed=3)
    orders = {
        load: [block.method for block, _, _ in blocks if block.load == load]
        for load in (one.load for one, _, _ in blocks)
    }
    one, eight, rate = orders.values()
    assert len(one) == 12
    assert len(eight) == 6
    assert len(rate) == 3
    for turns in (one[:6], one[6:], eight):
        assert turns[3:] == turns[:3][::-1]
        assert sorted(turns[:3]) == sorted(METHODS)
    assert [block.number for block, _, _ in blocks] == list(range(len(blocks)))


def test_a_straight_drift_falls_on_all_methods_alike() -> None:
    for seed in range(5):
        places: dict[str, list[int]] = {}
        for at, (block, _, _) in enumerate(schedule(METHODS, [Load(concurrency=2)], 32, seed)):
            places.setdefault(block.method, []).append(at)
        assert len({sum(own) for own in places.values()}) == 1


@pytest.mark.parametrize(
    ("loads", "requests"),
    [
        ([Load(concurrency=c) for c in (1, 2, 4, 8)], 16),  # 4, 2, 2 and 1 passes
        ([Load(concurrency=c) for c in (8, 1, 32)], 32),  # 2, 4 and 1
        ([Load(rate=1.0), Load(concurrency=2)], 256),
        ([Load(concurrency=4), Load(concurrency=2), Load(concurrency=1)], 64),  # 4 each
    ],
)
def test_a_straight_drift_falls_on_all_loads_alike(loads: list[Load], requests: int) -> None:
    places: dict[tuple[Load, str], list[int]] = {}
    blocks = schedule(METHODS, loads, requests, seed=0)
    for block, count, _ in blocks:
        places.setdefault((block.load, block.method), []).extend([block.number] * count)
    assert len(places) == len(loads) * len(METHODS)
    middle = (len(blocks) - 1) / 2
    for own in places.values():  # of its requests; a single pass may lie before or after the very middle
        assert np.mean(own) == pytest.approx(middle, abs=len(METHODS))


def test_orders_follow_the_seed() -> None:
    def order(seed: int) -> list[str]:
        return [block.method for block, _, _ in schedule(METHODS, [Load(concurrency=1)], 16, seed)]

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(20)}) > 5


@pytest.mark.parametrize("requests", [1, 7, 32, 256])
def test_blocks_hold_every_request_once(requests: int) -> None:
    blocks = schedule(METHODS, [Load(concurrency=4)], requests, seed=0)
    for method in METHODS:
        parts = sorted((first, count) for block, count, first in blocks if block.method == method)
        assert [n for first, count in parts for n in range(first, first + count)] == list(range(requests))


def test_the_summary_by_hand() -> None:
    # Window of 4 s; requests inside it by 1, 1, 1/2 (the last ends after it), and a failure of 1 s.
    rows = [
        row(1.0, 1.1, 2.0, token_s=[1.1, 1.4, 2.0], completion_tokens=4),
        row(2.0, 2.4, 3.0),
        row(4.0, 4.3, 6.0),
        row(3.0, 3.0, 4.0, error="500"),
        row(0.0, 0.5, 1.0, phase="lead-in"),
    ]
    (cell,) = summarise([Block(0, "stale", Load(concurrency=2), rows, (1.0, 5.0))], slo_ttft_ms=350)
    assert cell["throughput_rps"] == pytest.approx(2.5 / 4)
    assert cell["goodput_rps"] == pytest.approx(1.5 / 4)  # 100 and 300 ms meet it, 400 does not
    assert cell["slo_met"] == pytest.approx(2 / 4)
    assert cell["ttft_ms"]["p50"] == pytest.approx(300)
    assert cell["ttft_ms"]["p95"] == pytest.approx(390)
    assert cell["itl_ms"]["mean"] == pytest.approx(450)
    assert cell["tpot_ms"]["p50"] == pytest.approx(300)
    assert (cell["requests"], cell["errors"], cell["errors_by_kind"]) == (4, 1, {"500": 1})
    # 3.5 requests in 4 s, 1.25 s each, two clients.
    assert cell["little_ratio"] == pytest.approx(3.5 / 4 * 1.25 / 2, abs=1e-4)


def test_refusals_of_an_open_loop_are_not_waited_for() -> None:
    """Ten refusals of 10 ms in a second: a tenth of a request is there at a time, whatever wait they ask for."""
    rows = [row(at / 10, 0.0, at / 10 + 0.01, error="429 overloaded", wait_s=1.0) for at in range(10)]
    (cell,) = summarise([Block(0, "stale", Load(rate=10.0), rows, (0.0, 1.0))])
    assert cell["outstanding"] == pytest.approx(0.1)


def test_a_step_of_a_ramp_counts_what_its_window_saw_whenever_it_was_sent() -> None:
    # Sent in the first step, half of it spent in the second; the second's own request is whole in its window.
    steps = [
        Block(0, "stale", Load(concurrency=2, step=0), [row(0.0, 0.5, 1.0), row(3.0, 4.0, 5.0)], (0.0, 4.0)),
        Block(1, "stale", Load(concurrency=1, step=1), [row(5.0, 6.0, 7.0, block=1)], (4.0, 8.0)),
    ]
    cells = summarise(steps)
    assert [cell["throughput_rps"] for cell in cells] == pytest.approx([1.5 / 4, 1.5 / 4])
    assert [cell["requests"] for cell in cells] == [2, 1]


def test_no_answers_make_no_latencies_and_no_goodput() -> None:
    rows = [row(0.0, 0.0, 1.0, error="429 overloaded", wait_s=1.0)]
    (cell,) = summarise([Block(0, "stale", Load(concurrency=1), rows, (0.0, 2.0))], slo_ttft_ms=100)
    assert (cell["throughput_rps"], cell["goodput_rps"], cell["ttft_ms"]["p95"]) == (0.0, 0.0, None)
    assert cell["little_ratio"] == pytest.approx(1.0)  # one second of asking, one of waiting as told, one client


def report(ttft: np.ndarray, method: str = "stale", load: int | None = 4, throughput: float = 10.0) -> Report:
    samples = {"ttft": ttft.tolist(), "e2e": (2 * ttft).tolist()}
    cell = {"method": method, "concurrency": load, "rate_rps": None if load else 3.0}
    cells = [{**cell, "throughput_rps": throughput, "samples_ms": samples}]
    return Report.model_validate({"cells": cells, "config": {"complete": True}})


def test_a_real_difference_is_seen_and_its_size_is_inside_the_interval() -> None:
    random = np.random.default_rng(0)
    a, b = random.lognormal(4, 0.2, 256), 1.3 * random.lognormal(4, 0.2, 256)
    found = {one.metric: one for one in compare(report(a), report(b, throughput=10 / 1.3))}
    for name in ("TTFT p50, ms", "TTFT p95, ms", "e2e p50, ms", "e2e p95, ms"):
        assert found[name].low < 1.3 < found[name].high
        assert found[name].ratio == pytest.approx(found[name].after / found[name].before)
    throughput = found["req/s"]
    assert throughput.low < 1 / 1.3 < throughput.high
    assert throughput.differs
    assert found["TTFT p50, ms"].differs


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    random = np.random.default_rng(1)
    hits = 0
    for _ in range(40):
        a, b = random.lognormal(4, 0.3, (2, 64))
        hits += not {one.metric: one for one in compare(report(a, load=1), report(b, load=1))}["TTFT p50, ms"].differs
    assert 34 <= hits <= 40  # 38 expected


def test_requests_that_are_slow_together_widen_the_interval() -> None:
    random = np.random.default_rng(2)
    ttft = np.repeat(random.lognormal(4, 0.3, 32), 8)  # eight at a time, as a batch makes them

    def width(load: int) -> float:
        one = next(c for c in compare(report(ttft, load=load), report(ttft, load=load)) if c.metric == "TTFT p50, ms")
        return one.high - one.low

    assert width(8) > 1.8 * width(1)  # eight times fewer independent values: sqrt(8) wider in the ideal case


def test_an_open_loop_has_no_interval_of_its_throughput() -> None:
    values = np.full(8, 10.0)
    found = {one.metric: one for one in compare(report(values, load=None), report(values, load=None))}
    assert found["req/s"].ratio is None
    assert found["TTFT p50, ms"].ratio == 1.0


@pytest.mark.parametrize("swapped", [False, True])
def test_a_run_whose_counted_requests_all_failed_is_compared_without_a_ratio(swapped: bool) -> None:
    # Its lead-ins were answered, so the throughput of its window is above zero.
    runs = [report(np.full(8, 10.0)), report(np.array([]), throughput=0.5)]
    found = {one.metric: one for one in compare(*(runs[::-1] if swapped else runs))}
    assert {found["req/s"].before, found["req/s"].after} == {10.0, 0.5}
    assert all(one.ratio is None and not one.differs for one in found.values())


def test_runs_without_a_cell_in_common_and_files_that_are_no_reports(tmp_path: Path) -> None:
    values = np.ones(3)
    with pytest.raises(ReportError, match="in common"):
        compare(report(values, "full"), report(values, "stale"))
    path = tmp_path / "a.json"
    path.write_text('{"cells": [{"method": "full"}], "config": {}}')
    with pytest.raises(ReportError, match=r"a\.json.*cells\.0\.concurrency"):
        Report.read(path)
    with pytest.raises(ReportError, match=r"b\.json cannot be read"):
        Report.read(tmp_path / "b.json")


def test_ratios_to_full_are_of_the_same_load() -> None:
    def cell(method: str, load: int, throughput: float, p95: float) -> dict[str, Any]:
        return {
            "method": method,
            "concurrency": load,
            "rate_rps": None,
            "throughput_rps": throughput,
            "ttft_ms": {"p95": p95},
        }

    cells = [cell("full", 1, 2.0, 100.0), cell("stale", 1, 6.0, 25.0), cell("stale", 2, 9.0, 30.0)]
    assert ratios_to(cells, "full") == {1: (3.0, 4.0)}


def test_rows_are_written_so_that_a_table_program_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    whole = row(1.0, 1.25, 2.0, answer='said "no",\nthen yes', stages_ms={"mend": 1.5}, token_s=[1.25, 2.0])
    write_rows([whole, row(1.0, None, 1.5, error="500")], path)
    with path.open(newline="", encoding="utf-8") as file:
        first, second = csv.DictReader(file)
    assert (first["ttft_ms"], first["e2e_ms"], first["answer"]) == ("250.0", "1000.0", 'said "no",\nthen yes')
    assert json.loads(first["stages_ms"]) == {"mend": 1.5}
    assert json.loads(first["token_s"]) == [1.25, 2.0]
    assert (second["ttft_ms"], second["error"]) == ("", "500")


def test_questions_are_read_and_bad_lines_named(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question": "Who?", "extra": 1}\n\n{"id": 7, "question": "Where?", "answers": ["Rome"]}\n')
    assert read_questions(path) == [
        Question(id="1", question="Who?"),
        Question(id="7", question="Where?", answers=("Rome",)),
    ]
    for text, complaint in [
        ("", "no questions"),
        ('{"question": "Who?"}\nWho?', "line 2: not JSON"),
        ('{"question": " "}', "line 1, field question"),
        ('{"question": "Who?", "answers": "Rome"}', "line 1, field answers"),
        ("[1]", "line 1"),
    ]:
        path.write_text(text)
        with pytest.raises(QuestionsError, match=complaint):
            read_questions(path)
    with pytest.raises(QuestionsError, match="cannot be read"):
        read_questions(tmp_path / "none.jsonl")


def test_two_runs_do_not_share_prompts() -> None:
    question = Question(question="Who?")
    workloads = [Workload([question]) for _ in range(2)]
    texts = [workload.unique(question) for workload in workloads for _ in range(10_000)]
    assert len(set(texts)) > len(texts) - 5  # runs begin anywhere among a hundred million
    assert len({*texts[:10_000]}) == 10_000


def test_no_replicas_are_told_where_there_are_no_metrics_of_them() -> None:
    assert replicas_in("# HELP something\nother_metric 3\n") == {}


def test_what_two_runs_did_not_have_in_common() -> None:
    config = {"model": "m", "rag": {"top_k": 8}, "max_tokens": 16, "questions_sha256": "a", "seed": 0, "requests": 32}
    before = Report(cells=[], config={**config, "url": "http://one", "started_at": "yesterday"})
    after = Report(cells=[], config={**config, "url": "http://two", "started_at": "today"})
    assert differences(before, after) == []
    after.config["rag"] = {"top_k": 5}
    assert differences(before, after) == [("rag", {"top_k": 8}, {"top_k": 5})]
