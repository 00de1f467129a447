# SPDX-License-Identifier: Apache-2.0
"""Training on a tiny target: it learns, it goes on exactly where it stopped, its numbers are what they say."""

from __future__ import annotations

import json
import math
import resource
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kvcache.settings import Settings, TrainingSettings
from kvcache.target import TargetLLM
from pipelines.training.pairs import PairSource, joint_kv
from pipelines.training.state import StateError
from pipelines.training.statistics import measure
from pipelines.training.trainer import CURVE_FILE, STATE_FILE, Trainer, learning_rate, visits
from pipelines.training.validation import validate
from repair.network import SIZES, RepairNetwork
from tests.pipelines.runs import HEADER, curve, job, random_groups, recipe

pytestmark = pytest.mark.usefixtures("one_thread", "tiny_size")


@pytest.mark.parametrize(
    ("optimizer", "updates", "objective"), [("adamw", 150, "mse"), ("muon", 100, "mse"), ("adamw", 150, "qkv")]
)
def test_overfits_four_groups(
    target: TargetLLM, directory: str, tmp_path: Path, optimizer: str, updates: int, objective: str
) -> None:
    settings = recipe(directory, tmp_path, variants=1, optimizer=optimizer, objective=objective)
    trainer = Trainer(target, job(tmp_path / "out", updates), settings)
    trainer.run()
    seen = validate(trainer.network, list(trainer.training_pairs()), trainer.statistics)
    assert seen.repaired.nmse < 0.35 * seen.stale.nmse
    assert seen.repaired.k["interior"] < 0.7 * seen.stale.k["interior"]
    assert seen.repaired.v["boundary"] < 0.7 * seen.stale.v["boundary"]


def test_rows_added_for_the_matrix_library_change_nothing(
    target: TargetLLM, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = []
    for multiple in (1, 64):
        monkeypatch.setattr("pipelines.training.trainer._ROW_MULTIPLE", multiple)
        Trainer(target, job(tmp_path / str(multiple), 8), settings).run()
        losses.append([line["loss"] for line in curve(tmp_path / str(multiple)) if "loss" in line])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] != losses[0][0]


def test_bfloat16_activations_train_alike_and_leave_no_setting_behind(
    target: TargetLLM, directory: str, tmp_path: Path
) -> None:
    outside, losses = torch.get_float32_matmul_precision(), {}
    for precision in ("highest", "medium"):
        settings = recipe(directory, tmp_path, matmul_precision=precision)
        Trainer(target, job(tmp_path / precision, 8), settings).run()
        losses[precision] = [line["loss"] for line in curve(tmp_path / precision) if "loss" in line]
    assert losses["medium"] == pytest.approx(losses["highest"], rel=0.02)
    assert losses["medium"] != losses["highest"]
    assert torch.get_float32_matmul_precision() == outside


@pytest.mark.parametrize("variant", [{"attention": "block_diagonal"}, {"reinject": False}])
def test_a_variant_is_trained_and_loads_as_what_it_is(
    target: TargetLLM, directory: str, tmp_path: Path, variant: dict[str, object]
) -> None:
    trainer = Trainer(target, job(tmp_path / "out", 5), recipe(directory, tmp_path, **variant))
    trainer.run()
    loaded = RepairNetwork.load(tmp_path / "out", target.model.get_input_embeddings())
    assert loaded.config == trainer.network.config == SIZES["tiny"].model_copy(update=variant)


def test_layer_0_is_left_alone(target: TargetLLM, settings: Settings, tmp_path: Path) -> None:
    trainer = Trainer(target, job(tmp_path / "out", 20), settings)
    trainer.run()
    assert torch.equal(trainer.statistics.weight[0], torch.zeros_like(trainer.statistics.weight[0]))
    assert torch.equal(trainer.statistics.weight[1:], torch.ones_like(trainer.statistics.weight[1:]))
    (pair, *_) = trainer.training_pairs()
    repaired = trainer.network.repair(pair.stale[None], pair.tokens[None], chunk_ids(pair.lengths)[None])
    change = (repaired[0] - pair.stale)[:, 0]
    assert change.square().mean().sqrt() < 0.01 * pair.stale[:, 0].square().mean().sqrt()


@pytest.mark.parametrize(("optimizer", "objective"), [("adamw", "mse"), ("muon", "mse"), ("adamw", "qkv")])
def test_a_run_killed_anywhere_ends_with_the_same_weights(
    target: TargetLLM, directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str, objective: str
) -> None:
    settings = recipe(directory, tmp_path, optimizer=optimizer, objective=objective)
    Trainer(target, job(tmp_path / "whole", 17), settings).run()
    kill_at = Random().randrange(1, 17)
    update = Trainer._update

    def die(self: Trainer, number: int) -> dict:
        if number == kill_at:
            raise KeyboardInterrupt
        return update(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_update", die)
        with pytest.raises(KeyboardInterrupt):
            Trainer(target, job(tmp_path / "killed", 17), settings).run()
    Trainer(target, job(tmp_path / "killed", 17), settings).run()

    whole, killed = (load_file(tmp_path / name / STATE_FILE) for name in ("whole", "killed"))
    assert whole.keys() == killed.keys()
    assert [name for name in whole if not torch.equal(whole[name], killed[name])] == [], f"killed at {kill_at}"
    assert curve(tmp_path / "whole") == curve(tmp_path / "killed")


def test_another_runs_state_is_refused(target: TargetLLM, directory: str, tmp_path: Path) -> None:
    Trainer(target, job(tmp_path / "out", 5), recipe(directory, tmp_path)).run()
    before = (tmp_path / "out" / STATE_FILE).read_bytes()
    with pytest.raises(StateError, match=r"state\.safetensors belongs to a run with other"):
        Trainer(target, job(tmp_path / "out", 5), recipe(directory, tmp_path, learning_rate=1e-3)).run()
    assert (tmp_path / "out" / STATE_FILE).read_bytes() == before


def test_a_damaged_state_is_named(target: TargetLLM, settings: Settings, tmp_path: Path) -> None:
    Trainer(target, job(tmp_path / "out", 5), settings).run()
    state = tmp_path / "out" / STATE_FILE
    state.write_bytes(state.read_bytes()[:-100])
    with pytest.raises(StateError, match=r"cannot read training state .*state\.safetensors"):
        Trainer(target, job(tmp_path / "out", 5), settings).run()


def test_a_full_disk_leaves_the_last_state(target: TargetLLM, settings: Settings, tmp_path: Path) -> None:
    trainer = Trainer(target, job(tmp_path / "out", 10), settings)
    trainer.run()
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before[STATE_FILE]) // 2, limits[1]))
    try:
        with pytest.raises(StateError, match=r"cannot write training state .*state\.safetensors"):
            trainer.checkpoint(10, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before


def test_statistics_are_those_of_float64(target: TargetLLM, settings: Settings) -> None:
    source = PairSource(target, settings)
    pairs = [source.pair((HEADER, *group.chunks)) for group in random_groups(3)]
    found = measure(pairs, tuple(pairs[0].stale.shape[1:])).statistics(floor=1e-3)
    stale = np.concatenate([pair.stale.numpy() for pair in pairs]).astype(np.float64)
    residual = np.concatenate([pair.residual.numpy() for pair in pairs]).astype(np.float64)
    rms = np.sqrt(np.mean(stale**2, axis=0))
    np.testing.assert_allclose(found.sigma_stale.numpy(), rms, rtol=1e-6)
    expected = np.maximum(np.sqrt(np.mean(residual**2, axis=0)), 1e-3 * rms)
    np.testing.assert_allclose(found.sigma_delta.numpy(), expected, rtol=1e-6)


def test_stale_plus_residual_is_one_prefill(target: TargetLLM, settings: Settings) -> None:
    chunks = (HEADER, *random_groups(1)[0].chunks)
    pair = PairSource(target, settings).pair(chunks)
    ids = torch.tensor([[token for chunk in chunks for token in chunk]])
    with torch.no_grad():
        cache = target.model(ids, use_cache=True).past_key_values
    joint = pair.stale + pair.residual
    for layer in range(target.geometry.n_layers):
        keys = target.rotary.rotate(joint[:, layer, :, 0], torch.arange(ids.shape[1]))
        torch.testing.assert_close(keys, cache.layers[layer].keys[0].transpose(0, 1), atol=6e-3, rtol=2e-3)
        values = cache.layers[layer].values[0].transpose(0, 1)
        torch.testing.assert_close(joint[:, layer, :, 1], values, atol=6e-3, rtol=2e-3)
    # rotary undone from its place in the whole prefix, not in its chunk: layer 0 lacks nothing
    assert pair.residual[:, 0].abs().max() < 2e-3 * pair.stale[:, 0].abs().max()


def test_a_chunk_is_computed_once(
    target: TargetLLM, settings: Settings, directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[tuple[int, ...]] = []
    stale_kv = target.stale_kv
    monkeypatch.setattr(target, "stale_kv", lambda chunks: computed.extend(map(tuple, chunks)) or stale_kv(chunks))
    a, b, c = random_groups(1)[0].chunks
    source = PairSource(target, settings)
    for chunks in ((HEADER, a, b), (HEADER, b, a), (HEADER, c, a)):
        source.pair(chunks)
    assert sorted(computed) == sorted([HEADER, a, b, c])

    computed.clear()
    prefills: list[int] = []
    monkeypatch.setattr("pipelines.training.pairs.joint_kv", lambda t, ids: prefills.append(1) or joint_kv(t, ids))
    again, first = PairSource(target, settings).pair((HEADER, b, a)), source.pair((HEADER, b, a))
    assert (computed, prefills) == ([], [])
    without = PairSource(target, recipe(directory, tmp_path / "other", cache_bytes=0)).pair((HEADER, b, a))
    assert prefills and not list((tmp_path / "other").rglob("*.safetensors"))
    for one in (again, without):
        assert torch.equal(one.stale, first.stale) and torch.equal(one.residual, first.residual)


def test_the_cache_keeps_its_bound(target: TargetLLM, directory: str, tmp_path: Path) -> None:
    bound = 400_000
    source = PairSource(target, recipe(directory, tmp_path, cache_bytes=bound))
    for group in random_groups(12):
        source.pair((HEADER, *group.chunks))
    used = sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*") if file.is_file())
    assert 0.5 * bound < used <= bound * 1.05  # headers of the files are on top


def test_an_epochs_order_is_the_published_one() -> None:
    found = [group for group, _ in visits(0, 14, 7, TrainingSettings(seed=3))]
    expected = []
    for epoch in (0, 1):
        order = list(range(7))
        Random(3 * 1000003 + epoch * 10007).shuffle(order)
        expected += order
    assert found == expected


def test_each_epoch_sees_another_arrangement_until_they_come_round() -> None:
    assert [variant for _, variant in visits(0, 12, 2, TrainingSettings(variants=4))] == [
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        3,
        0,
        0,
        1,
        1,
    ]


def test_the_learning_rate_warms_up_and_ends_at_the_minimum() -> None:
    published = TrainingSettings()
    rates = [learning_rate(update, 1000, published) for update in range(1000)]
    assert rates[0] == pytest.approx(3e-4 / 20)
    assert max(rates) == rates[19] == rates[20] == pytest.approx(3e-4)
    assert rates[20 + 490] == pytest.approx((3e-4 + 3e-5) / 2, rel=0.01)
    assert rates[-1] == pytest.approx(3e-5)


def test_validation_by_region(target: TargetLLM, settings: Settings) -> None:
    source = PairSource(target, settings)
    pairs = [source.pair((HEADER, *group.chunks)) for group in random_groups(2)]
    statistics = measure(pairs, tuple(pairs[0].stale.shape[1:])).statistics(1e-3)
    network = RepairNetwork(SIZES["tiny"], target.geometry, target.model.get_input_embeddings())
    network.sigma_stale.copy_(statistics.sigma_stale)
    network.sigma_delta.copy_(statistics.sigma_delta)
    found = validate(network, pairs, statistics)
    assert found.repaired == found.stale  # a fresh network repairs nothing
    assert found.stale.nmse == pytest.approx(1.0, rel=1e-3)  # by what RMS is, on the same pairs

    error, joint = {"boundary": 0.0, "first": 0.0}, {"boundary": 0.0, "first": 0.0}
    for pair in pairs:
        begin = 0
        for index, length in enumerate(pair.lengths):
            region = "first" if index == 0 else "boundary"
            rows = slice(begin, begin + (length if index == 0 else min(8, length)))
            error[region] += float((pair.residual[rows, :, :, 1].double() ** 2).sum())
            joint[region] += float(((pair.stale + pair.residual)[rows, :, :, 1].double() ** 2).sum())
            begin += length
    for region in error:
        assert found.stale.v[region] == pytest.approx(math.sqrt(error[region] / joint[region]), rel=1e-6)


def test_the_curve_tells_losses_and_errors(target: TargetLLM, settings: Settings, tmp_path: Path) -> None:
    Trainer(target, job(tmp_path / "out", 20), settings).run()
    lines = [json.loads(text) for text in (tmp_path / "out" / CURVE_FILE).read_text().splitlines()]
    losses = [line for line in lines if "loss" in line]
    assert [line["update"] for line in losses] == list(range(1, 21))
    assert losses[-1]["loss"] < losses[0]["loss"] == pytest.approx(1.0, rel=0.5)
    checked = [line for line in lines if "validation" in line]
    assert [line["update"] for line in checked] == [10, 20]
    assert set(checked[0]["validation"]["repaired"]["k"]) == {"first", "boundary", "interior", "all"}


def chunk_ids(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
