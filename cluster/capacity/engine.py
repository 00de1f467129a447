# SPDX-License-Identifier: Apache-2.0
"""A simulated engine: continuous batching with chunked prefill, as vLLM's scheduler does it.

A step computes one token for every request that decodes, then as many waiting prompt tokens as its budget holds, first
come, first served. What a request loads (its hand-off) is loaded in the step that admits it. A step takes a fixed time,
plus its MACs over the engine's rate, plus what is loaded, plus reading the KV of every request in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import simpy

from cluster.capacity.model import Cluster, Stages
from cluster.capacity.targets import Target


@dataclass
class Job:
    """One request in an engine. Counts of tokens; `first` and `last` succeed with the first and the last token."""

    prefix: int
    question: int
    outputs: int
    loaded: bool
    first: simpy.Event
    last: simpy.Event
    uncomputed: int = 0

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
            if not job.first.triggered:
                job.first.succeed()
            job.outputs -= 1
            if not job.outputs:
                self._running.remove(job)
                self.jobs -= 1
                job.last.succeed()


class Machine:
    """What several devices run on at the same time: `n` busy ones each have an n-th of its speed."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._served_s = 0.0
        """What something busy from the beginning would have got."""
        self._since_s = 0.0
        self._due: dict[simpy.Event, float] = {}
        """By `_served_s`."""
        self._turn = 0

    def work(self, seconds: float) -> simpy.Event:
        """Succeeds when work that takes that long alone is done."""
        self._serve()
        done = self._env.event()
        self._due[done] = self._served_s + seconds
        self._plan()
        return done

    def _serve(self) -> None:
        """Count what was got since the number of busy devices last changed."""
        self._served_s += (self._env.now - self._since_s) / max(len(self._due), 1)
        self._since_s = self._env.now

    def _plan(self) -> None:
        """Wait for the next end, unless something comes before it."""
        self._turn += 1
        if self._due:
            left = max(min(self._due.values()) - self._served_s, 0.0)
            ends = self._env.timeout(left * len(self._due), value=self._turn)
            assert ends.callbacks is not None
            ends.callbacks.append(self._end)

    def _end(self, ends: simpy.Event) -> None:
        if ends.value != self._turn:
            return
        self._serve()
        done = min(self._due, key=lambda each: self._due[each])
        del self._due[done]
        done.succeed()
        self._plan()


class Device:
    """Something one user has at a time, first come, first served, or several units of it; counts its busy seconds.

    Args:
        machine: what it runs on together with other devices; None has it to itself.
    """

    def __init__(self, env: simpy.Environment, units: int = 1, machine: Machine | None = None) -> None:
        self.busy_s = 0.0
        self._env, self._machine = env, machine
        self.units = simpy.Resource(env, units)

    def use(self, seconds: Any) -> Generator[simpy.Event, Any, None]:
        """Hold one unit for that long; a function is asked for the seconds when the unit is there."""
        with self.units.request() as turn:
            yield turn
            held = seconds() if callable(seconds) else seconds
            self.busy_s += held
            yield self._machine.work(held) if self._machine else self._env.timeout(held)
