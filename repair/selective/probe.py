# SPDX-License-Identifier: Apache-2.0
"""The question looks at the stale prefix: how much attention it gives to every row, by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvcache.target import TargetLLM
from repair.selective.kernel import RowPass
from repair.selective.prefix import AssembledPrefix

_TILE = 64

Reduce = Callable[[torch.Tensor], torch.Tensor]
"""Attention of each question token `[q, N]`, mean over heads, to one score per row `[N]`."""


def mean(attention: torch.Tensor) -> torch.Tensor:
    """Over question tokens; the scores add up to the share of attention that stays in the prefix."""
    return attention.mean(dim=0)


def l2_norm(attention: torch.Tensor) -> torch.Tensor:
    """Over question tokens."""
    return attention.norm(dim=0)


def probe(
    target: TargetLLM, prefixes: Sequence[AssembledPrefix], layers: Sequence[int], reduce: Reduce
) -> list[torch.Tensor]:
    """Run each prefix's question over it, up to the last of `layers`; the prefix's own rows stay as they are.

    Returns:
        Scores, float32 `[len(layers), N]`, per prefix.
    """
    run = RowPass(target, prefixes, [prefix.question for prefix in prefixes])
    scores: list[dict[int, torch.Tensor]] = [{} for _ in prefixes]
    while True:
        run.write(run.keys_values())
        queries = run.queries()
        if run.layer in layers:
            for found, prefix, q in zip(scores, prefixes, queries, strict=True):
                found[run.layer] = reduce(question_attention(q, prefix, run.layer))
        if run.layer == max(layers):
            return [torch.stack([found[layer] for layer in layers]) for found in scores]
        run.advance(queries=queries)


def question_attention(queries: torch.Tensor, prefix: AssembledPrefix, layer: int, tile: int = _TILE) -> torch.Tensor:
    """Attention probabilities of the question's tokens to the prefix's rows, mean over query heads.

    A token's softmax is over all it sees: the prefix, and the question up to itself.

    Args:
        queries: `[q, Q, D]`, rotated, of all question tokens.
        prefix: its keys in this layer, the question's included.
        layer: which.
        tile: question tokens that are worked on together; bounds the memory, not the result.

    Returns:
        float32 `[q, N]`.
    """
    k = prefix.turned[layer].float().permute(1, 2, 0)  # [H, D, T]
    q = queries.float().unflatten(1, (k.shape[0], -1)).permute(1, 2, 0, 3) * queries.shape[-1] ** -0.5  # [H, G, q, D]
    own = torch.arange(q.shape[2], device=k.device)
    result = torch.zeros(len(own), prefix.rows, device=k.device)
    for start in range(0, len(own), tile):
        part = q[:, :, start : start + tile]
        scores = (part.flatten(1, 2) @ k).unflatten(1, part.shape[1:3])
        # All of the prefix is seen.
        scores[..., prefix.rows :].masked_fill_(own > own[start : start + tile, None], -torch.inf)
        result[start : start + tile] = scores.softmax(dim=-1)[..., : prefix.rows].sum(dim=(0, 1))
    return result / queries.shape[1]
