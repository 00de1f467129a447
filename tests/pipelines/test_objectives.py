# SPDX-License-Identifier: Apache-2.0
"""What a repair network is trained to make small."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvcache.geometry import Geometry
from kvcache.settings import TrainingSettings
from kvcache.target import TargetLLM
from pipelines.training.objectives import document_loss, objective
from pipelines.training.pairs import PairSource, TrainingPair
from pipelines.training.scores import ScoreMoments
from pipelines.training.statistics import Statistics, measure
from tests.tiny import tiny_model_dir, tiny_settings

pytestmark = pytest.mark.usefixtures("one_thread")

GEOMETRY = Geometry(2, 1, 4, 2, 8, 16, 32)


def named(name: str) -> torch.nn.Module:
    return objective(TrainingSettings(objective=name, huber_delta=0.5), GEOMETRY)


def test_mse_huber_and_qkv_of_known_errors() -> None:
    true = torch.zeros(1, 2, 1, 2, 4)
    error = torch.tensor([0.1, -0.5, 2.0, 0.0]).expand(true.shape)
    assert named("mse")(error, true)[0, 1, 0, 1].tolist() == pytest.approx([0.01, 0.25, 4.0, 0.0])
    assert named("huber")(error, true)[0, 1, 0, 1].tolist() == pytest.approx([0.01, 0.25, 2 * 0.5 * (2 - 0.25), 0.0])
    qkv = named("qkv")
    qkv.metric[1, 0] = 2 * torch.eye(4).flip(0)
    found = qkv(error, true)[0]
    assert found[1, 0, 0].tolist() == pytest.approx([0.0, 16.0, 1.0, 0.04])
    assert found[1, 0, 1].tolist() == found[0, 0, 0].tolist() == pytest.approx([0.01, 0.25, 4.0, 0.0])


@pytest.mark.parametrize("name", ["mse", "huber", "qkv"])
def test_the_loss_is_a_mean_over_tokens_and_coordinates_with_weight(name: str) -> None:
    torch.manual_seed(0)
    predicted, true = torch.randn(2, 5, 2, 1, 2, 4)
    weight = (torch.rand(2, 1, 2, 4) > 0.3).float()
    elements = named(name)(predicted, true)
    expected = elements[:, weight.bool()].mean()
    torch.testing.assert_close(document_loss(predicted, true, weight, named(name)), expected)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[TargetLLM, list[TrainingPair], Statistics]:
    folder = tmp_path_factory.mktemp("objectives")
    directory = tiny_model_dir(folder / "model")
    settings = tiny_settings(directory, training={"cache_dir": str(folder / "cache"), "cache_dtype": "float32"})
    target, random = TargetLLM.load(settings=settings), Random(5)
    source = PairSource(target, settings)
    pairs = [source.pair([random.choices(range(3, 384), k=20) for _ in range(3)]) for _ in range(6)]
    shape = tuple(pairs[0].stale.shape[1:])
    return target, pairs, measure(pairs, shape).statistics(floor=1e-3)


def metric(target: TargetLLM, pairs: list[TrainingPair], statistics: Statistics, times: int = 1) -> torch.Tensor:
    moments = ScoreMoments(target, seed=7)
    for pair in pairs * times:
        moments.add(pair)
    return moments.metric(statistics)


def test_scores_weigh_a_normalised_residual_as_much_as_mse_does(measured: Any) -> None:
    _, pairs, statistics = measured
    keys = torch.cat([pair.residual / statistics.sigma_delta for pair in pairs])[:, 1:, :, 0]
    scores = torch.einsum("lhed,tlhd->tlhe", metric(*measured)[1:], keys)
    torch.testing.assert_close(scores.square().sum((0, 3)), keys.square().sum((0, 3)), rtol=1e-4, atol=0)


def test_layer_0_which_lacks_nothing_has_no_scores_to_mend(measured: Any) -> None:
    found = metric(*measured)
    assert found.isfinite().all()
    assert not found[0].any()


def test_an_error_counts_as_it_changes_the_scores_of_the_targets_own_attention(measured: Any) -> None:
    """Every query with every key before it, by transformers: mean squares stand in the proportion that we say."""
    target, pairs, statistics = measured
    found, layer = metric(target, pairs, statistics, times=40), 2
    torch.manual_seed(1)
    errors = torch.randn(4, target.geometry.head_dim)
    changes = torch.zeros(len(errors), target.geometry.n_kv_heads)
    for pair in pairs:
        q, cos, sin = rotated_queries(target, pair.tokens, layer)  # [Q, T, D]
        for index, error in enumerate(errors):
            spread = error.expand(1, 1, len(pair.tokens), -1)
            key = apply_rotary_pos_emb(spread, spread, cos, sin)[1][0, 0]  # the same canonical error at every place
            squares = (q @ key.T).square().tril() / torch.arange(1, len(key) + 1)[:, None]
            changes[index] += squares.sum((1, 2)).unflatten(0, (target.geometry.n_kv_heads, -1)).sum(1)
    normalised = errors[:, None] / statistics.sigma_delta[layer, :, 0]
    lengths = torch.einsum("hed,nhd->nhe", found[layer], normalised).square().sum(2)
    ratio = lengths / changes
    torch.testing.assert_close(ratio / ratio.mean(0), torch.ones_like(ratio), rtol=0, atol=0.05)


def rotated_queries(target: TargetLLM, tokens: torch.Tensor, layer: int) -> tuple[torch.Tensor, ...]:
    """Queries `[Q, T, D]` of one prefill, and the rotary tables that transformers made for it."""
    decoder, kept = target.model.get_decoder(), {}
    attention = decoder.layers[layer].self_attn
    hooks = [
        attention.q_proj.register_forward_hook(lambda _, __, out: kept.update(q=out)),
        decoder.rotary_emb.register_forward_hook(lambda _, __, out: kept.update(tables=out)),
    ]
    with torch.no_grad():
        target.model(tokens[None])
    for hook in hooks:
        hook.remove()
    q, (cos, sin) = kept["q"].unflatten(2, (-1, attention.head_dim)).transpose(1, 2), kept["tables"]
    return apply_rotary_pos_emb(q, q, cos, sin)[0][0], cos, sin
