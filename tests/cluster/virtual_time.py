# SPDX-License-Identifier: Apache-2.0
"""An event loop whose clock jumps to the next timer, and a service of known slots and service times in it.

What a load test finds there is exact, whatever else the machine does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Self

from cluster.loadtest.rows import Row


class VirtualLoop(asyncio.SelectorEventLoop):
    """Sleeping takes no time; `time()` says what time it would be."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        select = self._selector.select  # type: ignore[attr-defined]

        def jump(timeout: float | None = None) -> Any:
            self._now += max(0.0, timeout or 0.0)
            return select(0)

        self._selector.select = jump  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._now


def run_virtually(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main)


class SimulatedService:
    """Stands in for a `Sender`: `slots` at a time, in order of arrival; one token after `first_s`, the end later.

    Args:
        service_s: of a request, whole; called once for each.
        first_s: of it, until the first token; None when that comes with the end.
        queue: requests that may wait; one more is refused, and told to wait `wait_s`.
    """

    def __init__(
        self,
        slots: int,
        service_s: Callable[[], float],
        first_s: float | None = 0.0,
        queue: int | None = None,
        wait_s: float = 0.0,
    ) -> None:
        self._free, self._slots = asyncio.Semaphore(slots), slots
        self._service_s, self._first_s = service_s, first_s
        self._queue, self._wait_s = queue, wait_s
        self.outstanding: list[tuple[float, int]] = []
        self._inside = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def text(self, path: str) -> str | None:
        return None

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def send(self, row: Row, body: dict[str, Any], golds: tuple[str, ...] = ()) -> Row:
        self._inside += 1
        self.outstanding.append((self.now(), self._inside))
        try:
            if self._queue is not None and self._inside > self._slots + self._queue:
                row.status, row.error, row.wait_s = 429, "429 overloaded", self._wait_s
                return row
            async with self._free:
                service_s = self._service_s()
                first_s = service_s if self._first_s is None else self._first_s
                await asyncio.sleep(first_s)
                row.token_s.append(self.now())
                await asyncio.sleep(service_s - first_s)
            row.status, row.first_token_s = 200, row.token_s[0]
            return row
        finally:
            self._inside -= 1
            row.end_s = self.now()
