# SPDX-License-Identifier: Apache-2.0
"""`cachemend loadtest` as a user meets it."""

from __future__ import annotations

import csv
import itertools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cachemend.cli import app
from cluster.loadtest.rows import Row
from cluster.loadtest.sender import Sender
from tests.cluster.queueing_server import QueueingServer

PNG = b"\x89PNG\r\n"


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "220")
    return CliRunner()


def test_one_run_writes_numbers_rows_and_curves_and_two_are_compared(cli: CliRunner, tmp_path: Path) -> None:
    with QueueingServer(first_s=0.02, pieces=2, corpora=("demo",)).running() as server:
        for name in ("a", "b"):
            command = f"loadtest --url {server.url} --methods full,stale --concurrency 1,2 --rate 20 --requests 4"
            files = f"--slo-ttft-ms 60000 --json out/{name}.json --rows out/{name}.csv --chart out/{name}.png"
            result = cli.invoke(app, f"{command} {files}".split())
            assert result.exit_code == 0, result.output
    report = json.loads(Path("out/a.json").read_text())
    assert set(report) == {"cells", "config"}
    assert [(c["method"], c["concurrency"], c["rate_rps"]) for c in report["cells"]].count(("stale", 2, None)) == 1
    assert len(report["cells"]) == 6
    for cell in report["cells"]:
        assert (cell["requests"], cell["errors"]) == (4, 0)
        assert 0 < cell["ttft_ms"]["p50"] <= cell["ttft_ms"]["p95"] < cell["e2e_ms"]["p95"]
        assert cell["goodput_rps"] == cell["throughput_rps"]
        assert cell["cached_tokens"] == (0 if cell["method"] == "full" else 90)
        assert cell["f1"] is not None
    assert report["config"]["complete"] is True
    assert report["config"]["rag"] == {"corpus": "demo"}
    with Path("out/a.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert sum(row["phase"] == "counted" for row in rows) == 6 * 4
    assert Path("out/a.png").read_bytes().startswith(PNG)

    result = cli.invoke(app, ["loadtest", "--compare", "out/a.json", "out/b.json", "--json", "out/ab.json"])
    assert result.exit_code == 0, result.output
    compared = json.loads(Path("out/ab.json").read_text())
    assert len(compared) == 6 * 5
    assert all(one["low"] <= one["ratio"] <= one["high"] for one in compared if one["ratio"] is not None)


def test_a_ramp_draws_its_chart(cli: CliRunner) -> None:
    with QueueingServer(first_s=0.02, pieces=2).running() as server:
        command = f"loadtest --url {server.url} --methods stale --ramp 1,2 --step-s 1 --json r.json --chart r.png"
        result = cli.invoke(app, command.split())
    assert result.exit_code == 0, result.output
    timeline = json.loads(Path("r.json").read_text())["timeline"]
    assert list(dict.fromkeys(one["concurrency"] for one in timeline)) == [1, 2]
    assert "replicas" not in timeline[0] and "none are drawn" in result.output
    assert Path("r.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--requests 0", "--requests"),
        ("--warmup 0", "--warmup"),
        ("--concurrency 0", "--concurrency '0'"),
        ("--concurrency two", "--concurrency 'two'"),
        ("--rate -1", "--rate '-1'"),
        ("--rate nan", "--rate 'nan'"),
        ("--methods ,", "--methods"),
        ("--methods full,full", "once"),
        ("--concurrency 2,4,2", "once"),
        ("--ramp 1,2 --rate 3", "a run of its own"),
        ("--url 127.0.0.1:8000", "http://127.0.0.1:8000"),
    ],
)
def test_options_that_make_no_sense_are_refused(cli: CliRunner, options: str, complaint: str) -> None:
    result = cli.invoke(app, ["loadtest", *options.split()])
    assert result.exit_code == 2
    assert complaint in result.output


def test_no_service_is_one_line(cli: CliRunner) -> None:
    result = cli.invoke(app, ["loadtest", "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 1
    assert "error: no service at http://127.0.0.1:9" in result.output


def test_an_error_on_the_way_writes_what_there_is_and_says_so(
    cli: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, sent = Sender.send, itertools.count()

    async def failing(self: Sender, *args: Any) -> Row:
        if next(sent) == 12:
            raise RuntimeError("a fault of our own")
        return await send(self, *args)

    monkeypatch.setattr(Sender, "send", failing)
    with QueueingServer(first_s=0.0, pieces=2).running() as server:
        command = f"loadtest --url {server.url} --methods stale --concurrency 2 --requests 100"
        result = cli.invoke(app, [*command.split(), "--json", "p.json", "--rows", "p.csv"])
    assert result.exit_code == 1
    assert "partial results" in result.output and "a fault of our own" in result.output
    report = json.loads(Path("p.json").read_text())
    assert report["config"]["complete"] is False
    assert 1 <= report["cells"][0]["requests"] <= 10
    assert len(Path("p.csv").read_text().splitlines()) > 1


def test_no_service_leaves_earlier_results_as_they_are(cli: CliRunner) -> None:
    Path("p.json").write_text("earlier")
    result = cli.invoke(app, ["loadtest", "--url", "http://127.0.0.1:9", "--json", "p.json"])
    assert result.exit_code == 1
    assert Path("p.json").read_text() == "earlier"


def test_ctrl_c_in_the_warm_up_leaves_earlier_results_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text("earlier")
    with QueueingServer(first_s=10.0).running() as server:
        command = f"loadtest --url {server.url} --methods stale --concurrency 2 --json p.json"
        code = "from cachemend.cli import app; app()"
        process = subprocess.Popen(
            [sys.executable, "-c", code, *command.split()], cwd=tmp_path, stderr=subprocess.PIPE, text=True
        )
        until = time.monotonic() + 240
        while not server.bodies and time.monotonic() < until and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=240)
    assert process.returncode == 130
    assert "no file was written" in errors
    assert (tmp_path / "p.json").read_text() == "earlier"


def test_ctrl_c_writes_what_there_is_and_says_so(tmp_path: Path) -> None:
    with QueueingServer(first_s=0.07, gap_s=0.03, pieces=2).running() as server:
        command = f"loadtest --url {server.url} --methods full,stale --concurrency 2,4 --requests 5000"
        files = "--json p.json --rows p.csv --chart p.png"
        code = "from cachemend.cli import app; app()"
        process = subprocess.Popen(
            [sys.executable, "-c", code, *command.split(), *files.split()],
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        until = time.monotonic() + 240
        while len(server.bodies) < 40 and time.monotonic() < until and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=240)
    assert process.returncode == 130
    assert "partial results" in errors
    report = json.loads((tmp_path / "p.json").read_text())
    assert report["config"]["complete"] is False
    (cell,) = report["cells"]
    assert 20 <= cell["requests"] <= 5000 / 4  # in the first of four blocks
    assert 0 < cell["throughput_rps"] <= 2 / 0.1 * 1.02
    with (tmp_path / "p.csv").open(newline="") as file:
        assert sum(row["phase"] == "counted" for row in csv.DictReader(file)) == cell["requests"]
    assert (tmp_path / "p.png").read_bytes().startswith(PNG)
