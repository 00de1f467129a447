# SPDX-License-Identifier: Apache-2.0
"""Passes of the target over a prompt whose beginning may be handed over: what quality and latency are measured on.

Shapes: `V` vocabulary, `E` hidden size, `q` question tokens, `L` layers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from kvcache.compile import to_hf_cache
from kvcache.target import TargetLLM
from pipelines.qa.continuation import borrowed, extend
from repair.base import RepairedPrefix, Repairer, RepairRequest


@dataclass
class Prompted:
    """A prompt that has been read, up to its first token.

    Attributes:
        prefix: what the repairer returned.
        cache: prefix and question.
        logits_V: at the last prompt token, on the target's device.
        repair_s: seconds of the repair.
        ttft_s: seconds from stale KV in host memory to the first token: repair, rotary, loading, and computing what was
            not handed over.
    """

    prefix: RepairedPrefix
    cache: DynamicCache
    logits_V: torch.Tensor
    repair_s: float
    ttft_s: float

    @property
    def prefix_rows(self) -> int:
        """Positions before the question."""
        return len(self.prefix.token_ids)


@torch.inference_mode()
def read_prompt(target: TargetLLM, repairer: Repairer, request: RepairRequest) -> Prompted:
    """Repair, load, and compute the rest of the prompt; a method that hands nothing over prefills all of it.

    Args:
        target: the target LLM.
        repairer: the method.
        request: with stale KV in host memory.
    """
    begin = time.perf_counter()
    prefix = repairer.repair(request)
    repaired = time.perf_counter()
    cache = load(target, prefix)
    logits_V = extend(target, cache, [*prefix.token_ids[prefix.rows :], *request.question_ids], keep=1)[-1]
    int(logits_V.argmax())  # the first token; waits for the device
    return Prompted(prefix, cache, logits_V, repaired - begin, time.perf_counter() - begin)


def load(target: TargetLLM, prefix: RepairedPrefix) -> DynamicCache:
    """A repaired prefix as a transformers cache on the target's device: keys rotated to their positions."""
    if not prefix.rows:
        return DynamicCache()
    layers, _, heads, head_dim = prefix.kv[0][0].shape
    kv_1TLH2D = torch.empty(1, prefix.rows, layers, heads, 2, head_dim, dtype=target.dtype)
    k_LTHD, v_LTHD = (kv_1TLH2D[0, ..., index, :].transpose(0, 1) for index in (0, 1))
    prefix.write(target.rotary, k_LTHD, v_LTHD)
    return to_hf_cache(kv_1TLH2D.to(target.device))


def greedy(target: TargetLLM, prompt: Prompted, max_tokens: int) -> list[int]:
    """The likeliest token, again and again: at most `max_tokens` ids, the last of which may end the turn."""
    ends, ids = end_ids(target), [int(prompt.logits_V.argmax())]
    with borrowed(prompt.cache) as cache:
        while len(ids) < max_tokens and ids[-1] not in ends:
            ids.append(int(extend(target, cache, ids[-1:])[-1].argmax()))
    return ids


def end_ids(target: TargetLLM) -> set[int]:
    """Tokens that end an answer: the generation config's, and the tokenizer's."""
    configured = target.model.generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return {token for token in [*ids, target.tokenizer.eos_token_id] if token is not None}


@torch.inference_mode()
def question_states(target: TargetLLM, prompt: Prompted, question_ids: Sequence[int]) -> list[torch.Tensor]:
    """What the question's tokens bring to each layer's attention: inputs after the layer's norm, `L` of `[1, q, E]`."""
    decoder = target.model.get_decoder()
    cache = _prefix_only(prompt)
    states = decoder(
        input_ids=torch.tensor([list(question_ids)], device=target.device),
        past_key_values=cache,
        use_cache=True,
        output_hidden_states=True,
    ).hidden_states
    return [layer.input_layernorm(state) for layer, state in zip(decoder.layers, states[:-1], strict=True)]


@torch.inference_mode()
def attention_outputs(target: TargetLLM, prompt: Prompted, states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each layer's attention output, after its output projection, for given inputs of the question's tokens.

    Every layer gets the inputs as they are, whatever the layer before would have made of this prompt's prefix: so the
    outputs of two prefixes differ by what these hold, and layers can be compared. The question's tokens see the prefix
    and each other, from the position after the prefix on.

    Args:
        target: the target LLM.
        prompt: whose prefix is attended to.
        states: from `question_states`.

    Returns:
        `L` of `[q, E]`.
    """
    decoder, cache, rows = target.model.get_decoder(), _prefix_only(prompt), prompt.prefix_rows
    q = states[0].shape[1]
    positions_1q = torch.arange(rows, rows + q, device=target.device)[None]
    visible_11qT = torch.ones(q, rows + q, dtype=torch.bool, device=target.device).tril(rows)[None, None]
    rotation = decoder.rotary_emb(states[0], position_ids=positions_1q)
    return [
        layer.self_attn(
            hidden_states=state, position_embeddings=rotation, attention_mask=visible_11qT, past_key_values=cache
        )[0][0]
        for layer, state in zip(decoder.layers, states, strict=True)
    ]


def _prefix_only(prompt: Prompted) -> DynamicCache:
    cache = DynamicCache()
    for index, layer in enumerate(prompt.cache.layers):
        cache.update(layer.keys[:, :, : prompt.prefix_rows], layer.values[:, :, : prompt.prefix_rows], index)
    return cache
