# SPDX-License-Identifier: Apache-2.0
"""The kernel of selective recomputation, against transformers' dense pass, for every model family."""

from __future__ import annotations

import pytest
import torch

from repair.selective import attention
from repair.selective.kernel import RowPass, climb, recompute
from repair.selective.prefix import AssembledPrefix
from tests.repair.reference import dense, joint
from tests.repair.selective import LAYERS, QUESTION, ROWS, distance, global_kv, random_target, stale_chunks
from tests.tiny import FAMILIES

EXACT = 2e-4
SCATTERED = torch.tensor([8, 9, 13, 19, 20, 25, 38])


@pytest.fixture(scope="module", params=[*((family, "default") for family in FAMILIES), ("llama", "yarn")], ids="-".join)
def target(request, tmp_path_factory):
    return random_target(tmp_path_factory.mktemp("kernel") / "-".join(request.param), *request.param)


@pytest.fixture
def chunks(target):
    return stale_chunks(target)


@pytest.fixture(params=[5, 256], ids=["many tiles", "one tile"], autouse=True)
def tile(request, monkeypatch):
    monkeypatch.setattr(attention, "_TILE", request.param)


@torch.inference_mode()
def run(target, chunks, rows_by_layer, contexts=None, question=()):
    prefix = AssembledPrefix.of(target, chunks, question)
    recompute(target, [prefix], [rows_by_layer], None if contexts is None else [contexts])
    return prefix


def as_masks(rows_by_layer, rows=ROWS):
    masks = torch.zeros(len(rows_by_layer), rows, dtype=torch.bool)
    for mask, selected in zip(masks, rows_by_layer, strict=True):
        mask[selected] = True
    return masks


def test_every_row_is_full_prefill(target, chunks):
    prefix = run(target, chunks, [torch.arange(ROWS)] * LAYERS)
    assert distance(global_kv(target, prefix), joint(target, prefix.ids())) < EXACT


def test_no_row_is_stale(target, chunks):
    prefix = run(target, chunks, [torch.arange(0)] * LAYERS)
    assert torch.equal(prefix.k, torch.cat([chunk.k for chunk in chunks], dim=1))
    assert torch.equal(prefix.v, torch.cat([chunk.v for chunk in chunks], dim=1))


def test_scattered_rows(target, chunks):
    prefix = run(target, chunks, [SCATTERED] * LAYERS)
    want = dense(target, chunks, as_masks([SCATTERED] * LAYERS))
    assert distance(global_kv(target, prefix), want) < EXACT
    # It is a repair of those rows, and neither full prefill nor nothing.
    assert distance(want, joint(target, prefix.ids())) > 0.1
    assert distance(want, global_kv(target, AssembledPrefix.of(target, chunks))) > 0.1


def test_rows_that_drop_out_on_the_way(target, chunks):
    schedule = [torch.arange(ROWS), torch.arange(5, 39), SCATTERED, SCATTERED[2:4]]
    prefix = run(target, chunks, schedule)
    assert distance(global_kv(target, prefix), dense(target, chunks, as_masks(schedule))) < EXACT


def test_a_context_for_each_layer(target, chunks):
    """Rows see themselves, whether the context has them or not."""
    contexts = [torch.arange(0, ROWS, step) for step in (2, 3, 1, 4)]
    schedule = [torch.arange(6, 40), torch.arange(7, 40, 2), SCATTERED[1:4], SCATTERED[1:2]]
    prefix = run(target, chunks, schedule, contexts)
    want = dense(target, chunks, as_masks(schedule), as_masks(contexts))
    assert distance(global_kv(target, prefix), want) < EXACT


def test_rows_that_are_not_selected_never_change(target, chunks):
    prefix = run(target, chunks, [SCATTERED] * LAYERS)
    others = torch.ones(ROWS, dtype=torch.bool)
    others[SCATTERED] = False
    for part, stale in ((prefix.k, "k"), (prefix.v, "v")):
        before = torch.cat([getattr(chunk, stale) for chunk in chunks], dim=1)
        assert torch.equal(part[:, others], before[:, others])
        assert (part[0] - before[0]).abs().max() < EXACT  # layer 0 depends on token and position only
        assert (part[1:, SCATTERED] - before[1:, SCATTERED]).abs().amax(dim=(2, 3)).min() > 1e-3


def test_the_order_of_the_selection_changes_nothing(target, chunks):
    shuffled = SCATTERED[torch.randperm(len(SCATTERED), generator=torch.Generator().manual_seed(0))]
    twice = torch.cat([shuffled, shuffled[:2]])
    prefix = AssembledPrefix.of(target, chunks)
    with torch.inference_mode():
        climb(RowPass(target, [prefix], [twice]), [[SCATTERED] * LAYERS])
    assert torch.equal(prefix.v, run(target, chunks, [SCATTERED] * LAYERS).v)


def test_the_question_in_the_pass_or_after_it(target, chunks):
    together = run(target, chunks, [torch.cat([SCATTERED, torch.arange(ROWS, ROWS + 5)])] * LAYERS, question=QUESTION)
    after = run(target, chunks, [SCATTERED] * LAYERS, question=QUESTION)
    with torch.inference_mode():
        recompute(target, [after], [[after.question] * LAYERS])
    assert distance(global_kv(target, together), global_kv(target, after)) < EXACT


def test_prefixes_go_up_together_as_if_alone(target, chunks):
    others = stale_chunks(target, (3, 30), seed=7)
    schedules = [[SCATTERED] * LAYERS, [torch.arange(4, 20)] * 2 + [torch.arange(5, 9)] * 2, [torch.arange(0)] * LAYERS]
    batch = [AssembledPrefix.of(target, each) for each in (chunks, others, others)]
    with torch.inference_mode():
        recompute(target, batch, schedules)
    for prefix, each, schedule in zip(batch, (chunks, others, others), schedules, strict=True):
        alone = run(target, each, schedule)
        assert distance((prefix.k, prefix.v), (alone.k, alone.v)) < EXACT


@pytest.mark.parametrize("back", [torch.tensor([8, 10]), torch.arange(ROWS), torch.tensor([39])])
def test_rows_do_not_come_back(target, chunks, back):
    with pytest.raises(ValueError, match="cannot come back"):
        run(target, chunks, [SCATTERED, SCATTERED, back, back])


def test_stale_chunks_are_left_alone(target, chunks):
    before = [chunk.v.clone() for chunk in chunks]
    run(target, chunks, [torch.arange(ROWS)] * LAYERS)
    assert all(torch.equal(chunk.v, copy) for chunk, copy in zip(chunks, before, strict=True))
