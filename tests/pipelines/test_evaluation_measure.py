# SPDX-License-Identifier: Apache-2.0
"""What is measured of one request, against transformers run in another way: one pass with a mask, no cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvcache.settings import load_settings
from kvcache.target import TargetLLM
from pipelines.evaluation.measure import Meter, Reference
from pipelines.evaluation.requests import EvaluationRequest
from pipelines.training.statistics import Statistics
from repair.base import RepairedPrefix, RepairRequest, joined
from repair.macs import CostModel
from repair.registry import create
from repair.stale import StaleKV

IDS = torch.randint(3, 512, (120,), generator=torch.Generator().manual_seed(5)).tolist()
GOLDS = ((40, 41, 42), (77,))


pytestmark = pytest.mark.usefixtures("one_thread")


def request(*lengths: int) -> EvaluationRequest:
    """Chunks of these lengths, then 12 tokens of question."""
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    chunks = tuple(tuple(IDS[start : start + n]) for start, n in zip(starts, lengths, strict=True))
    return EvaluationRequest("data", "row", chunks, tuple(IDS[100:112]), ("gold one", "gold two"), GOLDS)


@pytest.fixture
def meter(tiny: TargetLLM) -> Meter:
    g = tiny.geometry
    ones = torch.ones(g.n_layers, g.n_kv_heads, 2, g.head_dim)
    return Meter(tiny, Statistics(ones, ones, floor=1e-3))


@pytest.fixture
def measured(tiny: TargetLLM, meter: Meter):
    def measure(asked: EvaluationRequest, repairer: Any) -> tuple[dict[str, Any], Reference]:
        reference = meter.reference(asked, create("full", tiny, load_settings()))
        stale = tiny.stale_kv(asked.chunks)
        return meter.measure(asked, reference, repairer, {}, stale), reference

    return measure


@torch.inference_mode()
def logprobs(target: TargetLLM, chunks: Sequence[Sequence[int]], rest: Sequence[int], alone: bool) -> torch.Tensor:
    """One pass over chunks and rest; `alone`: chunks see only themselves, the rest sees all. Float64 `[T, V]`."""
    ids = [*joined(chunks), *rest]
    visible = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    if alone:
        start = 0
        for chunk in chunks:
            visible[start : start + len(chunk), :start] = False
            start += len(chunk)
    logits = target.model(torch.tensor([ids]), attention_mask=visible[None, None], use_cache=False).logits[0]
    return logits.double().log_softmax(-1)


def test_full_prefill_is_itself(tiny, measured) -> None:
    asked = request(20, 40, 30)
    row, reference = measured(asked, create("full", tiny, load_settings()))
    metrics = row["metrics"]
    for name in ("kl_to_full", "kv_mse_normalized", "k_rmse", "v_rmse", "attention_error", "kv_bytes"):
        assert metrics[name] == 0, name
    assert (metrics["token_agreement"], metrics["answer_equal"]) == (1, 1)
    assert metrics["macs"] == CostModel.of(tiny.model.config).full(90, 12)
    want = logprobs(tiny, asked.chunks, [*asked.question_ids, *reference.forced[:-1]], alone=False)[101:]
    assert reference.forced == want.argmax(-1).tolist()
    assert reference.logprobs == pytest.approx(want, abs=1e-3)


def test_one_chunk_of_stale_kv_is_full_prefill(tiny, measured) -> None:
    metrics = measured(request(90), create("stale", tiny, load_settings()))[0]["metrics"]
    assert metrics["kl_to_full"] < 1e-8
    assert metrics["kv_mse_normalized"] < 1e-8
    assert max(metrics["k_rmse"], metrics["v_rmse"], metrics["attention_error"]) < 1e-5
    assert (metrics["token_agreement"], metrics["answer_equal"]) == (1, 1)


def test_likelihoods_are_those_of_one_masked_pass(tiny, measured) -> None:
    asked = request(20, 40, 30)
    row, reference = measured(asked, create("stale", tiny, load_settings()))
    metrics = row["metrics"]
    forced = [*asked.question_ids, *reference.forced[:-1]]
    p, q = (logprobs(tiny, asked.chunks, forced, alone)[101:] for alone in (False, True))
    want = float((p.exp() * (p - q)).sum(-1).mean())
    assert want > 0.01  # the tiny model does tell stale from joint
    assert metrics["kl_to_full"] == pytest.approx(want, rel=1e-3)
    golds = []
    for gold in GOLDS:
        found = logprobs(tiny, asked.chunks, [*asked.question_ids, *gold], alone=True)[101:-1]
        golds.append(found[range(len(gold)), list(gold)])
    best = max(golds, key=lambda each: float(each.mean()))
    assert metrics["gold_logprob"] == pytest.approx(float(best.mean()), rel=1e-4)
    assert metrics["gold_logprob_sum"] == pytest.approx(float(best.sum()), rel=1e-4)


def test_attention_outputs_by_hand(tiny, measured) -> None:
    """The last layer's, from its weights: full's question against stale keys and values."""
    asked = request(20, 40, 30)
    row, reference = measured(asked, create("stale", tiny, load_settings()))
    assert row["attention"][0] < 1e-5  # layer 0's KV depends on token and position only
    attention, g = tiny.model.model.layers[-1].self_attn, tiny.geometry
    with torch.inference_mode():
        h = reference.states[-1][0]
        positions = torch.arange(90, 102)
        q, k_own, v_own = (
            project(h).unflatten(-1, (-1, g.head_dim))
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        k = torch.cat([part.k[-1] for part in tiny.stale_kv(asked.chunks)] + [k_own])
        v = torch.cat([part.v[-1] for part in tiny.stale_kv(asked.chunks)] + [v_own])
        q, k = tiny.rotary.rotate(q, positions), tiny.rotary.rotate(k, torch.arange(102))
        groups = g.n_attention_heads // g.n_kv_heads
        scores = torch.einsum("qhd,thd->hqt", q, k.repeat_interleave(groups, 1)) / g.head_dim**0.5
        scores.masked_fill_(torch.arange(102) > positions[:, None], -torch.inf)
        mixed = torch.einsum("hqt,thd->qhd", scores.softmax(-1), v.repeat_interleave(groups, 1))
        ours = attention.o_proj(mixed.flatten(1))
    theirs = reference.attention[-1]
    assert row["attention"][-1] == pytest.approx(float((ours - theirs).norm() / theirs.norm()), rel=1e-3)
    assert row["attention"][-1] > 0.01
    assert row["metrics"]["attention_error"] == pytest.approx(sum(row["attention"]) / len(row["attention"]))


def test_attention_outputs_of_full_are_the_models_own(tiny, measured) -> None:
    asked = request(20, 40)
    _, reference = measured(asked, create("stale", tiny, load_settings()))
    seen: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.register_forward_hook(lambda module, args, output: seen.append(output[0][0]))
        for layer in tiny.model.model.layers
    ]
    logprobs(tiny, asked.chunks, asked.question_ids, alone=False)
    for hook in hooks:
        hook.remove()
    for ours, theirs in zip(reference.attention, seen, strict=True):
        assert ours == pytest.approx(theirs[-12:], abs=1e-4)


class Shortened(StaleKV):
    """Stale KV without the first row: other rows than the prefix has."""

    def repair(self, request: RepairRequest) -> RepairedPrefix:
        whole = super().repair(request)
        (k, v), *others = whole.kv
        return RepairedPrefix(whole.token_ids[1:], ((k[:, 1:], v[:, 1:]), *others), macs=7)


class FirstChunkOnly(StaleKV):
    """Hands over the first chunk alone, which is exact, and leaves the rest to be computed."""

    def repair(self, request: RepairRequest) -> RepairedPrefix:
        whole = super().repair(request)
        return RepairedPrefix(whole.token_ids, whole.kv[:1], macs=7)


def test_other_rows_have_no_kv_error_and_all_the_rest(tiny, measured) -> None:
    row, _ = measured(request(20, 40, 30), Shortened(tiny, load_settings()))
    metrics = row["metrics"]
    assert row["kv_error"] is None
    assert [name for name, value in metrics.items() if value is None] == ["kv_mse_normalized", "k_rmse", "v_rmse"]
    assert metrics["kl_to_full"] > 0 and metrics["attention_error"] > 0
    assert metrics["kv_bytes"] == tiny.geometry.kv_bytes(89, torch.float32)
    assert metrics["macs"] == 7 + CostModel.of(tiny.model.config).query(89, 12)


def test_what_is_not_handed_over_is_computed(tiny, measured) -> None:
    metrics = measured(request(20, 40, 30), FirstChunkOnly(tiny, load_settings()))[0]["metrics"]
    assert metrics["kl_to_full"] < 1e-8 and metrics["attention_error"] < 1e-5
    assert metrics["k_rmse"] < 1e-5 and metrics["v_rmse"] < 1e-5
    assert metrics["kv_bytes"] == tiny.geometry.kv_bytes(20, torch.float32)
    assert metrics["macs"] == 7 + CostModel.of(tiny.model.config).query(20, 82)


def test_errors_are_against_joint_kv(tiny, measured) -> None:
    """Units of one: the normalised error is the mean square, over all layers but those without residual."""
    asked = request(20, 40, 30)
    row, _ = measured(asked, create("stale", tiny, load_settings()))
    with torch.inference_mode():
        layers = tiny.model.model(torch.tensor([joined(asked.chunks)]), use_cache=True).past_key_values.layers
    joint_k = torch.stack([tiny.rotary.unrotate(x.keys[0].transpose(0, 1), torch.arange(90)) for x in layers])
    joint_v = torch.stack([x.values[0].transpose(0, 1) for x in layers])
    stale = tiny.stale_kv(asked.chunks)
    k, v = (torch.cat([getattr(chunk, name) for chunk in stale], dim=1) for name in "kv")
    assert row["metrics"]["k_rmse"] == pytest.approx(float((k - joint_k).norm() / joint_k.norm()), rel=1e-4)
    assert row["metrics"]["v_rmse"] == pytest.approx(float((v - joint_v).norm() / joint_v.norm()), rel=1e-4)
    both = torch.cat([k - joint_k, v - joint_v])
    assert row["metrics"]["kv_mse_normalized"] == pytest.approx(float(both.square().mean()), rel=1e-4)
    first_chunk = torch.tensor(row["kv_error"]["layer_head"][0])
    assert first_chunk.max() < 1e-6 < torch.tensor(row["kv_error"]["layer_head"][2]).max()
