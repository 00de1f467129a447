# SPDX-License-Identifier: Apache-2.0
"""Processes under test: which there are, and that they have ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import psutil


def family_of(pid: int | None = None) -> list[psutil.Process]:
    """A process, this one by default, and all that came of it."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def engines() -> list[psutil.Process]:
    """vLLM's processes below this one."""
    return [process for process in family_of() if alive(process) and "VLLM::" in title(process)]


def started_by_actors() -> list[psutil.Process]:
    """What the actors of a Ray Data job below this process have started: vLLM's processes, from their first moment.

    Told by their parents: vLLM names its own only once it has been imported, a few seconds before a short job ends.
    """
    family = family_of()
    actors = {process.pid for process in family if title(process).startswith("ray::MapWorker")}
    return [process for process in family if alive(process) and _parent(process) in actors]


@contextmanager
def watched_actors() -> Iterator[set[psutil.Process]]:
    """What they start at any time during this; a job ends it before it says that it is done."""
    seen: set[psutil.Process] = set()
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            seen.update(started_by_actors())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


def alive(process: psutil.Process) -> bool:
    """Whether it runs: one that has ended, and that its parent has not asked about, does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _parent(process: psutil.Process) -> int | None:
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return None


def assert_gone(processes: Iterable[psutil.Process], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while (left := [process for process in processes if alive(process)]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left, f"left behind: {left}"
