# SPDX-License-Identifier: Apache-2.0
"""The first half of ingest: files to chunks, on Ray Data."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import ray
import ray.data

from kvcache.settings import ChunkingSettings, Settings
from kvcache.target import load_tokenizer
from pipelines.ray_data import Progress, quiet_ray_data
from pipelines.readers import BadRecord, Document, InputFile, read_file
from retrieval.chunking import Chunker, tokenizer_digest

STAGED = pa.schema(
    {
        "kind": pa.string(),
        "file": pa.int32(),
        "line": pa.int64(),
        "ordinal": pa.int32(),
        "document_id": pa.string(),
        "title": pa.string(),
        "text": pa.large_string(),
        "token_ids": pa.list_(pa.int32()),
        "source": pa.string(),
        "content_hash": pa.string(),
        "reason": pa.string(),
    }
)
"""A row is a chunk, an unchanged document, a bad record (`line` null when the file is meant), or the end of a file."""
CHUNK, UNCHANGED, BAD, END = "chunk", "unchanged", "bad", "end"

_ROWS_PER_BLOCK = 2048
_MOST_READ_TASKS = 256


def stage_files(
    files: Sequence[InputFile], known: Mapping[str, str], settings: Settings, progress: Progress
) -> pa.Table:
    """Read, cut and tokenise files.

    Args:
        files: what to read.
        known: content hash by document id; a document that still has its hash comes as one `unchanged` row.
        settings: chunking and target.
        progress: told about files read.

    Returns:
        Rows of `STAGED`, in the order of files and lines.
    """
    items = [{"file": number, **vars(file)} for number, file in enumerate(files)]
    with quiet_ray_data():
        rows = ray.data.from_items(items, override_num_blocks=min(len(items), _MOST_READ_TASKS)).map_batches(
            _stage, batch_size=None, batch_format="pyarrow", fn_args=(ray.put(dict(known)), settings)
        )
        batches, ended = [STAGED.empty_table()], 0
        progress("read", 0, len(files))
        for batch in rows.iter_batches(batch_size=None, batch_format="pyarrow"):
            batches.append(batch.cast(STAGED))
            ended += batch["kind"].to_pylist().count(END)
            progress("read", ended, len(files))
    staged = pa.concat_tables(batches)
    return staged.sort_by([("file", "ascending"), ("line", "ascending"), ("ordinal", "ascending")])


def content_hash(document: Document, chunking: ChunkingSettings, tokenizer: str) -> str:
    """SHA-256, lower-case hex, over all that decides a document's rows: content, chunking, tokenizer digest."""
    parts = [document.title, document.text, document.source, chunking.model_dump(), tokenizer]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _stage(batch: pa.Table, known: ray.ObjectRef | Mapping[str, str], settings: Settings) -> Iterator[pa.Table]:
    hashes = ray.get(known) if isinstance(known, ray.ObjectRef) else known
    rows: list[dict[str, Any]] = []
    for item in batch.to_pylist():
        number = item.pop("file")
        for record in read_file(InputFile(**item)):
            rows += ({"file": number, **row} for row in _rows(record, hashes, settings))
            if len(rows) >= _ROWS_PER_BLOCK:
                yield pa.Table.from_pylist(rows, STAGED)
                rows = []
        rows.append({"file": number, "kind": END})
    yield pa.Table.from_pylist(rows, STAGED)


def _rows(record: Document | BadRecord, known: Mapping[str, str], settings: Settings) -> Iterator[dict[str, Any]]:
    if isinstance(record, BadRecord):
        yield {"kind": BAD, "line": record.line, "reason": record.reason}
        return
    chunker, tokenizer = _tools(settings)
    common = {
        "line": record.line,
        "document_id": record.document_id,
        "content_hash": content_hash(record, settings.chunking, tokenizer),
    }
    if known.get(record.document_id) == common["content_hash"]:
        yield {"kind": UNCHANGED, "ordinal": 0, **common}
        return
    chunks = chunker.chunks(record.title, record.text)
    if not chunks:
        yield {"kind": BAD, "line": record.line, "reason": "the target's tokenizer makes no tokens of the text"}
    for ordinal, chunk in enumerate(chunks):
        yield {
            "kind": CHUNK,
            "ordinal": ordinal,
            "title": record.title,
            "text": chunk.text,
            "token_ids": chunk.token_ids,
            "source": record.source,
            **common,
        }


@functools.lru_cache(maxsize=2)
def _tools(settings: Settings) -> tuple[Chunker, str]:
    # Once per worker process: loading a tokenizer takes about a second.
    tokenizer = load_tokenizer(settings)
    return Chunker(tokenizer, settings.chunking), tokenizer_digest(tokenizer)
