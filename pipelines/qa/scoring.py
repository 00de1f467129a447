# SPDX-License-Identifier: Apache-2.0
"""How likely the target finds the gold answer, given the KV that the engine was given.

The engine scores nothing itself: vLLM reports log-probabilities of generated tokens, and of prompt tokens only where
it computed all of the prompt. So the target (transformers) continues from a copy of the very hand-off that the engine
loads; where nothing was handed off, from a prefill of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from kvcache.compile import to_hf_cache
from kvcache.prompt import plain_ids
from kvcache.settings import PromptSettings
from kvcache.target import TargetLLM
from pipelines.qa.continuation import answer_likelihoods, extend


@dataclass(frozen=True)
class GoldScore:
    """The gold answer that the target finds likeliest per token.

    Attributes:
        gold: its text.
        mean: mean log-probability of its tokens, in nats.
        sum: their sum.
    """

    gold: str
    mean: float
    sum: float


def gold_ids(tokenizer: PreTrainedTokenizerBase, gold: str, prompt: PromptSettings) -> list[int]:
    """Ids of an answer as it follows the prompt: after a cue ("Answer:") a space belongs to its first token."""
    return plain_ids(tokenizer, f" {gold}" if prompt.answer_cue else gold)


@torch.inference_mode()
def score_golds(
    target: TargetLLM,
    handed_off: tuple[torch.Tensor, torch.Tensor] | None,
    following: Sequence[int],
    golds: Sequence[tuple[str, Sequence[int]]],
) -> GoldScore:
    """Score the gold answers after a prompt, without a token that would end the answer.

    Args:
        target: the target LLM.
        handed_off: global keys and values `[L, T, H, D]` of the prompt's beginning; None for nothing.
        following: ids of the rest of the prompt, at least one.
        golds: texts and ids, at least one.
    """
    cache = DynamicCache()
    if handed_off is not None:
        k_LTHD, v_LTHD = handed_off
        cache = to_hf_cache(torch.stack([k_LTHD, v_LTHD], dim=-2).transpose(0, 1)[None].to(target.device))
    (logits_V,) = extend(target, cache, following, keep=1)
    likelihoods = answer_likelihoods(target, cache, logits_V, [ids for _, ids in golds])
    scores = [GoldScore(gold, *likelihood) for (gold, _), likelihood in zip(golds, likelihoods, strict=True)]
    return max(scores, key=lambda score: score.mean)
