# SPDX-License-Identifier: Apache-2.0
"""Question-answering data sets: JSONL or Parquet, from any location `pyarrow.fs` opens.

A record has `id`, `question`, `answers` (accepted ones, at least one), and, unless a corpus is searched for it,
`chunks`: `{"title": ..., "text": ...}`, title optional. Other fields are ignored.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from pipelines.readers import FORMATS, InputFile, find_files, resolve

_PARQUET_BATCH = 256


class DatasetError(ValueError):
    """A data set cannot be used; the text names file, line and field."""


@dataclass(frozen=True)
class QARow:
    """One question.

    Attributes:
        id: unique in its data set.
        question: its text.
        answers: accepted answers, at least one.
        chunks: texts of its own chunks in order (title, newline, text); None when it has none.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    chunks: tuple[str, ...] | None


_Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


class _Chunk(BaseModel):
    title: str | None = None
    text: _Text

    @property
    def whole(self) -> str:
        return f"{self.title}\n{self.text}" if self.title else self.text


class _Record(BaseModel):
    model_config = ConfigDict(coerce_numbers_to_str=True)

    id: _Text
    question: _Text
    answers: Annotated[list[_Text], Field(min_length=1)]
    chunks: Annotated[list[_Chunk], Field(min_length=1)] | None = None

    def row(self) -> QARow:
        chunks = None if self.chunks is None else tuple(chunk.whole for chunk in self.chunks)
        return QARow(self.id, self.question, tuple(self.answers), chunks)


def read_dataset(path: str | Path, limit: int = 0) -> list[QARow]:
    """Read a data set.

    Args:
        path: file, or folder of files, JSONL or Parquet; local path or URI.
        limit: most rows, the first ones; 0 takes all.

    Raises:
        InputError: nothing to read there.
        DatasetError: a record that cannot be used, or an id that comes twice.
    """
    rows: list[QARow] = []
    places: dict[str, str] = {}
    for file in find_files([str(path)]):
        for place, row in _read(file):
            if row.id in places:
                raise DatasetError(f"{place}, field id: {row.id!r} was already used in {places[row.id]}")
            places[row.id] = place
            rows.append(row)
            if len(rows) == limit:
                return rows
    if not rows:
        raise DatasetError(f"{path}: no records")
    return rows


def dataset_digest(rows: Sequence[QARow]) -> str:
    """SHA-256, lower-case hex, over the rows as read: the same for one content in JSONL and in Parquet."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(asdict(row), sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def _read(file: InputFile) -> Iterator[tuple[str, QARow]]:
    """Rows, each with the place it was read from."""
    kinds = {"jsonl": _jsonl, "parquet": _parquet}
    kind = FORMATS[Path(file.path).suffix.lower()]
    if kind not in kinds:
        raise DatasetError(f"{file.source}: a data set is JSONL or Parquet, not {kind}")
    try:
        yield from kinds[kind](file)
    except (OSError, pa.ArrowException) as error:
        raise DatasetError(f"{file.source} cannot be read: {error}") from error


def _jsonl(file: InputFile) -> Iterator[tuple[str, QARow]]:
    filesystem, _ = resolve(file.location)
    with filesystem.open_input_stream(file.path) as stream:
        for number, data in enumerate(io.BufferedReader(stream), start=1):
            if number == 1:
                data = data.removeprefix(b"\xef\xbb\xbf")
            if data.strip():
                place = f"{file.source}, line {number}"
                try:
                    yield place, _Record.model_validate_json(data).row()
                except ValidationError as error:
                    raise explained(place, error) from None


def _parquet(file: InputFile) -> Iterator[tuple[str, QARow]]:
    filesystem, _ = resolve(file.location)
    with filesystem.open_input_file(file.path) as stream:
        table, number = pq.ParquetFile(stream), 0
        columns = [name for name in _Record.model_fields if name in table.schema_arrow.names]
        for batch in table.iter_batches(batch_size=_PARQUET_BATCH, columns=columns):
            try:
                records: list[dict[str, Any]] = batch.to_pylist()
            except UnicodeDecodeError:
                raise DatasetError(f"{file.source}, row {number + 1} or after: invalid UTF-8") from None
            for record in records:
                number += 1
                place = f"{file.source}, row {number}"
                try:
                    yield place, _Record.model_validate(record).row()
                except ValidationError as error:
                    raise explained(place, error) from None


def explained(place: str, error: ValidationError) -> DatasetError:
    """What is wrong with a record, and where."""
    first = error.errors()[0]
    field = ".".join(map(str, first["loc"]))
    return DatasetError(f"{place}{f', field {field}' if field else ''}: {first['msg']}")
