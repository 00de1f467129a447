# SPDX-License-Identifier: Apache-2.0
"""vLLM on one CPU worker: scheduler and worker in one process.

vLLM would put them into two, joined by a queue in shared memory whose reader spins for a second after each message:
while the worker computes, the scheduler takes a core from it. vLLM asks for the second process because OpenMP must be
set up before a process starts; `Engine` does that for the process both live in.
"""

from __future__ import annotations

import os

from vllm.v1.executor.uniproc_executor import UniProcExecutor

_LAST = 19


class OneProcessExecutor(UniProcExecutor):
    """`UniProcExecutor` by another name: by its own, vLLM replaces it with worker processes on CPU.

    It computes at the lowest priority. Its steps never end while requests are decoded; retrieval and repair are short,
    and a thread of theirs that waits for a core holds up all of them.
    """

    def _init_executor(self) -> None:
        os.nice(_LAST)  # of this thread, and of those that come later: OpenMP's, and vLLM's own for messages
        super()._init_executor()
