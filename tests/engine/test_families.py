# SPDX-License-Identifier: Apache-2.0
"""Reuse and repair through real vLLM, for other architectures and rotary variants; one engine of each for all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.engine import Engine
from engine.proof import EngineProof
from kvcache.arena import Arena
from kvcache.handoff import SharedMemoryTransport
from kvcache.settings import Settings
from kvcache.target import TargetLLM
from tests.engine.prompts import answer, repaired, repaired_reference, repaired_ticket, stale_reference, stale_ticket
from tests.repair.methods import METHODS
from tests.tiny import ROPES, tiny_model_dir, tiny_settings

TOLERANCE = 5e-3
CHUNKS = [list(range(10, 30)), list(range(100, 180)), list(range(200, 333))]
QUESTION = [7, 8, 9]
PREFIX = [token for chunk in CHUNKS for token in chunk]
PARAMS = {"infoflow": {"reorder": True}, "relaxkv": {"ratio": 0.3}}
"""Where a method's defaults would leave its hardest part out: an order of its own, a context of its own."""


@dataclass(frozen=True)
class Served:
    """A target, and the engine that serves it."""

    settings: Settings
    target: TargetLLM
    engine: Engine
    transport: SharedMemoryTransport
    folder: Path


@pytest.fixture(scope="module", params=[("qwen2", "default"), ("qwen3", "yarn"), ("llama", "llama3")], ids="-".join)
async def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    family, rope = request.param
    folder = tmp_path_factory.mktemp(family)
    settings = tiny_settings(tiny_model_dir(folder, family, rope_parameters=ROPES[rope]), engine={"threads": 2})
    engine = Engine(settings)
    await engine.start()
    try:
        arena = Arena(2**24, 60)
        yield Served(settings, TargetLLM.load(settings=settings), engine, SharedMemoryTransport(arena), folder)
        assert arena.stats()["live"] == 0
    finally:
        engine.shutdown()


async def test_stale_through_vllm(served: Served) -> None:
    await EngineProof(served.settings, served.target).check(served.engine)
    ticket = stale_ticket(served.target, served.transport, "got", CHUNKS)
    got = await answer(served.engine, "got", PREFIX + QUESTION, ticket)
    assert got.last.cached_tokens == len(PREFIX)
    assert got.logprobs == pytest.approx(stale_reference(served.target, CHUNKS, QUESTION), abs=TOLERANCE)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("full", "stale")])
async def test_a_repaired_prefix_through_vllm(served: Served, name: str) -> None:
    target = served.target
    repair = METHODS[name](target, served.folder)
    settings = served.settings.model_copy(update={"repair": served.settings.repair.model_copy(update=repair)})
    prefix = repaired(target, name, CHUNKS, QUESTION, settings, **PARAMS.get(name, {}))
    assert sorted(prefix.token_ids) == sorted(PREFIX)
    ticket = repaired_ticket(target, served.transport, name, prefix)
    got = await answer(served.engine, name, [*prefix.token_ids, *QUESTION], ticket)
    assert got.last.cached_tokens == len(PREFIX) and got.last.handoff_miss is None
    assert got.logprobs == pytest.approx(repaired_reference(target, prefix, QUESTION), abs=TOLERANCE)
    # The repair is what made the answer: stale KV gives another one.
    stale = stale_reference(target, CHUNKS, QUESTION)
    assert max(abs(a - b) for a, b in zip(got.logprobs, stale, strict=True)) > 10 * TOLERANCE
