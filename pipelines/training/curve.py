# SPDX-License-Identifier: Apache-2.0
"""The loss curve: a JSONL file, a line per update and per validation."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pipelines.training.state import StateError


class Curve:
    """Appends to a curve.

    Args:
        path: the file; its directory is made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self, update: int) -> None:
        """Drop what a run wrote after its last state, from which it goes on: after `update`, or from 0 without one."""
        kept = [line for line in read_curve(self._path) if line["update"] <= update] if update else []
        part = self._path.with_name(f"{self._path.name}.part")
        with self._written():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text("".join(f"{json.dumps(line)}\n" for line in kept), encoding="utf-8")
            part.replace(self._path)

    def add(self, line: dict[str, Any], write: bool = True) -> None:
        """Append a line, where `write`."""
        if write:
            with self._written(), open(self._path, "a", encoding="utf-8") as file:
                file.write(f"{json.dumps(line)}\n")

    @contextmanager
    def _written(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StateError(f"cannot write the loss curve {self._path}: {error}") from error


class CurveReader:
    """Reads a curve while it is written, each line once.

    Args:
        path: the file, which need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self._offset = 0, 0

    def new(self) -> list[dict[str, Any]]:
        """The whole lines since the last call; from the first line, when the curve has been begun again meanwhile."""
        lines: list[dict[str, Any]] = []
        with suppress(FileNotFoundError), open(self._path, "rb") as file:
            if (inode := os.fstat(file.fileno()).st_ino) != self._inode:
                self._inode, self._offset = inode, 0
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                lines.append(json.loads(line))
                self._offset += len(line)
        return lines


def read_curve(path: Path) -> list[dict[str, Any]]:
    """All lines of a curve; a half-written last line, and a file that is not there, are no error."""
    return CurveReader(path).new()
