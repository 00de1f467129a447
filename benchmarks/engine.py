# SPDX-License-Identifier: Apache-2.0
"""Time to first token of repair and engine alone: no HTTP, no Ray, no retrieval.

    python -m benchmarks.engine [--tokens 1000] [--chunks 8] [--question 40] [--rounds 8] [--methods full,stale]

One process holds the mender, another vLLM, as on a node of the service. Random token ids of the default target; chunks
come from the host tier; methods take turns. What `benchmarks.ttft` shows beyond these numbers is the service's own.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time

from engine.engine import Engine
from engine.types import GenerateRequest
from kvcache import fetch
from kvcache.arena import Arena
from kvcache.handoff import SharedMemoryTransport
from kvcache.settings import Settings, load_settings
from kvcache.store import ChunkStore
from kvcache.target import TargetLLM
from repair.mender import Mender
from repair.types import MendRequest

Chunks = tuple[tuple[int, ...], ...]


async def measure(
    settings: Settings, methods: list[str], chunks: Chunks, question: tuple[int, ...], rounds: int
) -> dict[str, dict[str, float]]:
    """Median milliseconds by method: `mend`, `engine`, both (`ttft`), and the mender's and the engine's stages."""
    target = TargetLLM.load(settings=settings)
    transport = SharedMemoryTransport(Arena(settings.handoff.arena_bytes, settings.handoff.lease_s))
    mender = Mender(target, ChunkStore.of(settings), transport, settings)
    engine = Engine(settings)
    await engine.start()
    times: dict[str, dict[str, list[float]]] = {method: {} for method in methods}
    try:
        for number in range(rounds + 1):
            for method in methods:
                request_id = f"{method}-{number}"
                begin = time.perf_counter()
                mended = await mender.mend(MendRequest(request_id, method, chunks, question))
                half = time.perf_counter()
                request = GenerateRequest(
                    request_id, (*mended.prefix_ids, *question), mended.handoff, {"max_tokens": 2, "temperature": 0.0}
                )
                stages = dict(mended.stages)
                end = 0.0
                async for delta in engine.generate(request):
                    end = end or time.perf_counter()
                    stages.update(delta.stages)
                stages.update({"mend": half - begin, "engine": end - half, "ttft": end - begin})
                if number:  # the first round computes the chunks and warms up
                    for stage, seconds in stages.items():
                        times[method].setdefault(stage, []).append(1e3 * seconds)
    finally:
        engine.shutdown()
        mender.shutdown()
    return {m: {stage: statistics.median(values) for stage, values in found.items()} for m, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of the prefix")
    parser.add_argument("--chunks", type=int, default=8, help="chunks of equal length")
    parser.add_argument("--question", type=int, default=40, help="tokens after the prefix")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--methods", default="full,stale", help="comma-separated; the first one is compared with")
    options = parser.parse_args()
    methods = options.methods.split(",")
    rng = random.Random(1)
    ids = [rng.randrange(100, 40_000) for _ in range(options.tokens + options.question)]
    length = options.tokens // options.chunks
    chunks = tuple(tuple(ids[start : start + length]) for start in range(0, length * options.chunks, length))
    with tempfile.TemporaryDirectory() as root:
        settings = load_settings().model_copy(update={"root": root})
        settings = settings.model_copy(update={"repair": settings.repair.model_copy(update={"methods": methods})})
        fetch.fetch(settings)
        found = asyncio.run(measure(settings, methods, chunks, tuple(ids[options.tokens :]), options.rounds))
    print(
        f"{length * options.chunks} tokens in {options.chunks} chunks, then {options.question}; p50 of {options.rounds}"
    )
    for method, stages in found.items():
        parts = ", ".join(f"{stage} {ms:.0f}" for stage, ms in stages.items() if stage != "ttft")
        ratio = found[methods[0]]["ttft"] / stages["ttft"]
        print(f"{method}: TTFT {stages['ttft']:.0f} ms, {methods[0]}/{method} {ratio:.1f}; stages, ms: {parts}")


if __name__ == "__main__":
    main()
