# SPDX-License-Identifier: Apache-2.0
"""Input files for the jobs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write_jsonl(path: str | Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write records, a line each."""
    Path(path).write_text("".join(f"{json.dumps(record)}\n" for record in records))
