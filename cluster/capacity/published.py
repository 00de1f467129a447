# SPDX-License-Identifier: Apache-2.0
"""CacheRepair's closed-loop load test, and what is known about the installation it ran on.

Qwen2.5-3B, one A800, 256 requests a cell, one run of each: Table 21. The repairer has 30 million parameters and runs
inside the engine's process, on its GPU.
"""

from __future__ import annotations

from cluster.capacity.loadtest import Cell, LoadTest, Percentiles
from cluster.capacity.model import Cluster, Method, Stages, Workload
from cluster.capacity.targets import PUBLISHED

TARGET = PUBLISHED["qwen2.5-3b"]
_CONCURRENCY = (1, 2, 4, 8)
_RPS_AND_P95_MS: dict[Method, tuple[tuple[float, float], ...]] = {
    "full": ((7.45, 130.6), (8.96, 219.3), (10.42, 312.5), (11.35, 521.9)),
    "stale": ((12.43, 29.5), (19.48, 50.3), (31.61, 65.7), (44.61, 96.7)),
    "repaired": ((11.35, 52.2), (16.90, 74.2), (24.25, 105.4), (30.70, 173.9)),
}
TABLE_21 = LoadTest(
    cells=[
        Cell(method=method, concurrency=clients, requests=256, throughput_rps=rps, ttft_ms=Percentiles(p95=p95))
        for method, row in _RPS_AND_P95_MS.items()
        for clients, (rps, p95) in zip(_CONCURRENCY, row, strict=True)
    ]
)
"""Requests per second and 95th percentile of the time to first token."""

WORKLOAD = Workload(
    mean_tokens=2800,
    sd_tokens=1100,
    min_tokens=600,
    max_tokens=4096,
    output_tokens=5.5,
    max_output_tokens=32,
    top_k=20,
)
"""The caps (4,096 document tokens, 20 chunks, 32 new tokens) are published (section 3.8). Lengths within them and the
answers' mean length are not in our sources: a reconstruction [I], chosen with Table 21 in view."""

CLUSTER = Cluster(batch_tokens=4352)
"""One engine whose device also repairs; `max_num_batched_tokens` as published (section 3.8)."""

PRIOR = Stages(
    step_s=0.0127,
    macs_per_s=1.08e14,
    load_s_per_token=3.7e-6,
    repair_macs_per_s=2.8e13,
    outside_s=0.001,
)
"""What other tables say: Table 20's times of stale KV at 4K, 8K and 16K tokens are 12.7 ms plus 3.7 us a token; its
times of full prefill are 1.1e14 MAC/s; Table 1's 12.55 ms for the 51M repairer at 4.1K tokens are 2.8e13 MAC/s."""

TRAINING_GPU_HOURS = (65.9, 84.5)
STATISTICS_GPU_HOURS = 8.9
"""One-time cost of a repair network for the 3B target, least and most, and of its statistics pass (section 3.7)."""

FITTED_AT = 4
"""Concurrency of the one point of Table 21 that the model is fitted on. A loaded point says more than an idle one."""
