# SPDX-License-Identifier: Apache-2.0
"""The object store of chunk caches: one object per chunk and target.

`<uri>/target.json` says whose store it is; `<uri>/chunks/<two hex digits>/<key>.safetensors` are the chunks. An object
that is missing, damaged or another's is a `ChunkMiss` with its reason and never an answer.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from kvcache.chunk import ChunkKV
from kvcache.chunk_object import HEADER_BYTES, ChunkMiss, MissReason, ObjectFormat, claimed
from kvcache.geometry import Geometry
from kvcache.manifest import MANIFEST, MANIFEST_BYTES, StoreManifest, StoreMismatchError
from kvcache.objects import STORAGE_ERRORS, ObjectInfo, ObjectStore, StoreError, explain, is_timeout
from kvcache.settings import Settings, StoreSettings
from kvcache.target import load_config, target_dtype, target_fingerprint

__all__ = [
    "BadObject",
    "ChunkMiss",
    "ChunkStore",
    "MissReason",
    "StoreError",
    "StoreMismatchError",
    "StoreStats",
    "VerifyReport",
]

_T = TypeVar("_T")
_CHUNKS = "chunks"
_SUFFIX = ".safetensors"
_KEY = re.compile("[0-9a-f]{64}")
_STALE_S = 600.0  # a writer is done, or dead, long before


@dataclass(frozen=True)
class BadObject:
    """An object that `verify` found to be no good."""

    path: str
    reason: MissReason
    detail: str


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` found.

    Attributes:
        objects: how many were checked.
        bad: those that would be misses; one that could not be read is among them and may be a good one.
        deleted: how many of them were deleted.
        temporary: files of killed writers that were removed.
    """

    objects: int
    bad: list[BadObject]
    deleted: int
    temporary: int


@dataclass
class StoreStats:
    """What the store holds, by what the objects' headers claim.

    Attributes:
        objects: all objects below `chunks/`.
        bytes: of all objects, headers included.
        tokens: of the readable ones.
        by_dtype: objects by storage dtype; "unreadable" for those without a header of ours.
    """

    objects: int = 0
    bytes: int = 0
    tokens: int = 0
    by_dtype: dict[str, int] = field(default_factory=dict)


class ChunkStore:
    """Chunk caches of one target in object storage. Thread-safe.

    Args:
        uri: any location `pyarrow.fs` opens, see `kvcache.objects.ObjectStore`.
        fingerprint: the target's, lower-case hex.
        geometry: the target's.
        dtype: of the stored keys and values.
        settings: retries and parallelism; its `uri` and `dtype` are not looked at.
        model: the target's name, for the manifest and for messages.

    Raises:
        StoreError: the location cannot be opened.
    """

    def __init__(
        self,
        uri: str,
        *,
        fingerprint: str,
        geometry: Geometry,
        dtype: torch.dtype,
        settings: StoreSettings,
        model: str = "",
    ) -> None:
        self.format = ObjectFormat(fingerprint, geometry, dtype)
        self._objects = ObjectStore(uri, attempts=settings.attempts, retry_base_s=settings.retry_base_s)
        self._parallelism = settings.read_parallelism
        self._manifest = StoreManifest(fingerprint, model, str(dtype).removeprefix("torch."))
        self._lock = threading.Lock()
        self._manifest_checked = False

    @classmethod
    def of(cls, settings: Settings) -> ChunkStore:
        """The store that the settings name, for the target that they name. Loads no model.

        Raises:
            StoreError: the location cannot be opened.
            ModelNotFoundError: the target has not been fetched.
        """
        stored = settings.store.dtype
        return cls(
            settings.store_uri,
            fingerprint=target_fingerprint(settings),
            geometry=Geometry.of(load_config(settings)),
            dtype=target_dtype(settings) if stored == "auto" else getattr(torch, stored),
            settings=settings.store,
            model=settings.target.model,
        )

    @property
    def uri(self) -> str:
        """Location, for messages: without credentials."""
        return self._objects.uri

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the stored keys and values."""
        return self.format.dtype

    def get(self, token_ids: Sequence[int]) -> ChunkKV:
        """Fetch a chunk: one read into one buffer, checked, and tensors that are views of it.

        Returns:
            Canonical keys and values `[L, T, H, D]` in the store's dtype, in host memory.

        Raises:
            ChunkMiss: it is not there, not whole, not this chunk's or not this target's; nothing else is raised.
        """
        key, size = self.format.key(token_ids), self.format.size(len(token_ids))
        try:
            buffer, found = self._objects.read(_path(key), at_most=size)
        except STORAGE_ERRORS as error:
            raise _storage_miss(error, key) from error
        return self.format.decode(buffer, found, token_ids)

    def put(self, chunk: ChunkKV) -> int:
        """Store a chunk, in place of any object of its key.

        Args:
            chunk: canonical KV in any float dtype; it is converted to the store's.

        Returns:
            Bytes written.

        Raises:
            ValueError: wrong shapes, no tokens, or values that are not finite in the store's dtype.
            StoreError: it could not be written; nothing is visible.
            StoreMismatchError: the store belongs to another target.
        """
        parts = self.format.encode(chunk)
        self.claim()
        return self._objects.write(_path(self.format.key(chunk.token_ids)), parts)

    def contains(self, token_ids: Sequence[int]) -> bool:
        """Whether an object of the right name and size is there; its bytes are not read.

        Raises:
            StoreError: the store does not answer.
        """
        return self._objects.size(_path(self.format.key(token_ids))) == self.format.size(len(token_ids))

    def delete(self, key: str) -> None:
        """Delete a chunk by key; it is no error when it is not there.

        Raises:
            ValueError: not a key.
            StoreError: it could not be deleted.
        """
        self._objects.delete(_path(key))

    def check_target(self) -> None:
        """Refuse a store that belongs to another target. An empty store is fine.

        Raises:
            StoreMismatchError: the manifest names another fingerprint, dtype or format version, or is damaged.
            StoreError: the store cannot be read, or its bucket does not exist.
        """
        try:
            buffer, _ = self._objects.read(MANIFEST, at_most=MANIFEST_BYTES)
        except FileNotFoundError:
            self._objects.check_bucket()
            return
        except STORAGE_ERRORS as error:
            raise StoreError(f"cannot read {MANIFEST} in {self.uri}: {explain(error)}") from error
        self._manifest.check(buffer.numpy().tobytes(), self.uri)

    def claim(self) -> None:
        """Write the manifest if there is none, and refuse a store of another target. Done once per instance.

        Raises:
            StoreMismatchError, StoreError: as for `check_target`.
        """
        with self._lock:
            if self._manifest_checked:
                return
            self.check_target()
            if self._objects.size(MANIFEST) is None:
                self._objects.write(MANIFEST, [self._manifest.encode()])
                self.check_target()  # another target's first writer may have been here at the same moment
            self._manifest_checked = True

    def keys(self) -> Iterator[str]:
        """Keys of all objects, in no particular order."""
        return (key for info in self._objects.list(_CHUNKS) if (key := _key(info.path)) is not None)

    def verify(self, progress: Callable[[int], None] | None = None, *, delete: bool = False) -> VerifyReport:
        """Read and check every object, and remove what killed writers left behind.

        Args:
            progress: called with the number of objects checked so far.
            delete: delete the bad objects; they are computed again when they are needed. Objects that could not be
                read are kept, and so are those that somebody has replaced with a good one meanwhile.

        Raises:
            StoreError: the store cannot be listed, or an object cannot be looked up or deleted.
        """
        checked, bad = 0, []
        for checked, found in enumerate(self._each(self._check), start=1):
            if found is not None:
                bad.append(found)
            if progress is not None:
                progress(checked)
        deleted = sum(self._delete_bad(found) for found in bad) if delete else 0
        return VerifyReport(checked, bad, deleted, self.sweep())

    def stats(self) -> StoreStats:
        """Count objects, bytes and tokens; reads every object's header.

        Raises:
            StoreError: the store cannot be listed.
        """
        stats = StoreStats()
        for size, claim in self._each(self._claim):
            tokens, dtype = claim or (0, "unreadable")
            stats.objects += 1
            stats.bytes += size
            stats.tokens += tokens
            stats.by_dtype[dtype] = stats.by_dtype.get(dtype, 0) + 1
        return stats

    def sweep(self) -> int:
        """Remove temporary files that killed writers left (not those of the last minutes), and say how many."""
        return self._objects.sweep("", _STALE_S)

    def _each(self, work: Callable[[ObjectInfo], _T]) -> Iterator[_T]:
        listing = (info for info in self._objects.list(_CHUNKS) if _key(info.path) is not None)
        with ThreadPoolExecutor(self._parallelism, thread_name_prefix="store") as pool:
            while part := list(itertools.islice(listing, 1024)):
                yield from pool.map(work, part)

    def _check(self, info: ObjectInfo) -> BadObject | None:
        key = _key(info.path) or ""
        # An object larger than any chunk is not ours: its header says enough.
        longest = self.format.size(self.format.geometry.max_positions)
        try:
            buffer, size = self._objects.read(info.path, info.size if info.size <= longest else HEADER_BYTES)
            self.format.check(buffer, size, key)
        except ChunkMiss as miss:
            return BadObject(info.path, miss.reason, miss.detail)
        except STORAGE_ERRORS as error:
            miss = _storage_miss(error, key)
            return BadObject(info.path, miss.reason, miss.detail)
        return None

    def _delete_bad(self, found: BadObject) -> bool:
        if not found.reason.damaged:  # it says something about the reading, and nothing about the object
            return False
        # Looked at again: a service may have written it anew since it was found to be bad.
        size = self._objects.size(found.path)
        again = None if size is None else self._check(ObjectInfo(found.path, size, 0.0))
        if again is None or not again.reason.damaged:
            return False
        self._objects.delete(found.path)
        return True

    def _claim(self, info: ObjectInfo) -> tuple[int, tuple[int, str] | None]:
        try:
            head, size = self._objects.read(info.path, HEADER_BYTES)
        except STORAGE_ERRORS:
            return info.size, None
        return size, claimed(head)


def _path(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise ValueError(f"not a chunk key (64 lower-case hex digits): {key[:80]!a}")
    return f"{_CHUNKS}/{key[:2]}/{key}{_SUFFIX}"


def _key(path: str) -> str | None:
    """The key an object's path stands for; None for files that are not chunks (no reader ever asks for them)."""
    key = path.rpartition("/")[2].removesuffix(_SUFFIX)
    return key if _KEY.fullmatch(key) and path == _path(key) else None


def _storage_miss(error: BaseException, key: str) -> ChunkMiss:
    if isinstance(error, FileNotFoundError):
        return ChunkMiss(MissReason.absent, key, "no such object")
    return ChunkMiss(MissReason.timeout if is_timeout(error) else MissReason.unreadable, key, explain(error))
