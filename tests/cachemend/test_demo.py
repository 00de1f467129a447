# SPDX-License-Identifier: Apache-2.0
"""The example corpus is whole, and the demo's numbers are those of its answers."""

from __future__ import annotations

import json
import re

import pytest

from cachemend import report
from cachemend.client import Answer
from cachemend.demo import EXAMPLES, Question, Row, ask_all, read_questions


def test_every_gold_passage_is_in_the_corpus() -> None:
    passages = [json.loads(line) for line in (EXAMPLES / "passages.jsonl").read_text().splitlines()]
    ids = {passage["id"] for passage in passages}
    assert 100 <= len(passages) == len(ids) <= 150
    assert len({passage["text"] for passage in passages}) == len(passages)
    questions = read_questions()
    assert len(questions) >= 8
    for question in questions:
        assert question.passage_ids and set(question.passage_ids) <= ids


class FakeClient:
    """Answers with a time that depends on the method and the number of earlier requests."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def ask(self, question: str, *, method: str, corpus: str, top_k: int, max_tokens: int) -> Answer:
        self.calls.append((question, method))
        cached = 900 if method == "stale" else 0
        return Answer(f"{method}\n says", 4.0 if method == "full" else 0.5, 5.0, 1000, cached, {"engine": 400.0})


QUESTIONS = [Question("q1", "when?", ["1891"], ["p"]), Question("q2", "who?", ["Stale Says"], ["p"])]


def test_every_question_is_asked_with_every_method_after_a_warm_up() -> None:
    client = FakeClient()
    rows = ask_all(client, QUESTIONS, ["full", "stale"])  # type: ignore[arg-type]
    warm_up = [("when?", "full"), ("when?", "stale")]
    assert client.calls == [*warm_up, ("when?", "full"), ("when?", "stale"), ("who?", "full"), ("who?", "stale")]
    assert [(row.question.id, row.method) for row in rows] == [
        ("q1", "full"),
        ("q1", "stale"),
        ("q2", "full"),
        ("q2", "stale"),
    ]


def test_json_has_what_a_program_reads() -> None:
    rows = ask_all(FakeClient(), QUESTIONS, ["full", "stale"])  # type: ignore[arg-type]
    rows[1].answer.ttft_s = 0.7
    result = report.as_json(rows, {"tiny": {"source": "wheel"}})
    assert result["methods"]["stale"] == {
        "questions": 2,
        "cached_tokens": 1800,
        "ttft_ms": {"p50": 600.0, "p95": 690.0},
        "answers": ["stale says", "stale says"],
        "gold_found": 1,
    }
    assert result["methods"]["full"]["cached_tokens"] == 0
    assert len(result["rows"]) == 4
    json.dumps(result)


def test_tables_name_methods_ratio_and_where_the_time_went(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        Row(method, question, Answer("[x]", 4.0 if method == "full" else 0.5, 5.0, 1000, 900, {"engine": 400.0}))
        for question in QUESTIONS
        for method in ("full", "stale")
    ]
    report.print_tables(rows)
    printed = re.sub(r" +\n", "\n", capsys.readouterr().out)
    assert "engine" in printed and " 400\n" in printed
    assert "8.0" in printed  # full / stale
    assert "when? [1891]" in printed
    assert "[x]" in printed  # an answer in brackets is text, not markup
