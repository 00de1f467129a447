# SPDX-License-Identifier: Apache-2.0
"""What a replica measures of its own requests, for the autoscaling policy."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import mean, pstdev

from serve_app.autoscaling import WINDOW_S

REMEMBERED = 64
"""Requests that means and percentiles are taken over."""
UNKNOWN = -1.0
"""`service_s` before a request has ended: Ray takes numbers only."""


class ServiceMeter:
    """Counts arrivals and service times of one replica.

    Args:
        slo_s: the application's objective for the p95 of the time to first token, in seconds.
        slots: requests that the replica serves at once; measured when left out, see `served`.
        now: clock, in seconds.
    """

    def __init__(self, slo_s: float, slots: int | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._slo_s, self._slots, self._now = slo_s, slots, now
        self._born = now()
        self._arrived: deque[float] = deque()
        self._left: deque[float] = deque()
        self._served: deque[tuple[float, float, Sequence[float]]] = deque(maxlen=REMEMBERED)

    def arrived(self) -> None:
        """A request has come in."""
        self._note(self._arrived)

    def served(self, service_s: float, first_s: float, alone_s: Sequence[float] = ()) -> None:
        """A request has ended.

        Args:
            service_s: seconds that it was served, waits apart.
            first_s: the part of them before its first token.
            alone_s: the parts of them in which no other request could be, such as on the device; the same parts for
                every request of the replica. A pipeline whose busiest part is never idle holds service / alone requests
                (Little): those are its slots.
        """
        self._note(self._left)
        self._served.append((service_s, first_s, alone_s))

    def given_up(self) -> None:
        """A request has left without the work that it came for: it says nothing of how long that takes."""
        self._note(self._left)

    def stats(self) -> dict[str, float]:
        """For Ray's `record_autoscaling_stats`.

        Rates are over the whole window also when the replica is younger: summed over the replicas they are then the
        application's, however requests moved from older replicas to newer ones meanwhile.
        """
        service, first, alone = zip(*self._served, strict=True) if self._served else ((), (), ())
        busiest = max((sum(part) for part in zip(*alone, strict=True)), default=0.0)
        measured = sum(service) / busiest if busiest else 1.0
        return {
            "slo_s": self._slo_s,
            "age_s": self._now() - self._born,
            "slots": float(self._slots or max(1.0, measured)),
            "arrivals": self._rate(self._arrived),
            "departures": self._rate(self._left),
            "service_s": mean(service) if service else UNKNOWN,
            "spread": (pstdev(service) / mean(service)) ** 2 if sum(service) else 1.0,
            "first_s": sorted(first)[int(0.95 * (len(first) - 1))] if first else 0.0,
        }

    def _note(self, times: deque[float]) -> None:
        times.append(self._now())
        self._forget(times)  # here too: without autoscaling nobody asks for rates

    def _rate(self, times: deque[float]) -> float:
        self._forget(times)
        return len(times) / WINDOW_S

    def _forget(self, times: deque[float]) -> None:
        while times and times[0] <= self._now() - WINDOW_S:
            times.popleft()
