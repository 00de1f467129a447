# SPDX-License-Identifier: Apache-2.0
"""The job's files: rows in parts while it runs, one file at its end, and the run file beside it.

<output>.run.json     what the rows are of: written first, and compared when the job is started again
<output>.parts/       a JSONL file per finished batch, each visible only when whole
<output>              all rows, JSONL or Parquet by its name; then the parts are deleted
"""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kvcache.objects import ObjectStore
from kvcache.settings import StoreSettings

Row = dict[str, Any]

SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "method": pa.string(),
        "params": pa.string(),
        "question": pa.string(),
        "answer": pa.string(),
        "answer_token_ids": pa.list_(pa.int32()),
        "golds": pa.list_(pa.string()),
        "f1": pa.float64(),
        "em": pa.float64(),
        "gold": pa.string(),
        "gold_logprob_mean": pa.float64(),
        "gold_logprob_sum": pa.float64(),
        "ttft_s": pa.float64(),
        "stages": pa.map_(pa.string(), pa.float64()),
        "prompt_tokens": pa.int32(),
        "cached_tokens": pa.int32(),
        "chunk_ids": pa.list_(pa.string()),
        "computed_chunks": pa.int32(),
        "fallback": pa.string(),
    }
)
"""Columns of a row. `method` with its parameters, as on a command line; `params` these again, JSON; `answer` as
written; `gold` the likeliest gold answer, its log-probabilities in nats, mean over its tokens and sum; times in
seconds; `chunk_ids` keys in the chunk-cache store, header chunk first; `computed_chunks` those that were not there;
`fallback` why the whole prompt was computed all the same."""


class OutputError(ValueError):
    """The output cannot be used: of another kind, or of another run; the text names the difference."""


class Results:
    """Rows of one run, those of earlier starts included.

    Args:
        output: file to write, `.jsonl` or `.parquet`; local path or URI.

    Raises:
        OutputError: another suffix.
    """

    def __init__(self, output: str) -> None:
        path, mark, query = output.partition("?") if "://" in output else (output, "", "")
        folder, _, self._name = path.rpartition("/")
        if not self._name.endswith((".jsonl", ".parquet")):
            raise OutputError(f"output {output!r} must end in .jsonl or .parquet")
        if not folder:
            folder = "/" if path.startswith("/") else "."
        defaults = StoreSettings()
        self._objects = ObjectStore(
            f"{folder}{mark}{query}", attempts=defaults.attempts, retry_base_s=defaults.retry_base_s
        )
        self._rows: dict[tuple[str, str], Row] = {}
        self._run: dict[str, Any] = {}

    @property
    def run_name(self) -> str:
        """Name of the run file."""
        return f"{self._name}.run.json"

    def open(self, run: Mapping[str, Any]) -> None:
        """Read what earlier starts of the run have left; nothing is written.

        Args:
            run: everything that the rows depend on, JSON.

        Raises:
            OutputError: the files there are of another run.
        """
        before = self._read(self.run_name)
        self._run = run = json.loads(json.dumps(run))
        if before is None:
            if self._objects.size(self._name) is not None:
                raise OutputError(f"{self._name} exists without {self.run_name}: name another output")
            return
        there = self._parsed(self.run_name, before)
        if there != run:
            changes = "; ".join(_differences(there, run))
            raise OutputError(f"{self.run_name} is of another run ({changes}): name another output, or delete this one")
        for info in self._objects.list(self._parts):
            self._take(self._parsed(info.path, line) for line in self._must(info.path).splitlines())
        if self._objects.size(self._name) is not None:
            self._take(self._final())

    def begin(self) -> None:
        """Write the run file.

        Raises:
            StoreError: the location cannot be written to.
        """
        self._objects.write(self.run_name, [json.dumps(self._run, indent=2, ensure_ascii=False).encode() + b"\n"])

    def done(self, row_id: str, method: str) -> bool:
        """Whether that row is there."""
        return (row_id, method) in self._rows

    def add(self, rows: Sequence[Row]) -> None:
        """Keep rows, so that a killed run has them."""
        data = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows).encode()
        self._objects.write(f"{self._parts}/{uuid.uuid4().hex}.jsonl", [data])
        self._take(rows)

    def finish(self, order: Sequence[tuple[str, str]]) -> list[Row]:
        """Write the output, delete the parts.

        Args:
            order: id and method of every row, as they are to be written.

        Returns:
            The rows.
        """
        rows = [self._rows[key] for key in order]
        if self._name.endswith(".jsonl"):
            lines = (f"{json.dumps(row, ensure_ascii=False)}\n".encode() for row in rows)
            self._objects.write(self._name, list(lines))
        else:
            sink = pa.BufferOutputStream()
            flat = [{**row, "params": json.dumps(row["params"]), "stages": list(row["stages"].items())} for row in rows]
            pq.write_table(pa.Table.from_pylist(flat, SCHEMA), sink)
            self._objects.write(self._name, [memoryview(sink.getvalue())])
        self._objects.delete_folder(self._parts)
        return rows

    @property
    def _parts(self) -> str:
        return f"{self._name}.parts"

    def _take(self, rows: Iterable[Row]) -> None:
        self._rows.update({(row["id"], row["method"]): row for row in rows})

    def _final(self) -> Iterator[Row]:
        data = self._must(self._name)
        if self._name.endswith(".jsonl"):
            yield from (self._parsed(self._name, line) for line in data.splitlines())
            return
        try:
            records = pq.read_table(pa.BufferReader(data)).to_pylist()
        except pa.ArrowException as error:
            raise OutputError(f"{self._name} is damaged: {error}") from None
        yield from ({**row, "params": json.loads(row["params"]), "stages": dict(row["stages"])} for row in records)

    def _must(self, name: str) -> bytes:
        data = self._read(name)
        if data is None:
            raise OutputError(f"{name} vanished while it was read: is the job running twice?")
        return data

    def _read(self, name: str) -> bytes | None:
        try:
            return self._objects.read(name, at_most=sys.maxsize)[0].numpy().tobytes()
        except FileNotFoundError:
            return None

    def _parsed(self, name: str, data: bytes) -> Any:
        try:
            return json.loads(data)
        except ValueError as error:
            raise OutputError(f"{name} is damaged ({error}): delete it, and its rows are computed again") from None


def _differences(before: Any, now: Any, where: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            yield from _differences(before.get(key), now.get(key), f"{where}.{key}" if where else key)
    elif before != now:
        yield f"{where}: {before!r} there, {now!r} now"
