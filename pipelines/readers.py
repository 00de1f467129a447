# SPDX-License-Identifier: Apache-2.0
"""Files become documents: JSONL, Parquet, plain text and Markdown, from any location `pyarrow.fs` opens."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from retrieval.types import MAX_DOCUMENT_ID

TEXT_FIELDS = ("text", "contents", "body")
"""Names of the field that holds a record's text; the first that a record has is taken."""
FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".txt": "text",
    ".md": "markdown",
    ".markdown": "markdown",
}
_OPTIONAL_FIELDS = ("id", "title", "source")
_PARQUET_BATCH = 1024
_HEADING = re.compile(r"\A# +(.+?) *#* *(?:\n|\Z)")


class InputError(ValueError):
    """An input cannot be read at all: it does not exist, or holds no file of a known kind."""


@dataclass(frozen=True)
class InputFile:
    """A file to read.

    Attributes:
        location: the input it was found by; it opens the file system.
        path: its path in that file system.
        source: what documents name as their source: the input as given, normalised, and the path below it.
    """

    location: str
    path: str
    source: str


@dataclass(frozen=True)
class Document:
    """A document as read; `text` is not empty. Plain text files are one document on line 1.

    A document without an id of its own is called by its source and line. Where that is too long for an id, a digest of
    it and as much of its end as there is room for take its place: the same in every run.
    """

    line: int
    document_id: str
    title: str
    text: str
    source: str


@dataclass(frozen=True)
class BadRecord:
    """A record that was left out.

    Attributes:
        file: the file's source name.
        line: line in a text file, row in a Parquet file, from 1; None when the whole file is meant.
        reason: why.
    """

    file: str
    line: int | None
    reason: str


class _Bad(ValueError):
    pass


def find_files(inputs: Sequence[str]) -> list[InputFile]:
    """Files of known kinds behind files and folders (recursively, hidden ones left out), in a fixed order.

    Raises:
        InputError: an input does not exist, is of no known kind, or is a folder without files of a known kind.
    """
    found: dict[str, InputFile] = {}
    for location in inputs:
        filesystem, path = resolve(location)
        source = _source_name(location)
        info = filesystem.get_file_info(path)
        if info.type == fs.FileType.NotFound:
            raise InputError(f"input {source} does not exist")
        if info.type == fs.FileType.File:
            below = [""]
        else:
            entries = filesystem.get_file_info(fs.FileSelector(path, recursive=True))
            names = (entry.path.removeprefix(path.rstrip("/")) for entry in entries if entry.type == fs.FileType.File)
            below = sorted(name for name in names if _format(name) and "/." not in name)
        if not below or (below == [""] and not _format(path)):
            raise InputError(f"input {source} holds no file of a known kind ({', '.join(FORMATS)})")
        for name in below:
            found.setdefault(source + name, InputFile(location, path + name, source + name))
    return list(found.values())


def read_file(file: InputFile) -> Iterator[Document | BadRecord]:
    """Documents of a file, in order; what cannot be used comes as a `BadRecord` in its place."""
    read = {"jsonl": _read_jsonl, "parquet": _read_parquet, "text": _read_text, "markdown": _read_text}
    try:
        filesystem, _ = resolve(file.location)
        yield from read[_format(file.path)](filesystem, file)
    except (OSError, pa.ArrowException) as error:
        yield BadRecord(file.source, None, f"the file cannot be read: {error}")


def resolve(location: str) -> tuple[fs.FileSystem, str]:
    """File system and path of a location; without a scheme it is a local path.

    Raises:
        InputError: pyarrow cannot open it.
    """
    if "://" in location:
        return _open_uri(location)
    return fs.LocalFileSystem(), os.path.abspath(os.path.expanduser(location))


@functools.lru_cache(maxsize=16)
def _open_uri(uri: str) -> tuple[fs.FileSystem, str]:
    try:
        filesystem, path = fs.FileSystem.from_uri(uri)
    except (OSError, pa.ArrowException, ValueError) as error:
        name = _source_name(uri)
        raise InputError(f"input {name} cannot be opened: {str(error).replace(uri, name)}") from None
    return filesystem, path.rstrip("/")


def _source_name(location: str) -> str:
    if "://" not in location:
        return os.path.normpath(location)
    # Neither credentials nor file-system options belong into citations.
    return re.sub(r"//[^@/]*@", "//", location.partition("?")[0]).rstrip("/")


def _format(path: str) -> str | None:
    return FORMATS.get(PurePosixPath(path).suffix.lower())


def _read_jsonl(filesystem: fs.FileSystem, file: InputFile) -> Iterator[Document | BadRecord]:
    with filesystem.open_input_stream(file.path) as stream:
        for line, data in enumerate(io.BufferedReader(stream), start=1):
            if line == 1:
                data = data.removeprefix(b"\xef\xbb\xbf")
            if not data.strip():
                continue
            try:
                yield _document(_parse(data), file, line)
            except _Bad as bad:
                yield BadRecord(file.source, line, str(bad))


def _parse(data: bytes) -> dict[str, Any]:
    try:
        record = json.loads(data.decode())
    except UnicodeDecodeError as error:
        raise _Bad(f"invalid UTF-8 at byte {error.start + 1} of the line") from None
    except json.JSONDecodeError as error:
        raise _Bad(f"invalid JSON at character {error.pos + 1} of the line: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise _Bad(f"invalid JSON: {error}") from None
    if not isinstance(record, dict):
        raise _Bad(f"a record must be a JSON object, not {_kind(record)}")
    return record


def _read_parquet(filesystem: fs.FileSystem, file: InputFile) -> Iterator[Document | BadRecord]:
    with filesystem.open_input_file(file.path) as stream:
        table = pq.ParquetFile(stream)
        names = table.schema_arrow.names
        columns = [name for name in (*TEXT_FIELDS, *_OPTIONAL_FIELDS) if name in names]
        if not set(columns) & set(TEXT_FIELDS):
            yield BadRecord(file.source, None, f"no column {' or '.join(TEXT_FIELDS)}; it has {', '.join(names)}")
            return
        row = 0
        for batch in table.iter_batches(batch_size=_PARQUET_BATCH, columns=columns):
            values = [_plain(column) for column in batch.columns]
            for record in zip(*values, strict=True):
                row += 1
                try:
                    yield _document(dict(zip(batch.schema.names, record, strict=True)), file, row)
                except _Bad as bad:
                    yield BadRecord(file.source, row, str(bad))


def _plain(column: pa.Array) -> list[Any]:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = column.cast(pa.large_binary())  # nothing has checked the bytes yet: each row is decoded by itself
    return column.to_pylist()


def _read_text(filesystem: fs.FileSystem, file: InputFile) -> Iterator[Document | BadRecord]:
    with filesystem.open_input_stream(file.path) as stream:
        data = stream.read()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        yield BadRecord(file.source, data.count(b"\n", 0, error.start) + 1, "invalid UTF-8")
        return
    if "\0" in text:
        yield BadRecord(file.source, text.count("\n", 0, text.index("\0")) + 1, "NUL character")
        return
    record: dict[str, Any] = {"id": _default_id(file.source), "text": text.replace("\r\n", "\n")}
    if _format(file.path) == "markdown":
        record |= _markdown_title(record["text"])
    try:
        yield _document(record, file, 1)
    except _Bad as bad:
        yield BadRecord(file.source, 1, str(bad))


def _markdown_title(text: str) -> dict[str, str]:
    """A heading on the first line is the title, and is not repeated in the body."""
    text = text.strip()
    heading = _HEADING.match(text)
    body = text[heading.end() :] if heading else ""
    return {"title": heading[1], "text": body} if heading and body.strip() else {}


def _document(record: Mapping[str, Any], file: InputFile, line: int) -> Document:
    name = next((name for name in TEXT_FIELDS if record.get(name) is not None), None)
    if name is None:
        raise _Bad(f"no text: a record needs one of {', '.join(TEXT_FIELDS)}")
    text = _string(record, name).strip()
    if not text:
        raise _Bad(f"{name} is empty")
    document_id = _string(record, "id") if record.get("id") is not None else _default_id(f"{file.source}:{line}")
    if not document_id.strip():
        raise _Bad("id is empty")
    if len(document_id) > MAX_DOCUMENT_ID:
        raise _Bad(f"id has {len(document_id)} characters: shorten it to at most {MAX_DOCUMENT_ID}")
    title = " ".join(_string(record, "title").split())  # a title is one line
    return Document(line, document_id, title, text, _string(record, "source") or file.source)


def _default_id(name: str) -> str:
    if len(name) <= MAX_DOCUMENT_ID:
        return name
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:32]
    return f"{digest}:{name[len(digest) + 1 - MAX_DOCUMENT_ID :]}"


def _string(record: Mapping[str, Any], name: str) -> str:
    value = record.get(name)
    if value is None:
        return ""
    if name == "id" and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError:
            raise _Bad(f"{name} is not valid UTF-8") from None
    if not isinstance(value, str):
        raise _Bad(f"{name} must be a string, not {_kind(value)}")
    if "\0" in value:
        raise _Bad(f"{name} holds a NUL character")
    if re.search(r"[\ud800-\udfff]", value):
        raise _Bad(f"{name} holds half of a surrogate pair, which is no character")
    return value


def _kind(value: Any) -> str:
    names = {dict: "object", list: "array", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return names.get(type(value), type(value).__name__)
