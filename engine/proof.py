# SPDX-License-Identifier: Apache-2.0
"""Proof at start that reuse through this engine is right; it also warms the engine up."""

from __future__ import annotations

import torch

from engine.engine import Engine
from engine.types import GenerateRequest
from kvcache.arena import Arena
from kvcache.chunk import token_digest
from kvcache.compile import compile_stale, materialize, to_hf_cache
from kvcache.geometry import UnsupportedTargetError
from kvcache.handoff import HandoffIdentity, SharedMemoryTransport
from kvcache.proof import prove_movable
from kvcache.settings import Settings
from kvcache.target import TargetLLM

_TOLERANCE = {torch.float32: 5e-3, torch.float16: 5e-2, torch.bfloat16: 3e-1}
"""Largest difference of a first-token log-probability that rounding explains."""
_TOP = 5


class EngineProof:
    """Made before the engine starts, so that the target's own copy of the weights is gone when vLLM takes the memory.

    Args:
        settings: which target.
        target: None loads it, and lets it go again.

    Raises:
        UnsupportedTargetError: the target's KV cannot be moved; names the layer and the error.
    """

    def __init__(self, settings: Settings, target: TargetLLM | None = None) -> None:
        target = target or TargetLLM.load(settings=settings)
        prove_movable(target)
        generator = torch.Generator().manual_seed(11)
        ids = torch.randint(target.geometry.vocab_size, (150,), generator=generator).tolist()
        self._first, self._second, self._question = ids[:70], ids[70:140], ids[140:]
        self._stale = target.stale_kv([self._first, self._second])
        self._moved = _continue(target, [self._first, self._second], self._question)
        self._rotary, self._fingerprint, self._dtype = target.rotary, target.fingerprint, target.dtype

    async def check(self, engine: Engine) -> None:
        """Check that the engine, given a chunk's KV, says what it says when it computes that KV itself.

        First one chunk at position 0 against full prefill in vLLM; then two chunks, the second moved, against
        transformers continuing from the same assembled cache. Log-probabilities of the first token are compared.

        Raises:
            UnsupportedTargetError: reuse is wrong for this target; nothing must be served.
        """
        arena = Arena(2 * sum(chunk.nbytes for chunk in self._stale), lease_s=60.0)
        transport = SharedMemoryTransport(arena)
        try:
            prompt = self._first + self._question
            want = await _first_token(engine, "proof-full", prompt, None)
            got = await _first_token(engine, "proof-reuse", prompt, self._ticket(transport, "proof-reuse", 1))
            self._compare("one chunk at position 0", got, want)
            prompt = self._first + self._second + self._question
            got = await _first_token(engine, "proof-moved", prompt, self._ticket(transport, "proof-moved", 2))
            self._compare(f"a chunk moved to position {len(self._first)}", got, self._moved)
        finally:
            arena.close()

    def _ticket(self, transport: SharedMemoryTransport, request_id: str, chunks: int) -> dict:
        stale = self._stale[:chunks]
        ids = [token for chunk in stale for token in chunk.token_ids]
        k_LTHD = torch.cat([chunk.k for chunk in stale], dim=1)
        dtype = str(self._dtype).removeprefix("torch.")
        identity = HandoffIdentity(
            request_id, len(ids), token_digest(ids), self._fingerprint, tuple(k_LTHD.shape), dtype
        )
        writer = transport.reserve(identity)
        self._rotary.rotate(k_LTHD, torch.arange(len(ids)), out=writer.k)
        torch.cat([chunk.v for chunk in stale], dim=1, out=writer.v)
        return writer.commit()

    def _compare(self, what: str, got: dict[int, float], want: dict[int, float]) -> None:
        shared = got.keys() & want.keys()
        error = max((abs(got[key] - want[key]) for key in shared), default=float("inf"))
        best = max(want, key=want.__getitem__)
        if best not in got or not error <= _TOLERANCE[self._dtype]:
            raise UnsupportedTargetError(
                f"reuse through the engine is wrong for {what}: log-probabilities differ by {error:.2g} "
                f"(at most {_TOLERANCE[self._dtype]:.2g}); vLLM and the cached KV do not agree on this target"
            )


async def _first_token(engine: Engine, request_id: str, ids: list[int], ticket: dict | None) -> dict[int, float]:
    sampling = {"max_tokens": 1, "temperature": 0.0, "logprobs": _TOP}
    request = GenerateRequest(request_id, tuple(ids), ticket, sampling)
    async for delta in engine.generate(request):
        if ticket is not None and delta.handoff_miss:
            raise UnsupportedTargetError(f"the engine did not load the proof's hand-off: {delta.handoff_miss}")
        if delta.logprobs:
            return {entry["token_id"]: entry["logprob"] for entry in delta.logprobs[0]["top_logprobs"]}
    raise UnsupportedTargetError("the engine gave no log-probabilities for the proof")


@torch.inference_mode()
def _continue(target: TargetLLM, chunks: list[list[int]], question: list[int]) -> dict[int, float]:
    stale, _, _ = compile_stale(target, chunks)
    cache = to_hf_cache(materialize(stale, target.rotary).to(target.device))
    logits = target.model(torch.tensor([question], device=target.device), past_key_values=cache).logits[0, -1]
    logprobs = logits.float().log_softmax(-1)
    return {int(index): float(logprobs[index]) for index in logprobs.topk(_TOP).indices}
