# SPDX-License-Identifier: Apache-2.0
"""Reuse through real vLLM for other architectures and rotary variants."""

from __future__ import annotations

import pytest

from engine.engine import Engine
from engine.proof import EngineProof
from kvcache.arena import Arena
from kvcache.handoff import SharedMemoryTransport
from kvcache.target import TargetLLM
from tests.engine.prompts import answer, stale_reference, stale_ticket
from tests.tiny import ROPES, tiny_model_dir, tiny_settings


@pytest.mark.parametrize(("family", "rope"), [("qwen2", "default"), ("qwen3", "yarn"), ("llama", "llama3")])
async def test_stale_through_vllm(tmp_path, family, rope):
    directory = tiny_model_dir(tmp_path, family, rope_parameters=ROPES[rope])
    settings = tiny_settings(directory, engine={"threads": 2})
    target = TargetLLM.load(settings=settings)
    engine = Engine(settings)
    await engine.start()
    try:
        await EngineProof(settings, target).check(engine)
        chunks, question = [list(range(10, 90)), list(range(100, 233))], [7, 8, 9]
        transport = SharedMemoryTransport(Arena(2**24, 60))
        flat = [token for chunk in chunks for token in chunk]
        got = await answer(engine, "got", flat + question, stale_ticket(target, transport, "got", chunks))
        assert got.last.cached_tokens == len(flat)
        assert got.logprobs == pytest.approx(stale_reference(target, chunks, question), abs=5e-3)
    finally:
        engine.shutdown()
