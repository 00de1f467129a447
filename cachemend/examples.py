# SPDX-License-Identifier: Apache-2.0
"""Where the example corpus is, and what it is called once it is ingested."""

from __future__ import annotations

from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "corpus"
CORPUS = "demo"
