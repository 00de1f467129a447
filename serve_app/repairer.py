# SPDX-License-Identifier: Apache-2.0
"""The Repairer deployment: ordered chunks in, a repaired prefix handed off."""

from __future__ import annotations

import os
from dataclasses import replace

import ray
import torch

from kvcache.arena import Arena
from kvcache.handoff import RayTransport, SharedMemoryTransport, Transport
from kvcache.settings import Settings
from kvcache.store import ChunkStore
from kvcache.target import TargetLLM
from repair.mender import Mender
from serve_app.messages import MendRequest, MendResult
from serve_app.meter import ServiceMeter
from serve_app.metrics import RepairMetrics
from serve_app.request_log import log_request

_WAITS = ("repair_queue", "handoff_queue")
_WRITING = ("rotary", "handoff")


class RepairerDeployment:
    """Mends prefixes; one target LLM, one host tier and one hand-off arena.

    Args:
        settings: target, store, host tier, hand-off and methods.

    Raises:
        StoreMismatchError: the store belongs to another target; names both.
    """

    def __init__(self, settings: Settings) -> None:
        target = TargetLLM.load(settings=settings)
        # Ray gives an actor of a fraction of a CPU one OpenMP thread.
        torch.set_num_threads(settings.target.threads or len(os.sched_getaffinity(0)))
        store = ChunkStore.of(settings)
        store.check_target()
        self._mender = Mender(target, store, _transport(settings), settings)
        self._meter = ServiceMeter(settings.serve.autoscaling.slo_ttft_s)
        self._metrics = RepairMetrics()
        self._node = ray.get_runtime_context().get_node_id()

    async def mend(self, request: MendRequest) -> MendResult:
        """Fetch, repair and hand off a prefix.

        Raises:
            UnknownMethodError, MethodParamsError: the request cannot be worked on.
        """
        self._meter.arrived()
        try:
            result = await self._mender.mend(request)
        except BaseException:
            self._meter.given_up()
            raise
        self._measure(result)
        if result.handoff is not None:
            result = replace(result, node=self._node)
        log_request(
            "mended",
            request.request_id,
            result.stages,
            method=result.method,
            rows=result.rows,
            hits=result.hits,
            misses=result.misses,
            fallback=result.fallback,
        )
        return result

    def _measure(self, result: MendResult) -> None:
        if result.fallback is not None:
            self._meter.given_up()
            return
        work = {stage: seconds for stage, seconds in result.stages.items() if stage not in _WAITS}
        service, fetch = sum(work.values()), work.get("fetch", 0.0)
        writing = sum(work.get(stage, 0.0) for stage in _WRITING)
        # One request at a time is on the device, and one is handed off.
        self._meter.served(service, service, (service - fetch - writing, writing))

    async def ready(self) -> None:
        """Return when requests can be worked on."""

    async def check_health(self) -> None:
        """Serve's health check."""
        self._metrics.queued(self._mender.queued)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """For the autoscaling policy."""
        return self._meter.stats()

    def record_routing_stats(self) -> dict[str, int]:
        """For the request router: chunks that the host tier holds when it is full."""
        tier = self._mender.host_tier
        held = tier.stats()
        return (
            {"tier_chunks": held["entries"] * tier.capacity_bytes // held["used_bytes"]} if held["used_bytes"] else {}
        )

    def __del__(self) -> None:
        if hasattr(self, "_mender"):
            self._mender.shutdown()


def _transport(settings: Settings) -> Transport:
    wanted = settings.handoff.transport
    nodes = sum(node["Alive"] for node in ray.nodes())
    if wanted == "ray" or (wanted == "auto" and nodes > 1):
        return RayTransport()
    return SharedMemoryTransport(Arena(settings.handoff.arena_bytes, settings.handoff.lease_s))
