# SPDX-License-Identifier: Apache-2.0
"""LegoLink-0: what chunks computed behind a front are, and what the method takes."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from kvcache.settings import load_settings
from repair import RepairRequest, create
from repair.base import MethodParamsError
from tests.repair.reference import joint
from tests.repair.selective import QUESTION, distance, random_target, stale_chunks

EXACT = 2e-4


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return random_target(tmp_path_factory.mktemp("legolink") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def chunks(target):
    return stale_chunks(target)


def mend(target, chunks, **params):
    request = RepairRequest([chunk.token_ids for chunk in chunks], chunks, QUESTION, params)
    return create("legolink-0", target, load_settings()).repair(request)


def test_legolink0_is_a_chunk_behind_dummies(target, chunks):
    prefix = mend(target, chunks)
    assert distance(prefix.kv[0], (chunks[0].k, chunks[0].v)) == 0
    dummies = [target.tokenizer.bos_token_id] * 4
    for piece, chunk in zip(prefix.kv[1:], chunks[1:], strict=True):
        k, v = joint(target, [*dummies, *chunk.token_ids])
        length = len(chunk.token_ids)
        assert distance(piece, (target.rotary.unrotate(k, torch.arange(4 + length))[:, 4:], v[:, 4:])) < EXACT
        assert distance(piece, (chunk.k, chunk.v)) > 0.01


def test_a_chunk_behind_the_header_lacks_only_other_chunks(target, chunks):
    """Alone behind it, a chunk is what full prefill makes of it; the second one lacks the first."""
    prefix = mend(target, chunks, front="header")
    ids = [token for chunk in chunks for token in chunk.token_ids]
    k, v = joint(target, ids)
    truth = (target.rotary.unrotate(k, torch.arange(len(ids))), v)
    pieces = [
        tuple(part[:, start : start + len(chunk.token_ids)] for part in truth)
        for start, chunk in zip(accumulate((len(chunk.token_ids) for chunk in chunks), initial=0), chunks, strict=False)
    ]
    assert distance(prefix.kv[0], pieces[0]) < EXACT
    assert distance(prefix.kv[1], pieces[1]) < EXACT
    assert distance(prefix.kv[2], pieces[2]) > 0.01


def test_legolink0_refuses_what_it_does_not_take(target):
    method = create("legolink-0", target, load_settings())
    for params in ({}, {"front": "dummies"}, {"front": "header"}):
        method.check_params(params)
    for params in ({"front": "bos"}, {"front": 3}, {"front": ["header"]}, {"front": None}):
        with pytest.raises(MethodParamsError, match="front must be one of dummies, header"):
            method.check_params(params)
    with pytest.raises(MethodParamsError, match="takes front, not dummies"):
        method.check_params({"dummies": 4})
