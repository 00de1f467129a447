# SPDX-License-Identifier: Apache-2.0
"""Requests go where their chunks are, and elsewhere when it is full there."""

from __future__ import annotations

from collections import Counter, OrderedDict
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from engine.types import GenerateRequest
from serve_app.router import FETCH_COST, ContentMap, NearRouter, nearest

NAMES = ("a", "b", "c")


def chunk(number: int, tokens: int = 16) -> tuple[int, ...]:
    return tuple([number] * tokens)


def content(*names: str) -> ContentMap:
    made = ContentMap()
    made.update(names)
    return made


def idle(*names: str) -> dict[str, int]:
    return dict.fromkeys(names, 0)


def test_a_request_goes_where_most_of_its_tokens_are() -> None:
    where = content(*NAMES)
    where.sent("b", [chunk(1), chunk(2)])
    where.sent("c", [chunk(3, tokens=64)])
    assert where.ranked([chunk(1), chunk(2), chunk(9)], idle(*NAMES))[0] == "b"
    assert where.ranked([chunk(1), chunk(2), chunk(3, tokens=64)], idle(*NAMES))[0] == "c"


def test_a_replica_that_holds_all_is_left_when_more_wait_there_than_a_fetch_costs() -> None:
    where = content(*NAMES)
    where.sent("a", [chunk(1)])
    assert where.ranked([chunk(1)], {"a": int(FETCH_COST) - 1, "b": 0, "c": 0})[0] == "a"
    assert where.ranked([chunk(1)], {"a": int(FETCH_COST) + 1, "b": 0, "c": 1}) == ["b", "a", "c"]


def test_new_chunks_have_homes_that_all_routers_agree_on_and_that_are_spread() -> None:
    here, there = content(*NAMES), content(*reversed(NAMES))
    homes = [here.ranked([chunk(number)], idle(*NAMES))[0] for number in range(300)]
    assert homes == [there.ranked([chunk(number)], idle(*reversed(NAMES)))[0] for number in range(300)]
    # Three standard deviations of a binomial count.
    assert all(abs(count - 100) < 3 * (300 * 1 / 3 * 2 / 3) ** 0.5 for count in Counter(homes).values())


def test_what_a_host_tier_has_dropped_is_forgotten_and_so_is_a_replica_that_went() -> None:
    where = content("a", "b")
    where.sent("a", [chunk(number) for number in range(5)], most=3)
    load = {"a": 0, "b": 1}  # the load decides only where neither holds the chunk
    assert where.ranked([chunk(4)], {"a": 1, "b": 0})[0] == "a"
    assert where.ranked([chunk(0)], {"a": 1, "b": 0})[0] == "b"
    where.update(["b"])
    where.update(["a", "b"])
    assert where.ranked([chunk(4)], {"a": 1, "b": 0})[0] == "b"
    assert where.ranked([chunk(4)], load)[0] == "a"


def hit_rate(by_content: bool, replicas: int = 3, topics: int = 60, per_topic: int = 5, tier: int = 100) -> float:
    """Of chunks, in host tiers that each hold a third of the corpus, under popularity by Zipf."""
    random = np.random.default_rng(11)
    popularity = 1 / np.arange(1, topics + 1) ** 0.8
    asked = random.choice(topics, p=popularity / popularity.sum(), size=3_000)
    names = [str(number) for number in range(replicas)]
    where, tiers = content(*names), {name: OrderedDict[int, None]() for name in names}
    hits = 0
    for topic in asked:
        numbers = [int(topic) * per_topic + at for at in range(per_topic)]
        chunks = [chunk(number) for number in numbers]
        loads = {name: int(load) for name, load in zip(names, random.integers(3, size=replicas), strict=True)}
        name = where.ranked(chunks, loads)[0] if by_content else min(names, key=loads.__getitem__)
        where.sent(name, chunks, most=tier)
        for number in numbers:
            hits += number in tiers[name]
            tiers[name][number] = None
            tiers[name].move_to_end(number)
            if len(tiers[name]) > tier:
                tiers[name].popitem(last=False)
    return hits / len(asked) / per_topic


def test_host_tiers_together_hold_more_when_requests_go_by_content() -> None:
    # By load alone each tier holds the same third of the corpus; by content the three hold nearly all of it.
    alike, apart = hit_rate(by_content=False), hit_rate(by_content=True)
    assert alike < 0.75 and apart > 0.9, (alike, apart)


def test_a_hand_off_goes_to_the_engine_beside_it_unless_requests_wait_there() -> None:
    nodes = {"a": "one", "b": "one", "c": "two"}
    for _ in range(20):
        assert set(nearest({"a": 0, "b": 0, "c": 0}, nodes, "one")[:2]) == {"a", "b"}
        assert nearest({"a": 4, "b": 2, "c": 1}, nodes, "one") == ["b", "c", "a"]
        assert nearest({"a": 4, "b": 4, "c": 1}, nodes, "one")[0] == "c"
    firsts = Counter(nearest(dict.fromkeys("abc", 0), dict.fromkeys("abc", "one"), "one")[0] for _ in range(300))
    assert all(count > 50 for count in firsts.values()) and len(firsts) == 3


class Id(NamedTuple):
    """Of a replica, as far as a router looks at it."""

    unique_id: str


class Placed(NearRouter):
    """Without Ray's connections: engines, and how much each has to do."""

    def __init__(self, loads: dict[str, int]) -> None:
        self._loads = {Id(name): load for name, load in loads.items()}

    @property
    def replica_queue_len_cache(self) -> dict[Id, int]:
        return self._loads

    def replicas(self, nodes: dict[str, str]) -> list[SimpleNamespace]:
        return [SimpleNamespace(replica_id=one, node_id=nodes[one.unique_id]) for one in self._loads]


async def test_the_engine_s_router_reads_the_node_from_the_request() -> None:
    router = Placed({"a": 1, "b": 1})
    candidates = router.replicas({"a": "one", "b": "two"})
    for node, first in (("one", "a"), ("two", "b")):
        work = GenerateRequest("r", (1,), {"kind": "ray"}, {}, node)
        pending = SimpleNamespace(args=[work], routing_context=SimpleNamespace(should_backoff=False))
        ranks = await router.choose_replicas(candidates, pending)
        assert [one.replica_id.unique_id for one in ranks[0]] == [first] and len(ranks) == 2
    pending.args = [GenerateRequest("r", (1,), None, {})]
    assert [len(rank) for rank in await router.choose_replicas(candidates, pending)] == [2]
