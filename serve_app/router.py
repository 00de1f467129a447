# SPDX-License-Identifier: Apache-2.0
"""Sends a prefix to be mended where most of its chunks already are, and to the engine beside what mended it, unless
that one has too much to do.

Without the first, every new repairer fetches the whole popular corpus once more, and each one's host tier holds the
same chunks: scaling out scales the misses. Without the second, nearly every hand-off of a large cluster crosses its
network.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

FETCH_COST = 2.0
"""What fetching a whole prefix costs, in requests that wait before this one. Field figures for 4,096 tokens of a 3B
target: 22 ms from a local disk to 100 ms from object storage, against 22 ms of repair."""
HOP_COST = 2.0
"""What a hand-off from another node costs, in requests that one engine works on more than another: so much balance is
given up for it, and no more. Field figure: 12 ms for 4,096 tokens of a 3B target over 100 GbE."""
MOST_REMEMBERED = 100_000
"""Chunks remembered per replica until it has said how many its host tier holds."""

Chunks = Sequence[Sequence[int]]


class ContentMap:
    """Which replica holds which chunks: what was sent there, least recently used out first, as its host tier does.

    A chunk that nobody holds has a home, the same for every router (rendezvous hashing), so that routers that do not
    know of each other spread new chunks alike.
    """

    def __init__(self) -> None:
        self._held: dict[str, OrderedDict[int, None]] = {}

    def update(self, replicas: Sequence[str]) -> None:
        """These are the replicas; the others' content is forgotten."""
        self._held = {name: self._held.get(name, OrderedDict()) for name in replicas}

    def sent(self, replica: str, chunks: Chunks, most: int = MOST_REMEMBERED) -> None:
        """A replica has, or is about to have, these chunks.

        Args:
            most: chunks that its host tier holds.
        """
        held = self._held.get(replica)
        if held is None:
            return
        for key in map(_key, chunks):
            held[key] = None
            held.move_to_end(key)
        while len(held) > most:
            held.popitem(last=False)

    def ranked(self, chunks: Chunks, loads: Mapping[str, int]) -> list[str]:
        """Replicas, cheapest first: requests that wait there, plus the fetching of what it does not hold.

        Args:
            chunks: token ids; a chunk weighs as much as it is long.
            loads: requests that each replica works on.
        """
        weights = {_key(ids): len(ids) for ids in chunks}
        whole = sum(weights.values()) or 1

        def cost(name: str) -> float:
            missing = sum(weight for key, weight in weights.items() if key not in self._held.get(name, {}))
            return loads[name] + FETCH_COST * missing / whole

        costs = {name: cost(name) for name in loads}
        ordered = sorted(loads, key=costs.__getitem__)
        tied = [name for name in ordered if costs[name] == costs[ordered[0]]]
        if len(tied) > 1:
            homes: Counter[str] = Counter()
            for key, weight in weights.items():
                homes[max(tied, key=lambda name, key=key: _mixed(key, name))] += weight
            ordered[: len(tied)] = sorted(tied, key=lambda name: -homes[name])
        return ordered


def _key(ids: Sequence[int]) -> int:
    return hash(tuple(ids))  # of integers: the same in every process


def _mixed(key: int, name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=8, key=key.to_bytes(8, "big", signed=True)).digest()


def nearest(loads: Mapping[str, int], nodes: Mapping[str, str | None], node: str) -> list[str]:
    """Engines, cheapest first: requests that are there, plus the hop of a hand-off that lies on another node.

    Args:
        loads: requests that each replica works on.
        nodes: where each replica is.
        node: where the hand-off is.
    """
    names = random.sample(list(loads), len(loads))  # among equals any: routers do not know of each other
    return sorted(names, key=lambda name: loads[name] + HOP_COST * (nodes[name] != node))


class _RankingRouter(RequestRouter):
    """Tries replicas in the order that a call itself asks for. Calls that ask for none go to the less loaded of two."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas in the order in which they are to be tried."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = {name: self.replica_queue_len_cache.get(one.replica_id) or 0 for name, one in by_name.items()}
        names = self._ranked(pending_request, loads, by_name)
        if not names:
            return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]
        return [[by_name[name]] for name in names]

    def _ranked(
        self, request: PendingRequest | None, loads: Mapping[str, int], replicas: Mapping[str, RunningReplica]
    ) -> list[str]:
        raise NotImplementedError


class NearRouter(_RankingRouter):
    """Ray Serve's request router for the Engine."""

    def _ranked(
        self, request: PendingRequest | None, loads: Mapping[str, int], replicas: Mapping[str, RunningReplica]
    ) -> list[str]:
        node = getattr(_work_of(request), "node", "")
        return nearest(loads, {name: one.node_id for name, one in replicas.items()}, node) if node else []


class ContentRouter(_RankingRouter):
    """Ray Serve's request router for the Repairer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._content = ContentMap()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._content.update([replica.replica_id.unique_id for replica in replicas])

    def _ranked(
        self, request: PendingRequest | None, loads: Mapping[str, int], replicas: Mapping[str, RunningReplica]
    ) -> list[str]:
        chunks = _chunks_of(request)
        return self._content.ranked(chunks, loads) if chunks else []

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        replica = self.curr_replicas.get(replica_id)
        if replica is not None and (chunks := _chunks_of(pending_request)):
            most = int(replica.routing_stats.get("tier_chunks", MOST_REMEMBERED))
            self._content.sent(replica_id.unique_id, chunks, most)


def _work_of(request: PendingRequest | None) -> Any:
    return request.args[0] if request is not None and request.args else None


def _chunks_of(request: PendingRequest | None) -> Chunks:
    """Chunks of a request to mend that will be fetched; none for other calls."""
    work = _work_of(request)
    return () if getattr(work, "method", "full") == "full" else work.chunks
