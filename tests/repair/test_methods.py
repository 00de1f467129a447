# SPDX-License-Identifier: Apache-2.0
"""What holds for every repair method, whatever it does inside."""

from __future__ import annotations

import pytest
import torch

from kvcache.settings import load_settings
from repair import RepairRequest, available, create
from repair.base import MethodParamsError
from repair.registry import UnknownMethodError
from tests.repair.methods import METHODS

IDS = torch.randint(3, 512, (120,), generator=torch.Generator().manual_seed(2)).tolist()
QUESTION = [9, 8, 7]


@pytest.fixture
def make(tiny, tmp_path):
    """Creates a method by name, with the settings of its row."""
    return lambda name: create(name, tiny, load_settings(repair=METHODS[name](tiny, tmp_path)))


def request_for(target, chunks):
    return RepairRequest(chunks, [target.stale_kv([ids])[0] for ids in chunks], QUESTION)


def written(target, prefix):
    k, v = (torch.full(target.geometry.kv_shape(prefix.rows), torch.nan) for _ in "kv")
    prefix.write(target.rotary, k, v)
    return k, v


@torch.inference_mode()
def joint(target, ids):
    cache = target.model.model(torch.tensor([ids]), use_cache=True).past_key_values
    return tuple(
        torch.stack([getattr(layer, name)[0].transpose(0, 1) for layer in cache.layers]) for name in ("keys", "values")
    )


def test_the_matrix_has_every_method():
    assert sorted(METHODS) == available()


@pytest.mark.parametrize("name", METHODS)
def test_ids_stand_for_rows(tiny, make, name):
    prefix = make(name).repair(request_for(tiny, [IDS[:40], IDS[40:]]))
    assert prefix.rows in (0, len(prefix.token_ids))
    for part in written(tiny, prefix):
        assert torch.isfinite(part).all()


@pytest.mark.parametrize("name", METHODS)
def test_one_chunk_is_full_prefill(tiny, make, name):
    prefix = make(name).repair(request_for(tiny, [IDS]))
    assert list(prefix.token_ids) == IDS
    for got, want in zip(written(tiny, prefix), joint(tiny, IDS), strict=True):
        assert (got - want[:, : prefix.rows]).abs().max() < 1e-4 if prefix.rows else True


@pytest.mark.parametrize("name", METHODS)
def test_layer_zero_never_changes(tiny, make, name):
    """Layer 0's KV depends on token and position only, so any method must give full prefill's."""
    prefix = make(name).repair(request_for(tiny, [IDS[:40], IDS[40:]]))
    if prefix.rows == len(IDS):
        for got, want in zip(written(tiny, prefix), joint(tiny, IDS), strict=True):
            assert (got[0] - want[0]).abs().max() < 1e-4


@pytest.mark.parametrize("name", METHODS)
def test_foreign_parameters_are_refused(make, name):
    with pytest.raises(MethodParamsError, match="no_such_parameter"):
        make(name).check_params({"no_such_parameter": 1})


def test_unknown_method(tiny):
    with pytest.raises(UnknownMethodError, match=r"available: .*full.*stale"):
        create("fulll", tiny, load_settings())


def test_stale_differs_from_joint_where_it_should(tiny):
    """Chunk 0 exact; later chunks right in layer 0 and wrong deeper down."""
    prefix = create("stale", tiny, load_settings()).repair(request_for(tiny, [IDS[:40], IDS[40:]]))
    k, v = written(tiny, prefix)
    k_joint, v_joint = joint(tiny, IDS)
    assert (k[:, :40] - k_joint[:, :40]).abs().max() < 1e-4 and (v[:, :40] - v_joint[:, :40]).abs().max() < 1e-4
    assert (v[1:, 40:] - v_joint[1:, 40:]).abs().mean() > 1e-2
