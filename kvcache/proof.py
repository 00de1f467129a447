# SPDX-License-Identifier: Apache-2.0
"""Proof, on a small prompt, that a target's KV can be cached alone and moved."""

from __future__ import annotations

import torch
from transformers import DynamicCache

from kvcache.chunk import ChunkKV
from kvcache.geometry import UnsupportedTargetError
from kvcache.target import TargetLLM

_LENGTH, _OFFSET = 24, 37
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Largest relative error (root mean square, per layer) that rounding explains; a wrong rotary gives 0.1 to 1."""


@torch.inference_mode()
def prove_movable(target: TargetLLM) -> None:
    """Check layer by layer that a chunk's stored KV, moved, is what prefilling the chunk there gives.

    At position 0 (behind it other tokens, which a causal model must not notice) and at an offset.

    Raises:
        UnsupportedTargetError: it is not; names the layer and the error.
    """
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(target.geometry.vocab_size, (_LENGTH * 2,), generator=generator)
    chunk = target.stale_kv([ids[:_LENGTH].tolist()])[0]
    for offset, prefilled in ((0, ids), (_OFFSET, ids[:_LENGTH])):
        positions = torch.arange(offset, offset + len(prefilled))
        cache = target.model.get_decoder()(
            input_ids=prefilled[None].to(target.device), position_ids=positions[None].to(target.device), use_cache=True
        ).past_key_values
        _compare(target, chunk, cache, offset)


def _compare(target: TargetLLM, chunk: ChunkKV, cache: DynamicCache, offset: int) -> None:
    moved_LTHD = target.rotary.rotate(chunk.k, torch.arange(offset, offset + _LENGTH))
    for layer, entry in enumerate(cache.layers):
        for name, got, want in (("keys", moved_LTHD, entry.keys), ("values", chunk.v, entry.values)):
            want_THD = want[0].transpose(0, 1)[:_LENGTH].cpu().float()
            error = ((got[layer].float() - want_THD).square().mean() / want_THD.square().mean()).sqrt().item()
            if not error <= _TOLERANCE[target.dtype]:
                raise UnsupportedTargetError(
                    f"KV of this target cannot be reused: {name} of layer {layer}, moved to position {offset}, "
                    f"differ from prefilling there by {error:.2g} (relative; at most {_TOLERANCE[target.dtype]:.2g})"
                )
