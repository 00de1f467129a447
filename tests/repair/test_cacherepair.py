# SPDX-License-Identifier: Apache-2.0
"""The method `cacherepair`: alone, in a batch, and in the mender."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import torch

from kvcache import compile_stale
from kvcache.settings import load_settings
from kvcache.target import TargetLLM
from repair import RepairRequest, cacherepair, create, load_repairer
from repair.base import MethodParamsError
from repair.cacherepair import QualityError
from repair.checkpoint import CheckpointError
from repair.registry import offered
from repair.types import MendRequest
from tests.repair.methods import checkpoint
from tests.repair.test_mender import CHUNKS, Rig
from tests.tiny import tiny_model_dir, tiny_settings, tiny_target

OTHERS = (((3, 4, 5), (6, 7)), ((9,), (8,), (7,), (6,)), (tuple(range(50, 90)),), CHUNKS[::-1])


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    return checkpoint(tiny, tmp_path_factory.mktemp("network"))


@pytest.fixture(scope="module")
def method(tiny, folder):
    return create("cacherepair", tiny, load_settings(repair={"cacherepair": folder}))


def request_for(target, chunks, **params):
    return RepairRequest(chunks, [target.stale_kv([ids])[0] for ids in chunks], (1, 2), params)


def rows(prefix):
    """The prefix's canonical keys and values, `[L, T, H, D]` each."""
    return tuple(torch.cat(parts, dim=1) for parts in zip(*prefix.kv, strict=True))


def by_network(target, folder, chunks):
    """What the documented Python use gives."""
    kv = load_repairer(folder, target).repair(*compile_stale(target, chunks))[0].transpose(0, 1)
    return kv[..., 0, :], kv[..., 1, :]


def stale_rows(request):
    return tuple(torch.cat([getattr(chunk, name) for chunk in request.stale], dim=1) for name in "kv")


def close(got, want):
    return all((a - b).abs().max() < 1e-5 * b.abs().max() for a, b in zip(got, want, strict=True))


def test_gives_what_the_network_gives(tiny, folder, method):
    request = request_for(tiny, CHUNKS)
    prefix = method.repair(request)
    assert close(rows(prefix), by_network(tiny, folder, CHUNKS))
    assert not close(rows(prefix), stale_rows(request))
    assert prefix.token_ids == tuple(token for ids in CHUNKS for token in ids)
    assert set(prefix.stages) == {"transfer", "mask", "repair"}


def test_stale_caches_are_left_alone(tiny, method):
    """They are shared with other requests, in the host tier."""
    request = request_for(tiny, CHUNKS)
    before = stale_rows(request)
    method.repair(request)
    assert all(map(torch.equal, stale_rows(request), before))


def test_a_batch_is_each_request_alone(tiny, method):
    requests = [request_for(tiny, chunks) for chunks in (CHUNKS, *OTHERS)]
    for request, prefix in zip(requests, method.repair_batch(requests), strict=True):
        alone = method.repair(request)
        assert prefix.token_ids == alone.token_ids
        assert close(rows(prefix), rows(alone))


def test_one_chunk_is_passed_through(tiny, method):
    request = request_for(tiny, CHUNKS[1:2])
    prefix = method.repair(request)
    assert all(map(torch.equal, rows(prefix), stale_rows(request)))
    assert not prefix.stages


@pytest.mark.parametrize("parts", ["k", "v"])
def test_half_a_repair(tiny, method, parts):
    request = request_for(tiny, CHUNKS, parts=parts)
    whole, stale = rows(method.repair(request_for(tiny, CHUNKS))), stale_rows(request)
    k, v = rows(method.repair(request))
    assert torch.equal(k, (whole if parts == "k" else stale)[0])
    assert torch.equal(v, (whole if parts == "v" else stale)[1])


def test_keep_first(tiny, method):
    request = request_for(tiny, CHUNKS, keep_first=True)
    whole, stale, n = rows(method.repair(request_for(tiny, CHUNKS))), stale_rows(request), len(CHUNKS[0])
    for got, mended, old in zip(rows(method.repair(request)), whole, stale, strict=True):
        assert torch.equal(got[:, :n], old[:, :n]) and torch.equal(got[:, n:], mended[:, n:])


@pytest.mark.parametrize(
    "params, message",
    [
        ({"parts": "q"}, "parts must be one of kv, k, v"),
        ({"parts": ["k"]}, "parts must be one of"),
        ({"keep_first": "yes"}, "keep_first must be true or false"),
        ({"ratio": 0.1, "parts": "k"}, "takes parts and keep_first, not ratio"),
    ],
)
def test_bad_parameters(method, params, message):
    with pytest.raises(MethodParamsError, match=message):
        method.check_params(params)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stores_of_half_precision(tiny, method, dtype):
    request = request_for(tiny, CHUNKS)
    halves = [type(c)(c.token_ids, c.k.to(dtype), c.v.to(dtype)) for c in request.stale]
    got = rows(method.repair(RepairRequest(CHUNKS, halves)))
    for a, b in zip(got, rows(method.repair(request)), strict=True):
        assert (a - b).norm() < 0.05 * b.norm()


def test_without_a_network_there_is_no_method(tiny):
    with pytest.raises(CheckpointError, match=r"no repair network is shipped for target '.*': set repair\.cacherepair"):
        create("cacherepair", tiny, load_settings(target={"model": "someone/else"}))


def test_offered_by_default_where_a_network_fits_the_target(tiny, tmp_path, monkeypatch):
    directory = tiny_model_dir(tmp_path)
    target = TargetLLM.load(settings=tiny_settings(directory))
    basic = ("full", "stale")
    assert offered(tiny_settings(directory)) == basic
    network = checkpoint(target, tmp_path / "network")
    assert offered(tiny_settings(directory, repair={"cacherepair": network})) == (*basic, "cacherepair")
    assert offered(tiny_settings(directory, repair={"cacherepair": network, "methods": basic})) == basic

    monkeypatch.setattr(cacherepair, "shipped", lambda model: Path(network))
    assert offered(tiny_settings(directory)) == (*basic, "cacherepair")
    assert offered(tiny_settings(tiny_model_dir(tmp_path, seed=1))) == basic  # another copy of the model
    assert offered(load_settings(target={"model": "someone/else"})) == basic  # not fetched
    (Path(network) / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        offered(tiny_settings(directory))


def test_a_network_of_another_target_is_refused(tmp_path, folder):
    other = tiny_target(tmp_path, layers=2)
    with pytest.raises(
        CheckpointError, match=r"made for another target: target_config\.n_layers is 3, the target's is 2"
    ):
        create("cacherepair", other, load_settings(repair={"cacherepair": folder}))


@pytest.mark.parametrize("error, served", [(0.6, True), (0.95, False), (1.2, False), (None, True)])
def test_only_a_network_that_helps_is_served(tiny, tmp_path, error, served):
    validation = error and {"validation": {"normalized_mse": error, "stale_normalized_mse": 0.95}}
    repair = {"cacherepair": checkpoint(tiny, tmp_path, training=validation)}
    if not served:
        with pytest.raises(QualityError, match=rf"config\.json: training\.validation\.normalized_mse {error} .* 0\.95"):
            create("cacherepair", tiny, load_settings(repair=repair))
        repair["force"] = True
    create("cacherepair", tiny, load_settings(repair=repair))


@pytest.mark.parametrize("validation", [{"normalized_mse": 0.5}, {"normalized_mse": "low"}, [1], 3])
def test_an_account_that_cannot_be_read_is_refused(tiny, tmp_path, validation):
    folder = checkpoint(tiny, tmp_path, training={"validation": validation})
    with pytest.raises(QualityError, match=r"training\.validation needs the numbers"):
        create("cacherepair", tiny, load_settings(repair={"cacherepair": folder}))


@pytest.fixture
async def rig(tiny, tmp_path, folder):
    repair = {"methods": ("full", "stale", "cacherepair"), "cacherepair": folder, "batch_tokens": 150}
    rig = Rig(tiny, tmp_path / "store", repair=repair)
    rig.precompute()
    yield rig
    await rig.settle()
    rig.mender.shutdown()


class Spy:
    """Watches the batches of the rig's repairer, and holds the first until told to go on."""

    def __init__(self, rig) -> None:
        self._repairer = rig.mender._repairers["cacherepair"]
        self._repair_batch = self._repairer.repair_batch
        self.sizes: list[int] = []
        self.tokens: list[int] = []
        self.gate = threading.Event()
        self.poison: tuple[int, ...] | None = None
        self._repairer.repair_batch = self
        self.submitted = 0
        self._submit = rig.mender._batcher.submit
        rig.mender._batcher.submit = self.submit

    def submit(self, *work):
        self.submitted += 1
        return self._submit(*work)

    def __call__(self, requests):
        self.sizes.append(len(requests))
        self.tokens.append(sum(len(ids) for request in requests for ids in request.chunks))
        assert self.gate.wait(60)
        if any(tuple(request.chunks[0]) == self.poison for request in requests):
            raise RuntimeError("poisoned")
        return self._repair_batch(requests)

    async def waits_for(self, batches: int, submitted: int = 0) -> None:
        while len(self.sizes) < batches or self.submitted < submitted:
            await asyncio.sleep(0.005)


async def mend(rig, chunks, method="cacherepair", **params):
    return await rig.mender.mend(MendRequest("r", method, tuple(chunks), (1, 2), params=params))


async def test_through_the_mender(rig, tiny, folder):
    result = await mend(rig, CHUNKS)
    assert result.fallback is None and result.rows == sum(map(len, CHUNKS))
    assert set(result.stages) == {
        "fetch",
        "repair_queue",
        "transfer",
        "mask",
        "repair",
        "rotary",
        "handoff",
        "handoff_queue",
    }
    k, v = by_network(tiny, folder, CHUNKS)
    k = tiny.rotary.rotate(k, torch.arange(result.rows))
    assert close(rig.read(result), (k, v))


async def test_requests_that_wait_together_are_mended_together(rig):
    """While one is on the device five more queue up, of 108, 108, 40, 5 and 4 tokens: two batches of 150 at best."""
    want = [rig.read(await mend(rig, chunks)) for chunks in (CHUNKS, *OTHERS)]
    spy = Spy(rig)
    first = asyncio.create_task(mend(rig, CHUNKS))
    await spy.waits_for(1)
    tasks = [asyncio.create_task(mend(rig, chunks)) for chunks in (CHUNKS, *OTHERS)]
    await spy.waits_for(1, submitted=6)
    spy.gate.set()
    results = await asyncio.gather(first, *tasks)
    assert spy.sizes[0] == 1 and sum(spy.sizes) == 6 and 3 <= len(spy.sizes) <= 4
    assert max(spy.tokens) <= 150
    for result, expected in zip(results, [want[0], *want], strict=True):
        assert close(rig.read(result), expected)
        assert result.stages["repair_queue"] >= 0


async def test_one_bad_request_does_not_spoil_its_batch(rig):
    want = rig.read(await mend(rig, CHUNKS))
    spy = Spy(rig)
    spy.poison = OTHERS[0][0]
    first = asyncio.create_task(mend(rig, CHUNKS))
    await spy.waits_for(1)
    tasks = [asyncio.create_task(mend(rig, chunks)) for chunks in (OTHERS[0], CHUNKS)]
    await spy.waits_for(1, submitted=3)
    spy.gate.set()
    bad, good = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(bad, RuntimeError)
    for result in (await first, good):
        assert close(rig.read(result), want)


async def test_a_request_cancelled_in_the_queue_is_not_worked_on(rig):
    spy = Spy(rig)
    first = asyncio.create_task(mend(rig, CHUNKS))
    await spy.waits_for(1)
    tasks = [asyncio.create_task(mend(rig, OTHERS[i])) for i in (0, 1)]
    await spy.waits_for(1, submitted=3)
    tasks[0].cancel()
    await asyncio.sleep(0.05)
    spy.gate.set()
    rig.read(await first)
    rig.read(await tasks[1])
    assert tasks[0].cancelled() and spy.sizes == [1, 1]


async def test_parameters_reach_the_method(rig):
    whole, keys, stale = [
        rig.read(result)
        for result in (await mend(rig, CHUNKS), await mend(rig, CHUNKS, parts="k"), await mend(rig, CHUNKS, "stale"))
    ]
    assert torch.equal(keys[0], whole[0]) and torch.equal(keys[1], stale[1])
    assert not torch.equal(whole[1], stale[1])
    with pytest.raises(MethodParamsError, match="parts must be"):
        await mend(rig, CHUNKS, parts="x")
