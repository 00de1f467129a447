# SPDX-License-Identifier: Apache-2.0
"""Fetch, repair, hand-off: misses are made good and counted, memory comes back on every path."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvcache.arena import Arena
from kvcache.chunk import chunk_key
from kvcache.handoff import HandoffReader, SharedMemoryTransport, release
from kvcache.store import ChunkStore
from repair.batching import Batcher
from repair.mender import Mender
from repair.registry import UnknownMethodError
from repair.stale import StaleKV
from repair.types import MendRequest
from tests.tiny import tiny_settings

CHUNKS = (tuple(range(3, 30)), tuple(range(30, 100)), tuple(range(100, 111)))


class Rig:
    """A mender on a real store, and the engine's side of its hand-offs."""

    def __init__(self, target, folder: Path, dtype: torch.dtype = torch.float32, **overrides) -> None:
        directory = target.model.name_or_path
        self.target = target
        self.settings = tiny_settings(directory, store={"uri": str(folder), **overrides.pop("store", {})}, **overrides)
        self.store = ChunkStore(
            self.settings.store_uri,
            fingerprint=target.fingerprint,
            geometry=target.geometry,
            dtype=dtype,
            settings=self.settings.store,
        )
        self.arena = Arena(self.settings.handoff.arena_bytes, self.settings.handoff.lease_s)
        self.mender = Mender(target, self.store, SharedMemoryTransport(self.arena), self.settings)
        self.reader = HandoffReader(target.fingerprint, target.geometry, torch.float32)

    def precompute(self) -> None:
        for chunk in self.target.stale_kv(CHUNKS):
            self.store.put(chunk)

    async def mend(self, method: str = "stale", **kwargs):
        return await self.mender.mend(MendRequest("r", method, CHUNKS, (1, 2), **kwargs))

    def read(self, result):
        k, v = (part.clone() for part in self.reader.open(result.handoff))
        self.reader.confirm(result.handoff)
        self.reader.release(result.handoff)
        return k, v

    def path(self, ids) -> Path:
        key = chunk_key(self.target.fingerprint, ids)
        (path,) = Path(self.settings.store_uri).rglob(f"{key}*")
        return path

    async def settle(self) -> None:
        """Everything is given back: hand-off memory and pins."""
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            if not self.arena.stats()["live"] and not self.mender.host_tier.stats()["pinned_bytes"]:
                break
            await asyncio.sleep(0.01)
        assert self.arena.stats()["live"] == 0
        assert self.mender.host_tier.stats()["pinned_bytes"] == 0
        self.mender.host_tier.check_integrity()


@pytest.fixture
async def rig(tiny, tmp_path):
    rig = Rig(tiny, tmp_path / "store")
    rig.precompute()
    yield rig
    await rig.settle()
    rig.mender.shutdown()


async def test_from_store_then_from_memory(rig):
    first, second = await rig.mend(), await rig.mend()
    assert (first.hits, first.misses) == ({"store": 3}, {})
    assert (second.hits, second.misses) == ({"host": 3}, {})
    assert first.rows == sum(map(len, CHUNKS)) and first.fallback is None
    assert set(first.stages) == {"fetch", "repair_queue", "repair", "rotary", "handoff", "handoff_queue"}
    for one, two in zip(rig.read(first), rig.read(second), strict=True):
        assert torch.equal(one, two)


async def test_full_hands_nothing_over(rig):
    result = await rig.mend("full")
    assert result.handoff is None and result.rows == 0
    assert result.prefix_ids == tuple(token for ids in CHUNKS for token in ids)


DAMAGE = {
    "absent": lambda path: path.unlink(),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "corrupt": lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])),
    "header": lambda path: path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:]),
}


@pytest.mark.parametrize("reason", DAMAGE)
async def test_damage_is_a_counted_miss_with_the_undamaged_answer(tiny, tmp_path, reason):
    rig = Rig(tiny, tmp_path / "store")
    rig.precompute()
    want = rig.read(await rig.mend())
    DAMAGE[reason](rig.path(CHUNKS[1]))
    fresh = Rig(tiny, tmp_path / "store")
    result = await fresh.mend()
    assert result.misses == {reason: 1} and result.hits == {"store": 2}
    for got, expected in zip(fresh.read(result), want, strict=True):
        assert (got - expected).abs().max() < 1e-5
    fresh.mender.shutdown()  # waits for the chunk to be stored again
    again = Rig(tiny, tmp_path / "store")
    result = await again.mend()
    assert result.misses == {} and result.hits == {"store": 3}
    again.read(result)
    for each in (rig, fresh, again):
        await each.settle()


async def test_swapped_objects_are_misses(tiny, tmp_path):
    rig = Rig(tiny, tmp_path / "store")
    rig.precompute()
    one, two = rig.path(CHUNKS[1]), rig.path(CHUNKS[2])
    a, b = one.read_bytes(), two.read_bytes()
    one.write_bytes(b)
    two.write_bytes(a)
    result = await rig.mend()
    assert sum(result.misses.values()) == 2 and "absent" not in result.misses
    rig.read(result)
    await rig.settle()


async def test_a_clients_own_header_is_not_stored(tiny, tmp_path):
    rig = Rig(tiny, tmp_path / "store")
    result = await rig.mend(own_header=True)
    assert result.misses == {"absent": 3}
    rig.read(result)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and not all(map(rig.store.contains, CHUNKS[1:])):
        await asyncio.sleep(0.01)
    rig.mender.shutdown()  # waits for a write under way, drops those behind it
    assert not rig.store.contains(CHUNKS[0]) and rig.store.contains(CHUNKS[1]) and rig.store.contains(CHUNKS[2])


async def test_slow_storage_falls_back_within_the_deadline(tiny, tmp_path):
    rig = Rig(tiny, tmp_path / "store", store={"deadline_s": 0.1})
    rig.precompute()
    gate, read = threading.Event(), rig.store.get
    rig.store.get = lambda ids: gate.wait(5) and read(ids)
    begin = time.monotonic()
    result = await rig.mend()
    assert time.monotonic() - begin < 1
    assert result.fallback == "fetch_deadline" and result.handoff is None
    assert result.prefix_ids == tuple(token for ids in CHUNKS for token in ids)
    gate.set()
    await rig.settle()
    assert (await rig.mend()).fallback is None
    rig.mender.shutdown()


async def test_what_was_missing_counts_when_the_request_falls_back(tiny, tmp_path, monkeypatch):
    rig = Rig(tiny, tmp_path / "store", store={"deadline_s": 1.0})
    rig.precompute()
    for ids in CHUNKS[:2]:
        DAMAGE["truncated"](rig.path(ids))
    gate, compute = threading.Event(), rig.target.stale_kv
    monkeypatch.setattr(rig.target, "stale_kv", lambda chunks: gate.wait(30) and compute(chunks))
    result = await rig.mend()
    assert result.fallback == "fetch_deadline" and result.misses == {"truncated": 2}
    gate.set()
    await rig.settle()
    rig.mender.shutdown()


async def test_no_room_to_hand_off_falls_back(tiny, tmp_path):
    rows = sum(map(len, CHUNKS))
    nbytes = tiny.geometry.kv_bytes(rows, torch.float32)
    handoff = {"arena_bytes": nbytes, "wait_s": 0.05}
    rig = Rig(tiny, tmp_path / "store", handoff=handoff)
    rig.precompute()
    first, second = await rig.mend(), await rig.mend()
    assert first.fallback is None and second.fallback == "handoff_full"
    assert second.hits == {"host": 3}
    rig.read(first)
    assert (await rig.mend()).fallback is None
    small = Rig(tiny, tmp_path / "store", handoff={"arena_bytes": 4096})
    assert (await small.mend()).fallback == "handoff_too_large"


async def test_cancelled_requests_give_everything_back(rig):
    tasks = [asyncio.create_task(rig.mend()) for _ in range(40)]
    for delay, task in zip([0.0, 0.002, 0.005, 0.01] * 10, tasks, strict=True):
        await asyncio.sleep(delay)
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if not isinstance(result, BaseException):
            release(result.handoff)


async def test_ten_at_once_read_each_chunk_once(rig):
    reads, read = [], rig.store.get
    rig.store.get = lambda ids: reads.append(ids) or read(ids)
    results = await asyncio.gather(*(rig.mend() for _ in range(10)))
    assert len(reads) == 3
    for result in results:
        rig.read(result)


async def test_what_is_mended_waits_for_nobody_elses_repair(rig, monkeypatch):
    """The first repair lasts until a second one is queued, the second until the first prefix is handed off."""
    both_queued, handed_off, queued, begun = threading.Event(), threading.Event(), [], []
    real, submit = StaleKV.repair, Batcher.submit

    def queue(self, repairer, request):
        future = submit(self, repairer, request)
        queued.append(request)
        if len(queued) == 2:
            both_queued.set()
        return future

    def repair(self, request):
        begun.append(request)
        assert both_queued.wait(10)
        assert len(begun) == 1 or handed_off.wait(5), "the first prefix waits for the second repair"
        return real(self, request)

    monkeypatch.setattr(Batcher, "submit", queue)
    monkeypatch.setattr(StaleKV, "repair", repair)
    (first,), (second,) = await asyncio.wait(
        [asyncio.create_task(rig.mend()) for _ in range(2)], return_when=asyncio.FIRST_COMPLETED
    )
    rig.read(await first)
    handed_off.set()
    rig.read(await second)


async def test_unknown_method_and_bad_chunks(rig):
    with pytest.raises(UnknownMethodError, match="full, stale"):
        await rig.mend("nonsense")
    with pytest.raises(ValueError, match="token id"):
        await rig.mender.mend(MendRequest("r", "stale", ((600,),), ()))


async def test_no_chunks_no_handoff(rig):
    result = await rig.mender.mend(MendRequest("r", "stale", (), (1, 2)))
    assert result.handoff is None and result.prefix_ids == () and result.fallback is None


async def test_overflow_of_the_store_dtype_is_used_as_computed(tiny, tmp_path, monkeypatch):
    """Values that float16 cannot hold must not become infinities in the prompt; nor in the store."""
    rig = Rig(tiny, tmp_path / "store", dtype=torch.float16)
    real = tiny.stale_kv
    monkeypatch.setattr(tiny, "stale_kv", lambda chunks: [replace(c, v=c.v * 1e6) for c in real(chunks)])
    want = torch.cat([real([ids])[0].v * 1e6 for ids in CHUNKS], dim=1)
    result = await rig.mend()
    _, v = rig.read(result)
    assert result.misses == {"absent": 3} and (v - want).abs().max() < 1e-4 * want.abs().max()
    rig.mender.shutdown()
    assert not any(rig.store.contains(ids) for ids in CHUNKS)


async def test_long_system_prompts_do_not_hold_up_the_corpus(tiny, tmp_path, monkeypatch):
    rig = Rig(tiny, tmp_path / "store", store={"deadline_s": 1.0, "read_parallelism": 2})
    rig.precompute()
    gate, real = threading.Event(), tiny.stale_kv
    monkeypatch.setattr(tiny, "stale_kv", lambda chunks: (gate.wait(10), real(chunks))[1])
    own = [
        asyncio.create_task(
            rig.mender.mend(MendRequest(f"own{i}", "stale", (tuple(range(200 + i, 300)), *CHUNKS), (), {}, True))
        )
        for i in range(6)
    ]
    await asyncio.sleep(0.1)
    result = await rig.mend()
    assert result.fallback is None and result.misses == {}
    rig.read(result)
    gate.set()
    for mended in await asyncio.gather(*own):
        release(mended.handoff)
    await rig.settle()


async def test_requests_together_hold_no_more_than_the_host_tier(tiny, tmp_path):
    """Thirty requests of which two fit at a time: all are answered, and memory never exceeds the setting."""
    chunks = [tuple(range(10 * i, 10 * i + 9)) for i in range(30)]
    size = Rig(tiny, tmp_path / "store").store.format.size(9)
    rig = Rig(tiny, tmp_path / "store", host_tier={"bytes": 2 * size})
    most, real = [], rig.store.get
    rig.store.get = lambda ids: (most.append(rig.mender.host_tier.stats()), real(ids))[1]
    requests = [rig.mender.mend(MendRequest(f"r{i}", "stale", (ids,), ())) for i, ids in enumerate(chunks)]
    for result in await asyncio.gather(*requests):
        assert result.fallback is None
        rig.read(result)
    assert max(stats["used_bytes"] for stats in most) <= 2 * size
    assert rig.mender.host_tier.stats()["bypasses"] == 0
    await rig.settle()


async def test_a_store_that_is_down_does_not_fill_the_memory(tiny, tmp_path):
    rig = Rig(tiny, tmp_path / "store")
    gate = threading.Event()
    rig.store.put = lambda chunk: gate.wait(20)
    waiting = []
    for i in range(40):
        rig.read(await rig.mender.mend(MendRequest(f"r{i}", "stale", (tuple(range(10 * i, 10 * i + 9)),), ())))
        waiting.append(rig.mender._fetcher._writer._work_queue.qsize())
    assert max(waiting) <= 16
    gate.set()
    rig.mender.shutdown()
