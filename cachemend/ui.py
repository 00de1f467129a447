# SPDX-License-Identifier: Apache-2.0
"""What all commands print with: answers go to stdout, everything else to stderr, so that `--json` can be piped."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.status import Status

out = Console()
log = Console(stderr=True)
LOG_EVERY_S = 15.0

AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object for a program, instead of text for a person.")
]


def say(message: str) -> None:
    """Report a step on stderr."""
    log.print(message, style="dim", markup=False, highlight=False, soft_wrap=True)


def heading(message: str) -> None:
    """Announce a part of a longer job on stderr."""
    log.print(f"\n{message}", style="bold", markup=False, highlight=False)


def error(message: str) -> None:
    """Report a failure on stderr."""
    log.print(f"error: {message}", style="bold red", markup=False, highlight=False, soft_wrap=True)


class Heartbeat:
    """Reports a wait on stderr: live on a terminal, a line every `LOG_EVERY_S` where stderr goes to a file."""

    def __init__(self, status: Status) -> None:
        self._status = status
        self._said_at = time.monotonic()

    def tell(self, message: str) -> None:
        """Replace the message shown."""
        if log.is_terminal:
            self._status.update(message)
        elif time.monotonic() - self._said_at >= LOG_EVERY_S:
            self._said_at = time.monotonic()
            say(f"  {message}")


@contextmanager
def waiting(message: str) -> Iterator[Heartbeat]:
    """Show that something is being waited for."""
    with log.status(message) as status:
        yield Heartbeat(status)


@contextmanager
def stages() -> Iterator[Callable[[str, int, int | None], None]]:
    """Show a progress bar per stage on stderr; the callback is told (stage, done, total or None)."""
    columns = TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=log) as progress:
        bars: dict[str, TaskID] = {}
        heartbeat = Heartbeat(Status("", console=log))

        def tell(stage: str, done: int, total: int | None) -> None:
            if stage not in bars:
                bars[stage] = progress.add_task(stage)
            progress.update(bars[stage], completed=done, total=total)
            if not log.is_terminal:
                heartbeat.tell(f"{stage}: {done:,} of {total or '?'}")

        yield tell


def print_json(value: Any) -> None:
    """Print a value (dataclasses allowed anywhere in it) as JSON on stdout."""
    typer.echo(to_json(value))


def to_json(value: Any) -> str:
    """JSON text of a value; dataclasses are allowed anywhere in it."""
    return json.dumps(value, indent=2, ensure_ascii=False, default=_plain)


def size(n_bytes: float) -> str:
    """Bytes for a person: `46.1 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.1f} TB"


def duration(seconds: float) -> str:
    """Seconds for a person: `1 min 20 s`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return str(value)
