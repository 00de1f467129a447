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

from cluster.capacity.engine import Device, Engine, Job, Machine
from cluster.capacity.model import Closed, Cluster, Load, Method, Open, Outcome, Stages, Workload
from cluster.capacity.targets import Target

_AHEAD = 2.4
"""Share of a time-shared machine that repair has against the engine: Linux's at nice 15 (Ray's processes) and 19."""
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
    lead_in: int = 0,
    seed: int = 7,
) -> Outcome:
    """Run that many requests to their end.

    Args:
        requests: all of them, those of the lead-in included.
        lead_in: how many, the first ones, are left out of the times. In a closed loop throughput is then measured as
            a load test does it: from the end of the lead-in until a client first finds nothing left to ask.
        seed: the same seed gives the same run.
    """
    run = _Run(method, target, workload, stages, cluster, requests, seed)
    run.start(load)
    run.env.run()
    seconds = run.env.now
    return Outcome(
        throughput_rps=run.throughput(lead_in),
        ttft_s=(run.first_s - run.sent_s)[lead_in:],
        e2e_s=(run.end_s - run.sent_s)[lead_in:],
        itl_s=np.concatenate([np.empty(0), *(np.diff(token_s) for token_s in run.token_s[lead_in:])]),
        parts_s={name: seconds[lead_in:] for name, seconds in run.parts_s.items()},
        busy={
            name: float(sum(d.busy_s for d in devices) / seconds / units)
            for name, (devices, units) in run.kinds.items()
        },
    )


@dataclass
class _Node:
    """A repair node: its device, what puts KV together, its links, and how many requests it works for."""

    device: Device
    assembly: Device
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
        self.sent_s, self.first_s, self.end_s = np.zeros(requests), np.zeros(requests), np.zeros(requests)
        self.parts_s = {name: np.zeros(requests) for name in ("retrievers", "repairers", "engines")}
        self.token_s: list[list[float]] = [[] for _ in range(requests)]
        self._dry_s: float | None = None
        self._method, self._target, self._workload = method, target, workload
        self._stages, self._cluster = stages, cluster
        self._rng = rng
        self._prefixes = workload.prefixes(rng, requests)
        self._outputs = workload.outputs(rng, requests)
        self._missing = rng.binomial(workload.top_k, 1 - cluster.host_hit_rate, requests)
        self._gaps = rng.exponential(1.0, requests)

        in_turn = not cluster.repairers and not cluster.time_shared
        machine = Machine(self.env, stages.overlap) if cluster.time_shared else None
        engines = [Device(self.env, machine=machine) for _ in range(cluster.engines)]
        self._engines = [Engine(self.env, device, target, stages, cluster) for device in engines]
        apart = [Device(self.env, machine=machine, weight=_AHEAD) for _ in range(cluster.repairers or cluster.engines)]
        repairers = engines if in_turn else apart
        self._nodes = [_Node(device, Device(self.env), Device(self.env), Device(self.env)) for device in repairers]
        self._retriever = None if in_turn else Device(self.env, cluster.retrievers)
        self.kinds = {
            "engine": (engines, len(engines)),
            "storage link": ([node.storage for node in self._nodes], len(self._nodes)),
            "assembly": ([node.assembly for node in self._nodes], len(self._nodes)),
            "KV hop": ([node.hop for node in self._nodes], len(self._nodes)),
        }
        if self._retriever:
            self.kinds["repair"] = (repairers, len(repairers))
            self.kinds["retrieval"] = ([self._retriever], cluster.retrievers)

    def throughput(self, lead_in: int) -> float:
        """Requests per second, a request counting by the part of its time that lies in the window."""
        begin, end = 0.0, self.env.now
        if lead_in and self._dry_s is not None and (led_in := float(self.end_s[:lead_in].max())) < self._dry_s:
            begin, end = led_in, self._dry_s
        inside = np.clip(np.minimum(self.end_s, end) - np.maximum(self.sent_s, begin), 0, None)
        return float((inside / (self.end_s - self.sent_s)).sum() / (end - begin))

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
        if self._dry_s is None:
            self._dry_s = self.env.now

    def _arrivals(self, waiting: Any, load: Open) -> Steps:
        for index in waiting:
            yield self.env.timeout(self._gaps[index] / load.rate)
            self.env.process(self._request(index))

    def _request(self, index: int) -> Steps:
        self.sent_s[index] = self.env.now
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
        self.first_s[index] = self.env.now
        reached.append(self.env.now)
        for seconds, (begin, end) in zip(self.parts_s.values(), itertools.pairwise(reached), strict=True):
            seconds[index] = end - begin
        yield job.last
        self.token_s[index] = job.token_s
        self.end_s[index] = self.env.now

    def _mend(self, node: _Node, prefix: int, missing: int) -> Steps:
        cluster = self._cluster
        if missing:
            fetched = self._target.stored_bytes(prefix) * missing / self._workload.top_k
            yield self.env.timeout(cluster.first_byte_s)
            yield from node.storage.use(fetched / cluster.storage_bytes_per_s)
        if self._stages.assemble_s_per_token:
            yield from node.assembly.use(prefix * self._stages.assemble_s_per_token)
        if self._method == "repaired":
            seconds = self._target.repair_macs(prefix) / self._stages.repair_macs_per_s
            if cluster.repairers:  # on a device of its own, the stale KV has to be copied there as well
                seconds += prefix * self._stages.load_s_per_token
            yield from node.device.use(seconds)
        if cluster.repairers:
            yield from node.hop.use(self._target.kv_bytes(prefix) / cluster.hop_bytes_per_s)
