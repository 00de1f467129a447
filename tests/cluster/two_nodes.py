# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of two nodes, a repairer on one and an engine's side of the hand-off on the other; prints what it saw.

    python -m tests.cluster.two_nodes FOLDER

A process of its own, because a process has one Ray, and other tests have theirs.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster

from kvcache.arena import Arena
from kvcache.handoff import HandoffReader, SharedMemoryTransport, localise, release
from kvcache.settings import Settings
from kvcache.store import ChunkStore
from kvcache.target import TargetLLM
from repair.mender import Mender
from repair.types import MendRequest
from serve_app.repairer import RepairerDeployment
from tests.tiny import tiny_model_dir, tiny_settings

REQUEST = MendRequest("crossing", "stale", (tuple(range(3, 40)), tuple(range(40, 110))), (1, 2))


def digests(parts: Any) -> list[str]:
    """Of keys and of values."""
    return [hashlib.sha256(part.contiguous().numpy().tobytes()).hexdigest() for part in parts]


class EngineSide:
    """What an engine does with a ticket: copy it to its node's memory, check it, read it, free it."""

    def __init__(self, settings: Settings, fingerprint: str, geometry: Any) -> None:
        self._inbox = SharedMemoryTransport(Arena(settings.handoff.arena_bytes, settings.handoff.lease_s))
        self._reader = HandoffReader(fingerprint, geometry, torch.float32)

    async def load(self, ticket: dict[str, Any]) -> list[str]:
        local = await localise(ticket, self._inbox, wait_s=0)
        found = digests(self._reader.open(local))
        self._reader.confirm(local)
        self._reader.release(local)
        return found

    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()


class RepairSide(RepairerDeployment):
    """The deployment's class, as an actor."""

    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()


async def expected(target: TargetLLM, settings: Settings) -> list[str]:
    """The same prefix, made in this process and read from its own memory."""
    transport = SharedMemoryTransport(Arena(settings.handoff.arena_bytes, settings.handoff.lease_s))
    mender = Mender(target, ChunkStore.of(settings), transport, settings)
    ticket = (await mender.mend(REQUEST)).handoff
    try:
        return digests(HandoffReader(target.fingerprint, target.geometry, torch.float32).open(ticket))
    finally:
        release(ticket)
        mender.shutdown()


def main(folder: Path) -> None:
    """Start, cross, compare, stop."""
    settings = tiny_settings(tiny_model_dir(folder), handoff={"arena_bytes": 2**24}, target={"threads": 1})
    target = TargetLLM.load(settings=settings)
    wanted = asyncio.run(expected(target, settings))
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "resources": {"repair": 1}, "object_store_memory": 100_000_000},
    )
    try:
        cluster.add_node(num_cpus=1, resources={"engine": 1}, object_store_memory=100_000_000)
        ray.init(address=cluster.address, log_to_driver=False)
        repairer = ray.remote(RepairSide).options(resources={"repair": 1}).remote(settings)
        engine = ray.remote(EngineSide).options(resources={"engine": 1})
        reader = engine.remote(settings, target.fingerprint, target.geometry)
        result = ray.get(repairer.mend.remote(REQUEST))
        found = {
            "nodes": ray.get([repairer.node.remote(), reader.node.remote()]),
            "kind": result.handoff["kind"],
            "mended_on": result.node,
            "rows": result.rows,
            "wanted": wanted,
            "got": ray.get(reader.load.remote(result.handoff)),
        }
        print(json.dumps(found))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
