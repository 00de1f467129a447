# SPDX-License-Identifier: Apache-2.0
"""Hand-off memory: nothing leaks, nothing is read that is not whole, whoever dies."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from kvcache.arena import Arena, ArenaAddress, ArenaFullError, ArenaReader, LeaseError

PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture
def arena():
    arena = Arena(64 * PAGE, lease_s=60)
    yield arena
    arena.check_integrity()
    arena.close()


def publish(arena: Arena, data: bytes) -> ArenaAddress:
    block = arena.reserve(len(data))
    block.memory[:] = data
    return arena.publish(block)


def test_write_read_free(arena):
    reader = ArenaReader()
    address = publish(arena, b"hand-off" * 1000)
    assert bytes(reader.open(address)) == b"hand-off" * 1000
    reader.confirm(address)
    reader.confirm(address)  # every rank of an engine reads, and checks, the same hand-off
    reader.release(address)
    assert arena.stats() == {"live": 0, "live_bytes": 0}
    for again in (reader.open, reader.confirm):
        with pytest.raises(LeaseError):
            again(address)


def test_unpublished_is_unreadable(arena):
    block = arena.reserve(10)
    with pytest.raises(LeaseError):
        ArenaReader().open(block.address)
    arena.abandon(block)
    assert arena.stats()["live"] == 0


def test_full_then_free(arena):
    addresses = [publish(arena, bytes(16 * PAGE)) for _ in range(4)]
    with pytest.raises(ArenaFullError):
        arena.reserve(1)
    reader = ArenaReader()
    reader.release(addresses[1])
    reader.release(addresses[2])
    assert publish(arena, bytes(32 * PAGE)).offset == addresses[1].offset  # neighbours were joined
    with pytest.raises(ValueError, match="does not fit"):
        arena.reserve(65 * PAGE)


def test_more_hand_offs_than_slots_are_refused_and_lose_no_room():
    arena = Arena(2048 * PAGE, lease_s=60)
    blocks = []
    with pytest.raises(ArenaFullError, match="slots"):
        while True:
            blocks.append(arena.reserve(1))
    for _ in range(3):
        with pytest.raises(ArenaFullError):
            arena.reserve(1)
    arena.check_integrity()
    for block in blocks:
        arena.abandon(block)
    arena.abandon(arena.reserve(2048 * PAGE))
    arena.close()


def test_lease_runs_out():
    arena = Arena(4 * PAGE, lease_s=0.5)
    reader = ArenaReader()
    address = publish(arena, b"x" * 4 * PAGE)
    reader.open(address)
    time.sleep(0.6)
    assert arena.stats()["live"] == 0
    publish(arena, b"y" * 4 * PAGE)
    with pytest.raises(LeaseError, match="taken back"):
        reader.confirm(address)  # a slow reader learns that it read somebody else's bytes


def test_release_of_an_old_handoff_leaves_the_new_one(arena):
    reader = ArenaReader()
    old = publish(arena, b"old")
    reader.release(old)
    arena.stats()
    new = publish(arena, b"new")
    reader.release(replace(old, slot=new.slot))
    reader.release(old)
    assert bytes(reader.open(new)) == b"new"
    reader.release(new)


@pytest.mark.parametrize(
    "change",
    [
        {"slot": -1},
        {"slot": 5000},
        {"slot_id": "0" * 16},
        {"nonce": "0" * 32},
        {"pid": 2**22 - 1},
        {"fd": 0},
        {"offset": 0},
        {"offset": 2**40},
        {"nbytes": 2**40},
        {"nbytes": -5},
    ],
)
def test_forged_addresses_are_refused(arena, change):
    address = publish(arena, b"secret")
    with pytest.raises(LeaseError):
        ArenaReader().open(replace(address, **change))
    ArenaReader().release(address)


MAKER = """
import sys, json, time
from dataclasses import asdict
from kvcache.arena import Arena
arena = Arena(1 << 20, lease_s=60)
block = arena.reserve(5)
block.memory[:] = b"alive"
print(json.dumps(asdict(arena.publish(block))), flush=True)
time.sleep(600)
"""


def test_a_killed_maker_leaves_nothing():
    import json

    maker = subprocess.Popen([sys.executable, "-c", MAKER], stdout=subprocess.PIPE, text=True)
    address = ArenaAddress(**json.loads(maker.stdout.readline()))
    attached, late = ArenaReader(), ArenaReader()
    assert bytes(attached.open(address)) == b"alive"
    maker.send_signal(signal.SIGKILL)
    maker.wait()
    assert bytes(attached.open(address)) == b"alive"  # mapped memory outlives its maker
    with pytest.raises(LeaseError, match="gone"):
        late.open(address)
    late.release(address)
    other = Arena(PAGE, lease_s=60)
    mine = publish(other, b"")
    attached.open(mine)  # meeting a new maker drops the dead one's memory
    assert list(attached._maps) == [mine.nonce]


def test_threads_never_see_each_others_bytes():
    arena, reader = Arena(64 * PAGE, lease_s=60), ArenaReader()
    failures: list[str] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(150):
            data = bytes([rng.randrange(256)]) * rng.randrange(1, 9 * PAGE)
            try:
                address = publish(arena, data)
            except ArenaFullError:
                time.sleep(0.001)
                continue
            if bytes(reader.open(address)) != data:
                failures.append("foreign bytes")
            reader.confirm(address)
            reader.release(address)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and arena.stats()["live"] == 0
    arena.check_integrity()
