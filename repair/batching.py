# SPDX-License-Identifier: Apache-2.0
"""One worker thread for repairs: requests that queue up while it is busy go into the next batch together."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from repair.base import BatchRepairer, RepairedPrefix, Repairer, RepairRequest


@dataclass(frozen=True)
class Repaired:
    """A repair's result, and the seconds its batch took in the worker."""

    prefix: RepairedPrefix
    seconds: float


@dataclass(frozen=True)
class _Waiting:
    request: RepairRequest
    future: Future[Repaired] = field(default_factory=Future)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.request.chunks))


class Batcher:
    """Gives repairs to a worker, batched for methods that can; nobody ever waits for a batch to fill.

    Args:
        worker: one thread.
        batch_tokens: most prefix tokens of a batch; a longer request goes alone.
    """

    def __init__(self, worker: ThreadPoolExecutor, batch_tokens: int) -> None:
        self._worker = worker
        self._batch_tokens = batch_tokens
        self._lock = threading.Lock()
        self._queues: dict[str, deque[_Waiting]] = defaultdict(deque)

    def submit(self, repairer: Repairer, request: RepairRequest) -> Future[Repaired]:
        """Queue a repair. Cancelling the future before its turn takes it out of the queue."""
        waiting = _Waiting(request)
        with self._lock:
            self._queues[repairer.name].append(waiting)
        # A turn per request: a turn whose request went with an earlier batch finds less to do, or nothing.
        self._worker.submit(self._turn, repairer)
        return waiting.future

    @property
    def queued(self) -> int:
        """Repairs that have not begun."""
        with self._lock:
            return sum(map(len, self._queues.values()))

    def _turn(self, repairer: Repairer) -> None:
        batch = self._take(repairer)
        if not batch:
            return
        try:
            self._run(repairer, batch)
        except BaseException as error:
            for waiting in batch:
                if len(batch) == 1:
                    waiting.future.set_exception(error)
                else:  # the fault of one request, perhaps: the others must not suffer from it
                    self._alone(repairer, waiting)

    def _take(self, repairer: Repairer) -> list[_Waiting]:
        batch: list[_Waiting] = []
        room = self._batch_tokens if isinstance(repairer, BatchRepairer) else 0
        with self._lock:
            queue = self._queues[repairer.name]
            while queue and (not batch or queue[0].tokens <= room):
                waiting = queue.popleft()
                if waiting.future.set_running_or_notify_cancel():
                    batch.append(waiting)
                    room -= waiting.tokens
        return batch

    def _run(self, repairer: Repairer, batch: Sequence[_Waiting]) -> None:
        begin = time.perf_counter()
        requests = [waiting.request for waiting in batch]
        if isinstance(repairer, BatchRepairer):
            prefixes = repairer.repair_batch(requests)
        else:
            prefixes = [repairer.repair(request) for request in requests]
        seconds = time.perf_counter() - begin
        for waiting, prefix in zip(batch, prefixes, strict=True):
            waiting.future.set_result(Repaired(prefix, seconds))

    def _alone(self, repairer: Repairer, waiting: _Waiting) -> None:
        try:
            self._run(repairer, [waiting])
        except BaseException as error:
            waiting.future.set_exception(error)
