# SPDX-License-Identifier: Apache-2.0
"""What the framework alone adds to the time to first token: HTTP, Serve and our ingress, in front of mocks.

    python -m benchmarks.framework --clients 1 32 --requests 400 --json results.json

Engine, repairer and retriever are `serve_app.mocks`, which answer at once; the clients stream over one kept-alive
connection each. Closed loop: a client asks again when its answer is complete.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

import httpx
import ray
from ray import serve

from kvcache.settings import load_settings
from serve_app.app import Parts, run
from serve_app.mocks import MockEngine, MockRepairer, MockRetriever
from serve_app.tuning import tune

BODY = {"messages": [{"role": "user", "content": "Who wrote the song?"}], "stream": True, "max_tokens": 4}
WARM_UP = 50


async def measure(url: str, clients: int, requests: int) -> dict[str, float]:
    """TTFT over all requests of a closed loop, in milliseconds."""
    ttft: list[float] = []
    left = iter(range(requests))

    async def client() -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
            for _ in left:
                began = time.perf_counter()
                async with http.stream("POST", f"{url}/v1/chat/completions", json=BODY) as answer:
                    answer.raise_for_status()
                    first = True
                    async for _ in answer.aiter_raw():
                        if first:
                            ttft.append((time.perf_counter() - began) * 1e3)
                            first = False

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    seconds = time.perf_counter() - began
    cuts = statistics.quantiles(ttft, n=100, method="inclusive")
    return {
        "clients": clients,
        "requests": requests,
        "ttft_p50_ms": round(cuts[49], 2),
        "ttft_p95_ms": round(cuts[94], 2),
        "requests_per_s": round(requests / seconds, 1),
    }


def main() -> None:
    """Start Serve with mocks, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 32], help="concurrent clients, one row each")
    parser.add_argument("--requests", type=int, default=400, help="requests per row")
    parser.add_argument("--port", type=int, default=8199, help="port of the service")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()

    from tests.tiny import tiny_model_dir

    with tempfile.TemporaryDirectory() as folder:
        settings = load_settings(
            target={"model": tiny_model_dir(Path(folder))},
            serve={"port": arguments.port, "max_ongoing_requests": 64},
        )
        tune()
        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
        try:
            run(settings, parts=Parts(MockRetriever, MockRepairer, MockEngine))
            url = f"http://127.0.0.1:{arguments.port}"
            asyncio.run(measure(url, 4, WARM_UP))
            rows = [asyncio.run(measure(url, clients, arguments.requests)) for clients in arguments.clients]
        finally:
            serve.shutdown()
            ray.shutdown()
    print(f"{'clients':>8} {'TTFT p50':>10} {'TTFT p95':>10} {'requests/s':>11}")
    for row in rows:
        print(f"{row['clients']:>8} {row['ttft_p50_ms']:>7} ms {row['ttft_p95_ms']:>7} ms {row['requests_per_s']:>11}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
