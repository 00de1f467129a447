# SPDX-License-Identifier: Apache-2.0
"""What the simulation is told: the requests, the times of one installation, and how many of each thing there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

Method = Literal["full", "stale", "repaired"]
METHODS: tuple[Method, ...] = ("full", "stale", "repaired")


@dataclass(frozen=True)
class Workload:
    """What requests look like.

    Attributes:
        mean_tokens: mean document tokens of a prompt, before clipping.
        sd_tokens: standard deviation of them, before clipping.
        min_tokens: fewest document tokens.
        max_tokens: most document tokens, where prompts are cut.
        header_tokens: tokens of the header chunk, in every prompt.
        question_tokens: tokens after the prefix.
        output_tokens: mean tokens of an answer, the end token included.
        max_output_tokens: where answers are cut.
        top_k: chunks of a prompt.
        fixed_outputs: answers all have the mean length, rather than a geometric one.
        documents: document tokens of measured prompts; where given, the means and bounds above do not matter.
        answers: tokens of measured answers, likewise.
    """

    mean_tokens: float
    sd_tokens: float = 0.0
    min_tokens: int = 1
    max_tokens: int = 1_000_000
    header_tokens: int = 24
    question_tokens: int = 60
    output_tokens: float = 16.0
    max_output_tokens: int = 1_000
    top_k: int = 8
    fixed_outputs: bool = False
    documents: tuple[int, ...] = ()
    answers: tuple[int, ...] = ()

    def prefixes(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Prefix tokens of that many requests, header included, `[count]` int64, in random order."""
        if self.documents:
            return _shuffled(rng, count, self.documents) + self.header_tokens
        tokens = stats.norm.ppf(_shuffled_quantiles(rng, count), self.mean_tokens, self.sd_tokens or 1e-9)
        return np.rint(np.clip(tokens, self.min_tokens, self.max_tokens)).astype(np.int64) + self.header_tokens

    def outputs(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Answer tokens of that many requests, `[count]` int64: geometric, because any token may be the last."""
        if self.answers:
            return _shuffled(rng, count, self.answers)
        if self.fixed_outputs:
            return np.full(count, max(round(self.output_tokens), 1), dtype=np.int64)
        least = min(2, self.max_output_tokens)  # a word and the end token
        chance = 1 / max(self.output_tokens - least + 1, 1)
        drawn = stats.geom.ppf(_shuffled_quantiles(rng, count), chance).astype(np.int64) + least - 1
        return np.minimum(drawn, self.max_output_tokens)


def _shuffled_quantiles(rng: np.random.Generator, count: int) -> np.ndarray:
    # Evenly spread rather than drawn: a run of a few hundred requests then has the percentiles of its distribution.
    return rng.permutation((np.arange(count) + 0.5) / count)


def _shuffled(rng: np.random.Generator, count: int, measured: tuple[int, ...]) -> np.ndarray:
    return np.sort(measured)[(_shuffled_quantiles(rng, count) * len(measured)).astype(np.int64)]


@dataclass(frozen=True)
class Stages:
    """Service times of one installation: what a fit finds.

    Attributes:
        step_s: seconds of an engine step apart from its matrix products (launches, weights read, sampling).
        macs_per_s: dense MACs per second of an engine.
        load_s_per_token: seconds of the engine to load one token's KV (copy, rotary embedding, paged write).
        repair_macs_per_s: dense MACs per second of a repairer.
        outside_s: seconds of a request in which no device works for it (client, HTTP, routing).
        retrieval_s: seconds of a retriever for one question.
        read_s_per_token: seconds of the engine to read one token's KV, which each step does for all its requests.
        assemble_s_per_token: seconds of a repair node to put one token's KV together (copies from host memory, rotary
            embedding, hand-off), for one request at a time.
        overlap: how many busy devices' worth of work a time-shared machine does at once: 1 when they take each other's
            cores, more when one alone leaves cores idle.
    """

    step_s: float
    macs_per_s: float
    load_s_per_token: float
    repair_macs_per_s: float
    outside_s: float
    retrieval_s: float = 0.0
    read_s_per_token: float = 0.0
    assemble_s_per_token: float = 0.0
    overlap: float = 1.0


@dataclass(frozen=True)
class Cluster:
    """How many of each, and how fast their links are.

    Attributes:
        engines: engines; each decodes up to `max_num_seqs` requests in one batch.
        repairers: repair devices. 0: repair runs on the engine's own device, and retrieval does too unless time-shared.
        retrievers: retrieval replicas, where they have devices of their own.
        max_num_seqs: most requests in an engine's batch.
        batch_tokens: most tokens computed in one engine step (chunked prefill).
        host_hit_rate: share of chunks found in host memory.
        first_byte_s: seconds until the object store sends a chunk's first byte.
        storage_bytes_per_s: of one repair node, from the object store.
        hop_bytes_per_s: of one repair node, to the engines.
        time_shared: without repairers: engine and repair work at the same time, each the slower for it, as processes
            on the same cores do; if not, one after the other, as kernels of one process do.
    """

    engines: int = 1
    repairers: int = 0
    retrievers: int = 1
    max_num_seqs: int = 16
    batch_tokens: int = 4096
    host_hit_rate: float = 1.0
    first_byte_s: float = 0.03
    storage_bytes_per_s: float = 3e9
    hop_bytes_per_s: float = float("inf")
    time_shared: bool = False


@dataclass(frozen=True)
class Closed:
    """Closed loop: each of `clients` sends its next request when one completes."""

    clients: int


@dataclass(frozen=True)
class Open:
    """Open loop: requests come at random (Poisson) whether or not earlier ones are done."""

    rate: float


Load = Closed | Open


@dataclass(frozen=True)
class Outcome:
    """What one simulated run showed.

    Attributes:
        throughput_rps: completed requests per second.
        ttft_s: seconds from sending to first token, per request, in the order of sending, `[requests]`.
        e2e_s: seconds from sending to last token, likewise.
        itl_s: seconds between a request's tokens, of all requests, `[gaps]`.
        parts_s: what of `ttft_s` was spent at the retrievers, the repairers (links included) and the engines, waiting
            included, by these names, `[requests]`.
        busy: share of the time that each kind of thing was in use, by kind.
    """

    throughput_rps: float
    ttft_s: np.ndarray
    e2e_s: np.ndarray
    itl_s: np.ndarray
    parts_s: dict[str, np.ndarray]
    busy: dict[str, float]

    def ttft(self, percentile: float) -> float:
        """Seconds."""
        return float(np.percentile(self.ttft_s, percentile))

    def e2e(self, percentile: float) -> float:
        """Seconds."""
        return float(np.percentile(self.e2e_s, percentile))

    def parts(self, percentile: float) -> dict[str, float]:
        """Mean seconds by part of those requests whose TTFT is at least at that percentile."""
        slow = self.ttft_s >= self.ttft(percentile)
        return {name: float(seconds[slow].mean()) for name, seconds in self.parts_s.items()}
