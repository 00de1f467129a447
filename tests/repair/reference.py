# SPDX-License-Identifier: Apache-2.0
"""Selective recomputation as one would never serve it: transformers' own dense forward pass over every row.

A cache that answers with stale KV where nothing is selected, and a T x T mask, make the model itself compute what the
kernel has to. What unselected rows compute on the way is nonsense that nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import DynamicCache

from kvcache.chunk import ChunkKV
from kvcache.target import TargetLLM


class MixedCache(DynamicCache):
    """Fresh KV for the selected rows of each layer, stale global KV for the others."""

    def __init__(self, stale: Sequence[tuple[torch.Tensor, torch.Tensor]], selected: torch.Tensor) -> None:
        super().__init__()
        self.mixed = list(stale)
        self._selected = selected

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        chosen = self._selected[layer_idx][None, None, :, None]
        stale = self.mixed[layer_idx]
        self.mixed[layer_idx] = tuple(
            torch.where(chosen, new, old) for new, old in zip((key_states, value_states), stale, strict=True)
        )
        return self.mixed[layer_idx]


@torch.inference_mode()
def dense(
    target: TargetLLM,
    chunks: Sequence[ChunkKV],
    selected: torch.Tensor,
    admitted: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Global KV `[L, T, H, D]` after recomputing.

    Args:
        target: eager or SDPA attention, both take the mask.
        chunks: stale KV.
        selected: bool `[L, T]`.
        admitted: bool `[L, T]`, rows that others may attend to; None is all.
    """
    ids = torch.tensor([[token for chunk in chunks for token in chunk.token_ids]])
    rows = ids.shape[1]
    stale_k = torch.cat([chunk.k for chunk in chunks], dim=1)
    stale_v = torch.cat([chunk.v for chunk in chunks], dim=1)
    stale = [
        (target.rotary.rotate(k, torch.arange(rows)).transpose(0, 1)[None], v.transpose(0, 1)[None])
        for k, v in zip(stale_k, stale_v, strict=True)
    ]
    cache = MixedCache(stale, selected)
    lower = torch.ones(rows, rows, dtype=torch.bool).tril()
    masks = [
        lower if admitted is None else lower & (admitted[layer][None] | torch.eye(rows, dtype=torch.bool))
        for layer in range(len(selected))
    ]

    def own_mask(module, args, kwargs):
        mask = torch.zeros(rows, rows).masked_fill(~masks[module.layer_idx], -torch.inf)
        return args, {**kwargs, "attention_mask": mask[None, None]}

    hooks = [
        layer.self_attn.register_forward_pre_hook(own_mask, with_kwargs=True)
        for layer in target.model.get_decoder().layers
    ]
    try:
        target.model.get_decoder()(input_ids=ids, past_key_values=cache, use_cache=True)
    finally:
        for hook in hooks:
            hook.remove()
    k, v = (torch.stack([layer[part][0].transpose(0, 1) for layer in cache.mixed]) for part in (0, 1))
    return k, v


@torch.inference_mode()
def question_attentions(target: TargetLLM, chunks: Sequence[ChunkKV], question: Sequence[int]) -> torch.Tensor:
    """What transformers' eager attention gives the question over the stale prefix: `[L, Q, q, N + q]`."""
    rows = sum(len(chunk.token_ids) for chunk in chunks)
    k = target.rotary.rotate(torch.cat([chunk.k for chunk in chunks], dim=1), torch.arange(rows))
    v = torch.cat([chunk.v for chunk in chunks], dim=1)
    cache = DynamicCache()
    for layer in range(len(k)):
        cache.update(k[layer].transpose(0, 1)[None], v[layer].transpose(0, 1)[None], layer)
    before = target.model.config._attn_implementation
    target.model.set_attn_implementation("eager")
    try:
        output = target.model.get_decoder()(
            input_ids=torch.tensor([list(question)]), past_key_values=cache, output_attentions=True
        )
    finally:
        target.model.set_attn_implementation(before)
    return torch.stack([attention[0] for attention in output.attentions])


@torch.inference_mode()
def joint(target: TargetLLM, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Global KV `[L, T, H, D]` of one ordinary prefill."""
    cache = target.model.get_decoder()(torch.tensor([list(ids)]), use_cache=True).past_key_values
    keys, values = (
        torch.stack([getattr(layer, name)[0].transpose(0, 1) for layer in cache.layers]) for name in ("keys", "values")
    )
    return keys, values
