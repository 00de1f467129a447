# SPDX-License-Identifier: Apache-2.0
"""What the target says after a prompt that it has read: more tokens into its cache, and how likely given ones are.

Shapes: `V` vocabulary, `n` tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import DynamicCache

from kvcache.target import TargetLLM


@torch.inference_mode()
def extend(target: TargetLLM, cache: DynamicCache, ids: Sequence[int], keep: int = 0) -> torch.Tensor:
    """Compute more tokens into a cache.

    Args:
        target: the target LLM.
        cache: grows by the tokens.
        ids: at least one.
        keep: logits of this many last tokens; 0 keeps all.

    Returns:
        Logits `[n, V]`.
    """
    input_ids = torch.tensor([list(ids)], device=target.device)
    return target.model(input_ids=input_ids, past_key_values=cache, use_cache=True, logits_to_keep=keep).logits[0]


@contextmanager
def borrowed(cache: DynamicCache) -> Iterator[DynamicCache]:
    """A cache to continue from; what is added is taken off again."""
    length = cache.get_seq_length()
    try:
        yield cache
    finally:
        cache.crop(length - cache.get_seq_length())


@torch.inference_mode()
def forced_logprobs(target: TargetLLM, cache: DynamicCache, logits_V: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
    """Log-probabilities before each of `ids`, when these follow the prompt whatever the target would have said.

    Args:
        target: the target LLM.
        cache: of the whole prompt; left as it is.
        logits_V: at the prompt's last token.
        ids: at least one.

    Returns:
        float64 `[n, V]`: row `i` is the distribution of token `i` given the prompt and the tokens before it.
    """
    logits_nV = logits_V[None]
    if len(ids) > 1:
        with borrowed(cache):
            logits_nV = torch.cat([logits_nV, extend(target, cache, ids[:-1])])
    return logits_nV.double().log_softmax(-1)


def answer_likelihoods(
    target: TargetLLM, cache: DynamicCache, logits_V: torch.Tensor, answers: Sequence[Sequence[int]]
) -> list[tuple[float, float]]:
    """How likely each answer follows the prompt, without a token that would end it.

    Args:
        target, cache, logits_V: as for `forced_logprobs`.
        answers: ids of each, at least one id.

    Returns:
        Mean and sum of the tokens' natural log-probabilities, per answer.
    """
    found = []
    for ids in answers:
        chosen = torch.tensor(list(ids), device=logits_V.device)[:, None]
        logprobs = forced_logprobs(target, cache, logits_V, ids).gather(1, chosen)
        found.append((float(logprobs.mean()), float(logprobs.sum())))
    return found
