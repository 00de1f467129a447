# SPDX-License-Identifier: Apache-2.0
"""Stale KV against transformers, the target's fingerprint, and the public Python API."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from kvcache import TargetLLM, compile_stale, materialize, to_hf_cache
from kvcache.geometry import UnsupportedTargetError
from kvcache.proof import prove_movable
from kvcache.target import target_fingerprint
from tests.tiny import FAMILIES, tiny_model_dir, tiny_settings, tiny_target

IDS = torch.randint(3, 512, (90,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module", params=FAMILIES)
def target(request, tmp_path_factory) -> TargetLLM:
    return tiny_target(tmp_path_factory.mktemp("family") / request.param, family=request.param)


@torch.inference_mode()
def _logits(target, ids, **kwargs):
    return target.model(torch.tensor([ids]), **kwargs).logits[0]


@torch.inference_mode()
def test_one_chunk_is_full_prefill(target):
    stale, tokens, chunk_ids = compile_stale(target, [IDS])
    assert stale.shape == (1, 90, 3, 2, 2, 32)
    assert tokens.tolist() == [IDS] and chunk_ids.sum() == 0
    cache = to_hf_cache(materialize(stale, target.rotary))
    question = [7, 8, 9]
    want = _logits(target, IDS + question)[-3:]
    assert (_logits(target, question, past_key_values=cache) - want).abs().max() < 1e-3


@torch.inference_mode()
def test_stale_is_block_diagonal_attention(target):
    """Several chunks against one pass in which chunks do not see each other and the question sees all."""
    chunks, question = [IDS[:20], IDS[20:50], IDS[50:]], [7, 8, 9]
    stale, _, chunk_ids = compile_stale(target, chunks)
    got = _logits(target, question, past_key_values=to_hf_cache(materialize(stale, target.rotary)))
    owner = torch.cat([chunk_ids[0], torch.full((3,), 99)])
    seen = (owner[:, None] == owner) | (owner[:, None] == 99)
    mask = torch.where(seen.tril(), 0.0, torch.finfo(torch.float32).min)[None, None]
    want = _logits(target, IDS + question, attention_mask=mask)[-3:]
    assert (got - want).abs().max() < 1e-3


def test_batches_do_not_change_a_chunk(target):
    together = target.stale_kv([IDS[:10], IDS, IDS[:33]])
    for chunk in together:
        alone = target.stale_kv([chunk.token_ids])[0]
        assert (chunk.k - alone.k).abs().max() < 1e-4 and (chunk.v - alone.v).abs().max() < 1e-4


@pytest.mark.parametrize("bad", [[], [0] * 2049, [-1], [512]])
def test_bad_chunks_are_refused(tiny, bad):
    with pytest.raises(ValueError, match="chunk 1"):
        tiny.stale_kv([[1], bad])


def test_movable(target):
    prove_movable(target)


def test_proof_names_the_layer(tiny, monkeypatch):
    monkeypatch.setattr(tiny.rotary, "inv_freq", tiny.rotary.inv_freq * 1.05)
    with pytest.raises(UnsupportedTargetError, match=r"keys of layer \d+, moved to position 37"):
        prove_movable(tiny)


def test_fingerprint_covers_what_shapes_the_kv(tmp_path):
    base = tiny_model_dir(tmp_path / "base")
    settings = tiny_settings(base)
    fingerprint = target_fingerprint(settings)
    copy = Path(shutil.copytree(base, tmp_path / "copy"))
    assert target_fingerprint(tiny_settings(str(copy))) == fingerprint  # the place does not matter
    others = [target_fingerprint(tiny_settings(base, target={"dtype": "float16"}))]
    others.append(target_fingerprint(tiny_settings(tiny_model_dir(tmp_path / "weights", seed=1))))
    config = json.loads((copy / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 9999.0
    (copy / "config.json").write_text(json.dumps(config))
    others.append(target_fingerprint(tiny_settings(str(copy))))
    tokenizer = Path(shutil.copytree(base, tmp_path / "tokenizer"), "tokenizer.json")
    tokenizer.write_text(tokenizer.read_text().replace("<|im_end|>", "<|im_fin|>"))
    others.append(target_fingerprint(tiny_settings(str(tokenizer.parent))))
    assert len({fingerprint, *others}) == 5


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([], "no chunks"),
        ([[1], []], "chunk 1 has 0 tokens"),
        ([[1], [2], [10**6]], "chunk 2 has a token id outside"),
    ],
)
def test_what_cannot_be_compiled_is_named(tiny, chunks, message):
    with pytest.raises(ValueError, match=message):
        compile_stale(tiny, chunks)


def test_more_chunks_than_the_target_has_positions(tiny):
    half = [1] * (tiny.geometry.max_positions // 2 + 1)
    with pytest.raises(ValueError, match=f"{2 * len(half)} tokens; the target has {tiny.geometry.max_positions}"):
        compile_stale(tiny, [half, half])
