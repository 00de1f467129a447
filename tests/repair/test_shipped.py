# SPDX-License-Identifier: Apache-2.0
"""The repair networks that are in the repository: small enough to be there, and worth being there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cachemend.examples import EXAMPLES
from kvcache import TargetLLM, compile_stale
from kvcache.prompt import PromptTemplate, plain_ids
from kvcache.settings import load_settings
from pipelines.training.pairs import joint_kv
from repair import load_repairer
from repair.cacherepair import SHIPPED, network_at_hand, shipped
from repair.checkpoint_config import read_config

WEIGHTS = Path(__file__).parents[2] / "repair" / "weights"


def test_they_fit_into_a_repository_and_each_has_a_card() -> None:
    assert sum(path.stat().st_size for path in WEIGHTS.rglob("*") if path.is_file()) <= 32 * 10**6
    for name in SHIPPED:
        assert (WEIGHTS / name / "README.md").is_file()
        assert read_config(shipped(name)).weights_sha256


@pytest.mark.real
def test_the_default_mends_the_default_target() -> None:
    settings = load_settings()
    if not network_at_hand(settings):
        pytest.skip("the hub's copy of the default model is another than the one that the shipped network knows")
    target = TargetLLM.load(settings=settings)
    network = load_repairer(shipped(settings.target.model), target)
    lines = (EXAMPLES / "passages.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines[:4]]
    header = PromptTemplate(target.tokenizer, settings.prompt).header_ids()
    chunks = [header, *(plain_ids(target.tokenizer, text) for text in texts)]
    stale, tokens, chunk_ids = compile_stale(target, chunks)
    joint = joint_kv(target, tokens[0].tolist())[None]
    repaired = network.repair(stale, tokens, chunk_ids)
    later = chunk_ids[0] > 0
    for part, most in (
        (0, 0.75),
        (1, 0.9),
    ):  # on unseen groups 0.60 of the error of keys is left, 0.84 of that of values
        lacking, left = (torch.linalg.norm((kv - joint)[:, later, :, :, part]) for kv in (stale, repaired))
        assert left < most * lacking
