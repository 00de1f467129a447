# SPDX-License-Identifier: Apache-2.0
"""Helpers to put prompts with and without a hand-off through a real engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from engine.engine import Engine
from engine.types import GenerateDelta, GenerateRequest
from kvcache.chunk import token_digest
from kvcache.compile import compile_stale, materialize, to_hf_cache
from kvcache.handoff import HandoffIdentity, Transport
from kvcache.settings import Settings
from kvcache.target import TargetLLM
from repair import RepairRequest, create
from repair.base import RepairedPrefix


@dataclass
class Answer:
    """A whole answer."""

    token_ids: list[int]
    logprobs: list[float]
    last: GenerateDelta


async def answer(engine: Engine, request_id: str, ids: list[int], ticket: Any = None, tokens: int = 4) -> Answer:
    sampling = {"max_tokens": tokens, "temperature": 0.0, "logprobs": 1, "ignore_eos": True}
    token_ids, logprobs, last = [], [], None
    async for delta in engine.generate(GenerateRequest(request_id, tuple(ids), ticket, sampling)):
        token_ids += delta.token_ids
        logprobs += [entry["logprob"] for entry in delta.logprobs or []]
        last = delta
    return Answer(token_ids, logprobs, last)


def stale_ticket(
    target: TargetLLM,
    transport: Transport,
    request_id: str,
    chunks: list[list[int]],
    forge: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Hand stale KV off; `forge` changes fields of the identity."""
    ticket = repaired_ticket(target, transport, request_id, repaired(target, "stale", chunks))
    ticket["identity"].update(forge or {})
    return ticket


def repaired(
    target: TargetLLM,
    method: str,
    chunks: list[list[int]],
    question: Sequence[int] = (),
    settings: Settings | None = None,
    **params: Any,
) -> RepairedPrefix:
    """What a method makes of chunks."""
    return create(method, target, settings).repair(RepairRequest(chunks, target.stale_kv(chunks), question, params))


def repaired_ticket(target: TargetLLM, transport: Transport, request_id: str, prefix: RepairedPrefix) -> dict[str, Any]:
    """Hand a repaired prefix off."""
    shape = target.geometry.kv_shape(prefix.rows)
    digest = token_digest(prefix.token_ids)
    identity = HandoffIdentity(request_id, prefix.rows, digest, target.fingerprint, shape, "float32")
    writer = transport.reserve(identity)
    prefix.write(target.rotary, writer.k, writer.v)
    return writer.commit()


def stale_reference(target: TargetLLM, chunks: list[list[int]], question: list[int], tokens: int = 4) -> list[float]:
    """Greedy log-probabilities from transformers continuing from the same assembled cache."""
    stale, _, _ = compile_stale(target, chunks)
    return continued(target, to_hf_cache(materialize(stale, target.rotary)), question, tokens)


def repaired_reference(target: TargetLLM, prefix: RepairedPrefix, question: list[int], tokens: int = 4) -> list[float]:
    """The same from a repaired prefix, its keys turned by transformers' own rotary embedding."""
    rotary = target.model.get_decoder().rotary_emb
    k, v = (torch.cat(parts, dim=1).transpose(1, 2) for parts in zip(*prefix.kv, strict=True))
    cos, sin = rotary(k, torch.arange(prefix.rows)[None])
    cache = DynamicCache()
    for layer in range(len(k)):
        turned, _ = apply_rotary_pos_emb(k[layer, None], k[layer, None], cos, sin)
        cache.update(turned, v[layer, None], layer)
    return continued(target, cache, question, tokens)


@torch.inference_mode()
def continued(target: TargetLLM, cache: DynamicCache, question: list[int], tokens: int) -> list[float]:
    """Greedy log-probabilities from transformers, after a cache and a question."""
    step, result = torch.tensor([question]), []
    for _ in range(tokens):
        logprobs = target.model(step, past_key_values=cache).logits[0, -1].log_softmax(-1)
        result.append(logprobs.max().item())
        step = logprobs.argmax().view(1, 1)
    return result
