# SPDX-License-Identifier: Apache-2.0
"""Hand-off from a repair actor to an engine worker on one node, against one memcpy of the same bytes.

    python -m benchmarks.handoff [--tokens 1000] [--rounds 30] [--json FILE]

Two processes. The maker reserves memory, copies the KV in, commits and sends the ticket over a pipe; the reader opens
the hand-off in place, confirms and releases it. A hand-off's time is the maker's from `reserve` to the ticket, and the
reader's from the ticket to the release; the ticket itself travels in the request that goes to the engine in any case,
so the pipe, and how long the other process takes to wake up, are shown apart. A memcpy is the same `Tensor.copy_`
between two warm tensors of the same size in the maker. Rounds of both take turns, so that a busy machine slows both.

Copies that remain: the maker's write, which in the service is the rotation of the keys itself (it writes straight
into the hand-off), and the worker's write into vLLM's paged cache, which has a layout of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection

import torch

from kvcache.arena import Arena
from kvcache.chunk import token_digest
from kvcache.geometry import Geometry
from kvcache.handoff import HandoffIdentity, HandoffReader, SharedMemoryTransport

SMOLLM2_135M = Geometry(30, 3, 64, 9, 576, 49152, 8192)
FINGERPRINT = "0" * 64


def _read(pipe: Connection) -> None:
    reader = HandoffReader(FINGERPRINT, SMOLLM2_135M, torch.float32)
    while (ticket := pipe.recv()) is not None:
        begin = time.perf_counter()
        k, v = reader.open(ticket)
        float(k[-1, -1].sum() + v[-1, -1].sum())  # the tensors are readable
        reader.confirm(ticket)
        reader.release(ticket)
        pipe.send(time.perf_counter() - begin)


def measure(tokens: int, rounds: int) -> dict[str, float]:
    """Seconds (medians) of a hand-off, of the pipe there and back, and of a memcpy; and the first over the last."""
    shape = SMOLLM2_135M.kv_shape(tokens)
    identity = HandoffIdentity("r", tokens, token_digest(range(tokens)), FINGERPRINT, shape, "float32")
    source, destination = torch.rand(2, *shape), torch.empty(2, *shape)
    transport = SharedMemoryTransport(Arena(source.nbytes, lease_s=60))
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_read, args=(theirs,))
    process.start()
    handoffs, pipes, copies = [], [], []
    for _ in range(rounds + 3):  # the first ones touch pages
        begin = time.perf_counter()
        writer = transport.reserve(identity)
        writer.k.copy_(source[0])
        writer.v.copy_(source[1])
        ticket = writer.commit()
        made = time.perf_counter()
        ours.send(ticket)
        reading = ours.recv()
        handoffs.append(made - begin + reading)
        pipes.append(time.perf_counter() - made - reading)
        begin = time.perf_counter()
        destination.copy_(source)
        copies.append(time.perf_counter() - begin)
    ours.send(None)
    process.join()
    handoff, pipe, copy = (statistics.median(values[3:]) for values in (handoffs, pipes, copies))
    return {"bytes": source.nbytes, "handoff_s": handoff, "pipe_s": pipe, "memcpy_s": copy, "ratio": handoff / copy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1000, help="KV rows per hand-off")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1, help="threads of both copies")
    parser.add_argument("--json", help="write the numbers to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result = measure(options.tokens, options.rounds)
    mib = result["bytes"] / 2**20
    print(f"{options.tokens} tokens, {mib:.1f} MiB, median of {options.rounds} rounds, {options.threads} thread(s)")
    print(f"hand-off {1e3 * result['handoff_s']:7.2f} ms")
    print(f"pipe     {1e3 * result['pipe_s']:7.2f} ms   (there and back, two processes woken)")
    print(f"memcpy   {1e3 * result['memcpy_s']:7.2f} ms   ratio {result['ratio']:.2f} (goal: at most 1.2)")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"tokens": options.tokens, "threads": options.threads, **result}, file)


if __name__ == "__main__":
    main()
