# SPDX-License-Identifier: Apache-2.0
"""Rotary: there and back, moves that add up, and refusal of what cannot be moved."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config

from kvcache.geometry import Geometry, Rotary, UnsupportedTargetError
from tests.tiny import ROPES, tiny_target


@pytest.fixture(params=ROPES)
def rotary(request, tmp_path):
    return tiny_target(tmp_path / "model", rope=request.param).rotary


def _keys(tokens: int = 40) -> torch.Tensor:
    return torch.randn(3, tokens, 2, 32, generator=torch.Generator().manual_seed(1))


def test_there_and_back(rotary):
    k, positions = _keys(), torch.arange(700, 740)
    back = rotary.unrotate(rotary.rotate(k, positions), positions)
    assert (back - k).abs().max() < 1e-5


def test_moving_twice_is_moving_once(rotary):
    k = _keys()
    local, far = torch.arange(40), torch.arange(200, 240)
    moved = rotary.rotate(rotary.unrotate(rotary.rotate(k, local), local), far)
    assert (moved - rotary.rotate(k, far)).abs().max() < 1e-5


def test_matches_the_models_own_rotation(tmp_path):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    for rope in ROPES:
        target = tiny_target(tmp_path / rope, rope=rope)
        k, positions = _keys(), torch.arange(5, 45)
        cos, sin = target.model.model.rotary_emb(k, positions[None])
        _, want = apply_rotary_pos_emb(k.transpose(1, 2), k.transpose(1, 2), cos, sin)
        assert (target.rotary.rotate(k, positions) - want.transpose(1, 2)).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rounds_once(rotary, dtype):
    k, positions = _keys().to(dtype), torch.arange(100, 140)
    want = rotary.rotate(k.float(), positions).to(dtype)
    assert torch.equal(rotary.rotate(k, positions), want)
    assert torch.equal(rotary.rotate(k, positions, out=torch.empty(k.shape, dtype=dtype)), want)


def test_writes_into_a_strided_destination(rotary):
    k, positions = _keys(), torch.arange(40)
    destination = torch.zeros(3, 100, 2, 32)
    rotary.rotate(k, positions, out=destination[:, 30:70])
    assert torch.equal(destination[:, 30:70], rotary.rotate(k, positions))
    assert destination[:, :30].abs().sum() == destination[:, 70:].abs().sum() == 0


def test_positions_must_match(rotary):
    with pytest.raises(ValueError, match="positions"):
        rotary.rotate(_keys(), torch.arange(39))


def test_yarn_carries_its_amplitude(tmp_path):
    rotary = tiny_target(tmp_path / "model", rope="yarn").rotary
    assert rotary.attention_scaling > 1
    k = _keys()
    ratio = rotary.rotate(k, torch.arange(40)).norm() / k.norm()
    assert ratio.item() == pytest.approx(rotary.attention_scaling, rel=1e-5)


def test_refuses_what_cannot_be_moved():
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64}
    small = {**sizes, "num_hidden_layers": 1, "vocab_size": 64}
    dynamic = LlamaConfig(
        **small, max_position_embeddings=64, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    )
    with pytest.raises(UnsupportedTargetError, match="dynamic"):
        Rotary.of(AutoModelForCausalLM.from_config(dynamic))
    with pytest.raises(UnsupportedTargetError, match="sliding"):
        Geometry.of(MistralConfig(**small, sliding_window=32))
    with pytest.raises(UnsupportedTargetError, match="sliding"):
        Geometry.of(Qwen2Config(**small, use_sliding_window=True, sliding_window=32, max_window_layers=0))
    with pytest.raises(UnsupportedTargetError, match="gpt2"):
        from transformers import GPT2Config

        Geometry.of(GPT2Config())


def test_sizes():
    geometry = Geometry.of(
        LlamaConfig(hidden_size=576, num_hidden_layers=30, num_key_value_heads=3, num_attention_heads=9)
    )
    assert geometry.kv_shape(10) == (30, 10, 3, 64)
    assert geometry.kv_bytes(1, torch.float32) == 46_080
