# SPDX-License-Identifier: Apache-2.0
"""The work file: a JSONL line per request and method, so that a killed run goes on where it stopped."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.code import code_digest

PACKAGES = ("kvcache", "repair", "pipelines/evaluation", "pipelines/qa", "pipelines/training")
"""What shapes a result: a row made by other code does not count."""


class WorkFile:
    """Rows of one configuration; another one has another file.

    Args:
        folder: of all work files; made.
        config: whatever decides a row's values, JSON; the code is added to it.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        text = json.dumps({**config, "code": code_digest(PACKAGES)}, sort_keys=True)
        self.path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        self._rows = {(row["request"], row["method"]): row for row in self._read()}

    def get(self, request: str, method: str) -> dict[str, Any] | None:
        """A row, if it is there.

        Args:
            request: digest of the request.
            method: key of the method.
        """
        return self._rows.get((request, method))

    def row(self, request: str, method: str) -> dict[str, Any]:
        """A row that is there."""
        return self._rows[request, method]

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Append rows; each names its `request` and `method`.

        Raises:
            OSError: the file cannot be written.
        """
        text = "".join(f"{json.dumps(row, ensure_ascii=False, allow_nan=False)}\n" for row in rows)
        with open(self.path, "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # another run may be at work on the same rows
            file.write(text.encode())
        self._rows.update({(row["request"], row["method"]): row for row in rows})

    def _read(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        with open(self.path, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            if len(whole) < len(data):  # the last line of a killed run
                file.truncate(len(whole))
        return [json.loads(line) for line in whole.splitlines()]
