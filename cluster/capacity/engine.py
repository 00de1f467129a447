# SPDX-License-Identifier: Apache-2.0
"""A simulated engine: continuous batching with chunked prefill, as vLLM's scheduler does it.

A step computes one token for every request that decodes, then as many waiting prompt tokens as its budget holds, first
come, first served. What a request loads (its hand-off) is loaded in the step that admits it. A step takes a fixed time,
plus its MACs over the engine's rate, plus what is loaded, plus reading the KV of every request in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import simpy

from cluster.capacity.model import Cluster, Stages
from cluster.capacity.targets import Target


@dataclass
class Job:
    """One request in an engine. Counts of tokens; `first` and `last` succeed with the first and the last token.

    `token_s` is when each came.
    """

    prefix: int
    question: int
    outputs: int
    loaded: bool
    first: simpy.Event
    last: simpy.Event
    uncomputed: int = 0
    token_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.uncomputed = self.question if self.loaded else self.prefix + self.question


class Engine:
    """One engine on one device; the device may be shared with repair, a step at a time."""

    def __init__(
        self, env: simpy.Environment, device: Device, target: Target, stages: Stages, cluster: Cluster
    ) -> None:
        self.device = device
        self.jobs = 0
        self._env, self._target, self._stages, self._cluster = env, target, stages, cluster
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._wake = env.event()
        env.process(self._run())

    def submit(self, job: Job) -> None:
        """Queue a request."""
        self.jobs += 1
        self._waiting.append(job)
        if not self._wake.triggered:
            self._wake.succeed()

    def _run(self) -> Generator[simpy.Event, Any, None]:
        while True:
            if not self._waiting and not self._running:
                self._wake = self._env.event()
                yield self._wake
            yield from self.device.use(self._schedule)
            self._emit()

    def _schedule(self) -> float:
        """Choose the step's work, once the device is ours; returns its seconds."""
        budget, macs, read, loading = self._cluster.batch_tokens, 0, 0, 0.0
        while self._waiting and len(self._running) < self._cluster.max_num_seqs:
            job = self._waiting.popleft()
            self._running.append(job)
            loading += job.loaded * job.prefix * self._stages.load_s_per_token
        budget -= sum(not job.uncomputed for job in self._running)
        self._computed: list[Job] = []
        for job in self._running:
            rows = min(job.uncomputed, max(budget, 0)) if job.uncomputed else 1
            if not rows:
                continue
            if job.uncomputed:
                budget -= rows
                job.uncomputed -= rows
            there = job.prefix + job.question - job.uncomputed
            read += there
            macs += self._target.prefill_macs(rows, there)
            macs += self._target.cost.head
            if not job.uncomputed:
                self._computed.append(job)
        stages = self._stages
        return stages.step_s + macs / stages.macs_per_s + read * stages.read_s_per_token + loading

    def _emit(self) -> None:
        for job in self._computed:
            job.token_s.append(self._env.now)
            if not job.first.triggered:
                job.first.succeed()
            job.outputs -= 1
            if not job.outputs:
                self._running.remove(job)
                self.jobs -= 1
                job.last.succeed()


class Machine:
    """What several devices run on at the same time.

    Args:
        overlap: how many devices' speed they have together when more than one is busy; none has more than its own.
    """

    def __init__(self, env: simpy.Environment, overlap: float = 1.0) -> None:
        self._env, self._overlap = env, overlap
        self._since_s = 0.0
        self._left_s: dict[simpy.Event, float] = {}
        """Of the work at hand, as if alone."""
        self._weights: dict[simpy.Event, float] = {}
        self._speed: dict[simpy.Event, float] = {}
        self._turn = 0

    def work(self, seconds: float, weight: float) -> simpy.Event:
        """Succeeds when work that takes that long alone is done; a device's share is that of its weight."""
        self._advance()
        done = self._env.event()
        self._left_s[done], self._weights[done] = seconds, weight
        self._plan()
        return done

    def _share_out(self) -> None:
        """Speeds by weight; what one has no use for, because its own is the limit, goes to the others."""
        speed, weight = self._overlap if len(self._left_s) > 1 else 1.0, sum(self._weights.values())
        for work in sorted(self._weights, key=lambda each: self._weights[each], reverse=True):
            self._speed[work] = min(speed * self._weights[work] / weight, 1.0)
            speed, weight = speed - self._speed[work], weight - self._weights[work]

    def _advance(self) -> None:
        """Count what was done since the set of busy devices last changed."""
        for work in self._left_s:
            self._left_s[work] -= (self._env.now - self._since_s) * self._speed[work]
        self._since_s = self._env.now

    def _plan(self) -> None:
        """Wait for the next end, unless something comes before it."""
        self._turn += 1
        self._share_out()
        if self._left_s:
            seconds = {work: max(left, 0.0) / self._speed[work] for work, left in self._left_s.items()}
            first = min(seconds, key=lambda work: seconds[work])
            ends = self._env.timeout(seconds[first], value=(self._turn, first))
            assert ends.callbacks is not None
            ends.callbacks.append(self._end)

    def _end(self, ends: simpy.Event) -> None:
        turn, work = ends.value
        if turn != self._turn:
            return
        self._advance()
        del self._left_s[work], self._weights[work], self._speed[work]
        work.succeed()
        self._plan()


class Device:
    """Something one user has at a time, first come, first served, or several units of it; counts its busy seconds.

    Args:
        machine: what it runs on together with other devices; None has it to itself.
        weight: its part of that machine's speed, against the weights of others.
    """

    def __init__(
        self, env: simpy.Environment, units: int = 1, machine: Machine | None = None, weight: float = 1.0
    ) -> None:
        self.busy_s = 0.0
        self._env, self._machine, self._weight = env, machine, weight
        self.units = simpy.Resource(env, units)

    def use(self, seconds: Any) -> Generator[simpy.Event, Any, None]:
        """Hold one unit for that long; a function is asked for the seconds when the unit is there."""
        with self.units.request() as turn:
            yield turn
            held = seconds() if callable(seconds) else seconds
            self.busy_s += held
            yield self._machine.work(held, self._weight) if self._machine else self._env.timeout(held)
