# SPDX-License-Identifier: Apache-2.0
"""How the application scales, refuses, redeploys and routes, on real Ray Serve with mocks that take a GPU's time.

    python -m benchmarks.autoscaling                              # all four, about 15 minutes
    python -m benchmarks.autoscaling --only step --json step.json --chart step.png

Everything is the real application, deployed by `serve deploy` and loaded over HTTP by the load test's own code, but for
the repairer and the engine: `serve_app.paced_mocks` sleep for the published times of Qwen2.5-3B on an A800, 20 times
slower.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import ray
import yaml
from ray import serve

from cluster.loadtest.charts import ramp_chart
from cluster.loadtest.rows import Row
from cluster.loadtest.run import LoadTest, Plan
from cluster.loadtest.timeline import ReplicaSample
from cluster.loadtest.workload import Question, Workload
from kvcache.settings import load_settings
from serve_app.app import APP_NAME, bind
from serve_app.paced_mocks import FETCH_MS, PACED, REPAIR_S, SLOWER, TOPICS, UNLOADED_TTFT_S
from serve_app.tuning import tune

METHOD = "cacherepair"
SLO_S = 2 * UNLOADED_TTFT_S
STEP_S = 60.0
FEW, MANY = 2, 16
BUILDER = "benchmarks.autoscaling:build"
POLICY = {"policy_function": "serve_app.autoscaling:scale_together"}
BY_LOAD = "ray.serve._private.request_router.pow_2_router.PowerOfTwoChoicesRequestRouter"
PARTS = ("Repairer", "Engine")
STATES = ("STARTING", "RUNNING", "UPDATING", "STOPPING")


def build(args: dict[str, Any]) -> serve.Application:
    """The application with the paced mocks: the `import_path` of the Serve configs below."""
    return bind(load_settings(**args), PACED)


@dataclass
class Bench:
    """A Ray cluster of this process, and the application on it.

    Attributes:
        folder: of the tiny model and the configs.
        port: of the service.
        dashboard: address that `serve deploy` talks to.
        model: folder of a tiny model, for its tokenizer.
    """

    folder: Path
    port: int
    dashboard: str
    model: str

    def deploy(self, system: str = "Answer.", by_load: bool = False, wait: bool = True, **serving: Any) -> None:
        """`serve deploy` a config; returns when it runs.

        Args:
            system: the system prompt: another one is another version of every deployment.
            by_load: route to repairers by load alone, as Ray does by default.
            serving: the `serve` section of the settings.
        """
        args = {
            "root": str(self.folder / "data"),
            "target": {"model": self.model},
            "engine": {"max_model_len": 400},
            "prompt": {"system": system},
            "handoff": {"arena_bytes": 2**22},
            "repair": {"methods": [METHOD], "default": METHOD},
            "serve": {"shutdown_timeout_s": 30.0, **serving},
        }
        router = {"name": "Repairer", "request_router_config": {"request_router_class": BY_LOAD}}
        app = {"name": APP_NAME, "route_prefix": "/", "import_path": BUILDER, "args": args}
        app |= {"autoscaling_policy": POLICY} if "autoscaling" in serving else {}
        config = {
            "proxy_location": "EveryNode",
            "http_options": {"host": "127.0.0.1", "port": self.port},
            "logging_config": {"enable_access_log": False},
            "applications": [app | ({"deployments": [router]} if by_load else {})],
        }
        path = self.folder / "serve.yaml"
        path.write_text(yaml.safe_dump(config))
        command = [str(Path(sys.executable).with_name("serve")), "deploy", str(path), "-a", self.dashboard]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if wait:
            self.settle()

    def settle(self) -> None:
        """Wait until the application runs as it was deployed last."""
        time.sleep(2.0)
        while (status := serve.status().applications[APP_NAME]).status != "RUNNING":
            if status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise RuntimeError(status.message)
            time.sleep(0.5)

    def load(self, questions: list[Question], during: Any = None, **plan: Any) -> LoadTest:
        """A load test of the application, with the replicas it had."""
        url = f"http://127.0.0.1:{self.port}"
        test = LoadTest(
            Plan(url, [METHOD], slo_ttft_ms=SLO_S * 1e3, **plan), Workload(questions, max_tokens=8), corpora=(None,)
        )
        began: list[float] = []
        test.warmed = lambda _: began.append(time.perf_counter())
        with _watched() as samples:
            helper = threading.Thread(target=during or (lambda: None))
            helper.start()
            asyncio.run(test.run())
            helper.join()
        test.samples = [ReplicaSample(at - began[0] + test.warm_up[-1].end_s, replicas) for at, replicas in samples]
        return test


@contextmanager
def _watched() -> Iterator[list[tuple[float, dict[str, int]]]]:
    """Replicas by deployment, once a second: all that exist, those that start or stop included."""
    samples: list[tuple[float, dict[str, int]]] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(1.0):
            found = serve.status().applications[APP_NAME].deployments
            counts = {name: sum(found[name].replica_states.get(one, 0) for one in STATES) for name in PARTS}
            samples.append((time.perf_counter(), counts))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()


def step(bench: Bench, chart: Path | None) -> dict[str, Any]:
    """From 2 clients to 16 and back, autoscaled; and the smallest fixed size that keeps the objective at 16."""
    few_topics = _questions(4)  # so that chunks are in memory most of the time, and a fetch is not the p95
    bounds = {"max_ongoing_requests": 64, "max_queued_requests": 64}
    sizes = {}
    for repairers in (3, 4, 5, 6):
        bench.deploy(**bounds, repairer_replicas=repairers, engine_replicas=2)
        rows = _counted(bench.load(few_topics, concurrency=[MANY], requests=160, warm_up=48))
        sizes[repairers + 2] = _p95(rows)
        print(f"fixed, {repairers} repairers and 2 engines: p95 TTFT {sizes[repairers + 2]:.2f} s at {MANY} clients")
        if sizes[repairers + 2] <= SLO_S:
            break
    best = min((size for size, p95 in sizes.items() if p95 <= SLO_S), default=max(sizes))
    scaling = {
        "enabled": True,
        "slo_ttft_s": SLO_S,
        "max_repairer_replicas": 8,
        "max_engine_replicas": 3,
        "downscale_delay_s": 20,
    }
    bench.deploy(system="Scale.", **bounds, repairer_replicas=1, engine_replicas=1, autoscaling=scaling)
    test = bench.load(few_topics, ramp=[FEW, MANY, MANY, FEW], step_s=STEP_S)
    at = test.blocks[1].window[0]
    end = test.blocks[2].window[1]
    rows = _counted(test)
    back = next((t for t in range(0, 120, 5) if _late(rows, at + t, end) <= SLO_S), None)
    paid = sum(sum(one.replicas.values()) for one in test.samples if test.blocks[0].window[0] <= one.at_s < end)
    if chart:
        report = test.report()
        report["config"]["model"] = f"mocks that take the published times of Qwen2.5-3B, {SLOWER:.0f} times slower"
        ramp_chart(report, chart)
    return {
        "fixed_p95_s": sizes,
        "best_fixed_replicas": best,
        "slo_s": round(SLO_S, 3),
        "p95_s_before": _late(rows, at - 30, at),
        "p95_s_by_20_s_after": [_late(rows, at + t, at + t + 20) for t in range(0, 120, 20)],
        "s_until_p95_is_kept": back,
        "replica_seconds": paid,
        "replica_seconds_of_best_fixed": round(best * (end - test.blocks[0].window[0])),
        "ratio": round(paid / (best * (end - test.blocks[0].window[0])), 3),
        "turns_after_the_step": {name: _turns(test.samples, name, at, end) for name in PARTS},
        "turns_with_the_step_down": {name: _turns(test.samples, name, at, end + STEP_S) for name in PARTS},
        "most": {name: max(one.replicas[name] for one in test.samples) for name in PARTS},
        "requests": len(rows),
        "errors": _errors(test),
    }


def overload(bench: Bench, chart: Path | None) -> dict[str, Any]:
    """Four times the capacity of two repairers and an engine, Poisson."""
    capacity = 2 / REPAIR_S
    # What is let in has to be done in twice the unloaded time: about capacity times that.
    bench.deploy(repairer_replicas=2, engine_replicas=1, max_ongoing_requests=8, max_queued_requests=2)
    alone = _p95(_counted(bench.load(_questions(4), concurrency=[1], requests=24, warm_up=24)))
    test = bench.load(_questions(4), rates=[4 * capacity], requests=round(4 * capacity * 40), warm_up=1)
    rows = [row for block in test.blocks for row in block.rows]
    refused = [row for row in rows if row.status == 429]
    answered = [row for row in rows if row.error is None]
    return {
        "capacity_rps": round(capacity, 2),
        "arrivals_rps": round(4 * capacity, 2),
        "unloaded_p95_s": alone,
        "accepted_p95_s": _p95(answered),
        "ratio": round(_p95(answered) / alone, 3),
        "answered": len(answered),
        "refused": len(refused),
        "errors": _errors(test),
        "refused_in_ms": {
            f"p{cut}": round(float(np.percentile([row.e2e_ms for row in refused], cut)), 1) for cut in (50, 95)
        },
        "refused_without_retry_after": sum(not row.wait_s for row in refused),
    }


def redeploy(bench: Bench, chart: Path | None) -> dict[str, Any]:
    """`serve deploy` of another version under load."""
    size = {"repairer_replicas": 2, "engine_replicas": 2}
    bench.deploy(system="First.", **size)
    took: list[float] = []

    def replace() -> None:
        time.sleep(15.0)
        began = time.perf_counter()
        bench.deploy(system="Second version.", **size)
        took.append(time.perf_counter() - began)

    test = bench.load(_questions(12), during=replace, concurrency=[6], requests=260)
    rows = _counted(test)
    lengths = sorted({row.prompt_tokens for row in rows if row.error is None})
    return {
        "requests": len(rows),
        "errors": _errors(test),
        "replaced_in_s": round(took[0], 1),
        # The prompts' lengths tell the versions apart.
        "prompt_tokens": {length: sum(row.prompt_tokens == length for row in rows) for length in lengths},
        "p95_s": _p95(rows),
    }


def content(bench: Bench, chart: Path | None) -> dict[str, Any]:
    """Chunks found in host memory by three repairers, routed by load alone and by content."""
    found = {}
    for name, by_load in (("by_load", True), ("by_content", False)):
        bench.deploy(system=f"{name}.", by_load=by_load, repairer_replicas=3, engine_replicas=1)
        rows = _counted(bench.load(_questions(TOPICS), concurrency=[5], requests=400))[200:]
        fetched = np.mean([row.stages_ms["fetch"] for row in rows]) / (FETCH_MS * SLOWER)
        found[name] = {"host_hit_rate": round(1 - float(fetched), 3), "ttft_p95_s": _p95(rows), "requests": len(rows)}
    return found


def _questions(topics: int) -> list[Question]:
    """Questions on topics whose popularity falls as Zipf has it."""
    random = np.random.default_rng(7)
    popularity = 1 / np.arange(1, topics + 1) ** 0.8
    drawn = random.choice(topics, p=popularity / popularity.sum(), size=500)
    return [Question(id=str(number), question=f"topic-{topic} Who?") for number, topic in enumerate(drawn)]


def _counted(test: LoadTest) -> list[Row]:
    return sorted((r for b in test.blocks for r in b.rows if r.phase == "counted"), key=lambda row: row.submit_s)


def _p95(rows: list[Row]) -> float:
    answered = [row.ttft_ms for row in rows if row.error is None]
    return round(float(np.percentile(answered, 95)) / 1e3, 3) if answered else float("inf")


def _late(rows: list[Row], start: float, end: float) -> float:
    """p95 of those that were sent between two times."""
    return _p95([row for row in rows if start <= row.submit_s < end])


def _errors(test: LoadTest) -> dict[str, int]:
    kinds = [row.error for block in test.blocks for row in block.rows if row.error]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def _turns(samples: list[ReplicaSample], name: str, start: float, end: float) -> int:
    """Changes of direction of a deployment's size."""
    sizes = [one.replicas[name] for one in samples if start <= one.at_s < end]
    changes = [b > a for a, b in pairwise(sizes) if a != b]
    return sum(a != b for a, b in pairwise(changes))


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


SHOWN = {"step": step, "overload": overload, "redeploy": redeploy, "content": content}


def main() -> None:
    """Run the parts asked for, print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SHOWN), default=list(SHOWN), help="what to show")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--chart", type=Path, help="write the step's figure to this file")
    arguments = parser.parse_args()

    from tests.tiny import tiny_model_dir

    tune()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path.cwd()), os.environ.get("PYTHONPATH"))))
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        port, dashboard = _free_port(), _free_port()
        ray.init(address="local", num_cpus=8, include_dashboard=True, dashboard_port=dashboard, log_to_driver=False)
        try:
            bench = Bench(Path(folder), port, f"http://127.0.0.1:{dashboard}", tiny_model_dir(Path(folder)))
            for name in arguments.only:
                found[name] = SHOWN[name](bench, arguments.chart)
                print(json.dumps({name: found[name]}, indent=2), flush=True)
        finally:
            serve.shutdown()
            ray.shutdown()
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
