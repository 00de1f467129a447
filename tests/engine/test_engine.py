# SPDX-License-Identifier: Apache-2.0
"""Real vLLM on a tiny random Llama: what is loaded through the connector is what would have been computed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time

import pytest
import torch

from engine.engine import LOST, Engine
from engine.proof import EngineProof
from engine.types import GenerateRequest
from kvcache.arena import Arena
from kvcache.geometry import UnsupportedTargetError
from kvcache.handoff import RayTransport, SharedMemoryTransport, release
from kvcache.target import TargetLLM
from tests.engine.prompts import answer, stale_reference, stale_ticket
from tests.processes import assert_gone, engines
from tests.tiny import tiny_model_dir, tiny_settings

TOLERANCE = 2e-3
IDS = torch.randint(3, 512, (300,), generator=torch.Generator().manual_seed(5)).tolist()
BLOCK = 32


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    directory = tiny_model_dir(tmp_path_factory.mktemp("engine"))
    return tiny_settings(directory, engine={"block_size": BLOCK, "threads": 2, "max_num_seqs": 8})


@pytest.fixture(scope="module")
def target(settings):
    return TargetLLM.load(settings=settings)


@pytest.fixture(scope="module")
def arena():
    return Arena(32 * 2**20, lease_s=60)


@pytest.fixture(scope="module")
def transport(arena):
    return SharedMemoryTransport(arena)


@pytest.fixture(scope="module")
async def engine(settings):
    engine = Engine(settings)
    await engine.start()
    yield engine
    running = engines()
    assert running
    engine.shutdown()
    assert_gone(running, 20)


@pytest.fixture(autouse=True)
def nothing_leaks(arena):
    yield
    assert arena.stats()["live"] == 0
    arena.check_integrity()


def close(got, want):
    assert got == pytest.approx(want, abs=TOLERANCE)


@pytest.mark.parametrize("remainder", range(0, BLOCK, 1))
async def test_prefix_of_every_remainder(engine, target, transport, remainder):
    """One chunk at position 0, at every way to end inside a block."""
    prefix, question = IDS[: 2 * BLOCK + remainder], IDS[200:205]
    want = await answer(engine, "want", prefix + question)
    ticket = stale_ticket(target, transport, "got", [prefix])
    got = await answer(engine, "got", prefix + question, ticket)
    assert got.last.cached_tokens == len(prefix) and got.last.handoff_miss is None
    assert got.last.stages["inject"] > 0
    close(got.logprobs, want.logprobs)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 1, 0)])
async def test_stale_is_what_transformers_computes(engine, target, transport, order):
    pieces = [IDS[:40], IDS[40:51], IDS[51:150]]
    chunks, question = [pieces[i] for i in order], IDS[200:207]
    flat = [token for chunk in chunks for token in chunk]
    got = await answer(engine, "got", flat + question, stale_ticket(target, transport, "got", chunks))
    assert got.last.cached_tokens == len(flat)
    close(got.logprobs, stale_reference(target, chunks, question))


async def test_stale_never_enters_exact_reuse(engine, target, transport):
    """The same tokens, exact before and after an approximate answer; and the approximate one again."""
    chunks, question = [IDS[:64], IDS[64:160]], IDS[200:207]
    flat = IDS[:160]
    before = await answer(engine, "a", flat + question)
    stale = await answer(engine, "b", flat + question, stale_ticket(target, transport, "b", chunks))
    after = await answer(engine, "c", flat + question)
    again = await answer(engine, "d", flat + question, stale_ticket(target, transport, "d", chunks))
    assert after.last.cached_tokens == 0
    close(after.logprobs, before.logprobs)
    close(again.logprobs, stale.logprobs)
    assert max(abs(a - b) for a, b in zip(before.logprobs, stale.logprobs, strict=True)) > 10 * TOLERANCE


async def test_methods_side_by_side(engine, target, transport):
    """Eight requests at once, half of them with a hand-off, each with its own answer."""
    question = IDS[200:207]
    prefixes = [IDS[i : i + 70 + i] for i in range(8)]
    alone = [await answer(engine, f"alone{i}", prefix + question) for i, prefix in enumerate(prefixes)]
    tickets = [
        stale_ticket(target, transport, f"both{i}", [prefix]) if i % 2 else None for i, prefix in enumerate(prefixes)
    ]
    runs = (answer(engine, f"both{i}", p + question, t) for i, (p, t) in enumerate(zip(prefixes, tickets, strict=True)))
    for i, (got, want) in enumerate(zip(await asyncio.gather(*runs), alone, strict=True)):
        assert got.last.cached_tokens == (len(prefixes[i]) if i % 2 else 0)
        close(got.logprobs, want.logprobs)


async def test_fully_cached_prompt_computes_one_token(engine, target, transport):
    prompt = IDS[:96]
    want = await answer(engine, "want", prompt)
    got = await answer(engine, "got", prompt, stale_ticket(target, transport, "got", [prompt]))
    assert got.last.cached_tokens == 95
    close(got.logprobs, want.logprobs)


FORGED = {
    "another request": {"request_id": "somebody-else"},
    "other tokens": {"token_digest": "0" * 64},
    "another target": {"fingerprint": "f" * 64},
    "other shapes": {"shape": (3, 80, 2, 16)},
    "another dtype": {"dtype": "float16"},
    "more rows than its memory": {"rows": 90, "shape": (3, 90, 2, 32)},
    "negative rows": {"rows": -1, "shape": (3, -1, 2, 32)},
}


@pytest.mark.parametrize("changes", FORGED.values(), ids=FORGED.keys())
async def test_a_wrong_ticket_is_a_miss(engine, target, transport, changes):
    prefix, question = IDS[:80], IDS[200:207]
    want = await answer(engine, "want", prefix + question)
    got = await answer(engine, "got", prefix + question, stale_ticket(target, transport, "got", [prefix], changes))
    assert got.last.handoff_miss == "HandoffError" and got.last.cached_tokens == 0
    close(got.logprobs, want.logprobs)


@pytest.mark.parametrize("ticket", [{}, {"kind": "shared_memory"}, {"kind": 1, "identity": [], "address": None}])
async def test_a_malformed_ticket_is_a_miss(engine, ticket):
    got = await answer(engine, "got", IDS[:50], {"node": "", "kind": "shared_memory", **ticket})
    assert got.last.cached_tokens == 0 and got.last.handoff_miss


async def test_a_released_handoff_is_a_miss(engine, target, transport):
    prefix, question = IDS[:80], IDS[200:207]
    want = await answer(engine, "want", prefix + question)
    ticket = stale_ticket(target, transport, "got", [prefix])
    release(ticket)
    got = await answer(engine, "got", prefix + question, ticket)
    assert got.last.handoff_miss == "LeaseError"
    close(got.logprobs, want.logprobs)


MAKER = """
import json, sys
from kvcache.arena import Arena
from kvcache.handoff import SharedMemoryTransport
from kvcache.target import TargetLLM
from tests.engine.prompts import stale_ticket
from tests.tiny import tiny_settings
target = TargetLLM.load(settings=tiny_settings(sys.argv[1]))
transport = SharedMemoryTransport(Arena(2**24, 60))
for name in ("known", "lost"):
    print(json.dumps(stale_ticket(target, transport, name, [json.loads(sys.argv[2])])), flush=True)
input()
"""


async def test_a_handoff_lost_in_the_worker_is_a_miss(engine, settings):
    """Its maker dies where only the scheduler has mapped it: the plan is made, the worker's load fails."""
    prefix, question = IDS[:80], IDS[200:207]
    want = await answer(engine, "want", prefix + question)
    command = [sys.executable, "-c", MAKER, settings.target.model, json.dumps(prefix)]
    maker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    known, lost = (json.loads(maker.stdout.readline()) for _ in range(2))
    known["address"]["slot_id"] = "0" * 16  # mapped by the scheduler, and refused there
    assert (await answer(engine, "known", prefix + question, known)).last.handoff_miss == "LeaseError"
    maker.kill()
    maker.wait()
    got = await answer(engine, "lost", prefix + question, lost)
    assert got.last.handoff_miss == LOST and got.last.cached_tokens == 0
    close(got.logprobs, want.logprobs)
    assert len(got.token_ids) == 4


async def test_the_same_request_twice(engine, target, transport):
    prefix, question = IDS[:80], IDS[200:207]
    first = await answer(engine, "same", prefix + question, stale_ticket(target, transport, "same", [prefix]))
    second = await answer(engine, "same", prefix + question, stale_ticket(target, transport, "same", [prefix]))
    assert first.last.cached_tokens == second.last.cached_tokens == 80
    close(second.logprobs, first.logprobs)


async def test_abandoned_requests_free_their_handoffs(engine, target, transport, arena):
    async def leave(i: int) -> None:
        ids = IDS[: 100 + i]
        ticket = stale_ticket(target, transport, f"leave{i}", [ids])
        request = GenerateRequest(f"leave{i}", (*ids, 9), ticket, {"max_tokens": 300, "ignore_eos": True})
        async for _ in engine.generate(request):
            await asyncio.sleep(60)

    tasks = [asyncio.create_task(leave(i)) for i in range(12)]
    await asyncio.sleep(0.3)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    deadline = time.monotonic() + 10
    while arena.stats()["live"] and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    want = await answer(engine, "after", IDS[:60])
    assert len(want.token_ids) == 4


async def test_through_rays_object_transport(engine, target, ray_alone):
    prefix, question = IDS[:80], IDS[200:207]
    want = await answer(engine, "want", prefix + question)
    got = await answer(engine, "got", prefix + question, stale_ticket(target, RayTransport(), "got", [prefix]))
    assert got.last.cached_tokens == 80
    close(got.logprobs, want.logprobs)


async def test_proof(engine, settings, target, monkeypatch):
    await EngineProof(settings, target).check(engine)
    # A target whose KV is not the engine's: every layer movable, but other weights.
    other = TargetLLM.load(settings=tiny_settings(tiny_model_dir(_beside(settings), seed=1)))
    other.fingerprint = target.fingerprint
    with pytest.raises(UnsupportedTargetError, match="one chunk at position 0"):
        await EngineProof(settings, other).check(engine)


def _beside(settings):
    from pathlib import Path

    return Path(settings.target.model).parent


async def test_on_cpu_it_computes_behind_the_stages_before_it(engine):
    (process,) = engines()
    busiest = max(process.threads(), key=lambda thread: thread.user_time + thread.system_time)
    assert os.getpriority(os.PRIO_PROCESS, 0) < os.getpriority(os.PRIO_PROCESS, busiest.id) == 19


async def test_bad_sampling_is_the_callers_fault(engine):
    with pytest.raises(ValueError):
        request = GenerateRequest("bad", tuple(IDS[:10]), None, {"max_tokens": 4, "temperature": -1.0})
        async for _ in engine.generate(request):
            pass
    assert len((await answer(engine, "good", IDS[:10])).token_ids) == 4
