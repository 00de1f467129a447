# SPDX-License-Identifier: Apache-2.0
"""Which code made a result."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent


def code_digest(packages: Iterable[str]) -> str:
    """SHA-256, lower-case hex, over the Python files of packages, given as folders of this project."""
    digest = hashlib.sha256()
    for package in packages:
        for path in sorted((_ROOT / package).rglob("*.py")):
            digest.update(f"{path.relative_to(_ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()
