# SPDX-License-Identifier: Apache-2.0
"""What a ramp looked like over time."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cluster.loadtest.rows import Block

BINS_PER_STEP = 10
LEAST_BIN_S = 1.0
_REPLICAS = re.compile(r"^ray_serve_deployment_replica_healthy\{([^}]*)\} (\S+)", re.MULTILINE)
_DEPLOYMENT = re.compile(r'(?:^|,)deployment="([^"]*)"')


@dataclass(frozen=True)
class ReplicaSample:
    """Healthy replicas by deployment at a time (seconds on the run's clock)."""

    at_s: float
    replicas: dict[str, int]


def replicas_in(metrics: str) -> dict[str, int]:
    """Healthy replicas by deployment, out of Ray Serve's metrics in Prometheus text; empty when it does not tell."""
    found: Counter[str] = Counter()
    for labels, value in _REPLICAS.findall(metrics):
        if deployment := _DEPLOYMENT.search(labels):
            found[deployment[1]] += int(float(value))
    return dict(found)


def timeline(blocks: Sequence[Block], samples: Sequence[ReplicaSample]) -> list[dict[str, Any]]:
    """Ten bins to a step, none shorter than a second.

    A bin has the method, the step's `concurrency`, `t_s` (its start, seconds into the method's ramp), throughput of
    whole answers, p95 of the TTFT of those that ended in it (None without any), errors, and `replicas` by deployment as
    last told; without samples there is no `replicas`.

    Args:
        blocks: a ramp's steps, in order.
        samples: in order of time.
    """
    bins = []
    for block in blocks:
        steps = [one for one in blocks if one.method == block.method]
        zero, (start, end) = steps[0].window[0], block.window
        if end <= start:
            continue
        rows = [row for step in steps for row in step.rows]
        edges = np.linspace(start, end, max(1, min(BINS_PER_STEP, round((end - start) / LEAST_BIN_S))) + 1)
        for left, right in itertools.pairwise(edges):
            ended = [row for row in rows if left <= row.end_s < right]
            ttft = [row.ttft_ms for row in ended if row.error is None]
            one = {
                "method": block.method,
                "t_s": round(float(left - zero), 3),
                "concurrency": block.load.concurrency,
                "throughput_rps": round(len(ttft) / float(right - left), 4),
                "ttft_p95_ms": round(float(np.percentile(ttft, 95)), 3) if ttft else None,
                "errors": len(ended) - len(ttft),
            }
            if samples:
                told = [sample for sample in samples if sample.at_s < right]
                one["replicas"] = (told or samples)[-1 if told else 0].replicas
            bins.append(one)
    return bins
