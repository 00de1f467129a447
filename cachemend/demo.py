# SPDX-License-Identifier: Apache-2.0
"""The whole chain on the example corpus: models, ingest, precompute, service, questions, table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from cachemend import report, ui
from cachemend.client import Answer, Client
from cachemend.commands import corpus
from cachemend.examples import CORPUS, EXAMPLES
from cachemend.service import running_service
from kvcache import fetch
from kvcache.settings import Settings
from repair.registry import offered

TOP_K = 5
MAX_TOKENS = 24
APPLICATION = "serve_app:app"


class ExamplesMissingError(FileNotFoundError):
    """The example corpus is not where the repository has it."""


@dataclass(frozen=True)
class Question:
    """A line of questions.jsonl."""

    id: str
    question: str
    answers: list[str]
    passage_ids: list[str]


@dataclass(frozen=True)
class Row:
    """One question answered with one method."""

    method: str
    question: Question
    answer: Answer


def run(settings: Settings, limit: int | None = None) -> dict[str, Any]:
    """Run the demo and print its tables; what an earlier run made is used again.

    Args:
        settings: where everything lies and which methods to show.
        limit: ask only the first so many questions; None asks all.

    Returns:
        What `report.as_json` makes of the rows.
    """
    questions = read_questions()[:limit]
    ui.heading("1/4 models")
    models = fetch.fetch(settings, say=ui.say)
    ui.heading("2/4 corpus")
    prepare_corpus(settings)
    ui.heading("3/4 service")
    with _service() as client:
        ui.heading("4/4 questions")
        rows = ask_all(client, questions, offered(settings))
    report.print_tables(rows)
    return report.as_json(rows, {model.name: model.origin for model in models})


def read_questions() -> list[Question]:
    """The example questions.

    Raises:
        ExamplesMissingError: CacheMend was installed without its repository.
    """
    path = EXAMPLES / "questions.jsonl"
    if not path.is_file():
        raise ExamplesMissingError(f"{path} is missing: the demo runs in a clone of the repository (`make demo`)")
    return [Question(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def prepare_corpus(settings: Settings) -> None:
    """Ingest the example passages and compute their chunk caches, in a Ray cluster that ends with the work."""
    with corpus.ray_session(address="local"):
        corpus.run_ingest([str(EXAMPLES / "passages.jsonl")], CORPUS, settings, replace=True)
        corpus.run_precompute(CORPUS, settings)


def ask_all(client: Client, questions: Sequence[Question], methods: Sequence[str]) -> list[Row]:
    """Ask every question with every method, one at a time; the methods take turns, so that noise falls on all alike."""
    ui.say(f"warming up {', '.join(methods)}")
    for method in methods:
        _ask(client, questions[0], method)  # the first request of a method pays for one-time work: not counted
    rows, width = [], max(map(len, methods))
    for number, question in enumerate(questions, start=1):
        ui.say(f"{number} of {len(questions)}: {question.question}")
        for method in methods:
            answer = _ask(client, question, method)
            rows.append(Row(method, question, answer))
            told = f"first token after {ui.duration(answer.ttft_s)}: {report.one_line(answer.text)}"
            ui.say(f"  {method:<{width}} {told}")
    return rows


def _ask(client: Client, question: Question, method: str) -> Answer:
    return client.ask(question.question, method=method, corpus=CORPUS, top_k=TOP_K, max_tokens=MAX_TOKENS)


@contextmanager
def _service() -> Iterator[Client]:
    with ExitStack() as stack:
        with ui.waiting("starting the service") as heartbeat:

            def show(waited: float) -> None:
                heartbeat.tell(f"starting the repair actor and vLLM: {waited:.0f} s (one to two minutes on two cores)")

            stopping = partial(ui.say, "stopping the service")
            client = stack.enter_context(running_service(APPLICATION, show, stopping))
        ui.say(f"ready at {client.url}")
        yield client
