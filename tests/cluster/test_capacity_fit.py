# SPDX-License-Identifier: Apache-2.0
"""Fitting the capacity model on load tests, the published one and ones of ours."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from cachemend.cli import app
from cluster.capacity import published, size
from cluster.capacity.demand import Demand, Hardware
from cluster.capacity.fit import Installation, fit, guess_stages, predict
from cluster.capacity.loadtest import (
    Cell,
    LoadTest,
    LoadTestError,
    Percentiles,
    Samples,
    StageTimes,
    read_load_test,
)
from cluster.capacity.model import Closed, Cluster, Stages, Workload
from cluster.capacity.planner import Question, study
from cluster.capacity.simulation import simulate
from cluster.capacity.targets import PUBLISHED
from kvcache.settings import Settings

TARGET = PUBLISHED["qwen2.5-3b"]
LENGTHS = Samples(prompt=[500, 900], completion=[1, 3])
MEASURED = Installation(published.TARGET, published.WORKLOAD, published.CLUSTER)


def test_fitted_on_one_point_of_table_21_it_predicts_the_others_within_a_tenth() -> None:
    stages = fit(published.TABLE_21, published.FITTED_AT, MEASURED, published.PRIOR)
    unseen = [one for one in predict(published.TABLE_21, MEASURED, stages, published.FITTED_AT) if not one.fitted]
    assert len(unseen) == 3 * 3 * 2  # methods, concurrencies, throughput and p95
    assert {(one.method, one.concurrency, one.name): one.error for one in unseen if abs(one.error) > 0.1} == {}


def test_a_load_test_is_replayed_in_the_blocks_it_was_sent_in() -> None:
    """With all lengths equal the order does not matter, and the replay is the run itself."""
    here = Installation(TARGET, Workload(mean_tokens=2000, output_tokens=4, fixed_outputs=True), published.CLUSTER)
    clients, per_block = 4, 6
    seen = simulate(
        "repaired",
        Closed(clients),
        here.target,
        here.workload,
        published.PRIOR,
        here.cluster,
        requests=clients + per_block,
        lead_in=clients,
    )
    cell = {
        "method": "cacherepair",
        "concurrency": clients,
        "requests": 2 * per_block,
        "throughput_rps": seen.throughput_rps,
        "ttft_ms": {"p50": seen.ttft(50) * 1e3, "p95": np.percentile(np.tile(seen.ttft_s, 2), 95) * 1e3},
    }
    blocks = [["cacherepair", clients, None], ["stale", clients, None], ["cacherepair", clients, None]]
    test = LoadTest.model_validate({"cells": [cell], "config": {"blocks": blocks}})
    assert [one.error for one in predict(test, here, published.PRIOR, 1)] == pytest.approx([0, 0, 0], abs=1e-6)


def measured_with(stages: Stages, target_installation: Installation, clients: tuple[int, ...]) -> LoadTest:
    """A load test of a machine with those service times."""
    where, cells = target_installation, []
    for method in ("full", "stale", "cacherepair"):
        for count in clients:
            kind = "repaired" if method == "cacherepair" else method
            seen = simulate(
                kind, Closed(count), where.target, where.workload, stages, where.cluster, requests=64, seed=99
            )
            ttft = Percentiles(p50=seen.ttft(50) * 1e3, p95=seen.ttft(95) * 1e3)
            e2e = Percentiles(p50=seen.e2e(50) * 1e3, p95=seen.e2e(95) * 1e3)
            cell = Cell(
                method=method,
                concurrency=count,
                requests=64,
                throughput_rps=seen.throughput_rps,
                ttft_ms=ttft,
                e2e_ms=e2e,
            )
            cells.append(cell)
    return LoadTest(cells=cells)


def test_a_fit_on_a_load_test_needs_no_prior_knowledge_of_the_machine() -> None:
    """A machine a thousand times slower than the published one, with retrieval on the same device."""
    here = Installation(
        TARGET, Workload(mean_tokens=1000, output_tokens=16, fixed_outputs=True), Cluster(max_num_seqs=16)
    )
    true = Stages(0.08, 1.1e12, 2e-4, 1.5e11, 0.02, 0.15, 2e-5)
    test = measured_with(true, here, (1, 2, 4, 8))
    found = fit(test, 2, here, guess_stages(test, here))
    assert found.macs_per_s == pytest.approx(true.macs_per_s, rel=0.15)
    tokens = here.workload.mean_tokens
    assert found.step_s + tokens * found.read_s_per_token == pytest.approx(0.1, rel=0.15)
    throughputs = [one for one in predict(test, here, found, 2) if one.name == "throughput_rps" and not one.fitted]
    assert max(abs(one.error) for one in throughputs) < 0.15


def with_stages(stages: Stages, here: Installation, clients: tuple[int, ...]) -> LoadTest:
    """As `measured_with`, and what the service tells besides."""
    cells = []
    for cell in measured_with(stages, here, clients).cells:
        assert cell.modelled and cell.concurrency
        load = Closed(cell.concurrency)
        seen = simulate(cell.modelled, load, here.target, here.workload, stages, here.cluster, requests=64, seed=99)
        gap = Percentiles(p50=np.median(seen.itl_s) * 1e3)
        retrieve, mend, first = (
            Percentiles(p50=np.median(seen.parts_s[part]) * 1e3) for part in ("retrievers", "repairers", "engines")
        )
        told = StageTimes(retrieve=retrieve, mend=mend, first_token=first)
        cells.append(cell.model_copy(update={"itl_ms": gap, "tpot_ms": gap, "stages_ms": told}))
    return LoadTest(cells=cells)


def test_what_a_service_tells_of_its_stages_tells_the_times_apart() -> None:
    """At one load a slow read of each token's KV looks like slow loading, and like retrieval, in the totals."""
    here = Installation(
        TARGET,
        Workload(mean_tokens=1000, output_tokens=16, fixed_outputs=True),
        Cluster(max_num_seqs=16, time_shared=True),
    )
    true = Stages(0.06, 1.1e12, 5e-5, 1.5e11, 0.03, 0.045, 1e-5, 4e-5, 1.2)
    test = with_stages(true, here, (1, 4))
    found = fit(test, 4, here, guess_stages(test, here))
    for name in ("macs_per_s", "retrieval_s", "assemble_s_per_token", "repair_macs_per_s"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=0.1), name
    numbers = [one for one in predict(test, here, found, 4) if one.name in ("throughput_rps", "ttft_ms.p95")]
    assert max(abs(one.error) for one in numbers) < 0.1


def test_gaps_between_pieces_that_are_not_tokens_are_left_aside() -> None:
    here = Installation(TARGET, Workload(mean_tokens=1000, output_tokens=4, fixed_outputs=True), published.CLUSTER)
    test = with_stages(published.PRIOR, here, (2,))
    burst = [cell.model_copy(update={"itl_ms": Percentiles(p50=0.02)}) for cell in test.cells]
    names = [{one.name for one in predict(LoadTest(cells=c), here, published.PRIOR, 2)} for c in (test.cells, burst)]
    assert names[0] - names[1] == {"itl_ms.p50"}


def test_a_stage_that_the_model_does_not_have_is_left_aside() -> None:
    here = Installation(TARGET, Workload(mean_tokens=1000, output_tokens=4, fixed_outputs=True), published.CLUSTER)
    told = StageTimes(retrieve=Percentiles(p50=40.0), first_token=Percentiles(p50=50.0))
    cells = [cell.model_copy(update={"stages_ms": told}) for cell in measured_with(published.PRIOR, here, (2,)).cells]
    found = fit(LoadTest(cells=cells), 2, here, published.PRIOR)
    assert found.retrieval_s == 0 < found.macs_per_s < np.inf


def test_a_cell_measured_while_the_machine_was_slow_is_compared_with_a_slow_one() -> None:
    here = Installation(TARGET, Workload(mean_tokens=1000, output_tokens=4, fixed_outputs=True), published.CLUSTER)
    usual = measured_with(published.PRIOR, here, (2,))
    slow = LoadTest(
        cells=[
            cell.model_copy(
                update={
                    "throughput_rps": cell.throughput_rps / 1.3,
                    "ttft_ms": Percentiles(p50=cell.ttft_ms.p50 * 1.3, p95=cell.ttft_ms.p95 * 1.3),
                    "e2e_ms": Percentiles(p50=cell.e2e_ms.p50 * 1.3, p95=cell.e2e_ms.p95 * 1.3),
                    "slowness": 1.3,
                }
            )
            for cell in usual.cells
        ]
    )
    found = [predict(test, here, published.PRIOR, 2) for test in (usual, slow)]
    assert [one.name for one in found[0]] == [one.name for one in found[1]]
    assert [one.error for one in found[0]] == pytest.approx([one.error for one in found[1]])
    assert found[1][0].measured == slow.cells[0].throughput_rps


def test_chance_moves_a_number_less_the_more_requests_stand_behind_it() -> None:
    cells = with_stages(published.PRIOR, MEASURED, (2,)).cells
    tests = [LoadTest(cells=[cell.model_copy(update={"requests": count}) for cell in cells]) for count in (16, 1024)]
    few, many = (predict(test, MEASURED, published.PRIOR, 2) for test in tests)
    spreads = [np.mean([one.spread for one in found if one.name == "ttft_ms.p95"]) for found in (few, many)]
    assert 0 < spreads[1] < spreads[0] / 3  # by the root of 64, give or take


def test_open_loops_steps_of_a_ramp_and_cells_without_an_answer_are_left_aside(tmp_path: Path) -> None:
    path = tmp_path / "test.json"
    cells = [
        {"method": "full", "concurrency": 2, "throughput_rps": 1.5, "prompt_tokens": 100, "ttft_ms": {"p50": 3.0}},
        {"method": "full", "concurrency": None, "rate_rps": 5.0, "throughput_rps": 1.0, "prompt_tokens": 300},
        {"method": "full", "concurrency": 4, "throughput_rps": 0.0, "ttft_ms": {"p50": None}},
        {"method": "full", "concurrency": 8, "step": 0, "throughput_rps": 2.0, "ttft_ms": {"p50": 9.0}},
        {"method": "full", "concurrency": 2, "step": 1, "throughput_rps": 7.0, "ttft_ms": {"p50": 1.0}},
    ]
    path.write_text(json.dumps({"cells": cells}))
    test = read_load_test(path)
    assert test.concurrencies == [2]
    assert [cell.throughput_rps for cell in test.at(2)] == [1.5]
    assert test.mean("prompt_tokens") == 200
    assert test.mean("completion_tokens") is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "the whole file"),
        ('{"cells": []}', "cells"),
        ('{"cells": [{"method": "full", "concurrency": 0, "throughput_rps": 1}]}', "cells.0.concurrency"),
        ('{"cells": [{"method": "full", "concurrency": 1}]}', "cells.0.throughput_rps"),
        ('{"cells": [{"method": "epic", "concurrency": 1, "throughput_rps": 1}]}', "epic"),
        ('{"cells": [{"method": "full", "concurrency": 1, "step": 0, "throughput_rps": 1}]}', "steady"),
        (
            '{"cells": [{"method": "full", "concurrency": 1, "throughput_rps": 1}], "config": {"complete": false}}',
            "stopped early",
        ),
    ],
)
def test_an_unusable_load_test_is_refused_by_name(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "test.json"
    path.write_text(text)
    with pytest.raises(LoadTestError, match=says) as refused:
        read_load_test(path)
    assert str(path) in str(refused.value)


def test_a_plan_for_a_measured_installation_takes_its_target_from_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(size, "_REQUESTS", 100)
    path = tmp_path / "test.json"
    cells = [
        cell.model_copy(update={"completion_tokens": 2, "requests": 8, "samples_tokens": LENGTHS})
        for cell in measured_with(published.PRIOR, MEASURED, (1,)).cells
    ]
    path.write_text(LoadTest(cells=cells).model_dump_json())
    settings = Settings(target={"model": "Qwen/Qwen2.5-3B-Instruct", "device": "cuda"}, store={"dtype": "float32"})
    found = study(Question(Demand(2, 1000, 5.0), Hardware(), load_test=path), settings)
    assert found.target == "Qwen2.5-3B"
    around = found.workload.header_tokens + found.workload.question_tokens
    assert set(found.workload.documents) == {500 - around, 900 - around} and set(found.workload.answers) == {1, 3}
    reusing = [plan for plan in found.plans if plan.method != "full"]
    assert [plan.storage_bytes for plan in reusing] == [1000 * 512 * 36 * 2 * 2 * 128 * 4] * 2


def test_what_took_no_time_was_not_measured(tmp_path: Path) -> None:
    path = tmp_path / "test.json"
    cell = {"method": "full", "concurrency": 2, "throughput_rps": 1.5, "itl_ms": {"p50": 0.2, "p95": 0.0}}
    path.write_text(json.dumps({"cells": [{**cell, "stages_ms": {"first_token": {"p50": 0.0}, "queue": None}}]}))
    (read,) = read_load_test(path).cells
    assert (read.itl_ms, read.stages_ms) == (Percentiles(p50=0.2), StageTimes())


def test_a_plan_shows_what_it_was_fitted_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size, "_REQUESTS", 100)
    monkeypatch.setenv("COLUMNS", "100")
    path = tmp_path / "test.json"
    test = with_stages(published.PRIOR, MEASURED, (1, 2, 4, 8))
    cells = [cell.model_copy(update={"requests": 8}) for cell in test.cells]
    path.write_text(LoadTest(cells=cells).model_dump_json())
    asked = ["plan", "--fit", str(path), "--rps", "2", "--chunks", "1000", "--target", "qwen2.5-3b"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert "fitted at C = 4" in done.output
    for row in ("full ITL p50, ms", "cacherepair mend p50, ms", "stale first token p50, ms"):
        assert row in done.output


def test_a_missing_load_test_is_one_line(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["plan", "--fit", str(tmp_path / "none.json"), "--target", "qwen2.5-3b"])
    assert done.exit_code == 1
    assert "none.json" in done.output and "Traceback" not in done.output
