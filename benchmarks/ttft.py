# SPDX-License-Identifier: Apache-2.0
"""Time to first token through HTTP, one client, methods taking turns on the same list of questions.

    python -m benchmarks.ttft [--methods full,stale] [--top-k 8] [--questions 10] [--json FILE]

Uses the example corpus (made on first use, like the demo) and starts the service itself. The first time round, the
chunks of the first method that reuses any come from the object store, later from the host tier. A client that uses one
method asks it question after question, so a method's turn is the whole list: between two long prefills even a process
that only passes messages on starts with cold caches. Later rounds run the methods forwards and backwards, so that a
machine that gets slower or faster meanwhile favours none. Answers are one token long, so that only the prefill counts.
Memory is that of the whole service, shared pages counted once (PSS).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import suppress

import psutil

from cachemend import demo, ui
from cachemend.client import Client
from cachemend.service import running_service
from kvcache import fetch
from kvcache.settings import load_settings

PASSES = ("from the store", "from memory")


def measure(client: Client, methods: list[str], questions: list[str], top_k: int) -> dict[str, dict]:
    """Milliseconds by method and pass."""
    for method in methods:  # one-time work of a method is not counted
        client.ask("What is this?", method=method, corpus=demo.CORPUS, top_k=top_k, max_tokens=1)
    times: dict[str, dict[str, list[float]]] = {method: {name: [] for name in PASSES} for method in methods}
    stages: dict[str, dict[str, list[float]]] = {method: {} for method in methods}
    tokens = []
    for name, order in ((PASSES[0], methods), (PASSES[1], methods), (PASSES[1], methods[::-1])):
        for method in order:
            for question in questions:
                answer = client.ask(question, method=method, corpus=demo.CORPUS, top_k=top_k, max_tokens=1)
                times[method][name].append(answer.ttft_s * 1e3)
                tokens.append(answer.prompt_tokens)
                if name == PASSES[-1]:
                    for stage, ms in answer.stages_ms.items():
                        stages[method].setdefault(stage, []).append(ms)
    return {
        "prompt_tokens": {"mean": statistics.mean(tokens), "min": min(tokens), "max": max(tokens)},
        "ttft_ms": {m: {name: statistics.median(values) for name, values in t.items()} for m, t in times.items()},
        "stages_ms": {m: {stage: statistics.median(values) for stage, values in s.items()} for m, s in stages.items()},
    }


def service_bytes() -> int:
    """Memory of this process's descendants, each shared page counted once."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="full,stale", help="comma-separated")
    parser.add_argument("--top-k", type=int, default=8, help="chunks per prompt")
    parser.add_argument("--questions", type=int, default=10)
    parser.add_argument("--json", help="write the numbers to this file")
    options = parser.parse_args()
    methods = options.methods.split(",")
    settings = load_settings()
    fetch.fetch(settings, say=ui.say)
    demo.prepare_corpus(settings)
    questions = [question.question for question in demo.read_questions()][: options.questions]
    with running_service(demo.APPLICATION, lambda _: None) as client:
        result = measure(client, methods, questions, options.top_k)
        time.sleep(1)
        result["service_bytes"] = service_bytes()
    print(
        f"prompt tokens: mean {result['prompt_tokens']['mean']:.0f}; {len(questions)} questions, top_k {options.top_k}"
    )
    for name in PASSES:
        times = {method: result["ttft_ms"][method][name] for method in methods}
        ratios = ", ".join(f"{methods[0]}/{m} {times[methods[0]] / times[m]:.1f}" for m in methods[1:])
        print(f"TTFT p50, chunks {name}: " + ", ".join(f"{m} {ms:.0f} ms" for m, ms in times.items()) + f"; {ratios}")
    for method in methods:
        parts = ", ".join(f"{stage} {ms:.0f}" for stage, ms in result["stages_ms"][method].items())
        print(f"stages of {method}, ms: {parts}")
    print(f"memory of the whole service: {result['service_bytes'] / 2**30:.1f} GiB (goal: under 8 GB)")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=2)


if __name__ == "__main__":
    main()
