# SPDX-License-Identifier: Apache-2.0
"""The discrete-event simulation: clients, retrieval, object storage, repair devices, the KV hop, engines.

A request waits at each of them in turn:

    client -> retriever -> store link (chunks not in host memory) -> repairer -> hop link -> engine -> client

Links send one request's bytes after another's (first come, first served). Each request goes to the repair node and to
the engine with the fewest requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy

from cluster.capacity.engine import Device, Engine, Job
from cluster.capacity.model import Closed, Cluster, Load, Method, Open, Outcome, Stages, Workload
from cluster.capacity.targets import Target

Steps = Generator[simpy.Event, Any, None]


def simulate(
    method: Method,
    load: Load,
    target: Target,
    workload: Workload,
    stages: Stages,
    cluster: Cluster,
    *,
    requests: int = 256,
    warmup: float = 0.0,
    seed: int = 7,
) -> Outcome:
    """Run that many requests to their end.

    Args:
        warmup: share of the requests, the first ones, that are left out of the times (not out of the throughput).
        seed: the same seed gives the same run.
    """
    run = _Run(method, target, workload, stages, cluster, requests, seed)
    run.start(load)
    run.env.run()
    seconds, skipped = run.env.now, int(warmup * requests)
    return Outcome(
        throughput_rps=requests / seconds,
        ttft_s=np.array(run.ttft_s[skipped:]),
        e2e_s=np.array(run.e2e_s[skipped:]),
        parts_s={name: np.array(seconds[skipped:]) for name, seconds in run.parts_s.items()},
        busy={
            name: float(sum(d.busy_s for d in devices) / seconds / units)
            for name, (devices, units) in run.kinds.items()
        },
    )


@dataclass
class _Node:
    """A repair node: its device and its links, and how many requests it works for."""

    device: Device
    storage: Device
    hop: Device
    jobs: int = 0


class _Run:
    """One run: the things in it, and the life of a request."""

    def __init__(
        self,
        method: Method,
        target: Target,
        workload: Workload,
        stages: Stages,
        cluster: Cluster,
        requests: int,
        seed: int,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.env = simpy.Environment()
        self.ttft_s: list[float] = []
        self.e2e_s: list[float] = []
        self.parts_s: dict[str, list[float]] = {"retrievers": [], "repairers": [], "engines": []}
        self._method, self._target, self._workload = method, target, workload
        self._stages, self._cluster = stages, cluster
        self._rng = rng
        self._prefixes = workload.prefixes(rng, requests)
        self._outputs = workload.outputs(rng, requests)
        self._missing = rng.binomial(workload.top_k, 1 - cluster.host_hit_rate, requests)
        self._gaps = rng.exponential(1.0, requests)

        shared = not cluster.repairers
        engines = [Device(self.env) for _ in range(cluster.engines)]
        self._engines = [Engine(self.env, device, target, stages, cluster) for device in engines]
        repairers = engines if shared else [Device(self.env) for _ in range(cluster.repairers)]
        self._nodes = [_Node(device, Device(self.env), Device(self.env)) for device in repairers]
        self._retriever = None if shared else Device(self.env, cluster.retrievers)
        self.kinds = {
            "engine": (engines, len(engines)),
            "storage link": ([node.storage for node in self._nodes], len(self._nodes)),
            "KV hop": ([node.hop for node in self._nodes], len(self._nodes)),
        }
        if self._retriever:
            self.kinds["repair"] = (repairers, len(repairers))
            self.kinds["retrieval"] = ([self._retriever], cluster.retrievers)

    def start(self, load: Load) -> None:
        """Let clients send all requests."""
        waiting = iter(range(len(self._prefixes)))
        if isinstance(load, Closed):
            for _ in range(load.clients):
                self.env.process(self._client(waiting))
        else:
            self.env.process(self._arrivals(waiting, load))

    def _client(self, waiting: Any) -> Steps:
        for index in waiting:
            yield self.env.process(self._request(index))

    def _arrivals(self, waiting: Any, load: Open) -> Steps:
        for index in waiting:
            yield self.env.timeout(self._gaps[index] / load.rate)
            self.env.process(self._request(index))

    def _request(self, index: int) -> Steps:
        sent = self.env.now
        prefix = int(self._prefixes[index])
        node = min(self._nodes, key=lambda node: node.jobs)
        yield self.env.timeout(self._stages.outside_s)
        reached = [self.env.now]
        if self._stages.retrieval_s:
            yield from (self._retriever or node.device).use(self._stages.retrieval_s)
        reached.append(self.env.now)
        if self._method != "full":
            node.jobs += 1
            yield from self._mend(node, prefix, int(self._missing[index]))
            node.jobs -= 1
        reached.append(self.env.now)
        engine = min(self._engines, key=lambda engine: engine.jobs)
        job = Job(
            prefix,
            self._workload.question_tokens,
            int(self._outputs[index]),
            self._method != "full",
            self.env.event(),
            self.env.event(),
        )
        engine.submit(job)
        yield job.first
        self.ttft_s.append(self.env.now - sent)
        reached.append(self.env.now)
        for seconds, (begin, end) in zip(self.parts_s.values(), itertools.pairwise(reached), strict=True):
            seconds.append(end - begin)
        yield job.last
        self.e2e_s.append(self.env.now - sent)

    def _mend(self, node: _Node, prefix: int, missing: int) -> Steps:
        cluster = self._cluster
        if missing:
            fetched = self._target.stored_bytes(prefix) * missing / self._workload.top_k
            yield self.env.timeout(cluster.first_byte_s)
            yield from node.storage.use(fetched / cluster.storage_bytes_per_s)
        if self._method == "repaired":
            seconds = self._target.repair_macs(prefix) / self._stages.repair_macs_per_s
            if cluster.repairers:  # on a device of its own, the stale KV has to be copied there as well
                seconds += prefix * self._stages.load_s_per_token
            yield from node.device.use(seconds)
        if cluster.repairers:
            yield from node.hop.use(self._target.kv_bytes(prefix) / cluster.hop_bytes_per_s)
