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


@contextmanager
def watched_engines() -> Iterator[set[psutil.Process]]:
    """Those that run at any time during this; a job ends them before it says that it is done."""
    seen: set[psutil.Process] = set()
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.5):
            seen.update(engines())

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


def assert_gone(processes: Iterable[psutil.Process], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while (left := [process for process in processes if alive(process)]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left, f"left behind: {left}"
