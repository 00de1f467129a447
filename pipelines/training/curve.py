# SPDX-License-Identifier: Apache-2.0
"""The loss curve: a JSONL file, a line per update and per validation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Curve:
    """Appends to a curve.

    Args:
        path: the file; its directory is made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self, update: int) -> None:
        """Drop what a run wrote after its last state, from which it goes on: after `update`, or from 0 without one."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_curve(self._path) if line["update"] <= update] if update else []
        part = self._path.with_name(f"{self._path.name}.part")
        part.write_text("".join(f"{json.dumps(line)}\n" for line in kept), encoding="utf-8")
        part.replace(self._path)

    def add(self, line: dict[str, Any], write: bool = True) -> None:
        """Append a line, where `write`."""
        if write:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(f"{json.dumps(line)}\n")


def read_curve(path: Path) -> Iterator[dict[str, Any]]:
    """Lines of a curve; a half-written last line, and a file that is not there, are no error."""
    if not path.exists():
        return
    with open(path, encoding="utf-8") as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                return
