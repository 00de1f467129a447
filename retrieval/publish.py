# SPDX-License-Identifier: Apache-2.0
"""How a new generation of a corpus is written and made visible."""

from __future__ import annotations

import hashlib
import logging
import uuid

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kvcache.objects import ObjectStore, StoreError
from kvcache.settings import RetrievalSettings
from retrieval.corpus import (
    CURRENT,
    INDEX,
    MANIFEST,
    TABLE,
    corpora_at,
    generation_folder,
    is_corpus_name,
    read_pointer,
    table_schema,
)
from retrieval.errors import CorpusConflictError, UnknownCorpusError
from retrieval.index import DenseIndex
from retrieval.manifest import FileRecord, IndexRecord, Manifest, Owner, Pointer

logger = logging.getLogger(__name__)


def publish(
    corpora_uri: str,
    name: str,
    table: pa.Table,
    owner: Owner,
    settings: RetrievalSettings,
    based_on: str | None,
) -> Manifest:
    """Write a generation and make it the current one. Superseded generations but the last are deleted.

    Args:
        corpora_uri: location of the corpora.
        name: the corpus.
        table: the whole corpus, columns as in `table_schema`, any order; chunk ids unique.
        owner: what ids and vectors belong to.
        settings: how to build the index.
        based_on: generation the table was made from, None for a new corpus.

    Raises:
        ValueError: the name is not one a corpus can have.
        CorpusConflictError: the current generation is not `based_on` any more; nothing was published.
    """
    if not is_corpus_name(name):
        raise ValueError(f"a corpus cannot be called {name!r}: use letters, digits, '.', '-' and '_', at most 100")
    objects = corpora_at(corpora_uri)
    # Row order is the tie-break of every search, and lets a chunk id be found by bisection.
    table = table.select(table_schema(owner.embedding_dimension).names).sort_by("chunk_id")
    index = DenseIndex.build(embeddings_of(table, owner.embedding_dimension), settings)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    files = {TABLE: memoryview(sink.getvalue()), INDEX: index.to_bytes()}

    generation = f"{_next_number(objects, name):06d}-{uuid.uuid4().hex[:8]}"
    manifest = Manifest(
        corpus=name,
        generation=generation,
        files={
            file: FileRecord(sha256=hashlib.sha256(data).hexdigest(), bytes=data.nbytes) for file, data in files.items()
        },
        owner=owner,
        index=IndexRecord.of(settings),
        documents=len(pc.unique(table["document_id"])),
        chunks=table.num_rows,
        tokens=pc.sum(pc.list_value_length(table["token_ids"])).as_py() or 0,
    )
    folder = generation_folder(name, generation)
    manifest_data = manifest.model_dump_json(indent=2).encode()
    for file, data in {**files, MANIFEST: manifest_data}.items():
        objects.write(f"{folder}/{file}", [data])

    current = current_generation(corpora_uri, name)
    if current != based_on:
        objects.delete_folder(folder)
        raise CorpusConflictError(
            f"corpus {name!r} moved from generation {based_on} to {current} meanwhile: nothing was published, run again"
        )
    pointer = Pointer(generation, hashlib.sha256(manifest_data).hexdigest())
    objects.write(f"{name}/{CURRENT}", [pointer.to_bytes()])
    _collect(objects, name, keep={generation, based_on}, below=_number(generation))
    return manifest


def current_generation(corpora_uri: str, name: str) -> str | None:
    """Id of the current generation; None when there is no such corpus."""
    try:
        return read_pointer(corpora_uri, name).generation
    except UnknownCorpusError:
        return None


def embeddings_of(table: pa.Table, dimension: int) -> np.ndarray:
    """The table's embeddings, float32 `[N, E]`."""
    values = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in table["embedding"].chunks]
    return np.concatenate([np.empty(0, np.float32), *values]).astype(np.float32, copy=False).reshape(-1, dimension)


def _generations(objects: ObjectStore, name: str) -> set[str]:
    return {info.path.split("/")[2] for info in objects.list(f"{name}/generations")}


def _number(generation: str) -> int:
    return int(generation.partition("-")[0])


def _next_number(objects: ObjectStore, name: str) -> int:
    return 1 + max(map(_number, _generations(objects, name)), default=0)


def _collect(objects: ObjectStore, name: str, keep: set[str | None], below: int) -> None:
    """Delete generations nobody needs. The one before the current stays: a reader may be in the middle of it."""
    for generation in _generations(objects, name):
        if generation in keep or _number(generation) >= below:
            continue
        try:
            objects.delete_folder(generation_folder(name, generation))
        except StoreError as error:
            logger.warning("generation %s of %s was not deleted: %s", generation, name, error)
