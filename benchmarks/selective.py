# SPDX-License-Identifier: Apache-2.0
"""Selective recomputation against full prefill, in this process, on the target of the settings.

    python -m benchmarks.selective [--tokens 2000] [--chunks 10] [--methods LIST] [--rounds 3] [--threads N]

First the kernel alone, for evenly scattered rows; then whole methods, from the stale chunks in host memory to the
mended prefix. Random token ids: what is chosen does not matter for the time. Rounds of all take turns, so that a busy
machine slows all of them; the best of each counts.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable

import torch

from kvcache.settings import load_settings
from kvcache.target import TargetLLM
from repair.base import RepairRequest
from repair.selective.kernel import recompute
from repair.selective.prefix import AssembledPrefix
from repair.spec import parse_methods

METHODS = "epic,cacheblend,infoflow,prophetkv,relaxkv"
GOALS = {0.15: 0.30, 1.0: 1.15}
"""Most that a share of the rows may cost, as a share of full prefill at 2,000 tokens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of the prefix")
    parser.add_argument("--chunks", type=int, default=10, help="chunks of about equal length")
    parser.add_argument("--question", type=int, default=40, help="tokens of the question")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.05, 0.15, 0.5, 1.0], help="of the rows")
    parser.add_argument("--methods", default=METHODS, help="as for `cachemend evaluate`, e.g. epic:window=32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", help="write the seconds to this file")
    options = parser.parse_args()
    settings = load_settings()
    target = TargetLLM.load(settings=settings)
    torch.set_num_threads(options.threads)
    ids = torch.randint(target.geometry.vocab_size, (options.tokens + options.question,))
    chunks = [part.tolist() for part in ids[: options.tokens].chunk(options.chunks)]
    stale = [target.stale_kv([chunk])[0] for chunk in chunks]
    request = RepairRequest(chunks, stale, ids[options.tokens :].tolist())
    layers = target.geometry.n_layers

    def full() -> object:
        return target.model.get_decoder()(ids[None, : options.tokens].to(target.device), use_cache=True)

    def rows(share: float) -> Callable[[], object]:
        count = int(options.tokens * share)
        chosen = (torch.arange(count, device=target.device) * options.tokens) // count
        return lambda: recompute(target, [AssembledPrefix.of(target, stale)], [[chosen] * layers])

    work: dict[str, Callable[[], object]] = {"full prefill": full}
    work |= {f"{share:.0%} of the rows": rows(share) for share in options.shares}
    for spec in parse_methods(options.methods) if options.methods else ():
        repairer = spec.create(target, settings)
        asked = RepairRequest(request.chunks, request.stale, request.question_ids, spec.params)
        work[spec.label] = lambda repairer=repairer, asked=asked: repairer.repair(asked)
    best = dict.fromkeys(work, math.inf)
    with torch.inference_mode():
        for _ in range(options.rounds + 1):  # the first one warms up; the best never comes from it
            for name, run in work.items():
                best[name] = min(best[name], timed(run, target.device))
    print(f"{options.tokens} tokens in {len(chunks)} chunks, {torch.get_num_threads()} thread(s), best of the rounds")
    for name, seconds in best.items():
        goal = next((f" (goal: at most {GOALS[s]:.2f})" for s in GOALS if name == f"{s:.0%} of the rows"), "")
        print(f"{name:32} {1e3 * seconds:9.1f} ms {seconds / best['full prefill']:7.3f} of full prefill{goal}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"tokens": options.tokens, "seconds": best}, file, indent=2)


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
