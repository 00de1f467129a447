# SPDX-License-Identifier: Apache-2.0
"""No process outlives its parent: vLLM's engine core stays behind when the process that started it is killed."""

from __future__ import annotations

import os
import signal
import threading
import time

_POLL_S = 1.0
_started = threading.Lock()


def end_with_parent() -> None:
    """Kill this process within about a second of its parent's end. Asking twice starts one watcher.

    Polling, not `PR_SET_PDEATHSIG`: that signal comes when the *thread* that forked ends, and Ray forks from pools.
    """
    if _started.acquire(blocking=False):
        threading.Thread(target=_watch, args=(os.getppid(),), name="end-with-parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)
