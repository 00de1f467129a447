# SPDX-License-Identifier: Apache-2.0
"""What is asked: real questions, each request made unique."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

_TAGS = 10**8
_STRIDE = 38_196_601
"""Shares no factor with `_TAGS`: a hundred million tags before one comes again, neighbours far apart."""
_Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


class QuestionsError(ValueError):
    """A file of questions cannot be used; the text names file, line and field."""


class Question(BaseModel):
    """A line of a file of questions.

    Attributes:
        id: its name in the rows; the line's number where the file has none.
        question: its text.
        answers: accepted answers, for F1; may be empty.
    """

    model_config = ConfigDict(coerce_numbers_to_str=True, frozen=True)

    id: _Text = ""
    question: _Text
    answers: tuple[_Text, ...] = ()


def read_questions(path: Path) -> list[Question]:
    """Read JSONL with `question` and, where known, `id` and `answers` (a list); other fields are ignored.

    Raises:
        QuestionsError: no such file, no line in it, or a line that cannot be used.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise QuestionsError(f"{path} cannot be read: {error}") from None
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            question = Question.model_validate(json.loads(line))
        except json.JSONDecodeError as error:
            raise QuestionsError(f"{path}, line {number}: not JSON: {error}") from None
        except ValidationError as error:
            first = error.errors()[0]
            place = "".join(f", field {part}" for part in first["loc"][:1])
            raise QuestionsError(f"{path}, line {number}{place}: {first['msg']}") from None
        found.append(question if question.id else question.model_copy(update={"id": str(number)}))
    if not found:
        raise QuestionsError(f'{path}: no questions in it: give a line like {{"question": "Who ...?"}}')
    return found


@dataclass
class Workload:
    """The questions in the order they are asked, and the request bodies.

    Request number `n` of every cell asks the same question, so that methods and concurrencies meet equal work.

    No two requests are equal, in one run or in two: each question begins with a tag of eight digits of its own,
    `[40718812] Who ...?`, so that neither an answer nor the question's own KV can come from a cache above the service
    (an HTTP cache, a gateway, a prefix cache behind the same chunks). All tags have the same length, so prompts keep
    theirs. The retrieved chunks come before the question and stay as they are: what `cached_tokens` says of `full`
    shows whether an engine took those from a prefix cache.

    Attributes:
        questions: at least one.
        seed: of the order.
        max_tokens: longest answer, in tokens; None leaves it to the service.
        rag: fields of the `rag` object that all requests have (`corpus`, `top_k`).
    """

    questions: Sequence[Question]
    seed: int = 0
    max_tokens: int | None = None
    rag: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._order = np.random.default_rng(self.seed).permutation(len(self.questions))
        self._tag = secrets.randbelow(_TAGS)

    def question(self, number: int) -> Question:
        """Question of request `number` of a cell, from 0; they come round."""
        return self.questions[self._order[number % len(self._order)]]

    def unique(self, question: Question) -> str:
        """The question's text as nobody has sent it before."""
        self._tag = (self._tag + _STRIDE) % _TAGS
        return f"[{self._tag:08d}] {question.question}"

    def body(self, method: str, question: Question) -> dict[str, Any]:
        """Body of a `POST /v1/chat/completions`, unique."""
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": self.unique(question)}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "rag": {"method": method, **self.rag},
        }
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        return body
