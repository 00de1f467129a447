# SPDX-License-Identifier: Apache-2.0
"""The repair step of CacheRepair against the rate at which this machine multiplies matrices.

    python -m benchmarks.repair [--tokens 1000] [--chunks 6] [--sizes S M] [--rounds 20] [--threads N] [--json FILE]

The default target's shapes (SmolLM2-135M: 30 layers, 3 KV heads of 64, hidden 576), random weights. The repair's MACs
are counted as in the published cost model: dense, attention as tokens x tokens (what block-causal attention leaves out
counts as done). The matrix rate is that of a square float32 product of 1024. Rounds of both take turns, so that a busy
machine slows both; the best of each counts.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable

import torch
from torch import nn

from kvcache.geometry import Geometry
from repair.network import SIZES, RepairNetwork
from repair.visibility import Visibility

SMOLLM2_135M = Geometry(30, 3, 64, 9, 576, 49152, 8192)
SIDE = 1024


def timed(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


@torch.no_grad()
def measure(size: str, tokens: int, chunks: int, rounds: int) -> dict[str, float]:
    """Rates in MAC/s and the repair's seconds."""
    geometry = SMOLLM2_135M
    network = RepairNetwork(SIZES[size], geometry, nn.Embedding(geometry.vocab_size, geometry.hidden_size)).eval()
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.normal_(std=0.02)
    stale = torch.randn(tokens, geometry.n_layers, geometry.n_kv_heads, 2, geometry.head_dim)
    ids = torch.randint(geometry.vocab_size, (tokens,))
    lengths = [len(part) for part in torch.arange(tokens).chunk(chunks)]
    left, right = torch.randn(2, SIDE, SIDE)

    def repair() -> None:
        network.repair_packed_(stale, ids, Visibility.of([lengths], network.config.attention, network.device))

    repair_s, matmul_s = math.inf, math.inf
    for _ in range(rounds + 2):
        repair_s = min(repair_s, timed(repair))
        matmul_s = min(matmul_s, timed(lambda: left @ right))
    macs = network.config.macs(geometry, tokens)
    rate, matmul = macs / repair_s, SIDE**3 / matmul_s
    return {"macs": macs, "repair_s": repair_s, "rate": rate, "matmul_rate": matmul, "ratio": rate / matmul}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of the prefix")
    parser.add_argument("--chunks", type=int, default=6, help="chunks of about equal length")
    parser.add_argument("--sizes", nargs="+", choices=sorted(SIZES), default=["S", "M"], help="sizes of the network")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", help="write the numbers to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{options.tokens} tokens in {options.chunks} chunks, {options.threads} thread(s), best of {options.rounds}")
    print("size   GMAC  repair ms  GMAC/s  matmul GMAC/s  ratio (goal: at least 0.70)")
    results = {}
    for size in options.sizes:
        found = results[size] = measure(size, options.tokens, options.chunks, options.rounds)
        print(
            f"{size:4} {found['macs'] / 1e9:6.2f} {1e3 * found['repair_s']:10.1f} {found['rate'] / 1e9:7.1f}"
            f" {found['matmul_rate'] / 1e9:14.1f} {found['ratio']:6.2f}"
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"tokens": options.tokens, "threads": options.threads, "sizes": results}, file)


if __name__ == "__main__":
    main()
