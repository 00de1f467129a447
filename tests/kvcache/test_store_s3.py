# SPDX-License-Identifier: Apache-2.0
"""The chunk-cache store on S3: a real S3-speaking server on loopback, and what it answers on bad days."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvcache.chunk import ChunkKV, chunk_key
from kvcache.chunk_object import HEADER_BYTES
from kvcache.geometry import Geometry
from kvcache.objects import ObjectStore
from kvcache.settings import StoreSettings
from kvcache.store import ChunkMiss, ChunkStore, MissReason, StoreError, StoreMismatchError
from tests.s3 import ELSEWHERE, FORBIDDEN, SLOW_DOWN, S3Server, s3_server

FINGERPRINT = "0a" * 32
GEOMETRY = Geometry(2, 1, 4, 2, 8, 100, 64)
BUCKET = "chunk-bucket"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with s3_server(BUCKET) as server:
        yield server


def make_store(uri: str, fingerprint: str = FINGERPRINT, attempts: int = 4) -> ChunkStore:
    settings = StoreSettings(attempts=attempts, retry_base_s=0.001)
    kwargs = {"geometry": GEOMETRY, "dtype": torch.float32, "settings": settings, "model": "tiny"}
    return ChunkStore(uri, fingerprint=fingerprint, **kwargs)


def make_chunk(*token_ids: int, tokens: int | None = None) -> ChunkKV:
    generator = torch.Generator().manual_seed(int.from_bytes(bytes(token_ids)))
    return ChunkKV(token_ids, *torch.randn(2, *GEOMETRY.kv_shape(tokens or len(token_ids)), generator=generator))


def key_of(prefix: str, *token_ids: int) -> str:
    key = chunk_key(FINGERPRINT, token_ids)
    return f"{prefix}chunks/{key[:2]}/{key}.safetensors"


def miss_of(store: ChunkStore, *token_ids: int) -> ChunkMiss:
    with pytest.raises(ChunkMiss) as caught:
        store.get(token_ids)
    return caught.value


@pytest.mark.parametrize("prefix", ["", "some/prefix/"])
def test_round_trip(s3: S3Server, prefix: str) -> None:
    store = make_store(s3.uri(f"{BUCKET}/{prefix}"))
    assert miss_of(store, 1, 2).reason is MissReason.absent
    assert not store.contains((1, 2))
    written = store.put(make_chunk(1, 2))
    assert torch.equal(store.get((1, 2)).k, make_chunk(1, 2).k)
    assert store.contains((1, 2)) and not store.contains((2, 1))
    assert sorted(s3.objects(BUCKET)) == sorted([key_of(prefix, 1, 2), f"{prefix}target.json"])
    assert list(store.keys()) == [chunk_key(FINGERPRINT, (1, 2))]
    stats = store.stats()
    assert (stats.objects, stats.bytes, stats.tokens) == (1, written, 2)
    (key,) = store.keys()
    store.delete(key)
    assert miss_of(store, 1, 2).reason is MissReason.absent


def test_a_small_chunk_is_one_put_and_a_get_is_two_requests(s3: S3Server) -> None:
    store = make_store(s3.uri(BUCKET))
    store.put(make_chunk(1, 2))
    s3.seen.clear()
    store.put(make_chunk(3, 4))
    assert [method for method, _ in s3.seen] == ["PUT"]
    s3.seen.clear()
    store.get((3, 4))
    assert [method for method, _ in s3.seen] == ["HEAD", "GET"]


def test_a_chunk_larger_than_a_part_round_trips(s3: S3Server) -> None:
    geometry = Geometry(8, 8, 128, 8, 1024, 100, 4096)
    settings = StoreSettings(attempts=2, retry_base_s=0.001)
    uri = s3.uri(BUCKET)
    store = ChunkStore(uri, fingerprint=FINGERPRINT, geometry=geometry, dtype=torch.float32, settings=settings)
    ids = tuple(range(200))
    chunk = ChunkKV(ids, *torch.randn(2, *geometry.kv_shape(200)))
    assert store.put(chunk) == HEADER_BYTES + chunk.nbytes > 12 * 2**20  # S3 clients split at 10 MiB
    found = store.get(ids)
    assert torch.equal(found.k, chunk.k) and torch.equal(found.v, chunk.v)


def test_damaged_and_swapped_objects_are_misses(s3: S3Server) -> None:
    store = make_store(s3.uri(BUCKET))
    for first in (1, 3, 5):
        store.put(make_chunk(first, first + 1))
    read = lambda name: s3.client.get_object(Bucket=BUCKET, Key=name)["Body"].read()  # noqa: E731
    one, two, three = (key_of("", first, first + 1) for first in (1, 3, 5))
    first, second, third = read(one), read(two), read(three)
    s3.client.put_object(Bucket=BUCKET, Key=one, Body=second)
    s3.client.put_object(Bucket=BUCKET, Key=two, Body=first[:-1])
    s3.client.put_object(Bucket=BUCKET, Key=three, Body=third[:-1] + bytes([third[-1] ^ 1]))
    expected = {one: MissReason.wrong_tokens, two: MissReason.wrong_tokens, three: MissReason.corrupt}
    assert [miss_of(store, first, first + 1).reason for first in (1, 3, 5)] == list(expected.values())
    report = store.verify()
    assert {bad.path: bad.reason for bad in report.bad} == expected
    assert store.verify(delete=True).deleted == 3
    assert store.verify().objects == 0


@pytest.mark.parametrize("status", [SLOW_DOWN, (500, {}, ""), (429, {}, "")], ids=lambda s: str(s[0]))
def test_passing_answers_are_retried(s3: S3Server, status) -> None:
    store = make_store(s3.uri(BUCKET))
    s3.faults = [status] * 3  # four attempts
    store.put(make_chunk(1, 2))
    s3.faults = [status] * 3
    assert torch.equal(store.get((1, 2)).v, make_chunk(1, 2).v)
    s3.faults = [status] * 3
    assert store.contains((1, 2))
    s3.faults = [status] * 3
    assert store.verify().bad == []
    assert not s3.faults


@pytest.mark.parametrize("method", ["HEAD", "GET"])
def test_endless_slow_down_is_an_unreadable_miss_in_bounded_time(s3: S3Server, method: str) -> None:
    store = make_store(s3.uri(BUCKET))
    store.put(make_chunk(1, 2))
    s3.faults, s3.matches = [SLOW_DOWN] * 100, lambda verb, path: verb == method
    s3.seen.clear()
    begin = time.monotonic()
    miss = miss_of(store, 1, 2)
    assert miss.reason is MissReason.unreadable and "store.attempts" in miss.detail
    assert sum(verb == method for verb, _ in s3.seen) == 4  # the SDK does not multiply our attempts
    assert time.monotonic() - begin < 5
    s3.faults.clear()
    store.get((1, 2))


@pytest.mark.parametrize("multipart", [False, True], ids=["one put", "multipart"])
def test_endless_slow_down_fails_a_put_and_nothing_is_visible(s3: S3Server, multipart: bool) -> None:
    geometry = Geometry(8, 8, 128, 8, 1024, 100, 4096) if multipart else GEOMETRY
    settings = StoreSettings(attempts=2, retry_base_s=0.001)
    uri = s3.uri(BUCKET)
    store = ChunkStore(uri, fingerprint=FINGERPRINT, geometry=geometry, dtype=torch.float32, settings=settings)
    store.claim()
    chunk = ChunkKV(tuple(range(200)), *torch.randn(2, *geometry.kv_shape(200)))
    s3.faults, s3.matches = [SLOW_DOWN] * 100, lambda verb, path: verb == "PUT"
    with pytest.raises(StoreError, match=r"SLOW_DOWN|503") as caught:
        store.put(chunk)
    assert "verysecret" not in str(caught.value)
    s3.faults.clear()
    assert s3.objects(BUCKET) == ["target.json"]


def test_missing_bucket_is_named(s3: S3Server) -> None:
    store = make_store(s3.uri("no-such-bucket/x"))
    assert miss_of(store, 1).reason is MissReason.absent
    for refused in (store.check_target, lambda: store.put(make_chunk(1))):
        with pytest.raises(StoreError, match=r"bucket 'no-such-bucket' does not exist") as caught:
            refused()
        assert "verysecret" not in str(caught.value)


def test_denied_and_misplaced_buckets_are_explained_without_retries(s3: S3Server, caplog) -> None:
    store = make_store(s3.uri(BUCKET))
    store.put(make_chunk(1, 2))
    caplog.set_level(logging.DEBUG)
    for fault, hint in ((FORBIDDEN, "credentials"), (ELSEWHERE, "another region")):
        s3.seen.clear()
        s3.faults = [fault] * 2
        with pytest.raises(StoreError, match=hint):
            store.put(make_chunk(3, 4))
        miss = miss_of(store, 1, 2)
        assert miss.reason is MissReason.unreadable and hint in miss.detail
        assert len(s3.seen) == 2
    assert "verysecret" not in caplog.text


def test_server_that_is_not_there_is_explained_in_bounded_time() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = make_store(f"s3://key:verysecret@{BUCKET}?endpoint_override=127.0.0.1:{port}&scheme=http")
    begin = time.monotonic()
    miss = miss_of(store, 1)
    assert miss.reason is MissReason.unreadable and "endpoint_override" in miss.detail
    with pytest.raises(StoreError, match="endpoint_override"):
        store.check_target()
    assert time.monotonic() - begin < 5


def test_server_that_never_answers_is_a_timeout() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        uri = f"s3://key:verysecret@{BUCKET}?endpoint_override=127.0.0.1:{port}&scheme=http"
        assert miss_of(make_store(uri, attempts=1), 1).reason is MissReason.timeout


def test_store_of_another_target_is_refused(s3: S3Server) -> None:
    make_store(s3.uri(BUCKET)).put(make_chunk(1))
    with pytest.raises(StoreMismatchError, match=f"{FINGERPRINT}.*{'1b' * 32}"):
        make_store(s3.uri(BUCKET), fingerprint="1b" * 32).check_target()


def test_many_threads_read_and_write(s3: S3Server) -> None:
    store = make_store(s3.uri(BUCKET))
    chunks = [make_chunk(i, i + 1, i + 2) for i in range(40)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(store.put, chunks))
        found = list(pool.map(store.get, [chunk.token_ids for chunk in chunks]))
    assert all(torch.equal(a.k, b.k) and torch.equal(a.v, b.v) for a, b in zip(chunks, found, strict=True))
    assert sum(path.endswith("target.json") and verb == "PUT" for verb, path in s3.seen) == 1
    assert store.verify().objects == 40


def test_folders_of_a_bucket_are_the_prefixes_of_its_objects(s3: S3Server) -> None:
    objects = ObjectStore(s3.uri(f"{BUCKET}/root"), attempts=2, retry_base_s=0.01)
    assert objects.folders("") == []
    for path in ("a/CURRENT", "a/generations/1/x", "b/deep/er", "file"):
        objects.write(path, [b"x"])
    assert sorted(objects.folders("")) == ["a", "b"] and objects.folders("a") == ["generations"]
