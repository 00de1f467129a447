# SPDX-License-Identifier: Apache-2.0
"""The methods on the kernel: which rows they choose, and that choosing everything is full prefill."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvcache.settings import load_settings
from repair import RepairRequest, create
from repair.base import MethodParamsError
from repair.epic import windows
from repair.infoflow import densest_last, scoring_layers
from repair.macs import CostModel
from repair.registry import REPAIRERS
from repair.relaxkv import RelaxKVParams, plan
from repair.selective.kernel import RowPass
from repair.selective.method import SelectiveRepairer
from repair.selective.prefix import AssembledPrefix
from repair.selective.probe import l2_norm, mean, probe, question_attention
from repair.selective.select import top
from tests.repair.reference import dense, joint, question_attentions
from tests.repair.selective import LAYERS, LENGTHS, QUESTION, ROWS, distance, random_target, stale_chunks
from tests.tiny import FAMILIES

EXACT = 2e-4
HEADER = LENGTHS[0]
EVERYTHING = {
    "cacheblend": {"ratio": 1.0},
    "epic": {"window": max(LENGTHS)},
    "infoflow": {"ratio": 1.0},
    "prophetkv": {"ratio": 1.0},
    "relaxkv": {"ratio": 1.0},
    "kvshare-like": {"ratio": 1.0},
}
SELECTIVE = [name for name, cls in REPAIRERS.items() if issubclass(cls, SelectiveRepairer)]


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("methods")
    return {family: random_target(folder / family, family) for family in FAMILIES}


@pytest.fixture(scope="module")
def target(targets):
    return targets["qwen3"]


@pytest.fixture(scope="module")
def chunks(target):
    return stale_chunks(target)


def request_for(chunks, question=QUESTION, **params):
    return RepairRequest([chunk.token_ids for chunk in chunks], chunks, question, params)


def mend(target, name, chunks, **params):
    return create(name, target, load_settings()).repair(request_for(chunks, **params))


def written(target, prefix):
    k, v = (torch.full(target.geometry.kv_shape(prefix.rows), torch.nan) for _ in "kv")
    prefix.write(target.rotary, k, v)
    return k, v


def stale(chunks):
    return tuple(torch.cat([getattr(chunk, part) for chunk in chunks], dim=1) for part in "kv")


def changed(prefix, chunks, layer):
    """Rows whose values differ from the stale ones in a layer."""
    difference = (prefix.kv[0][1][layer] - stale(chunks)[1][layer]).abs().amax(dim=(1, 2))
    return (difference > 0).nonzero()[:, 0].tolist()


def test_every_selective_method_has_its_everything():
    assert sorted(EVERYTHING) == sorted(SELECTIVE)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", EVERYTHING)
def test_everything_selected_is_full_prefill(targets, family, name):
    prefix = mend(targets[family], name, stale_chunks(targets[family]), **EVERYTHING[name])
    assert distance(written(targets[family], prefix), joint(targets[family], prefix.token_ids)) < EXACT


@pytest.mark.parametrize("name", SELECTIVE)
def test_every_preset_mends_a_part(target, chunks, name):
    method = create(name, target, load_settings())
    full = joint(target, [token for chunk in chunks for token in chunk.token_ids])
    for preset in method.presets:
        prefix = method.repair(request_for(chunks, preset=preset))
        assert 0 < prefix.shares["recomputed"] < 1
        assert set(prefix.stages) >= {"transfer", "repair"}
        if preset != "reorder":
            # Header rows and layer 0 are as exact as they were; the rest is no longer stale, nor full prefill.
            got = written(target, prefix)
            assert distance([x[:, :HEADER] for x in got], [x[:, :HEADER] for x in full]) < EXACT
            assert distance([x[0] for x in got], [x[0] for x in full]) < EXACT
            assert distance(prefix.kv[0], stale(chunks)) > 0.01
            if name != "epic" or method.presets[preset]["window"] < max(LENGTHS):
                assert distance(got, full) > 0.01


@pytest.mark.parametrize("name", SELECTIVE)
def test_requests_together_come_out_as_if_alone(target, chunks, name):
    others = stale_chunks(target, (5, 16, 9), seed=11)
    single = stale_chunks(target, (6,), seed=12)
    method = create(name, target, load_settings())
    requests = [
        request_for(chunks),
        request_for(single),
        request_for(others, (3, 4, 5)),
        request_for(chunks, **EVERYTHING[name]),
    ]
    for got, request in zip(method.repair_batch(requests), requests, strict=True):
        alone = method.repair(request)
        assert got.token_ids == alone.token_ids and got.macs == alone.macs and got.shares == alone.shares
        assert distance(written(target, got), written(target, alone)) < EXACT


def test_epic_windows():
    assert windows([5, 10, 8], 2).tolist() == [5, 6, 15, 16]
    assert windows([5, 1, 8], 2).tolist() == [5, 6, 7]  # clamped, not spilled into the next chunk
    assert windows([5, 3], 64).tolist() == [5, 6, 7]


def test_epic_recomputes_its_windows(target, chunks):
    prefix = mend(target, "epic", chunks, window=2)
    want = [7, 8, 19, 20, 21]
    assert all(changed(prefix, chunks, layer) == want for layer in range(1, LAYERS))
    selected = torch.zeros(LAYERS, ROWS, dtype=torch.bool)
    selected[:, want] = True
    assert distance(written(target, prefix), dense(target, chunks, selected)) < EXACT


@pytest.mark.parametrize("name", ["cacheblend", "kvshare-like"])
@pytest.mark.parametrize("check_layer", [1, 2])
def test_deviation_is_that_of_full_prefill(target, chunks, name, check_layer):
    """All rows run through the layers below, so at the check layer fresh KV is joint KV."""
    full = joint(target, [token for chunk in chunks for token in chunk.token_ids])
    k_stale = target.rotary.rotate(stale(chunks)[0], torch.arange(ROWS))
    deviation = (full[1][check_layer] - stale(chunks)[1][check_layer]).pow(2).sum(dim=(1, 2))
    if name == "kvshare-like":
        deviation += (full[0][check_layer] - k_stale[check_layer]).pow(2).sum(dim=(1, 2))
    eligible = ROWS if name == "cacheblend" else ROWS - HEADER
    want = sorted(sorted(range(ROWS), key=lambda row: -deviation[row])[: int(0.3 * eligible)])
    prefix = mend(target, name, chunks, ratio=0.3, check_layer=check_layer)
    assert changed(prefix, chunks, LAYERS - 1) == want
    selected = torch.zeros(LAYERS, ROWS, dtype=torch.bool)
    selected[:, want] = True
    selected[: check_layer + (name == "cacheblend")] = True
    assert distance(written(target, prefix), dense(target, chunks, selected)) < EXACT


def test_cacheblend_may_refresh_only_what_it_selected(target, chunks):
    prefix = mend(target, "cacheblend", chunks, refresh="selected", candidates="documents", deviation="k_l1")
    picked = changed(prefix, chunks, 1)
    assert picked == changed(prefix, chunks, LAYERS - 1) and len(picked) == int(0.15 * ROWS)
    assert min(picked) >= HEADER


@pytest.fixture(scope="module")
def attentions(target, chunks):
    """Mean over heads of what transformers' own attention gives: `[L, q, N + q]`."""
    return question_attentions(target, chunks, QUESTION).mean(dim=1)


@torch.inference_mode()
def test_scores_are_the_attention_of_the_model(target, chunks, attentions):
    for reduce, want in ((mean, attentions.mean(dim=1)), (l2_norm, attentions.pow(2).sum(dim=1).sqrt())):
        prefix = AssembledPrefix.of(target, chunks, QUESTION)
        (scores,) = probe(target, [prefix], (1, 3), reduce)
        torch.testing.assert_close(scores, want[[1, 3], :ROWS], atol=1e-5, rtol=1e-4)
        assert torch.equal(prefix.v[:, :ROWS], stale(chunks)[1])  # looking changes nothing


@torch.inference_mode()
def test_scores_add_up_to_what_the_question_does_not_keep_for_itself(target, chunks, attentions):
    (scores,) = probe(target, [AssembledPrefix.of(target, chunks, QUESTION)], range(LAYERS), mean)
    kept = attentions[:, :, ROWS:].sum(dim=2).mean(dim=1)
    assert kept.min() > 0.01
    torch.testing.assert_close(scores.sum(dim=1), 1 - kept, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("tile", [1, 2, 5, 64])
@torch.inference_mode()
def test_scores_do_not_depend_on_the_tile(target, chunks, tile, attentions):
    prefix = AssembledPrefix.of(target, chunks, QUESTION)
    run = RowPass(target, [prefix], [prefix.question])
    run.write(run.keys_values())
    scores = question_attention(run.queries()[0], prefix, 0, tile)
    torch.testing.assert_close(scores, attentions[0, :, :ROWS], atol=1e-5, rtol=1e-4)


def test_infoflow_picks_by_norm_but_never_in_the_header(target, chunks, attentions):
    scores = attentions[[0, 2], :, :ROWS].norm(dim=1).mean(dim=0)
    assert scores.argmax() < HEADER or scores[:HEADER].max() > scores.median()  # the header would compete
    scores[:HEADER] = -1
    for ratio in (0.01, 0.1, 0.5, 1.0):
        prefix = mend(target, "infoflow", chunks, ratio=ratio, layers=[0, 2])
        count = min(max(1, int(ROWS * ratio)), ROWS - HEADER)
        want = sorted(scores.sort(descending=True).indices[:count].tolist())
        assert changed(prefix, chunks, LAYERS - 1) == want
        assert distance([x[:, :HEADER] for x in prefix.kv[0]], [x[:, :HEADER] for x in stale(chunks)]) == 0


def test_infoflow_default_layers_are_the_published_share_of_the_depth():
    assert scoring_layers(40) == (22, 23, 24, 25)
    assert scoring_layers(30) == (16, 17, 18, 19)
    assert scoring_layers(3) == (0, 1, 2)


def test_infoflow_puts_the_densest_chunk_last():
    picked = torch.tensor([5, 6, 7, 15, 16, 17, 18])  # shares 3/10, 4/8, 0
    assert densest_last([5, 10, 8, 4], picked) == [0, 3, 1, 2]
    assert densest_last([5, 3, 3], torch.tensor([5, 8])) == [0, 1, 2]  # ties as they were


def test_infoflow_reordered_prefix_is_a_prefix_in_that_order(target, chunks):
    prefix = mend(target, "infoflow", chunks, reorder=True, ratio=1.0)
    assert distance(written(target, prefix), joint(target, prefix.token_ids)) < EXACT
    # Every row after the header is picked at ratio 1, so all chunks tie; at a lower ratio they do not.
    prefix = mend(target, "infoflow", chunks, reorder=True, ratio=0.2)
    ids = [tuple(chunk.token_ids) for chunk in chunks]
    assert prefix.token_ids[:HEADER] == ids[0]
    assert sorted(prefix.token_ids) == sorted(token for each in ids for token in each)
    orders = {tuple(ids[0] + a + b + c): (a, b, c) for a in ids[1:] for b in ids[1:] for c in ids[1:]}
    assert prefix.token_ids in orders


def test_prophetkv_picks_by_the_mean_over_all_layers(target, chunks, attentions):
    scores = attentions[:, :, HEADER:ROWS].mean(dim=(0, 1))
    want = sorted((HEADER + scores.sort(descending=True).indices[: int(0.3 * (ROWS - HEADER))]).tolist())
    prefix = mend(target, "prophetkv", chunks, ratio=0.3)
    assert changed(prefix, chunks, 1) == changed(prefix, chunks, LAYERS - 1) == want


@pytest.fixture(scope="module")
def relax(attentions):
    """Plans of RelaxKV for the attention that transformers gives."""
    scores = attentions[:, :, :ROWS].mean(dim=1)
    prefix = SimpleNamespace(lengths=LENGTHS, rows=ROWS)
    return scores, lambda **params: plan(scores, prefix, RelaxKVParams(**params))


def test_relaxkv_targets_are_nested_and_begin_with_the_union(relax):
    scores, make = relax
    made = make(ratio=0.15)
    anchors = [set((HEADER + layer[HEADER:].sort(descending=True).indices[:6]).tolist()) for layer in scores]
    assert set(made.union.tolist()) == set().union(*anchors)
    assert torch.equal(made.rows[0], made.union)
    for layer, rows in enumerate(made.rows):
        assert set(rows.tolist()) == set().union(*anchors[layer:])
    assert len(made.rows[-1]) < len(made.rows[0]) < ROWS - HEADER


@pytest.mark.parametrize("context", ["union", "global", "layer", "full"])
@pytest.mark.parametrize("which", ["closed", "global"])
def test_relaxkv_is_the_dense_pass_under_its_plan(target, chunks, relax, context, which):
    scores, make = relax
    made = make(context=context, targets=which, target_ratio=0.2)
    size = len(made.union)
    admitted = torch.ones(LAYERS, ROWS, dtype=torch.bool)
    if context != "full":
        admitted[:, HEADER:] = False
        for layer in range(LAYERS):
            by = {"layer": scores[layer], "global": scores.mean(dim=0)}.get(context)
            rows = made.union if by is None else HEADER + by[HEADER:].sort(descending=True).indices[:size]
            admitted[layer, rows] = True
    selected = torch.zeros(LAYERS, ROWS, dtype=torch.bool)
    for layer, rows in enumerate(made.rows):
        selected[layer, rows] = True
    prefix = mend(target, "relaxkv", chunks, context=context, targets=which)
    assert distance(written(target, prefix), dense(target, chunks, selected, admitted)) < EXACT
    assert prefix.shares["context"] == size / ROWS


def test_relaxkv_one_set_is_capped_at_the_union_and_sinks_can_be_left_out(relax):
    _, make = relax
    made = make(ratio=0.05, targets="global", target_ratio=1.0, sinks=False)
    assert all(torch.equal(rows, made.union) for rows in made.rows)
    assert all(torch.equal(context, made.union) for context in made.contexts)
    some = make(targets="global", target_ratio=0.1)
    assert len(some.rows[0]) == 4 and set(some.rows[0].tolist()) <= set(some.union.tolist())


def test_of_equal_scores_the_earlier_row_wins():
    assert top(torch.tensor([1.0, 3.0, 3.0, 2.0, 3.0]), 2).tolist() == [1, 2]
    assert top(torch.tensor([9.0, 1.0, 1.0]), 5, start=1).tolist() == [1, 2]


def test_macs_are_those_of_the_closed_formula(target, chunks):
    cost = CostModel.of(target.model.config)
    q = len(QUESTION)
    t = ROWS + q
    probed = cost.rows(q, t)
    assert mend(target, "epic", chunks, window=2).macs == LAYERS * cost.rows(5, t)
    assert mend(target, "cacheblend", chunks, ratio=0.5).macs == cost.rows(
        ROWS, t
    ) + ROWS // 2 * cost.qkv + 3 * cost.rows(20, t)
    assert mend(target, "infoflow", chunks, ratio=0.5, layers=[2]).macs == 3 * probed + LAYERS * cost.rows(20, t)
    assert mend(target, "prophetkv", chunks, ratio=0.5).macs == LAYERS * (probed + cost.rows(16, t))


def test_relaxkv_macs_and_shares(target, chunks, relax):
    _, make = relax
    made, cost, q = make(), CostModel.of(target.model.config), len(QUESTION)
    layers = [cost.rows(len(rows), HEADER + len(made.union)) for rows in made.rows]
    prefix = mend(target, "relaxkv", chunks)
    assert prefix.macs == sum(layers) + LAYERS * cost.rows(q, ROWS + q)
    assert prefix.shares["recomputed"] == pytest.approx(sum(map(len, made.rows)) / (LAYERS * ROWS))


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("cacheblend", {"ratio": 0.0}, "ratio"),
        ("cacheblend", {"ratio": 1.01}, "ratio"),
        ("cacheblend", {"ratio": float("nan")}, "ratio"),
        ("cacheblend", {"ratio": "0.1"}, "ratio"),
        ("cacheblend", {"check_layer": 0}, "check_layer"),
        ("cacheblend", {"check_layer": LAYERS}, "check_layer must be 1 to 3"),
        ("cacheblend", {"deviation": "x"}, "deviation"),
        ("kvshare-like", {"check_layer": LAYERS}, "check_layer must be 1 to 3"),
        ("epic", {"window": 0}, "window"),
        ("epic", {"window": 1.5}, "window"),
        ("epic", {"window": True}, "window"),
        ("infoflow", {"layers": []}, "layers"),
        ("infoflow", {"layers": [0, LAYERS]}, "layers must be different ones of 0 to 3"),
        ("infoflow", {"layers": [1, 1]}, "layers must be different"),
        ("infoflow", {"layers": [-1]}, "layers"),
        ("relaxkv", {"context": "dense"}, "context"),
        ("relaxkv", {"ratio": 1.2}, "ratio"),  # more anchors than tokens
        ("relaxkv", {"targets": "global", "target_ratio": 1.2}, "target_ratio"),
        ("prophetkv", {"preset": "0.7"}, "'0.1', '0.2'"),
        ("prophetkv", {"preset": 0.2}, "no preset 0.2; choose one of '0.1'"),
        ("prophetkv", {"preset": ["0.2"]}, "no preset"),
    ],
)
def test_bad_parameters_are_named(target, name, params, words):
    with pytest.raises(MethodParamsError, match=words):
        create(name, target, load_settings()).check_params(params)


@pytest.mark.parametrize("name", ["infoflow", "prophetkv", "relaxkv"])
def test_a_method_guided_by_the_question_needs_one(target, chunks, name):
    with pytest.raises(MethodParamsError, match="question, which is empty"):
        create(name, target, load_settings()).repair(request_for(chunks, ()))


@pytest.mark.parametrize("name", [name for name in SELECTIVE if name != "epic"])
def test_a_ratio_that_is_less_than_a_token(target, chunks, name):
    """Nothing is chosen then, but for the one token that InfoFlow takes at least; every row is there all the same."""
    prefix = mend(target, name, chunks, ratio=1e-6)
    assert prefix.rows == ROWS
    assert len(changed(prefix, chunks, LAYERS - 1)) == (name == "infoflow")


def test_the_operator_bounds_what_is_asked_and_lowers_what_is_not(target, chunks):
    settings = load_settings(repair={"selective": {"max_ratio": 0.1, "max_window": 2}})
    blend, epic = create("cacheblend", target, settings), create("epic", target, settings)
    for method, params in ((blend, {"ratio": 0.2}), (blend, {"preset": "0.2"}), (epic, {"window": 3})):
        with pytest.raises(MethodParamsError, match="above this service's"):
            method.check_params(params)
    assert len(changed(blend.repair(request_for(chunks)), chunks, LAYERS - 1)) == int(0.1 * ROWS)
    assert epic.repair(request_for(chunks)).shares["recomputed"] == 5 / ROWS


def test_a_parameter_wins_over_the_preset(target, chunks):
    prefix = mend(target, "epic", chunks, preset="64", window=2)
    assert prefix.shares["recomputed"] == 5 / ROWS
