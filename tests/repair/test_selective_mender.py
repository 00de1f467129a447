# SPDX-License-Identifier: Apache-2.0
"""Selective methods behind the mender, as the service and batch jobs use them: what is handed off is their repair."""

from __future__ import annotations

import asyncio

import pytest
import torch

from repair import RepairRequest, create
from repair.base import MethodParamsError
from repair.registry import REPAIRERS
from repair.selective.method import SelectiveRepairer
from repair.types import MendRequest
from tests.repair.test_mender import CHUNKS, Rig

METHODS = [name for name, cls in REPAIRERS.items() if issubclass(cls, SelectiveRepairer)]
QUESTION = (7, 301, 44)
OTHERS = {"epic": {"window": 3}, "infoflow": {"reorder": True}}
"""Parameters beside the defaults; `ratio` for the rest."""


@pytest.fixture
async def rig(tiny, tmp_path):
    rig = Rig(tiny, tmp_path / "store", repair={"methods": METHODS, "default": "epic"})
    rig.precompute()
    yield rig
    await rig.settle()
    rig.mender.shutdown()


def mend(rig: Rig, method: str, params: dict, question=QUESTION):
    return rig.mender.mend(MendRequest("r", method, CHUNKS, question, params))


async def test_requests_with_their_own_parameters_in_one_batch(rig):
    """All are asked at once, so that those of one method share passes."""
    cases = [(name, params) for name in METHODS for params in ({}, OTHERS.get(name, {"ratio": 0.4}))]
    results = await asyncio.gather(*(mend(rig, *case) for case in cases))
    stale = rig.target.stale_kv(CHUNKS)
    for (name, params), result in zip(cases, results, strict=True):
        want = create(name, rig.target, rig.settings).repair(RepairRequest(CHUNKS, stale, QUESTION, params))
        assert result.fallback is None and result.prefix_ids == want.token_ids
        k, v = (torch.full(rig.target.geometry.kv_shape(want.rows), torch.nan) for _ in "kv")
        want.write(rig.target.rotary, k, v)
        for got, expected in zip(rig.read(result), (k, v), strict=True):
            assert (got - expected).abs().max() < 1e-4, (name, params)


@pytest.mark.parametrize("name", [name for name in METHODS if REPAIRERS[name].needs_query])
async def test_one_bad_request_of_a_batch_fails_alone(rig, name):
    good, bad = await asyncio.gather(mend(rig, name, {}), mend(rig, name, {}, ()), return_exceptions=True)
    assert isinstance(bad, MethodParamsError) and "question, which is empty" in str(bad)
    rig.read(good)
