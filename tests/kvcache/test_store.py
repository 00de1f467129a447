# SPDX-License-Identifier: Apache-2.0
"""The chunk-cache store on a local path: whatever happens to an object, the answer is a named miss or the right KV."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvcache.chunk import ChunkKV, chunk_key
from kvcache.chunk_object import HEADER_BYTES
from kvcache.geometry import Geometry
from kvcache.objects import ObjectStore
from kvcache.settings import StoreSettings
from kvcache.store import ChunkMiss, ChunkStore, MissReason, StoreError, StoreMismatchError

OURS, OTHER = "0a" * 32, "1b" * 32
GEOMETRY = Geometry(
    n_layers=2, n_kv_heads=1, head_dim=4, n_attention_heads=2, hidden_size=8, vocab_size=100, max_positions=64
)
FAST = StoreSettings(attempts=3, retry_base_s=0.001)


def make_store(root: Path, fingerprint: str = OURS, dtype: torch.dtype = torch.float32, **kwargs) -> ChunkStore:
    kwargs = {"geometry": GEOMETRY, "settings": FAST, "model": f"model-{fingerprint[:2]}", **kwargs}
    return ChunkStore(str(root), fingerprint=fingerprint, dtype=dtype, **kwargs)


def make_chunk(*token_ids: int, geometry: Geometry = GEOMETRY, dtype: torch.dtype = torch.float32) -> ChunkKV:
    generator = torch.Generator().manual_seed(int.from_bytes(bytes(token_ids)))
    k, v = torch.randn(2, *geometry.kv_shape(len(token_ids)), generator=generator).to(dtype)
    return ChunkKV(token_ids, k, v)


def object_path(root: Path, token_ids: tuple[int, ...], fingerprint: str = OURS) -> Path:
    key = chunk_key(fingerprint, token_ids)
    return root / "chunks" / key[:2] / f"{key}.safetensors"


def miss_of(store: ChunkStore, token_ids: tuple[int, ...]) -> MissReason:
    """The reason of the miss; anything but a miss fails the test, a right answer included."""
    with pytest.raises(ChunkMiss) as caught:
        store.get(token_ids)
    assert caught.value.key == store.format.key(token_ids)
    str(caught.value).encode()  # what it says can be logged
    return caught.value.reason


@pytest.fixture
def stored(tmp_path: Path) -> tuple[ChunkStore, ChunkKV, Path]:
    store, chunk = make_store(tmp_path), make_chunk(5, 9)
    store.put(chunk)
    return store, chunk, object_path(tmp_path, (5, 9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_round_trip_in_every_storage_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    store, chunk = make_store(tmp_path, dtype=dtype), make_chunk(1, 2, 3)
    written = store.put(chunk)
    found = store.get([1, 2, 3])
    assert found.token_ids == (1, 2, 3)
    assert torch.equal(found.k, chunk.k.to(dtype)) and torch.equal(found.v, chunk.v.to(dtype))
    assert written == object_path(tmp_path, (1, 2, 3)).stat().st_size == HEADER_BYTES + found.nbytes
    # One read into one buffer: keys and values are views of the same memory.
    assert found.k.untyped_storage().data_ptr() == found.v.untyped_storage().data_ptr()


def test_safetensors_itself_reads_the_object(stored) -> None:
    _, chunk, path = stored
    tensors = load_file(path)
    assert set(tensors) == {"k", "v"}
    assert torch.equal(tensors["k"], chunk.k) and torch.equal(tensors["v"], chunk.v)


def test_non_contiguous_tensors_are_stored_right(tmp_path: Path) -> None:
    store, chunk = make_store(tmp_path), make_chunk(1, 2, 3)
    twisted = chunk.k.transpose(0, 1).contiguous().transpose(0, 1)
    assert not twisted.is_contiguous()
    store.put(ChunkKV(chunk.token_ids, twisted, chunk.v))
    assert torch.equal(store.get((1, 2, 3)).k, chunk.k)


def test_relative_path_and_file_uri_are_the_same_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_store(Path("data/cache")).put(make_chunk(1))
    assert make_store(tmp_path / "data/cache").contains((1,))
    kwargs = {"fingerprint": OURS, "geometry": GEOMETRY, "dtype": torch.float32, "settings": FAST}
    assert ChunkStore(f"file://{tmp_path}/data/cache", **kwargs).contains((1,))


def test_absent(tmp_path: Path) -> None:
    store = make_store(tmp_path / "nothing" / "here")
    assert miss_of(store, (1, 2)) is MissReason.absent
    assert not store.contains((1, 2))
    assert list(store.keys()) == [] and store.verify().objects == 0 and store.stats().objects == 0


@pytest.mark.parametrize("mask", [0xFF, 0x01, 0x20])
def test_flip_of_any_byte_is_a_miss(stored, mask: int) -> None:
    store, _, path = stored
    good = path.read_bytes()
    reasons = {}
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= mask
        path.write_bytes(bad)
        reasons[position] = miss_of(store, (5, 9))
    assert {reasons[position] for position in range(8)} == {MissReason.header}
    assert {reasons[position] for position in range(HEADER_BYTES, len(good))} == {MissReason.corrupt}
    path.write_bytes(good)
    store.get((5, 9))


def test_any_other_whitespace_in_the_padding_is_a_miss(stored) -> None:
    store, _, path = stored
    bad = bytearray(path.read_bytes())
    for position, space in ((HEADER_BYTES - 1, 0x0A), (HEADER_BYTES - 2, 0x09)):
        bad[position] = space
        path.write_bytes(bad)
        assert miss_of(store, (5, 9)) is MissReason.header


def test_truncation_at_every_length_is_a_miss(stored) -> None:
    store, _, path = stored
    good = path.read_bytes()
    for length in range(len(good)):
        path.write_bytes(good[:length])
        assert miss_of(store, (5, 9)) is MissReason.truncated
        assert not store.contains((5, 9))


@pytest.mark.parametrize("extra", [b"\0", b"x" * 5000])
def test_trailing_bytes_are_a_miss(stored, extra: bytes) -> None:
    store, _, path = stored
    path.write_bytes(path.read_bytes() + extra)
    assert miss_of(store, (5, 9)) is MissReason.corrupt
    assert not store.contains((5, 9))


def test_swapped_objects_are_misses(stored) -> None:
    store, _, path = stored
    store.put(make_chunk(6, 8))
    other = object_path(path.parents[2], (6, 8))
    mine, theirs = path.read_bytes(), other.read_bytes()
    assert len(mine) == len(theirs)
    path.write_bytes(theirs)
    other.write_bytes(mine)
    assert miss_of(store, (5, 9)) is MissReason.wrong_tokens
    assert miss_of(store, (6, 8)) is MissReason.wrong_tokens
    assert [bad.reason for bad in store.verify().bad] == [MissReason.wrong_tokens] * 2


def test_payload_of_another_chunk_under_our_header_is_a_miss(stored) -> None:
    store, _, path = stored
    store.put(make_chunk(6, 8))
    theirs = object_path(path.parents[2], (6, 8)).read_bytes()
    path.write_bytes(path.read_bytes()[:HEADER_BYTES] + theirs[HEADER_BYTES:])
    assert miss_of(store, (5, 9)) is MissReason.corrupt


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fingerprint": OTHER}, MissReason.foreign_target),
        ({"dtype": torch.float16}, MissReason.wrong_shape),
        ({"dtype": torch.bfloat16}, MissReason.wrong_shape),
        ({"geometry": Geometry(4, 1, 4, 2, 8, 100, 64)}, MissReason.wrong_shape),
        ({"geometry": Geometry(1, 2, 4, 2, 8, 100, 64)}, MissReason.wrong_shape),  # as many bytes as ours
    ],
)
def test_object_of_another_target_dtype_or_shape_is_a_miss(stored, tmp_path: Path, change, reason) -> None:
    store, _, path = stored
    foreign = make_store(tmp_path / "foreign", **change)
    foreign.put(make_chunk(5, 9, geometry=foreign.format.geometry))
    theirs = object_path(tmp_path / "foreign", (5, 9), change.get("fingerprint", OURS))
    path.write_bytes(theirs.read_bytes())
    assert miss_of(store, (5, 9)) is reason


def test_object_of_another_format_version_is_a_miss(stored) -> None:
    store, _, path = stored
    path.write_bytes(path.read_bytes().replace(b'"format_version":"1"', b'"format_version":"2"'))
    assert miss_of(store, (5, 9)) is MissReason.format_version


def test_plain_safetensors_file_is_a_miss(stored) -> None:
    store, chunk, path = stored
    save_file({"k": chunk.k, "v": chunk.v}, path)
    assert miss_of(store, (5, 9)) is MissReason.truncated  # shorter than any header of ours
    save_file({"k": chunk.k.repeat(9, 1, 1, 1), "v": chunk.v}, path, metadata={"x": "y" * 2000})
    assert miss_of(store, (5, 9)) is MissReason.header


def _with_header(path: Path, header: object) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    payload = path.read_bytes()[HEADER_BYTES:]
    path.write_bytes((HEADER_BYTES - 8).to_bytes(8, "little") + text.ljust(HEADER_BYTES - 8) + payload)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"[" * 1016,
        b'{"a":' * 203,
        b"1" * 1016,
        [],
        {"__metadata__": {}, "k": {}, "v": {}},
        {"__metadata__": 3, "k": None, "v": []},
    ],
)
def test_header_that_is_no_header_is_a_miss(stored, header) -> None:
    store, _, path = stored
    _with_header(path, header)
    assert miss_of(store, (5, 9)) is MissReason.header
    assert [bad.reason for bad in store.verify().bad] == [MissReason.header]
    assert store.stats().by_dtype == {"unreadable": 1}


def test_header_with_odd_values_is_a_miss(stored) -> None:
    store, _, path = stored
    good = json.loads(path.read_bytes()[8:HEADER_BYTES])
    changes = [
        ("__metadata__", name, value)
        for name in good["__metadata__"]
        for value in ("", "\ud800", "٢", "-1", "9" * 400, "x" * 300, None, 1, [], {})
    ]
    changes += [("k", name, value) for name in good["k"] for value in (None, "F32x", [0, 1e300], [[]], -1)]
    changes += [("__metadata__", "extra", "field"), ("k", "extra", 1)]
    for section, name, value in changes:
        if good[section].get(name) == value:
            continue
        _with_header(path, {**good, section: {**good[section], name: value}})
        miss_of(store, (5, 9))
        store.verify()
        store.stats()


def test_random_bytes_are_misses(stored) -> None:
    store, _, path = stored
    good, rng = path.read_bytes(), random.Random(7)
    for _ in range(500):
        bad = bytearray(good)
        for _ in range(rng.randint(1, 30)):
            start = rng.randrange(len(bad))
            bad[start : start + rng.randint(0, 9)] = rng.randbytes(rng.randint(0, 9))
        path.write_bytes(bad)
        if bad != good:
            miss_of(store, (5, 9))


def test_unreadable_object_is_a_miss_after_retries(stored, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _, path = stored
    calls = []

    def failing(*args, **kwargs):
        calls.append(args)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("builtins.open", failing)
    assert miss_of(store, (5, 9)) is MissReason.unreadable
    assert len(calls) == FAST.attempts
    calls.clear()
    monkeypatch.setattr("builtins.open", lambda *a, **k: calls.append(a) or (_ for _ in ()).throw(TimeoutError("late")))
    assert miss_of(store, (5, 9)) is MissReason.timeout
    monkeypatch.undo()
    path.unlink()
    path.mkdir()  # a folder where the object should be: no use trying again, and no crash either
    assert miss_of(store, (5, 9)) is MissReason.unreadable


def test_passing_error_is_retried(stored, monkeypatch: pytest.MonkeyPatch) -> None:
    store, chunk, _ = stored
    real, failures = open, [OSError(errno.EIO, "Input/output error"), OSError(errno.ESTALE, "Stale file handle")]
    monkeypatch.setattr("builtins.open", lambda *a, **k: real(*a, **k) if not failures else _raise(failures.pop()))
    assert torch.equal(store.get((5, 9)).k, chunk.k)
    assert not failures


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("key", ["", "../../etc/passwd", "A" * 64, "a" * 63, "a" * 65, f"{'a' * 63}/", f"{'a' * 64}\n"])
def test_invalid_key_is_refused_before_the_file_system(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match="not a chunk key"):
        make_store(tmp_path).delete(key)


def test_delete(stored) -> None:
    store, _, _ = stored
    (key,) = store.keys()
    store.delete(key)
    store.delete(key)
    assert miss_of(store, (5, 9)) is MissReason.absent


@pytest.mark.parametrize(
    ("k_shape", "token_ids"), [((2, 3, 1, 4), (5, 9)), ((2, 2, 1, 5), (5, 9)), ((2, 0, 1, 4), ())], ids=str
)
def test_chunk_of_wrong_shape_is_not_stored(tmp_path: Path, k_shape, token_ids) -> None:
    store = make_store(tmp_path)
    with pytest.raises(ValueError, match="want"):
        store.put(ChunkKV(token_ids, torch.zeros(k_shape), torch.zeros(k_shape)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_not_stored(tmp_path: Path, bad: float) -> None:
    chunk = make_chunk(5, 9)
    chunk.v[-1, -1, -1, -1] = bad
    with pytest.raises(ValueError, match="v is not finite"):
        make_store(tmp_path).put(chunk)
    assert list(tmp_path.iterdir()) == []


def test_values_beyond_the_storage_dtype_are_not_stored(tmp_path: Path) -> None:
    chunk = make_chunk(5, 9)
    chunk.k[0, 0, 0, 0] = 70_000.0  # infinite as float16
    with pytest.raises(ValueError, match=r"not finite as torch\.float16"):
        make_store(tmp_path / "half", dtype=torch.float16).put(chunk)
    make_store(tmp_path / "brain", dtype=torch.bfloat16).put(chunk)


def _files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def test_write_that_the_kernel_stops_half_way_leaves_nothing(stored) -> None:
    store, _, path = stored
    before = _files(path.parents[2])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (HEADER_BYTES + 10, hard))  # the write fails after that many bytes
    try:
        with pytest.raises(StoreError, match=r"cannot write chunks/.*disk is full or over quota"):
            store.put(make_chunk(6, 8))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert _files(path.parents[2]) == before
    assert store.put(make_chunk(6, 8))


@pytest.mark.parametrize(
    ("number", "hint", "tries"),
    [(errno.ENOSPC, "free space", 1), (errno.EACCES, "permissions", 1), (errno.EIO, "Input/output error", 3)],
)
def test_failed_write_says_what_to_do_and_leaves_nothing(stored, monkeypatch, number, hint, tries) -> None:
    store, _, path = stored
    before, calls = _files(path.parents[2]), []

    def failing(descriptor: int) -> None:
        calls.append(descriptor)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(StoreError, match=hint) as caught:
        store.put(make_chunk(6, 8))
    assert store.uri in str(caught.value)
    assert len(calls) == tries
    assert _files(path.parents[2]) == before


def test_root_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    store = make_store(tmp_path / "file")
    with pytest.raises(StoreError, match="Not a directory"):
        store.put(make_chunk(1))
    assert miss_of(store, (1,)) is MissReason.unreadable


def test_unknown_scheme_is_refused(tmp_path: Path) -> None:
    kwargs = {"fingerprint": OURS, "geometry": GEOMETRY, "dtype": torch.float32, "settings": FAST}
    with pytest.raises(StoreError, match="ftp"):
        ChunkStore("ftp://host/path", **kwargs)


def test_readers_see_only_whole_objects_while_writers_write(tmp_path: Path) -> None:
    store, stop = make_store(tmp_path), threading.Event()
    chunks = [make_chunk(5, 9), ChunkKV((5, 9), *torch.ones(2, *GEOMETRY.kv_shape(2)))]
    store.put(chunks[0])

    def read() -> int:
        count = 0
        while not stop.is_set():
            found = store.get((5, 9))
            assert any(torch.equal(found.k, c.k) and torch.equal(found.v, c.v) for c in chunks)
            count += 1
        return count

    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(read) for _ in range(3)]
        try:
            for turn in range(200):
                store.put(chunks[turn % 2])
        finally:
            stop.set()
        assert all(reader.result() > 0 for reader in readers)
    assert len(list(store.keys())) == 1 and len(_files(tmp_path)) == 2  # the object and the manifest


def test_left_over_temporary_files_are_invisible_and_swept(stored) -> None:
    store, _, path = stored
    old, young = path.with_name(f"{path.name}.dead.tmp"), path.with_name(f"{path.name}.busy.tmp")
    for file in (old, young):
        file.write_bytes(path.read_bytes()[:900])
    os.utime(old, (0, 0))
    assert len(list(store.keys())) == 1 and store.stats().objects == 1
    report = store.verify()
    assert (report.objects, report.bad, report.temporary) == (1, [], 1)
    assert not old.exists() and young.exists()


def test_verify_names_the_bad_and_deletes_on_request(stored) -> None:
    store, _, path = stored
    for token in range(10, 30):
        store.put(make_chunk(token, token + 1))
    flipped = bytearray(path.read_bytes())
    flipped[-1] ^= 1
    path.write_bytes(flipped)
    short = object_path(path.parents[2], (10, 11))
    short.write_bytes(short.read_bytes()[:-1])
    (path.parent / "README").write_text("not an object")
    seen = []
    report = store.verify(seen.append)
    assert seen == list(range(1, 22))
    assert {(bad.path.split("/")[-1], bad.reason) for bad in report.bad} == {
        (path.name, MissReason.corrupt),
        (short.name, MissReason.truncated),
    }
    assert path.exists() and report.deleted == 0
    assert store.verify(delete=True).deleted == 2
    assert not path.exists() and not short.exists()
    assert store.verify().bad == []


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.EIO, "Input/output error"), MissReason.unreadable),
        (PermissionError(errno.EACCES, "Permission denied"), MissReason.unreadable),
        (pa.ArrowInvalid("broken stream"), MissReason.unreadable),
        (TimeoutError(errno.ETIMEDOUT, "timed out"), MissReason.timeout),
        (FileNotFoundError(errno.ENOENT, "listed, but not there"), MissReason.absent),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value,
)
def test_verify_keeps_what_it_could_not_read(stored, monkeypatch, error: Exception, reason: MissReason) -> None:
    store, chunk, path = stored
    store.put(make_chunk(10, 11))
    damaged = object_path(path.parents[2], (10, 11))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    read = ObjectStore.read

    def failing(objects: ObjectStore, name: str, at_most: int) -> tuple[torch.Tensor, int]:
        if name.endswith(path.name):
            raise error
        return read(objects, name, at_most)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "read", failing)
        report = store.verify(delete=True)
    assert {bad.path.split("/")[-1]: bad.reason for bad in report.bad} == {
        path.name: reason,
        damaged.name: MissReason.truncated,
    }
    assert report.deleted == 1 and not damaged.exists()
    assert torch.equal(store.get((5, 9)).k, chunk.k)


def test_verify_keeps_what_was_mended_or_became_unreadable_since_it_looked(stored, monkeypatch) -> None:
    store, chunk, path = stored
    good = path.read_bytes()
    path.write_bytes(good[:-1])
    report = store.verify(lambda _: path.write_bytes(good), delete=True)
    assert ([bad.reason for bad in report.bad], report.deleted) == ([MissReason.truncated], 0)
    assert torch.equal(store.get((5, 9)).k, chunk.k)

    path.write_bytes(good[:-1])

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    report = store.verify(lambda _: monkeypatch.setattr(ObjectStore, "read", broken), delete=True)
    assert report.deleted == 0 and path.exists()


def test_stats(stored, tmp_path: Path) -> None:
    store = stored[0]
    store.put(make_chunk(1, 2, 3))
    half = make_store(tmp_path / "half", dtype=torch.float16)
    half.put(make_chunk(7))
    theirs = object_path(tmp_path / "half", (7,))
    (target := tmp_path / "chunks" / theirs.parent.name).mkdir(exist_ok=True)
    theirs.rename(target / theirs.name)
    stats = store.stats()
    assert (stats.objects, stats.tokens) == (3, 6)
    # Per token: 2 layers of keys and values, 1 head of 4.
    assert stats.bytes == 3 * HEADER_BYTES + 5 * (2 * 2 * 4) * 4 + 1 * (2 * 2 * 4) * 2
    assert stats.by_dtype == {"float32": 2, "float16": 1}


def test_store_of_another_target_is_refused_and_both_are_named(stored) -> None:
    _, _, path = stored
    root = path.parents[2]
    intruder = make_store(root, fingerprint=OTHER)
    for refused in (intruder.check_target, lambda: intruder.put(make_chunk(1))):
        with pytest.raises(StoreMismatchError) as caught:
            refused()
        for named in (OURS, OTHER, "model-0a", "model-1b", "store.uri"):
            assert named in str(caught.value)
    assert not object_path(root, (1,), OTHER).exists()
    make_store(root).check_target()


def test_store_of_another_dtype_is_refused(stored) -> None:
    _, _, path = stored
    with pytest.raises(StoreMismatchError, match=r"dtype float32, this program has float16"):
        make_store(path.parents[2], dtype=torch.float16).check_target()


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"null", b"\xff", b'{"fingerprint": 3}', b"[" * 60_000])
def test_damaged_manifest_is_refused(stored, content: bytes) -> None:
    store, _, path = stored
    (path.parents[2] / "target.json").write_bytes(content)
    with pytest.raises(StoreMismatchError, match=r"target.json in .* is damaged"):
        store.check_target()


def test_empty_store_is_anybody_s(tmp_path: Path) -> None:
    make_store(tmp_path / "new").check_target()
    assert not (tmp_path / "new").exists()  # looking leaves no trace


@pytest.mark.parametrize("uri", ["s3://KEY:SECRET@bucket/x?bogus=1", "s3://KEY:SE CRET@b/x", "foo://KEY:SECRET@h/p"])
def test_messages_never_show_credentials(uri: str) -> None:
    with pytest.raises(StoreError) as refused:
        ObjectStore(uri, attempts=1, retry_base_s=0.1)
    assert "CRET" not in str(refused.value) and "***" in str(refused.value)
    assert refused.value.__suppress_context__
