# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's `config.json`: what it says about the network and about the target it was made for."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, field_validator
from torch import nn
from transformers import PretrainedConfig

from kvcache.geometry import Geometry, Rotary, rope_parameters
from kvcache.settings import Attention
from kvcache.target import TargetLLM
from repair.network import RepairConfig

CONFIG_FILE = "config.json"
FORMAT = "cacherepair-safetensors-v1"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used or written; the text names the file, the field and what was found."""


class TargetConfig(BaseModel):
    """`target_config`: what must equal the live target."""

    model_config = ConfigDict(extra="allow", frozen=True)

    n_layers: PositiveInt
    n_kv_heads: PositiveInt
    head_dim: PositiveInt
    hidden_size: PositiveInt
    n_attention_heads: PositiveInt

    @classmethod
    def of(cls, config: PretrainedConfig) -> TargetConfig:
        """Read it from a transformers config.

        transformers 5 keeps all rotary settings in `rope_parameters`; the format has `rope_theta` and the rest as
        `rope_scaling`, null for an unscaled embedding.
        """
        geometry, rope = Geometry.of(config), rope_parameters(config)
        theta = rope.pop("rope_theta", None)
        return cls(
            n_layers=geometry.n_layers,
            n_kv_heads=geometry.n_kv_heads,
            head_dim=geometry.head_dim,
            hidden_size=geometry.hidden_size,
            n_attention_heads=geometry.n_attention_heads,
            rope_theta=theta,
            rope_scaling=None if rope["rope_type"] == "default" else rope,
            max_position_embeddings=geometry.max_positions,
        )

    def geometry(self, vocab_size: int) -> Geometry:
        """The shapes it describes."""
        return Geometry(
            n_layers=self.n_layers,
            n_kv_heads=self.n_kv_heads,
            head_dim=self.head_dim,
            n_attention_heads=self.n_attention_heads,
            hidden_size=self.hidden_size,
            vocab_size=vocab_size,
            max_positions=(self.model_extra or {}).get("max_position_embeddings") or 0,
        )


class RopeSpec(BaseModel):
    """`target_rope_spec`: the part that can be checked against a live rotary embedding."""

    model_config = ConfigDict(extra="allow", frozen=True)

    inv_freq_count: int | None = None
    inv_freq_fp32_sha256: str | None = None
    attention_scaling: float | None = None

    @classmethod
    def of(cls, rotary: Rotary) -> RopeSpec:
        """Describe a rotary embedding."""
        return cls(
            inv_freq_count=rotary.inv_freq.numel(),
            inv_freq_fp32_sha256=hashlib.sha256(rotary.inv_freq.numpy().astype("<f4").tobytes()).hexdigest(),
            attention_scaling=rotary.attention_scaling,
        )


class CheckpointConfig(BaseModel):
    """`config.json`."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    format: Literal["cacherepair-safetensors-v1"] = FORMAT
    target_model_id: str | None = None
    capacity: str | None = None
    repair_config: RepairConfig
    target_config: TargetConfig
    target_rope_spec: RopeSpec = RopeSpec()
    target_embedding_sha256: str | None = None
    """Digest of the target's input embedding, see `embedding_digest`; published files have none."""
    weights_sha256: str | None = None
    """Digest of the file of tensors that belongs to it; published files have none."""
    key_coordinates: Literal["canonical"] = "canonical"
    repair_attention: Attention = "block_causal"
    training: dict[str, Any] = Field(default_factory=dict)

    @field_validator("repair_config", mode="before")
    @classmethod
    def _attention_stands_above(cls, value: Any) -> Any:
        return {k: v for k, v in value.items() if k != "attention"} if isinstance(value, dict) else value

    @property
    def network_config(self) -> RepairConfig:
        """The network's configuration."""
        return self.repair_config.model_copy(update={"attention": self.repair_attention})


def read_config(directory: str | Path) -> CheckpointConfig:
    """Read and check `config.json`.

    Raises:
        CheckpointError: not there, not JSON, or a field is missing or wrong (named).
    """
    path = Path(directory) / CONFIG_FILE
    try:
        return CheckpointConfig.model_validate_json(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the file"
        raise CheckpointError(f"{path}: {field}: {first['msg']} (got {_brief(first['input'])})") from None


def embedding_digest(embedding: nn.Embedding) -> str:
    """SHA-256 over the table rounded to bfloat16, so that a float32 and a bfloat16 copy of one model agree."""
    data = embedding.weight.detach().cpu().to(torch.bfloat16).contiguous().view(torch.int16)
    return hashlib.sha256(data.numpy().astype("<i2").tobytes()).hexdigest()


def check_target(path: Path, config: CheckpointConfig, target: TargetLLM) -> None:
    live = TargetConfig.of(target.model.config).model_dump()
    saved = config.target_config.model_dump()
    for field, value in live.items():
        if field in saved and _normal(saved[field]) != _normal(value):
            _foreign(path, f"target_config.{field}", saved[field], value)
    spec, live_spec = config.target_rope_spec, RopeSpec.of(target.rotary)
    for field in RopeSpec.model_fields:
        if getattr(spec, field) not in (None, getattr(live_spec, field)):
            _foreign(path, f"target_rope_spec.{field}", getattr(spec, field), getattr(live_spec, field))


def check_embedding(path: Path, config: CheckpointConfig, embedding: nn.Embedding) -> None:
    width = config.target_config.hidden_size
    if embedding.embedding_dim != width:
        raise CheckpointError(
            f"{path}: target_config.hidden_size is {width}, the embedding is {embedding.embedding_dim} wide"
        )
    # A float16 copy of the table has been rounded twice: nothing to compare.
    if config.target_embedding_sha256 and embedding.weight.dtype != torch.float16:
        digest = embedding_digest(embedding)
        if digest != config.target_embedding_sha256:
            _foreign(path, "target_embedding_sha256", config.target_embedding_sha256, digest)


def _foreign(path: Path, field: str, saved: Any, live: Any) -> None:
    raise CheckpointError(f"{path}: made for another target: {field} is {saved!r}, the target's is {live!r}")


def _normal(value: Any) -> Any:
    """Rotary scaling in one spelling: `type` was the old name of `rope_type`, and null or "default" is no scaling."""
    if not isinstance(value, dict):
        return value
    renamed = {"rope_type" if key == "type" else key: item for key, item in value.items() if item is not None}
    return None if renamed.get("rope_type", "default") == "default" else renamed


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
