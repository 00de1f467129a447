# SPDX-License-Identifier: Apache-2.0
"""How many of each thing serve N requests per second over M chunks, and what would give way first.

Engines are counted by simulation: the most requests per second one can take with p95 TTFT within its bound, and with a
quarter of its capacity to spare. Repair nodes and retrievers are counted by what they have to do, links included. The
whole is then simulated, in a slice of the same proportions where it is large, and enlarged until it keeps the bound:
each time where the slowest requests lose most against an idle cluster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cluster.capacity.demand import Demand, Hardware, embedding_index, hit_rate
from cluster.capacity.model import Closed, Cluster, Load, Method, Open, Outcome, Stages, Workload
from cluster.capacity.simulation import simulate
from cluster.capacity.targets import Target

_USED = 0.75
"""Share of its capacity that anything may use by plan; above it, waiting grows steeply."""
_SLICE = 8
"""Engines simulated at once; larger clusters are simulated as a slice of this size."""
_REQUESTS = 1500
_GROWTH = 1.05
_BISECTIONS = 7


class ImpossibleError(ValueError):
    """No number of machines does it; the message says which time alone is longer than the bound."""


@dataclass(frozen=True)
class Plan:
    """What serves a demand with one method.

    Attributes:
        method: `full`, `stale` or `repaired`.
        devices: GPUs (or machines like the one measured): engines, and repair nodes where something is repaired.
        engines: engines.
        repairers: repair nodes; for `stale` they only fetch, rotate and hand off, for `full` there are none.
        retrievers: retrieval replicas; each holds the whole index.
        host_hit_rate: share of chunks found in the repair nodes' host memory.
        storage_bytes: of all chunk caches.
        storage_reads_per_s: chunks read from the object store.
        storage_bytes_per_s: bytes read from the object store.
        hop_bytes_per_s: bytes from repair nodes to engines.
        index_bytes: vectors of one retriever.
        precompute_device_hours: one-time cost of the chunk caches.
        p95_ttft_s: simulated.
        used: share of its capacity that each kind uses; an engine's is its throughput with full batches.
        bottleneck: the kind that uses most, so the one that gives way first when more is asked.
        repairers_set_by: what a repair node is busiest with, so what their number follows; None for `full`.
        dollars_per_hour: by what it is for.
    """

    method: Method
    devices: int
    engines: int
    repairers: int
    retrievers: int
    host_hit_rate: float
    storage_bytes: float
    storage_reads_per_s: float
    storage_bytes_per_s: float
    hop_bytes_per_s: float
    index_bytes: float
    precompute_device_hours: float
    p95_ttft_s: float
    used: dict[str, float]
    bottleneck: str
    repairers_set_by: str | None
    dollars_per_hour: dict[str, float]


class Sizer:
    """Sizes one installation for demands."""

    def __init__(self, target: Target, workload: Workload, stages: Stages, hardware: Hardware) -> None:
        self.target, self.workload, self.hardware = target, workload, hardware
        self._stages = stages
        self._rates: dict[tuple[Method, Demand], float] = {}
        self._saturated: dict[tuple[Method, Demand], float] = {}
        self._idle: dict[tuple[Method, Demand], dict[str, float]] = {}

    def size(self, method: Method, demand: Demand) -> Plan:
        """The plan for one method.

        Raises:
            ImpossibleError: a single request on an idle cluster already takes longer than the bound.
        """
        stages = replace(self._stages, retrieval_s=self.hardware.retrieval_s(demand.chunks))
        counts = {
            "engines": math.ceil(demand.rate / self._engine_rate(method, demand, stages)),
            "repairers": self._repairers(method, demand),
            "retrievers": math.ceil(demand.rate * stages.retrieval_s / _USED),
        }
        idle = self._idle[method, replace(demand, rate=1.0)]
        while True:
            cluster = self._cluster(method, demand, **counts)
            seen = self._simulate(method, Open(demand.rate), stages, cluster)
            if seen.ttft(95) <= demand.ttft_s:
                return self._plan(method, demand, cluster, seen, demand.rate * stages.retrieval_s / cluster.retrievers)
            lost = {part: seconds - idle[part] for part, seconds in seen.parts(95).items()}
            most = max(lost.values())
            for part in counts:
                if lost[part] == most or most <= 0:
                    counts[part] = math.ceil(counts[part] * _GROWTH)

    def _prefix_tokens(self) -> int:
        return round(self.workload.mean_tokens) + self.workload.header_tokens

    def _repairers(self, method: Method, demand: Demand) -> int:
        def enough(nodes: int) -> bool:
            return demand.rate * max(self._node_seconds(method, demand, nodes).values()) <= _USED * nodes

        if method == "full":
            return 1  # the simulation wants one; nothing goes through it
        high = 1
        while not enough(high):
            high *= 2
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if enough(middle) else (middle, high)
        return high

    def _node_seconds(self, method: Method, demand: Demand, nodes: int) -> dict[str, float]:
        """Seconds that each part of a repair node works for a mean request, where there are that many nodes."""
        tokens = self._prefix_tokens()
        missed = self.target.stored_bytes(tokens) * (1 - self._hit_rate(demand, nodes))
        seconds = {
            "storage link": missed / self.hardware.storage_bytes_per_s,
            "assembly": tokens * self._stages.assemble_s_per_token,
            "KV hop": self.target.kv_bytes(tokens) / self.hardware.hop_bytes_per_s,
        }
        if method == "repaired":
            repair = self.target.repair_macs(tokens) / self._stages.repair_macs_per_s
            seconds["repair"] = repair + tokens * self._stages.load_s_per_token
        return seconds

    def _hit_rate(self, demand: Demand, nodes: int) -> float:
        held = nodes * self.hardware.host_bytes / self.target.stored_bytes(demand.chunk_tokens)
        return hit_rate(held, demand.chunks, demand.skew)

    def _engine_rate(self, method: Method, demand: Demand, stages: Stages) -> float:
        """Requests per second that one engine takes with p95 TTFT within the bound, everything else plentiful."""
        key = (method, replace(demand, rate=1.0))
        if key not in self._rates:
            cluster = self._cluster(method, demand, _SLICE, 4 * _SLICE, 1000)
            idle = self._simulate(method, Open(1e-3), stages, cluster)
            if idle.ttft(95) > demand.ttft_s:
                raise ImpossibleError(
                    f"{method}: p95 TTFT is {idle.ttft(95) * 1e3:.0f} ms on an idle cluster, more than the bound of "
                    f"{demand.ttft_s * 1e3:.0f} ms: shorten prompts, take a faster link or device, or raise the bound"
                )
            self._idle[key] = idle.parts(95)
            clients = Closed(2 * _SLICE * self.hardware.max_num_seqs)
            self._saturated[key] = self._simulate(method, clients, stages, cluster).throughput_rps / _SLICE
            low, high = 0.0, _USED * self._saturated[key]
            if self._simulate(method, Open(high * _SLICE), stages, cluster).ttft(95) <= demand.ttft_s:
                low = high
            for _ in range(_BISECTIONS if low < high else 0):
                middle = (low + high) / 2
                kept = self._simulate(method, Open(middle * _SLICE), stages, cluster).ttft(95) <= demand.ttft_s
                low, high = (middle, high) if kept else (low, middle)
            self._rates[key] = low
        return self._rates[key]

    def _cluster(self, method: Method, demand: Demand, engines: int, repairers: int, retrievers: int) -> Cluster:
        hardware = self.hardware
        return Cluster(
            engines=engines,
            repairers=repairers,
            retrievers=retrievers,
            max_num_seqs=hardware.max_num_seqs,
            batch_tokens=hardware.batch_tokens,
            host_hit_rate=1.0 if method == "full" else self._hit_rate(demand, repairers),
            first_byte_s=hardware.first_byte_s,
            storage_bytes_per_s=hardware.storage_bytes_per_s,
            hop_bytes_per_s=hardware.hop_bytes_per_s,
        )

    def _simulate(self, method: Method, load: Load, stages: Stages, cluster: Cluster) -> Outcome:
        """A run of the cluster, or of a slice of it that gets its part of an open load."""
        share = min(1.0, _SLICE / cluster.engines)
        if share < 1 and isinstance(load, Open):
            load = Open(load.rate * share)
            nodes, speed = _part(cluster.repairers * share)
            retrievers, search_speed = _part(cluster.retrievers * share)
            stages = replace(
                stages,
                repair_macs_per_s=stages.repair_macs_per_s * speed,
                retrieval_s=stages.retrieval_s / search_speed,
            )
            cluster = replace(
                cluster,
                engines=_SLICE,
                repairers=nodes,
                retrievers=retrievers,
                storage_bytes_per_s=cluster.storage_bytes_per_s * speed,
                hop_bytes_per_s=cluster.hop_bytes_per_s * speed,
            )
        return simulate(
            method, load, self.target, self.workload, stages, cluster, requests=_REQUESTS, lead_in=_REQUESTS // 10
        )

    def _plan(self, method: Method, demand: Demand, cluster: Cluster, seen: Outcome, retrieval: float) -> Plan:
        hardware, reuses = self.hardware, method != "full"
        prefix, chunk = self._prefix_tokens(), self.target.stored_bytes(demand.chunk_tokens)
        missing = (1 - cluster.host_hit_rate) * reuses
        macs = self.target.prefill_macs(demand.chunk_tokens, demand.chunk_tokens)
        saturated = cluster.engines * self._saturated[method, replace(demand, rate=1.0)]
        node = {} if method == "full" else self._node_seconds(method, demand, cluster.repairers)
        used = {kind: demand.rate * seconds / cluster.repairers for kind, seconds in node.items()}
        used |= {"engine": demand.rate / saturated, "retrieval": retrieval}
        reads, stored = demand.rate * self.workload.top_k * missing, float(demand.chunks * chunk * reuses)
        repairers = cluster.repairers * reuses
        devices = cluster.engines + (repairers if method == "repaired" else 0)
        servers = cluster.retrievers + (repairers if method == "stale" else 0)
        return Plan(
            method=method,
            devices=devices,
            engines=cluster.engines,
            repairers=repairers,
            retrievers=cluster.retrievers,
            host_hit_rate=cluster.host_hit_rate,
            storage_bytes=stored,
            storage_reads_per_s=reads,
            storage_bytes_per_s=demand.rate * self.target.stored_bytes(prefix) * missing,
            hop_bytes_per_s=demand.rate * self.target.kv_bytes(prefix) * reuses,
            index_bytes=embedding_index(demand.chunks),
            precompute_device_hours=demand.chunks * macs / self._stages.macs_per_s / 3600 * reuses,
            p95_ttft_s=seen.ttft(95),
            used=used,
            bottleneck=max(used, key=lambda kind: used[kind]),
            repairers_set_by=max(node, key=lambda kind: node[kind]) if node else None,
            dollars_per_hour=hardware.prices.of(devices, servers, stored, reads),
        )


def _part(share: float) -> tuple[int, float]:
    """Whole ones that stand for a slice's share, and their speed: slowed down to what the share can do.

    Where the share is not even one, that one keeps its speed: it does not take longer for serving others too.
    """
    whole = math.ceil(share)
    return whole, share / whole if share > 1 else 1.0
