# SPDX-License-Identifier: Apache-2.0
"""What the demo found out, as tables for a person and as JSON for a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from cachemend import ui
from cachemend.client import WHOLES

if TYPE_CHECKING:
    from cachemend.demo import Row

REFERENCE = "full"


def one_line(text: str) -> str:
    """An answer without its line breaks."""
    return " ".join(text.split())


def has_gold(row: Row) -> bool:
    """Whether a gold answer is somewhere in the answer, ignoring case."""
    return any(gold.casefold() in one_line(row.answer.text).casefold() for gold in row.question.answers)


def as_json(rows: Sequence[Row], models: dict[str, Any]) -> dict[str, Any]:
    """The results for a program.

    Returns:
        `{"methods": {NAME: {"questions", "cached_tokens", "ttft_ms": {"p50", "p95"}, "answers", "gold_found"}}, "rows":
        [...], "models": ...}`; times in milliseconds, `cached_tokens` summed over the questions.
    """
    methods = {}
    for method, own in _by_method(rows).items():
        p50, p95 = np.percentile([row.answer.ttft_s * 1e3 for row in own], [50, 95])
        methods[method] = {
            "questions": len(own),
            "cached_tokens": sum(row.answer.cached_tokens for row in own),
            "ttft_ms": {"p50": round(float(p50), 1), "p95": round(float(p95), 1)},
            "answers": [one_line(row.answer.text) for row in own],
            "gold_found": sum(map(has_gold, own)),
        }
    return {"methods": methods, "rows": [_row_json(row) for row in rows], "models": models}


def print_tables(rows: Sequence[Row]) -> None:
    """Print a line per question and method, then one per method."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, caption="times in milliseconds; TTFT: time to first token")
    table.add_column("method", no_wrap=True)
    table.add_column("question, gold, answer", ratio=1)
    for heading in ("TTFT", "cached", *WHOLES):
        table.add_column(heading, justify="right", no_wrap=True)
    for index, row in enumerate(rows):
        if index == 0 or rows[index - 1].question is not row.question:
            if index:
                table.add_section()
            gold = " / ".join(row.question.answers)
            table.add_row("", Text(f"{row.question.question} [{gold}]", style="bold"))
        answer = row.answer
        table.add_row(
            row.method,
            Text(one_line(answer.text)),
            f"{answer.ttft_s * 1e3:,.0f}",
            f"{answer.cached_tokens}/{answer.prompt_tokens}",
            *(f"{answer.stages_ms[whole]:,.0f}" if whole in answer.stages_ms else "" for whole in WHOLES),
        )
    ui.out.print(table)
    ui.out.print(_summary_table(rows))


def _summary_table(rows: Sequence[Row]) -> Table:
    methods = as_json(rows, {})["methods"]
    reference = methods.get(REFERENCE, {}).get("ttft_ms", {}).get("p50")
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in (
        "method",
        "asked",
        "TTFT p50",
        "TTFT p95",
        f"{REFERENCE} / it",
        "cached",
        "gold found",
    ):
        named = heading == "method"
        table.add_column(heading, justify="left" if named else "right", no_wrap=named)
    for method, one in methods.items():
        p50, p95 = one["ttft_ms"]["p50"], one["ttft_ms"]["p95"]
        prompt = sum(row.answer.prompt_tokens for row in rows if row.method == method)
        table.add_row(
            method,
            str(one["questions"]),
            f"{p50:,.0f} ms",
            f"{p95:,.0f} ms",
            f"{reference / p50:.1f}" if reference and p50 else "",
            f"{one['cached_tokens'] / prompt:.0%}" if prompt else "",
            f"{one['gold_found']} of {one['questions']}",
        )
    return table


def _by_method(rows: Sequence[Row]) -> dict[str, list[Row]]:
    grouped: dict[str, list[Row]] = {}
    for row in rows:
        grouped.setdefault(row.method, []).append(row)
    return grouped


def _row_json(row: Row) -> dict[str, Any]:
    return {
        "method": row.method,
        "id": row.question.id,
        "question": row.question.question,
        "gold": row.question.answers,
        "answer": one_line(row.answer.text),
        "ttft_ms": round(row.answer.ttft_s * 1e3, 1),
        "total_ms": round(row.answer.total_s * 1e3, 1),
        "prompt_tokens": row.answer.prompt_tokens,
        "cached_tokens": row.answer.cached_tokens,
        "stages_ms": row.answer.stages_ms,
        "chunk_ids": [cited.get("chunk_id") for cited in row.answer.citations],
    }
