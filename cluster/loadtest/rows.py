# SPDX-License-Identifier: Apache-2.0
"""What is kept of a run: a row per request, and the blocks they were sent in."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple


class Load(NamedTuple):
    """How a block loads the service: one of the two is set.

    Attributes:
        concurrency: requests outstanding, closed loop.
        rate: arrivals per second, open loop.
        step: number of a ramp's step, from 0; None outside a ramp.
    """

    concurrency: int | None = None
    rate: float | None = None
    step: int | None = None


@dataclass
class Row:
    """One request. Times are seconds on the run's monotonic clock, 0 at its start.

    Attributes:
        phase: `warm-up`, `reference` (the same request alone, between blocks), `lead-in` (each client's first of a
            block, not counted) or `counted`.
        submit_s: when the request was due: what it waited for in the client counts.
        first_token_s: when the first text came; for an answer without text, its end.
        token_s: when each piece of text came; a service may put several tokens into one.
        status: HTTP status; None when there was no answer.
        error: kind of failure, None when the answer came whole.
        wait_s: seconds that the client waited afterwards because the service asked for it (Retry-After) or was gone.
        f1: of the answer against the question's accepted ones; None where there are none.
    """

    method: str
    concurrency: int | None
    rate: float | None
    block: int
    phase: str
    number: int
    question_id: str
    request_id: str
    submit_s: float
    first_token_s: float | None = None
    end_s: float = 0.0
    status: int | None = None
    error: str | None = None
    message: str | None = None
    wait_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    fallback: str | None = None
    f1: float | None = None
    answer: str = ""
    stages_ms: dict[str, float] = field(default_factory=dict)
    token_s: list[float] = field(default_factory=list)

    @property
    def ttft_ms(self) -> float:
        """Milliseconds from submission to the first token of a whole answer."""
        assert self.first_token_s is not None
        return (self.first_token_s - self.submit_s) * 1e3

    @property
    def e2e_ms(self) -> float:
        """Milliseconds from submission to the end."""
        return (self.end_s - self.submit_s) * 1e3


@dataclass
class Block:
    """Requests of one method under one load, sent in one go.

    Attributes:
        window: from when to when the load was as wanted; throughput is measured there.
    """

    number: int
    method: str
    load: Load
    rows: list[Row] = field(default_factory=list)
    window: tuple[float, float] = (0.0, 0.0)


def write_rows(rows: Iterable[Row], path: Path) -> None:
    """Write CSV: a line per request, lists and stages as JSON in their cell, TTFT and end-to-end time added."""
    names = [one.name for one in fields(Row)]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*names, "ttft_ms", "e2e_ms"])
        for row in rows:
            ttft = None if row.first_token_s is None or row.error else row.ttft_ms
            writer.writerow([*(_cell(getattr(row, name)) for name in names), _cell(ttft), _cell(row.e2e_ms)])


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return json.dumps([round(one, 6) for one in value])
    return value
