# SPDX-License-Identifier: Apache-2.0
"""What the service counts, and where Prometheus reads it.

Ray's metrics agent on every node collects what the processes of that node count; `/metrics` passes its text on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import httpx
import ray
from ray.serve import metrics

from kvcache.chunk_object import MissReason
from serve_app.errors import unavailable

HEALTH_CHECK_S = 5.0
"""Seconds between a replica's health checks. Gauges are set anew at each: Ray drops one that was not for some 20 s."""
_DAMAGED = {str(reason) for reason in MissReason if reason.damaged}
_SECONDS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0]


class RequestMetrics:
    """Counters and histograms of the ingress. Made inside a replica, so that Serve adds its tags."""

    def __init__(self) -> None:
        self._requests = metrics.Counter("rag_requests", "Requests by outcome.", tag_keys=("method", "status"))
        self._stages = metrics.Histogram(
            "rag_stage_seconds", "Time of one stage of a request.", boundaries=_SECONDS, tag_keys=("stage", "method")
        )
        self._hits = metrics.Counter("rag_chunk_hits", "Chunk caches found, by tier.", tag_keys=("tier",))
        self._misses = metrics.Counter("rag_chunk_misses", "Chunks computed on the spot.", tag_keys=("reason",))
        self._damaged = metrics.Counter(
            "rag_checksum_failures", "Stored chunk caches that were not what their name promises."
        )
        self._fallbacks = metrics.Counter(
            "rag_fallback_full_prefill", "Requests whose prefix was computed in full instead.", tag_keys=("reason",)
        )
        self._in_flight = metrics.Gauge("rag_requests_in_flight", "Requests in flight.")

    def mended(self, hits: Mapping[str, int], misses: Mapping[str, int]) -> None:
        """Count where the chunks of a request came from: hits by tier, misses by reason."""
        for tier, count in hits.items():
            if count:
                self._hits.inc(count, {"tier": str(tier)})
        for reason, count in misses.items():
            if count:
                self._misses.inc(count, {"reason": str(reason)})
                if reason in _DAMAGED:
                    self._damaged.inc(count)

    def ended(self, method: str, status: int, stages: Mapping[str, float], fallback: str | None = None) -> None:
        """Count a request that ended.

        Args:
            method: repair method, "none" when nothing was retrieved.
            status: HTTP status; 499 for a client that left.
            stages: seconds by stage.
            fallback: why the prefix was computed in full instead, if it was.
        """
        self._requests.inc(1, {"method": method, "status": str(status)})
        if fallback:
            self._fallbacks.inc(1, {"reason": fallback})
        for stage, seconds in stages.items():
            self._stages.observe(seconds, {"stage": stage, "method": method})

    def in_flight(self, count: int) -> None:
        """Tell how many requests are in flight."""
        self._in_flight.set(count)


class RepairMetrics:
    """Gauge of a repairer, set at its health checks."""

    def __init__(self) -> None:
        self._queue = metrics.Gauge("rag_repair_queue", "Requests that wait for the repair device.")

    def queued(self, count: int) -> None:
        """Tell how many requests wait."""
        self._queue.set(count)


class IndexMetrics:
    """Gauge of a retriever, set at its health checks."""

    def __init__(self) -> None:
        self._generation = metrics.Gauge(
            "rag_index_generation",
            "1 for the generation of a corpus that is searched.",
            tag_keys=("corpus", "generation"),
        )

    def searched(self, generations: Mapping[str, str]) -> None:
        """Tell the generation of each corpus."""
        for corpus, generation in generations.items():
            self._generation.set(1, {"corpus": corpus, "generation": generation})


class NodeMetrics:
    """Reads the metrics endpoint of this node's Ray agent."""

    def __init__(self) -> None:
        self._client = httpx.AsyncClient(timeout=5.0, trust_env=False)
        self._url: str | None = None

    async def text(self) -> str:
        """Prometheus text of everything on this node.

        Raises:
            ApiError: 503, the agent does not answer.
        """
        try:
            self._url = self._url or await asyncio.to_thread(_agent_url)
            answer = await self._client.get(self._url)
            answer.raise_for_status()
        except (httpx.HTTPError, LookupError) as error:
            self._url = None
            raise unavailable(f"this node's metrics agent does not answer ({type(error).__name__})") from error
        return answer.text


def _agent_url() -> str:
    here = ray.get_runtime_context().get_node_id()
    for node in ray.nodes():
        if node["NodeID"] == here and node["MetricsExportPort"]:
            return f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    raise LookupError("no metrics agent on this node")
