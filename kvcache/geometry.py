# SPDX-License-Identifier: Apache-2.0
"""Shapes and rotary embedding of a target LLM.

Shape legend, here and everywhere: `T` tokens, `L` layers, `H` KV heads, `D` head size. Chunk caches hold keys and
values as two tensors `[L, T, H, D]`; the packed order of the published repairers is `[B, T, L, H, 2, D]`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig, PreTrainedModel

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3", "mistral")
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class UnsupportedTargetError(ValueError):
    """The model's KV cache cannot be moved by this code; the message names the property that stands in the way."""


@dataclass(frozen=True)
class Geometry:
    """Sizes of a target LLM that shape its KV cache."""

    n_layers: int
    n_kv_heads: int
    head_dim: int
    n_attention_heads: int
    hidden_size: int
    vocab_size: int
    max_positions: int

    @classmethod
    def of(cls, config: PretrainedConfig) -> Geometry:
        """Read the sizes from a transformers config.

        Raises:
            UnsupportedTargetError: another architecture, or attention that is not plain causal in every layer.
        """
        if config.model_type not in SUPPORTED_MODEL_TYPES:
            raise UnsupportedTargetError(
                f"model_type {config.model_type!r} is not supported (supported: {', '.join(SUPPORTED_MODEL_TYPES)})"
            )
        layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
        # Mistral has no per-layer types: its one window counts for every layer.
        window = getattr(config, "sliding_window", None) if config.model_type == "mistral" else None
        if layer_types != {"full_attention"} or window is not None:
            raise UnsupportedTargetError(
                "sliding-window attention is not supported: every layer must be full attention"
            )
        return cls(
            n_layers=config.num_hidden_layers,
            n_kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            n_attention_heads=config.num_attention_heads,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            max_positions=config.max_position_embeddings,
        )

    def kv_shape(self, tokens: int) -> tuple[int, int, int, int]:
        """Shape `[L, T, H, D]` of the keys (and of the values) of that many tokens."""
        return (self.n_layers, tokens, self.n_kv_heads, self.head_dim)

    def kv_bytes(self, tokens: int, dtype: torch.dtype) -> int:
        """Bytes of keys and values together."""
        return 2 * self.n_layers * tokens * self.n_kv_heads * self.head_dim * dtype.itemsize


class Rotary:
    """The target's rotary embedding (rotate-half pairing), done and undone in float32.

    Built from the live model's inverse frequencies, so that scaled variants (linear, llama3, YaRN) need no code of
    their own. YaRN also scales the amplitude by `attention_scaling`; undoing divides it out again.
    """

    def __init__(self, inv_freq: torch.Tensor, attention_scaling: float = 1.0) -> None:
        self.inv_freq = inv_freq.detach().to(device="cpu", dtype=torch.float32)
        self.attention_scaling = float(attention_scaling)

    @classmethod
    def of(cls, model: PreTrainedModel) -> Rotary:
        """Take the rotary embedding of a loaded transformers model.

        Raises:
            UnsupportedTargetError: the frequencies depend on sequence length, or rotate only part of the head.
        """
        rope_type = rope_parameters(model.config)["rope_type"]
        if rope_type not in SUPPORTED_ROPE_TYPES:
            raise UnsupportedTargetError(
                f"rotary type {rope_type!r} is not supported (supported: {', '.join(SUPPORTED_ROPE_TYPES)})"
            )
        rotary = model.get_decoder().rotary_emb
        geometry = Geometry.of(model.config)
        if 2 * rotary.inv_freq.numel() != geometry.head_dim:
            raise UnsupportedTargetError(
                f"partial rotary embedding is not supported: {2 * rotary.inv_freq.numel()} of {geometry.head_dim} dims"
            )
        return cls(rotary.inv_freq, rotary.attention_scaling)

    @property
    def digest(self) -> str:
        """SHA-256 over the float32 inverse frequencies and the amplitude."""
        data = self.inv_freq.numpy().astype("<f4").tobytes() + repr(self.attention_scaling).encode()
        return hashlib.sha256(data).hexdigest()

    def rotate(self, k: torch.Tensor, positions: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Turn canonical keys into keys at `positions`.

        Args:
            k: keys `[..., T, H, D]`, rotary undone, any float dtype.
            positions: int `[T]`.
            out: where to write, `[..., T, H, D]`; None allocates in the dtype of `k`.
        """
        return self._turn(k, positions, sign=1.0, amplitude=self.attention_scaling, out=out)

    def unrotate(self, k: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Turn keys at `positions` into canonical keys; the inverse of `rotate`."""
        return self._turn(k, positions, sign=-1.0, amplitude=1.0 / self.attention_scaling, out=None)

    def _turn(
        self, k: torch.Tensor, positions: torch.Tensor, sign: float, amplitude: float, out: torch.Tensor | None
    ) -> torch.Tensor:
        if positions.shape != (k.shape[-3],):
            raise ValueError(f"positions {tuple(positions.shape)} do not match keys {tuple(k.shape)} (want [T])")
        angle_Th = positions.to(device=k.device, dtype=torch.float32)[:, None] * self.inv_freq.to(k.device)
        cos_Th, sin_Th = angle_Th.cos() * amplitude, angle_Th.sin() * (sign * amplitude)
        # As wide as the keys: a product over whole rows runs twice as fast on CPU as one broadcast over the heads.
        cos_THD = torch.cat([cos_Th, cos_Th], dim=-1)[:, None].expand(k.shape[-3:]).contiguous()
        sin_THh = sin_Th[:, None].expand(-1, k.shape[-2], -1).contiguous()
        if out is None:
            out = torch.empty_like(k)
        half = k.shape[-1] // 2
        # Straight into a float32 destination; for another dtype the sum is rounded once, at its end.
        turned = torch.mul(k, cos_THD, out=out if out.dtype == torch.float32 else None)
        turned[..., :half].addcmul_(k[..., half:], sin_THh, value=-1.0)
        turned[..., half:].addcmul_(k[..., :half], sin_THh)
        if turned is not out:
            out.copy_(turned)
        return out


def rope_parameters(config: PretrainedConfig) -> dict[str, object]:
    """The one place that reads rotary settings: transformers 5 keeps them in `config.rope_parameters`.

    Returns:
        `{"rope_type": ..., "rope_theta": ..., ...}`.
    """
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    parameters.setdefault("rope_type", "default")
    return parameters
