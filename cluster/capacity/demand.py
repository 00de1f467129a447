# SPDX-License-Identifier: Apache-2.0
"""What is asked for, what machines can do, and what they cost: the assumptions of a plan, each with its default."""

from __future__ import annotations

import math
from dataclasses import dataclass

_EMBEDDING_BYTES = 384 * 4
_EXACT_TERMS = 1000
HOURS_PER_MONTH = 730


@dataclass(frozen=True)
class Demand:
    """What has to be served.

    Attributes:
        rate: requests per second.
        chunks: chunks in the corpus.
        ttft_s: bound on the 95th percentile of the time to first token.
        chunk_tokens: tokens of a chunk.
        skew: exponent of the chunks' popularity (Zipf): the i-th most popular one is asked for in proportion to
            1 / i ** skew; 0 is uniform.
    """

    rate: float
    chunks: int
    ttft_s: float
    chunk_tokens: int = 512
    skew: float = 0.9


@dataclass(frozen=True)
class Prices:
    """US dollars; list prices move, so check them.

    Attributes:
        device_hour: a GPU, its share of a server included.
        server_hour: a server without GPU (retrieval; fetching for stale KV).
        storage_tb_month: object storage, 10^12 bytes.
        million_reads: GET requests.
    """

    device_hour: float = 2.5
    server_hour: float = 1.0
    storage_tb_month: float = 23.0
    million_reads: float = 0.4

    def of(self, devices: int, servers: int, stored_bytes: float, reads_per_s: float) -> dict[str, float]:
        """Dollars per hour by what they are for."""
        return {
            "devices": devices * self.device_hour,
            "servers": servers * self.server_hour,
            "storage": stored_bytes / 1e12 * self.storage_tb_month / HOURS_PER_MONTH,
            "reads": reads_per_s * 3600 / 1e6 * self.million_reads,
        }


@dataclass(frozen=True)
class Hardware:
    """What one node of each kind can do.

    Attributes:
        host_bytes: host memory of a repair node for chunk caches. Requests go to the node that holds their chunks, so
            the nodes' memories add up.
        storage_bytes_per_s: of a repair node, from the object store (25 GbE).
        first_byte_s: of the object store.
        hop_bytes_per_s: of a repair node, to the engines (100 GbE).
        max_num_seqs: most requests in an engine's batch.
        batch_tokens: most tokens computed in one engine step.
        embed_s: a retriever's time to embed a question.
        scan_bytes_per_s: at which a retriever goes through vectors.
        prices: dollars.
    """

    host_bytes: float = 64 * 2**30
    storage_bytes_per_s: float = 3e9
    first_byte_s: float = 0.03
    hop_bytes_per_s: float = 12e9
    max_num_seqs: int = 16
    batch_tokens: int = 4352
    embed_s: float = 0.004
    scan_bytes_per_s: float = 10e9
    prices: Prices = Prices()

    def retrieval_s(self, chunks: int) -> float:
        """One search: an inverted-list index with 4 sqrt(M) lists, 16 of them visited."""
        visited = min(16 / (4 * chunks**0.5), 1.0)
        return self.embed_s + embedding_index(chunks) * visited / self.scan_bytes_per_s


def embedding_index(chunks: int) -> float:
    """Bytes of the vectors: 384 float32 each."""
    return float(chunks * _EMBEDDING_BYTES)


def hit_rate(held: float, chunks: int, skew: float) -> float:
    """Share of requests for chunks that find theirs among the `held` most popular of `chunks`."""
    if held >= chunks:
        return 1.0
    return _popularity(held, skew) / _popularity(chunks, skew)


def _popularity(first: float, skew: float) -> float:
    """Sum of 1 / i ** skew up to `first`: exact at the head, where it matters, an integral beyond."""
    head = int(min(first, _EXACT_TERMS))
    total = sum(i**-skew for i in range(1, head + 1))
    if first <= _EXACT_TERMS:
        return total
    low, high = head + 0.5, first + 0.5
    if abs(skew - 1) < 1e-9:
        return total + math.log(high / low)
    return total + (high ** (1 - skew) - low ** (1 - skew)) / (1 - skew)
