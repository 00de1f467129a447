# SPDX-License-Identifier: Apache-2.0
"""The precompute job on a real Ray cluster: what it stores, what it skips, and what it survives."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from kvcache.chunk import chunk_key
from kvcache.chunk_object import HEADER_BYTES
from kvcache.prompt import PromptTemplate
from kvcache.settings import Settings
from kvcache.store import ChunkStore, StoreError, StoreMismatchError
from kvcache.target import TargetLLM, target_fingerprint
from pipelines.precompute import PrecomputeError, length_batches, plan, precompute
from retrieval.errors import CorpusMismatchError, UnknownCorpusError
from tests.pipelines.corpora import publish_corpus
from tests.processes import family_of, title
from tests.s3 import SLOW_DOWN, s3_server
from tests.tiny import tiny_model_dir, tiny_settings

LAYERS, KV_HEADS, HEAD_DIM = 3, 2, 32  # of the tiny model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
def settings(model: str, tmp_path: Path) -> Settings:
    return tiny_settings(model, root=str(tmp_path / "data"), pipeline={"batch_tokens": 256})


def make_chunks(count: int, longest: int = 90, seed: int = 1) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.choices(range(3, 300), k=rng.randint(1, longest))) for _ in range(count)]


def objects_of(settings: Settings) -> dict[str, os.stat_result]:
    folder = Path(settings.store_uri) / "chunks"
    return {path.stem: path.stat() for path in folder.glob("*/*.safetensors")}


def object_bytes(tokens: int, itemsize: int = 4) -> int:
    return HEADER_BYTES + 2 * LAYERS * tokens * KV_HEADS * HEAD_DIM * itemsize


def test_every_chunk_and_the_header_are_stored_once_as_announced(ray_alone, settings: Settings) -> None:
    chunks = make_chunks(25)
    publish_corpus(settings, "passages", [*chunks, *chunks[:5]])  # some texts occur twice
    target = TargetLLM.load(settings=settings)
    header = PromptTemplate(target.tokenizer, settings.prompt).header_ids()
    everything = {header, *chunks}

    todo = plan("passages", settings)
    tokens = sum(map(len, everything))
    size = sum(object_bytes(len(ids)) for ids in everything)
    assert (todo.chunks, todo.missing, todo.tokens, todo.bytes) == (26, 26, tokens, size)
    assert todo.seconds_estimate > 0
    assert "work" not in asdict(todo)
    assert not Path(settings.store_uri).exists()  # planning writes nothing

    told = []
    report = precompute(todo, settings, lambda *args: told.append(args))
    assert (report.chunks, report.computed, report.tokens, report.bytes) == (26, 26, tokens, size)
    assert report.failed == []
    assert told[0] == ("compute", 0, 26) and told[-1] == ("compute", 26, 26)

    found = objects_of(settings)
    assert set(found) == {chunk_key(target.fingerprint, ids) for ids in everything}
    assert sum(stat.st_size for stat in found.values()) == size
    store = ChunkStore.of(settings)
    assert store.verify().bad == []
    for ids in everything:
        chunk = store.get(ids)
        # What transformers itself computes for the chunk alone.
        cache = target.model(torch.tensor([ids]), use_cache=True).past_key_values
        keys = target.rotary.rotate(chunk.k, torch.arange(len(ids)))
        for layer, (k_THD, v_THD) in enumerate(zip(keys, chunk.v, strict=True)):
            torch.testing.assert_close(k_THD, cache.layers[layer].keys[0].transpose(0, 1), atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(v_THD, cache.layers[layer].values[0].transpose(0, 1), atol=1e-4, rtol=1e-4)


def test_second_run_touches_nothing_and_a_short_object_is_made_again(ray_alone, settings: Settings) -> None:
    chunks = make_chunks(12)
    publish_corpus(settings, "passages", chunks)
    precompute("passages", settings)
    before = objects_of(settings)
    again = plan("passages", settings)
    assert (again.chunks, again.missing, again.tokens, again.bytes, again.seconds_estimate) == (13, 0, 0, 0, 0.0)
    assert precompute(again, settings).computed == 0
    assert {key: stat.st_mtime_ns for key, stat in objects_of(settings).items()} == {
        key: stat.st_mtime_ns for key, stat in before.items()
    }

    store = ChunkStore.of(settings)
    short, altered, gone = (store.format.key(ids) for ids in chunks[:3])
    path = {key: Path(settings.store_uri) / "chunks" / key[:2] / f"{key}.safetensors" for key in before}
    path[short].write_bytes(path[short].read_bytes()[:-1])
    flipped = bytearray(path[altered].read_bytes())
    flipped[-1] ^= 1
    path[altered].write_bytes(flipped)
    path[gone].unlink()
    assert [store.contains(ids) for ids in chunks[:4]] == [False, True, False, True]  # flips are found by `verify`
    assert store.verify(delete=True).deleted == 2
    assert precompute("passages", settings).computed == 3
    assert store.verify().bad == [] and set(objects_of(settings)) == set(before)


def test_storage_dtype_and_several_actors(ray_alone, settings: Settings) -> None:
    settings = settings.model_copy(
        update={
            "store": settings.store.model_copy(update={"dtype": "float16"}),
            "pipeline": settings.pipeline.model_copy(update={"actors": 9}),  # more than fit: no reason to hang
        }
    )
    chunks = make_chunks(20)
    publish_corpus(settings, "passages", chunks)
    report = precompute("passages", settings)
    assert report.computed == 21
    assert sum(stat.st_size for stat in objects_of(settings).values()) == report.bytes
    (reference,) = TargetLLM.load(settings=settings).stale_kv([chunks[0]])
    found = ChunkStore.of(settings).get(chunks[0])
    assert found.k.dtype is torch.float16
    torch.testing.assert_close(found.k.float(), reference.k, atol=2e-2, rtol=2e-3)


def test_relative_locations_mean_the_drivers_folder(ray_alone, settings: Settings, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # not where Ray's workers were started
    settings = settings.model_copy(update={"root": "here"})
    publish_corpus(settings, "passages", make_chunks(3))
    precompute("passages", settings)
    assert len(list((tmp_path / "here" / "chunk-cache" / "chunks").glob("*/*"))) == 4
    assert str(tmp_path) not in (tmp_path / "here" / "chunk-cache" / "target.json").read_text().replace(
        settings.target.model, ""
    )


def test_a_chunk_that_the_target_cannot_take_is_reported_and_the_rest_is_done(ray_alone, settings: Settings) -> None:
    publish_corpus(settings, "passages", [*make_chunks(4), (7,) * 2049])  # the tiny model has 2048 positions
    report = precompute("passages", settings)
    assert (report.chunks, report.computed) == (6, 5)
    assert [(bad.tokens, bad.reason) for bad in report.failed] == [(2049, "longer than the model's 2048 positions")]


def test_wrong_corpora_and_stores_are_refused(ray_alone, settings: Settings, model: str) -> None:
    with pytest.raises(UnknownCorpusError, match="nowhere"):
        precompute("nowhere", settings)
    publish_corpus(settings, "foreign", make_chunks(2), tokenizer_digest="0" * 64)
    with pytest.raises(CorpusMismatchError, match="foreign"):
        precompute("foreign", settings)
    publish_corpus(settings, "passages", make_chunks(2))
    other = tiny_settings(tiny_model_dir(Path(model).parent, seed=5), root=settings.root)
    ChunkStore.of(other).claim()
    with pytest.raises(StoreMismatchError) as caught:
        precompute("passages", settings)
    assert target_fingerprint(settings) in str(caught.value) and target_fingerprint(other) in str(caught.value)
    assert objects_of(settings) == {}


def test_a_store_that_cannot_be_written_to_ends_the_job_and_says_why(ray_alone, settings: Settings) -> None:
    publish_corpus(settings, "passages", make_chunks(4))
    todo = plan("passages", settings)
    root = Path(settings.store_uri)
    root.mkdir(parents=True)
    (root / "chunks").write_text("a file where the folder should be")
    with pytest.raises(PrecomputeError, match=r"cannot write chunks/.*"):
        precompute(todo, settings)
    blocked = settings.model_copy(update={"store": settings.store.model_copy(update={"uri": str(root / "chunks")})})
    with pytest.raises(StoreError, match="Not a directory"):
        precompute(todo, blocked)


_JOB = """
import sys, ray
from kvcache.settings import Settings
from pipelines.precompute import precompute
ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=200_000_000, log_to_driver=False)
precompute("passages", Settings.model_validate_json(sys.argv[1]))
"""


def _wait_for(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.002)


@pytest.mark.parametrize("when", [40])
def test_killed_with_all_its_workers_and_started_again(ray_alone, settings: Settings, when: int) -> None:
    chunks = make_chunks(500)
    publish_corpus(settings, "passages", chunks)
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    environment.pop("RAY_ADDRESS", None)
    job = subprocess.Popen(
        [sys.executable, "-c", _JOB, settings.model_dump_json()],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(lambda: len(objects_of(settings)) >= when or job.poll() is not None)
    finally:
        family = family_of(job.pid)
        for process in family:
            process.send_signal(signal.SIGKILL)
        job.wait()
        psutil.wait_procs(family, timeout=30)

    before, store = objects_of(settings), ChunkStore.of(settings)
    assert when <= len(before) < 501, "the job was to be killed in its middle"
    verified = store.verify()
    assert verified.objects == len(before) and verified.bad == []  # nothing half-written is visible
    report = precompute("passages", settings)
    assert report.computed == 501 - len(before)
    after = objects_of(settings)
    assert len(after) == 501 and store.verify().bad == []
    assert all(after[key].st_mtime_ns == stat.st_mtime_ns for key, stat in before.items())  # stored once


def test_an_actor_that_is_killed_is_replaced(ray_alone, settings: Settings) -> None:
    publish_corpus(settings, "passages", make_chunks(400))
    killed = []

    def kill_actor() -> bool:
        for process in family_of():
            if "MapWorker" in title(process):
                process.send_signal(signal.SIGKILL)
                killed.append(process.pid)
        return bool(killed)

    def kill() -> None:
        _wait_for(lambda: len(objects_of(settings)) >= 20)
        _wait_for(kill_actor)

    killer = threading.Thread(target=kill)
    killer.start()
    report = precompute("passages", settings)
    killer.join()
    assert killed
    assert report.computed == 401
    verified = ChunkStore.of(settings).verify()
    assert (verified.objects, verified.bad) == (401, [])


def test_onto_s3_that_slows_down(ray_alone, settings: Settings) -> None:
    publish_corpus(settings, "passages", make_chunks(30))
    with s3_server("cache-bucket") as s3:
        store = {"uri": s3.uri("cache-bucket/kv"), "retry_base_s": 0.01}
        settings = settings.model_copy(update={"store": settings.store.model_copy(update=store)})
        tries = Counter()

        def first_two(method: str, path: str) -> bool:  # fewer than `store.attempts`, whatever the order of threads
            tries[method, path] += 1
            return tries[method, path] <= 2

        s3.matches = first_two
        s3.faults = [SLOW_DOWN] * 60
        report = precompute("passages", settings)
        assert not s3.faults
        assert (report.computed, report.failed) == (31, [])
        assert len(s3.objects("cache-bucket")) == 32  # and the manifest
        verified = ChunkStore.of(settings).verify()
        assert (verified.objects, verified.bad) == (31, [])
        assert plan("passages", settings).missing == 0


@pytest.mark.parametrize("batch_tokens", [1, 64, 1000])
def test_batches_hold_chunks_of_like_length_and_stay_below_the_limit(batch_tokens: int) -> None:
    rng = np.random.default_rng(5)
    chunks = [np.full(length, number) for number, length in enumerate(rng.integers(1, 100, 200))]
    batches = list(length_batches(chunks, batch_tokens))
    lengths = [len(ids) for batch in batches for ids in batch]
    assert lengths == sorted(map(len, chunks), reverse=True)
    assert sorted(int(ids[0]) for batch in batches for ids in batch) == list(range(200))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * len(batch[0]) <= batch_tokens
    padded = sum(len(batch) * len(batch[0]) for batch in batches)
    assert padded <= 1.2 * sum(lengths)


def test_no_chunks_no_batches() -> None:
    assert list(length_batches([], 100)) == []
