# SPDX-License-Identifier: Apache-2.0
"""Who may hold memory: first come, first served, by bytes."""

from __future__ import annotations

import asyncio
from collections import deque


class Admission:
    """Lets requests in as long as their bytes fit together. Use it from one event loop.

    Args:
        capacity_bytes: most bytes inside; a request larger than that goes in alone.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._inside = 0
        self._requests = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def enter(self, nbytes: int) -> None:
        """Wait for room; every `enter` that returns wants one `leave`. Cancelling it gives the place up."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((nbytes, future))
        self._let_in()
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.leave(nbytes)  # let in and cancelled in the same moment
            else:
                self._let_in()  # the next in line may be smaller
            raise

    def leave(self, nbytes: int) -> None:
        """Give the bytes back."""
        self._inside -= nbytes
        self._requests -= 1
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting:
            nbytes, future = self._waiting[0]
            if future.done():  # cancelled
                self._waiting.popleft()
            elif not self._requests or self._inside + nbytes <= self._capacity:
                self._waiting.popleft()
                self._inside += nbytes
                self._requests += 1
                future.set_result(None)
            else:
                return
