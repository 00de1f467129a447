# SPDX-License-Identifier: Apache-2.0
"""The host-memory tier: bounded at every moment, one load per chunk, pins that come back on every path."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch

from kvcache.chunk import ChunkKV
from kvcache.host_tier import HostTier

UNIT = 1024


def make_chunk(units: int = 1, name: int = 0) -> ChunkKV:
    """A chunk of `units * UNIT` bytes."""
    return ChunkKV((name,), *torch.full((2, units * UNIT // 2), name, dtype=torch.uint8).clone().unbind())


def put(tier: HostTier, key: str, units: int = 1) -> bool:
    """Pin and release; whether it was a hit."""
    with tier.pin(key, units * UNIT, lambda: make_chunk(units)) as pinned:
        return pinned.hit


def test_second_pin_is_a_hit_on_the_same_memory() -> None:
    tier = HostTier(4 * UNIT)
    with tier.pin("a", UNIT, make_chunk) as first:
        assert not first.hit
    with tier.pin("a", UNIT, lambda: pytest.fail("loaded twice")) as second:
        assert second.hit and second.chunk is first.chunk
    assert tier.stats() == {
        "hits": 1, "misses": 1, "evictions": 0, "bypasses": 0, "used_bytes": UNIT, "pinned_bytes": 0, "entries": 1,
    }  # fmt: skip
    tier.check_integrity()


def test_least_recently_used_goes_first() -> None:
    tier = HostTier(3 * UNIT)
    for key in "abc":
        put(tier, key)
    assert put(tier, "a")  # now b is the oldest
    put(tier, "d")
    assert [put(tier, key) for key in "acd"] == [True, True, True]
    assert not put(tier, "b")
    assert tier.stats()["evictions"] == 2
    tier.check_integrity()


def test_a_large_chunk_evicts_only_as_many_as_it_needs() -> None:
    tier = HostTier(4 * UNIT)
    for key in "abcd":
        put(tier, key)
    put(tier, "big", 2)
    assert [put(tier, key) for key in ("c", "d", "big")] == [True] * 3
    assert tier.stats()["evictions"] == 2


def test_pinned_chunks_are_never_evicted() -> None:
    tier = HostTier(2 * UNIT)
    with tier.pin("a", UNIT, make_chunk), tier.pin("b", UNIT, make_chunk):
        assert not put(tier, "c")  # loaded all the same, but not kept
        assert not put(tier, "c")
        stats = tier.stats()
        assert (stats["bypasses"], stats["evictions"]) == (2, 0)
        assert stats["pinned_bytes"] == stats["used_bytes"] == 2 * UNIT
        tier.check_integrity()
    assert put(tier, "a") and put(tier, "b")
    assert not put(tier, "c") and put(tier, "c")


@pytest.mark.parametrize("capacity", [0, UNIT])
def test_a_chunk_larger_than_the_tier_is_not_kept_and_evicts_nothing(capacity: int) -> None:
    tier = HostTier(capacity)
    put(tier, "small")
    before = tier.used_bytes
    with tier.pin("big", 2 * UNIT, lambda: make_chunk(2)) as pinned:
        assert pinned.chunk.nbytes == 2 * UNIT
        with tier.pin("big", 2 * UNIT, lambda: pytest.fail("shared while somebody holds it")) as other:
            assert other.chunk is pinned.chunk and other.hit
        assert tier.used_bytes == before
    assert not put(tier, "big", 2)
    assert put(tier, "small") is (capacity > 0)
    tier.check_integrity()


def test_release_counts_once() -> None:
    tier = HostTier(UNIT)
    with tier.pin("a", UNIT, make_chunk) as first:
        other = tier.pin("a", UNIT, make_chunk)
        other.release()
        other.release()
        assert tier.stats()["pinned_bytes"] == UNIT  # still held by the first
        first.release()
        assert tier.stats()["pinned_bytes"] == 0
    tier.check_integrity()


def test_a_chunk_that_turns_out_larger_or_smaller_is_counted_at_its_size() -> None:
    tier = HostTier(4 * UNIT)
    put(tier, "old")
    with tier.pin("a", UNIT, lambda: make_chunk(4)):
        assert tier.used_bytes == 4 * UNIT  # and the old one had to go
        tier.check_integrity()
    assert not put(tier, "old")
    with tier.pin("b", 4 * UNIT, lambda: make_chunk(1)):
        assert tier.used_bytes == UNIT
    with tier.pin("c", UNIT, lambda: make_chunk(5)):
        assert tier.used_bytes == UNIT  # too large after all: b alone
        tier.check_integrity()
    assert tier.stats()["bypasses"] == 1


def test_a_view_is_counted_with_the_memory_it_keeps_alive() -> None:
    tier = HostTier(10 * UNIT)
    buffer = torch.zeros(4 * UNIT, dtype=torch.uint8)
    with tier.pin("a", UNIT, lambda: ChunkKV((1,), buffer[:10], buffer[10:20])):
        assert tier.used_bytes == 4 * UNIT


def test_ten_pins_at_once_load_once() -> None:
    tier, loads, ready = HostTier(2 * UNIT), [], threading.Barrier(10)

    def load() -> ChunkKV:
        loads.append(1)
        time.sleep(0.05)  # long enough for the other nine to arrive
        return make_chunk(name=7)

    def request() -> tuple[bool, int]:
        ready.wait()
        with tier.pin("a", UNIT, load) as pinned:
            return pinned.hit, int(pinned.chunk.k[0])

    with ThreadPoolExecutor(10) as pool:
        results = [future.result() for future in [pool.submit(request) for _ in range(10)]]
    assert len(loads) == 1
    assert sorted(results) == [(False, 7)] + [(True, 7)] * 9
    assert tier.stats()["pinned_bytes"] == 0 and tier.stats()["misses"] == 1
    tier.check_integrity()


@pytest.mark.parametrize("capacity", [2 * UNIT, 0])
def test_a_failed_load_reaches_every_waiter_and_leaves_nothing(capacity: int) -> None:
    tier, loads, ready, failing = HostTier(capacity), [], threading.Barrier(10), threading.Event()

    def load() -> ChunkKV:
        loads.append(1)
        failing.wait(0.05)
        raise ConnectionError("store is away")

    def request() -> None:
        ready.wait()
        tier.pin("a", UNIT, load)

    with ThreadPoolExecutor(10) as pool:
        futures = [pool.submit(request) for _ in range(10)]
        for future in futures:
            with pytest.raises(ConnectionError, match="store is away"):
                future.result()
    assert len(loads) == 1
    stats = tier.stats()
    assert stats["used_bytes"] == stats["pinned_bytes"] == stats["entries"] == 0
    tier.check_integrity()
    assert not put(tier, "a")  # and the next one tries again
    assert tier.stats()["misses"] == 2


def test_a_pin_after_a_failed_load_tries_again_while_others_still_get_the_error() -> None:
    tier, in_load, fail = HostTier(2 * UNIT), threading.Event(), threading.Event()

    def load() -> ChunkKV:
        in_load.set()
        fail.wait(5)
        raise KeyboardInterrupt

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(tier.pin, "a", UNIT, load)
        in_load.wait(5)
        second = pool.submit(tier.pin, "a", UNIT, load)
        while tier.stats()["hits"] == 0:
            time.sleep(0.001)
        fail.set()
        for future in (first, second):
            with pytest.raises(KeyboardInterrupt):
                future.result()
    with tier.pin("a", UNIT, make_chunk) as pinned:
        assert not pinned.hit
        tier.check_integrity()


def test_an_exception_in_the_body_releases_the_pin() -> None:
    tier = HostTier(UNIT)
    with pytest.raises(RuntimeError, match="request died"), tier.pin("a", UNIT, make_chunk):
        raise RuntimeError("request died")
    assert tier.stats()["pinned_bytes"] == 0


@pytest.mark.parametrize("seed", range(4))
def test_random_load_from_many_threads(seed: int) -> None:
    """Bounded at every moment a watcher looks, right data in every pin, nothing pinned in the end."""
    capacity, sizes = 10 * UNIT, [1 + (name * 7) % 4 for name in range(16)]
    tier, stop, peak, loading = HostTier(capacity), threading.Event(), [0], [0] * 16

    def watch() -> None:
        while not stop.is_set():
            stats = tier.stats()
            peak[0] = max(peak[0], stats["used_bytes"])
            assert stats["pinned_bytes"] <= stats["used_bytes"] <= capacity
            tier.check_integrity()
            time.sleep(0)

    def work(number: int) -> None:
        rng = random.Random(seed * 100 + number)
        for _ in range(150):
            with ExitStack() as pins:
                for name in rng.sample(range(16), rng.randint(1, 3)):
                    fails = rng.random() < 0.1

                    def load(name: int = name, fails: bool = fails) -> ChunkKV:
                        loading[name] += 1
                        assert loading[name] == 1, "two loads of one chunk at the same time"
                        time.sleep(rng.random() * 0.001)
                        loading[name] -= 1
                        if fails:
                            raise TimeoutError
                        return make_chunk(sizes[name], name)

                    try:
                        pinned = pins.enter_context(tier.pin(str(name), sizes[name] * UNIT, load))
                    except TimeoutError:
                        continue
                    assert pinned.chunk.nbytes == sizes[name] * UNIT
                    assert (pinned.chunk.k == name).all() and (pinned.chunk.v == name).all()

    with ThreadPoolExecutor(9) as pool:
        watcher = pool.submit(watch)
        workers = [pool.submit(work, number) for number in range(8)]
        for worker in workers:
            worker.result()
        stop.set()
        watcher.result()
    stats = tier.stats()
    assert stats["pinned_bytes"] == 0 and 0 < peak[0] <= capacity
    assert stats["evictions"] > 0 and stats["bypasses"] > 0 and stats["hits"] > 0
    tier.check_integrity()
