# SPDX-License-Identifier: Apache-2.0
"""Precompute's compute stage against bare batched transformers prefill, in tokens per second, on the same chunks.

    python -m benchmarks.precompute [--chunks 64] [--store-dtype float32] [--json FILE]

The stage is the job's own actor class with a store in a temporary folder: prefill, undoing the rotary embedding,
conversion, digest, write and fsync. Bare prefill is the target's decoder on the same length-sorted batches: no
logits, and nothing kept. Tasks of both take turns, so that a busy machine slows both; what the ratio leaves out is
Ray's start and the loading of the model, which a job pays once.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from kvcache.settings import Settings, load_settings
from kvcache.target import TargetLLM, load_tokenizer
from pipelines.precompute import BATCHES_PER_TASK, ChunkWriter, length_batches
from retrieval.chunking import Chunker

PASSAGES = Path(__file__).resolve().parent.parent / "examples" / "corpus" / "passages.jsonl"


def example_chunks(settings: Settings, count: int) -> list[list[int]]:
    """Token ids of the first chunks of the example corpus."""
    chunker = Chunker(load_tokenizer(settings), settings.chunking)
    records = map(json.loads, PASSAGES.read_text(encoding="utf-8").splitlines())
    cut = (chunk.token_ids for record in records for chunk in chunker.chunks(record.get("title", ""), record["text"]))
    return [list(ids) for ids in itertools.islice(cut, count)]


@torch.inference_mode()
def bare_prefill(target: TargetLLM, batch: list[list[int]]) -> None:
    """One right-padded batch through the decoder."""
    longest = max(map(len, batch))
    input_ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids in batch], device=target.device)
    target.model.get_decoder()(input_ids=input_ids, use_cache=True)


def measure(settings: Settings, chunks: list[list[int]], threads: int) -> dict[str, float]:
    """Tokens per second of the stage and of bare prefill, and their ratio."""
    writer, target = ChunkWriter(settings, threads), TargetLLM.load(settings=settings)
    batches = [
        [ids.tolist() for ids in b] for b in length_batches(map(np.array, chunks), settings.pipeline.batch_tokens)
    ]
    bare_prefill(target, batches[-1])
    seconds = {"stage": 0.0, "bare": 0.0}
    written = 0
    for start in range(0, len(batches), BATCHES_PER_TASK):
        task = batches[start : start + BATCHES_PER_TASK]
        begin = time.perf_counter()
        for rows in writer(pa.table({"batch": task})):
            written += sum(rows["bytes"].to_pylist())
        middle = time.perf_counter()
        for batch in task:
            bare_prefill(target, batch)
        seconds["stage"] += middle - begin
        seconds["bare"] += time.perf_counter() - middle
    tokens = sum(map(len, chunks))
    return {
        "chunks": len(chunks),
        "tokens": tokens,
        "bytes_written": written,
        "stage_tokens_per_s": tokens / seconds["stage"],
        "bare_tokens_per_s": tokens / seconds["bare"],
        "ratio": seconds["bare"] / seconds["stage"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=64, help="chunks of the example corpus")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of both passes")
    parser.add_argument("--store-dtype", choices=("auto", "float16", "bfloat16", "float32"), default="auto")
    parser.add_argument("--json", help="write the numbers to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = load_settings(store={"uri": folder, "dtype": options.store_dtype})
        result = measure(settings, example_chunks(settings, options.chunks), options.threads)
    print(f"{result['chunks']} chunks, {result['tokens']} tokens, {result['bytes_written'] / 2**20:.0f} MiB written")
    print(f"compute stage {result['stage_tokens_per_s']:8.1f} tokens/s")
    print(
        f"bare prefill  {result['bare_tokens_per_s']:8.1f} tokens/s   ratio {result['ratio']:.2f} (goal: at least 0.9)"
    )
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"threads": options.threads, "store_dtype": options.store_dtype, **result}, file)


if __name__ == "__main__":
    main()
