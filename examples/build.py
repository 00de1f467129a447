# SPDX-License-Identifier: Apache-2.0
"""Cut the example corpus out of local copies of public question-answering data sets.

    python examples/build.py SOURCE_FOLDER

SOURCE_FOLDER holds `hotpotqa.jsonl`, `2wikimultihopqa.jsonl`, `musique.jsonl` and `squad_xquad.jsonl`, with a question
per line: `{"id", "question", "answers", "chunks": [{"title", "text", "is_supporting"}]}`. The same input gives the same
output.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent / "corpus"
SEED = 7
PASSAGES = 130
SOURCES = {
    "hotpotqa": "hotpotqa.jsonl",
    "2wiki": "2wikimultihopqa.jsonl",
    "musique": "musique.jsonl",
    "xquad": "squad_xquad.jsonl",
}
QUESTIONS = [
    "xquad:56bf36b93aeaaa14008c9562",
    "xquad:57338007d058e614000b5bde",
    "xquad:5726a299dd62a815002e8ba0",
    "xquad:56f84485aef2371900625f75",
    "xquad:5733834ed058e614000b5c26",
    "xquad:571c9348dd7acb1400e4c115",
    "xquad:57265642f1498d1400e8dc68",
    "hotpotqa:5a7a650355429941d65f2615",
    "hotpotqa:5a85f2f55542997b5ce40036",
    "2wiki:7df5e65b086711ebbd5eac1f6bf848b6",
    "2wiki:99cf9bb2085a11ebbd5cac1f6bf848b6",
    "musique:2hop__678516_179720",
]
"""Picked by hand: gold passages can be found and the small default model has a chance. Never a benchmark."""


def main(folder: Path) -> None:
    """Write passages.jsonl and questions.jsonl."""
    rows = {row["id"]: row for name in SOURCES.values() for row in read_jsonl(folder / name)}
    chosen = [rows[question] for question in QUESTIONS]
    passages: dict[str, dict[str, str]] = {}
    questions = []
    for row in chosen:
        gold = [add(passages, row, chunk) for chunk in row["chunks"] if chunk["is_supporting"]]
        questions.append({"id": row["id"], "question": row["question"], "answers": row["answers"], "passage_ids": gold})
    # The questions' own distractors first (they are the hard ones), then other passages up to the size wanted.
    distractors = [(row, chunk) for row in chosen for chunk in row["chunks"]]
    others = [(row, chunk) for row in rows.values() if row["id"].startswith("xquad:") for chunk in row["chunks"]]
    random.Random(SEED).shuffle(others)
    for row, chunk in [*distractors, *others]:
        if len(passages) == PASSAGES:
            break
        add(passages, row, chunk)
    write_jsonl(OUT / "passages.jsonl", sorted(passages.values(), key=lambda passage: passage["id"]))
    write_jsonl(OUT / "questions.jsonl", questions)
    print(f"{len(passages)} passages, {len(questions)} questions in {OUT}")


def add(passages: dict[str, dict[str, str]], row: dict[str, Any], chunk: dict[str, Any]) -> str:
    """Add a passage unless its text is there already; return its id."""
    source = row["id"].split(":")[0]
    digest = hashlib.sha256(chunk["text"].encode()).hexdigest()[:12]
    title = chunk["title"].replace("_", " ")
    passages.setdefault(digest, {"id": f"{source}-{digest}", "title": title, "text": chunk["text"], "source": source})
    return passages[digest]["id"]


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All rows of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    """One JSON object a line, UTF-8."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
