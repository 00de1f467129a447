# SPDX-License-Identifier: Apache-2.0
"""A hand-off from another node on its way into this node's memory: it waits for room, and gives it back."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch

from kvcache import handoff
from kvcache.arena import Arena, ArenaFullError
from kvcache.geometry import Geometry
from kvcache.handoff import HandoffError, HandoffIdentity, HandoffReader, SharedMemoryTransport, localise, release

GEOMETRY = Geometry(2, 1, 4, 2, 8, 100, 1024)
ROWS = 40


@pytest.fixture
def arena():
    """Room for one hand-off."""
    arena = Arena(GEOMETRY.kv_bytes(ROWS, torch.float32), lease_s=60)
    yield arena
    assert arena.stats()["live"] == 0
    arena.check_integrity()
    arena.close()


def ticket(rows: int = ROWS) -> tuple[dict[str, Any], torch.Tensor]:
    """As `RayTransport` makes it, its object fetched already; and the KV."""
    kv = torch.randn(2, *GEOMETRY.kv_shape(rows))
    identity = HandoffIdentity("r", rows, "digest", "target", GEOMETRY.kv_shape(rows), "float32")
    data: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()
    data.set_result(kv.view(torch.uint8).numpy())
    return {"kind": "ray", "identity": asdict(identity), "object": data}, kv


async def test_it_waits_for_room(arena):
    taken, (sent, kv) = arena.reserve(1), ticket()
    moving = asyncio.create_task(localise(sent, SharedMemoryTransport(arena), wait_s=30))
    await asyncio.sleep(0.05)
    assert not moving.done()
    arena.abandon(taken)
    local = await moving
    assert torch.equal(torch.stack(HandoffReader("target", GEOMETRY, torch.float32).open(local)), kv)
    release(local)


async def test_it_waits_no_longer_than_it_may(arena):
    taken, (sent, _) = arena.reserve(1), ticket()
    with pytest.raises(ArenaFullError):
        await localise(sent, SharedMemoryTransport(arena), wait_s=0.02)
    arena.abandon(taken)


async def test_what_never_fits_is_not_waited_for(arena):
    sent, _ = ticket(ROWS + 200)
    with pytest.raises(HandoffError, match="does not fit"):
        await localise(sent, SharedMemoryTransport(arena), wait_s=30)


async def test_cancelled_it_gives_its_room_back_once_nobody_writes(arena, monkeypatch):
    begun, gate, copy = threading.Event(), threading.Event(), handoff._copy

    def slow(*args: Any) -> None:
        begun.set()
        assert gate.wait(30)
        copy(*args)

    monkeypatch.setattr(handoff, "_copy", slow)
    sent, _ = ticket()
    moving = asyncio.create_task(localise(sent, SharedMemoryTransport(arena), wait_s=0))
    await asyncio.to_thread(begun.wait, 30)
    moving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await moving
    assert arena.stats()["live"] == 1
    gate.set()
    async with asyncio.timeout(30):
        while arena.stats()["live"]:
            await asyncio.sleep(0.01)
