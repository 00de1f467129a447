# SPDX-License-Identifier: Apache-2.0
"""A corpus and its generations: the layout, and how one is read.

    <corpora>/<name>/CURRENT                       generation id and the SHA-256 of its manifest
    <corpora>/<name>/generations/<id>/manifest.json   SHA-256 of the other files, and what the corpus belongs to
                                     /chunks.parquet  the corpus table, sorted by chunk_id
                                     /index.faiss     row i is the table's row i

A generation never changes once written. `CURRENT` is replaced last, in one step: that makes a generation visible.
Every file is read whole and its digest checked before anything parses it.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from kvcache.objects import ObjectStore
from kvcache.settings import RetrievalSettings, StoreSettings
from retrieval.errors import CorpusIntegrityError, UnknownChunkError, UnknownCorpusError
from retrieval.index import DenseIndex
from retrieval.manifest import Manifest, Pointer
from retrieval.types import RetrievedChunk

CURRENT, MANIFEST, TABLE, INDEX = "CURRENT", "manifest.json", "chunks.parquet", "index.faiss"
SERVED_COLUMNS = ("chunk_id", "document_id", "title", "text", "token_ids", "source")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_POINTER = re.compile(r"(\d{6,}-[0-9a-f]{8}) ([0-9a-f]{64})\n")
_ATTEMPTS = 3
"""Times a reader starts again because the generation it was reading was replaced and collected."""

Listing = Callable[[str], list[str]]
"""Names of the corpora at a location."""


def table_schema(dimension: int) -> pa.Schema:
    """Schema of the corpus table; embeddings are unit vectors of that size."""
    return pa.schema(
        {
            "chunk_id": pa.string(),
            "document_id": pa.string(),
            "title": pa.string(),
            "text": pa.large_string(),
            "token_ids": pa.list_(pa.int32()),
            "source": pa.string(),
            "content_hash": pa.string(),
            "embedding": pa.list_(pa.float32(), dimension),
        }
    )


@dataclass(frozen=True)
class Corpus:
    """One generation of a corpus, in memory: a snapshot that no later generation touches.

    Attributes:
        manifest: its manifest.
        table: corpus table, the columns asked for, sorted by `chunk_id`.
        index: its index, when asked for.
    """

    manifest: Manifest
    table: pa.Table
    index: DenseIndex | None

    @property
    def name(self) -> str:
        """Name of the corpus."""
        return self.manifest.corpus

    @property
    def generation(self) -> str:
        """Generation id."""
        return self.manifest.generation

    @classmethod
    def open(
        cls,
        corpora_uri: str,
        name: str,
        *,
        columns: Sequence[str] = SERVED_COLUMNS,
        index_settings: RetrievalSettings | None = None,
        listing: Listing | None = None,
    ) -> Corpus:
        """Read the current generation.

        Args:
            corpora_uri: location of the corpora.
            name: the corpus.
            columns: columns of the table to keep.
            index_settings: how to search the index; None leaves the index unread.
            listing: asked for the names in the message, should there be no such corpus; None lists them.

        Raises:
            UnknownCorpusError: there is no such corpus.
            CorpusIntegrityError: a file is missing or altered; it is named.
        """
        for attempt in range(_ATTEMPTS):
            pointer = read_pointer(corpora_uri, name, listing or list_corpora)
            try:
                return cls._read(corpora_uri, name, pointer, columns, index_settings)
            except CorpusIntegrityError:
                # A reader so slow that its generation was collected meanwhile starts again with the newer one.
                if attempt == _ATTEMPTS - 1 or read_pointer(corpora_uri, name) == pointer:
                    raise
        raise AssertionError("unreachable")

    @classmethod
    def _read(
        cls,
        corpora_uri: str,
        name: str,
        pointer: Pointer,
        columns: Sequence[str],
        index_settings: RetrievalSettings | None,
    ) -> Corpus:
        objects, folder = corpora_at(corpora_uri), generation_folder(name, pointer.generation)
        data = _checked(objects, f"{folder}/{MANIFEST}", pointer.manifest_sha256)
        try:
            manifest = Manifest.model_validate_json(bytes(data))
        except ValidationError as error:
            raise CorpusIntegrityError(f"{folder}/{MANIFEST} is not one this version reads: {error}") from None
        table_data = _checked(objects, f"{folder}/{TABLE}", manifest.files[TABLE].sha256)
        table = pq.read_table(pa.BufferReader(table_data), columns=list(columns)).combine_chunks()
        index = None
        if index_settings is not None:
            index = DenseIndex.from_bytes(
                _checked(objects, f"{folder}/{INDEX}", manifest.files[INDEX].sha256), index_settings
            )
            if index.size != table.num_rows:
                raise CorpusIntegrityError(f"{folder}/{INDEX} holds {index.size} rows, {TABLE} {table.num_rows}")
        return cls(manifest, table, index)

    def rows_of(self, chunk_ids: Sequence[str]) -> list[int]:
        """Rows of chunk ids.

        Raises:
            UnknownChunkError: some are not in this generation.
        """
        ids = self.table["chunk_id"]
        rows = [bisect_left(ids, chunk_id, key=lambda scalar: scalar.as_py()) for chunk_id in chunk_ids]
        unknown = [
            chunk_id
            for chunk_id, row in zip(chunk_ids, rows, strict=True)
            if row == len(ids) or ids[row].as_py() != chunk_id
        ]
        if unknown:
            some = ", ".join(repr(chunk_id) for chunk_id in ids[:3].to_pylist()) or "none"
            raise UnknownChunkError(
                f"corpus {self.name!r} (generation {self.generation}, {len(ids)} chunks such as {some}) "
                f"has no chunk {', '.join(map(repr, unknown))}"
            )
        return rows

    def chunks_at(self, rows: Sequence[int], scores: Sequence[float]) -> list[RetrievedChunk]:
        """The chunks of some rows, with their scores."""
        found = self.table.take(pa.array(rows, type=pa.int64())).to_pylist()
        return [
            RetrievedChunk(
                **{**fields, "token_ids": tuple(fields["token_ids"])},
                score=float(score),
            )
            for fields, score in zip(found, scores, strict=True)
        ]


def corpora_at(corpora_uri: str) -> ObjectStore:
    """The objects below that location."""
    # A client of a bucket is worth keeping; a relative path means another folder once the process has changed its own.
    return _kept_client(corpora_uri) if "://" in corpora_uri else _client(corpora_uri)


def _client(uri: str) -> ObjectStore:
    defaults = StoreSettings()
    return ObjectStore(uri, attempts=defaults.attempts, retry_base_s=defaults.retry_base_s)


_kept_client = functools.lru_cache(maxsize=16)(_client)


def list_corpora(corpora_uri: str) -> list[str]:
    """Names of the corpora that have a generation, sorted."""
    objects = corpora_at(corpora_uri)
    return sorted(name for name in objects.folders("") if objects.size(f"{name}/{CURRENT}") is not None)


def read_pointer(corpora_uri: str, name: str, listing: Listing = list_corpora) -> Pointer:
    """Read `CURRENT`.

    Args:
        corpora_uri: location of the corpora.
        name: the corpus.
        listing: asked for the names in the message, should there be no such corpus.

    Raises:
        UnknownCorpusError: there is none, or the name is not one a corpus can have (it becomes a folder's name).
        CorpusIntegrityError: it is not a pointer.
    """
    try:
        if not is_corpus_name(name):
            raise FileNotFoundError(name)
        data = bytes(_read_whole(corpora_at(corpora_uri), f"{name}/{CURRENT}"))
    except FileNotFoundError:
        known = ", ".join(map(repr, listing(corpora_uri))) or "none yet (run `cachemend ingest`)"
        raise UnknownCorpusError(f"unknown corpus {name!r}; known: {known}") from None
    match = _POINTER.fullmatch(data.decode(errors="replace"))
    if match is None:
        raise CorpusIntegrityError(
            f"{name}/{CURRENT} does not hold a generation id and a SHA-256: delete it and ingest again"
        )
    return Pointer(*match.groups())


def is_corpus_name(name: str) -> bool:
    """Whether a corpus can be called that: letters, digits, dot, dash, underscore; at most 100."""
    return _NAME.fullmatch(name) is not None


def generation_folder(name: str, generation: str) -> str:
    """Folder of a generation, below the location of the corpora."""
    return f"{name}/generations/{generation}"


def _read_whole(objects: ObjectStore, path: str) -> memoryview:
    data, _ = objects.read(path, at_most=sys.maxsize)
    return memoryview(data.numpy())


def _checked(objects: ObjectStore, path: str, sha256: str) -> memoryview:
    try:
        data = _read_whole(objects, path)
    except FileNotFoundError:
        raise CorpusIntegrityError(f"{path} is missing") from None
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise CorpusIntegrityError(f"{path} was altered: its SHA-256 is {found}, {sha256} was written")
    return data
