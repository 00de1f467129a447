# SPDX-License-Identifier: Apache-2.0
"""Repairers and engines in virtual time under the real policy: what Ray and two GPUs would take an hour to show."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import simpy
from ray.serve.autoscaling_policy import _apply_app_level_autoscaling_config
from ray.serve.config import AutoscalingConfig

from serve_app.autoscaling import LOOK_BACK_S, METRICS_S, UPSCALE_DELAY_S, scale_together
from serve_app.meter import ServiceMeter

START_S = 8.0


@dataclass
class Replica:
    """Serves `slots` requests at once; the others wait in it."""

    slots: simpy.Resource
    meter: ServiceMeter
    load: int = 0


@dataclass
class Station:
    """One deployment.

    Attributes:
        draw_s: draws a service time.
        first_share: part of it before the first token.
        history: time and replicas wanted, at every change.
    """

    env: simpy.Environment
    name: str
    slots: int
    draw_s: Callable[[], float]
    first_share: float
    slo_s: float
    config: AutoscalingConfig
    target: int = 1
    replicas: list[Replica] = field(default_factory=list)
    in_flight: int = 0
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=round(LOOK_BACK_S / METRICS_S)))
    history: list[tuple[float, int]] = field(default_factory=list)
    paid_s: float = 0.0

    def __post_init__(self) -> None:
        self.target = self.config.min_replicas
        for _ in range(self.target):
            self._join()

    def _join(self) -> None:
        meter = ServiceMeter(self.slo_s, self.slots, lambda: self.env.now)
        self.replicas.append(Replica(simpy.Resource(self.env, self.slots), meter))

    def serve(self) -> Iterator[Any]:
        """A request: to the least loaded replica, as Ray's router does. Returns when its first token came."""
        replica = min(self.replicas, key=lambda one: one.load)
        self.in_flight += 1
        replica.load += 1
        replica.meter.arrived()
        with replica.slots.request() as turn:
            yield turn
            seconds = self.draw_s()
            yield self.env.timeout(seconds * self.first_share)
            first = self.env.now
            yield self.env.timeout(seconds * (1 - self.first_share))
        replica.meter.served(seconds, seconds * self.first_share)
        replica.load -= 1
        self.in_flight -= 1
        return first

    def scale(self, wanted: int) -> None:
        """New replicas join after their start; those that go finish what they have."""
        if wanted == self.target:
            return
        self.history.append((self.env.now, wanted))
        for _ in range(wanted - self.target):
            self.env.process(self._start())
        del self.replicas[max(1, wanted) :]
        self.target = wanted

    def _start(self) -> Iterator[Any]:
        yield self.env.timeout(START_S)
        if len(self.replicas) < self.target:
            self._join()

    def context(self, state: dict[str, Any]) -> Any:
        """What Ray's controller would hand to the policy."""
        stats = [replica.meter.stats() for replica in self.replicas]
        raw = {key: {i: [SimpleNamespace(value=one[key])] for i, one in enumerate(stats)} for key in stats[0]}
        return SimpleNamespace(
            target_num_replicas=self.target,
            current_num_replicas=len(self.replicas),
            total_num_requests=statistics.fmean(self.recent) if self.recent else 0.0,
            raw_metrics=raw,
            policy_state=state,
            config=self.config,
        )


class ScaledQueue:
    """Clients, repairers, engines, and the policy once a second.

    Args:
        slo_s: objective.
        repair_s, engine_s: draw service times; a third of the engine's is before the first token.
        least, most: replicas of each.
        engines: a fixed number of those, if there is one.
    """

    def __init__(
        self,
        slo_s: float,
        repair_s: Callable[[], float],
        engine_s: Callable[[], float],
        *,
        least: int = 1,
        most: int = 20,
        engines: int | None = None,
        downscale_delay_s: float = 30.0,
    ) -> None:
        self.env = simpy.Environment()

        def between(least: int, most: int) -> AutoscalingConfig:
            return AutoscalingConfig(
                min_replicas=least,
                max_replicas=most,
                upscale_delay_s=UPSCALE_DELAY_S,
                downscale_delay_s=downscale_delay_s,
            )

        self.repairers = Station(self.env, "Repairer", 1, repair_s, 1.0, slo_s, between(least, most))
        self.engines = Station(
            self.env, "Engine", 8, engine_s, 1 / 3, slo_s, between(engines or least, engines or most)
        )
        self.ttft: list[tuple[float, float]] = []
        self._clients = 0
        self.env.process(self._policy())

    def request(self) -> Iterator[Any]:
        """One request from its arrival to its last token."""
        begin = self.env.now
        yield from self.repairers.serve()
        first = yield from self.engines.serve()
        self.ttft.append((begin, first - begin))

    def closed(self, clients: int) -> None:
        """From now on so many clients ask, each again when it has its answer."""
        self._clients, before = clients, self._clients
        for place in range(before, clients):
            self.env.process(self._client(place))

    def _client(self, place: int) -> Iterator[Any]:
        while place < self._clients:
            yield from self.request()

    def open(self, rate: float, seconds: float, random: np.random.Generator) -> None:
        """Poisson arrivals for so long."""

        def arrivals() -> Iterator[Any]:
            end = self.env.now + seconds
            while self.env.now < end:
                yield self.env.timeout(float(random.exponential(1 / rate)))
                self.env.process(self.request())

        self.env.process(arrivals())

    def _policy(self) -> Iterator[Any]:
        policy = _apply_app_level_autoscaling_config(scale_together)
        states: dict[str, dict[str, Any]] = {}
        stations = {station.name: station for station in (self.repairers, self.engines)}
        while True:
            for name, wanted in self._decide(policy, stations, states).items():
                config = stations[name].config
                stations[name].scale(min(max(math.ceil(wanted), config.min_replicas), config.max_replicas))
            yield self.env.timeout(METRICS_S)
            for station in stations.values():
                station.recent.append(station.in_flight)
                station.paid_s += METRICS_S * station.target

    def _decide(self, policy: Any, stations: dict[str, Station], states: dict[str, dict[str, Any]]) -> dict[str, int]:
        contexts = {name: station.context(states.get(name, {})) for name, station in stations.items()}
        # Ray's delays run on the wall clock.
        with patch("ray.serve.autoscaling_policy.time.time", lambda: self.env.now):
            decisions, new = policy(contexts)
        states.update(new)
        return decisions

    def p95(self, since: float, until: float = math.inf) -> float:
        """95th percentile of the TTFT of requests that came in that time."""
        return float(np.percentile([ttft for at, ttft in self.ttft if since <= at < until], 95))

    def turns(self, since: float) -> int:
        """Changes of direction of either deployment's size since then."""
        turns = 0
        for station in (self.repairers, self.engines):
            sizes = [size for at, size in station.history if at >= since]
            signs = [b > a for a, b in itertools.pairwise(sizes)]
            turns += sum(a != b for a, b in itertools.pairwise(signs))
        return turns
