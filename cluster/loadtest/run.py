# SPDX-License-Identifier: Apache-2.0
"""One load test: warm-up, then the blocks in their order; whatever there is when it stops can be reported."""

from __future__ import annotations

import asyncio
import hashlib
import json
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from cluster.loadtest.loops import Driver, schedule
from cluster.loadtest.rows import Block, Load, Row
from cluster.loadtest.sender import Sender
from cluster.loadtest.summary import summarise
from cluster.loadtest.timeline import ReplicaSample, replicas_in, timeline
from cluster.loadtest.workload import Workload

OPEN_CONNECTIONS = 512
"""Most connections of an open loop; requests beyond them wait, and their time runs."""
SAMPLE_S = 2.0
"""How often a ramp asks the service for its replicas: Ray's metrics are a megabyte of text."""
_TRIES = 5
_BUSY_WAIT_S = 1.0
_BUSY = (429, 503)


class ServiceUnusableError(ConnectionError):
    """The service cannot be measured; the message says why, and what to do."""


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        url: address of the service.
        methods: to compare, at least one.
        concurrency: closed loops, in the order to report them.
        rates: open loops, arrivals per second.
        requests: counted requests per method and load.
        warm_up: requests per method before everything, one at a time, not counted; at least one, because it is also
            what finds out whether the service can be measured.
        seed: of orders and arrivals.
        slo_ttft_ms: objective for the time to first token.
        ramp: clients by step; replaces the loads.
        step_s: seconds of a step.
    """

    url: str
    methods: Sequence[str]
    concurrency: Sequence[int] = ()
    rates: Sequence[float] = ()
    requests: int = 32
    warm_up: int = 2
    seed: int = 0
    slo_ttft_ms: float | None = None
    ramp: Sequence[int] = ()
    step_s: float = 30.0

    @property
    def reference_method(self) -> str:
        """Of the requests between blocks: full where it is measured, whose time does not depend on what is cached."""
        return "full" if "full" in self.methods else self.methods[0]

    @property
    def loads(self) -> list[Load]:
        """The loads that a schedule goes through."""
        return [*(Load(concurrency=c) for c in self.concurrency), *(Load(rate=rate) for rate in self.rates)]

    def requests_in_all(self) -> int:
        """Requests after the warm-up, lead-ins and references included; a ramp's number is not known before."""
        blocks = schedule(self.methods, self.loads, self.requests, self.seed)
        return sum(1 + count + (block.load.concurrency or 0) for block, count, _ in blocks) + 1


@dataclass
class LoadTest:
    """A load test and what it has found so far.

    Attributes:
        plan: what to measure.
        workload: what to ask; the corpus may change in the warm-up, see `corpora`.
        corpora: tried in this order until the service knows one; None is the service's default.
        tell: called with block and its number of rows after every request; a ramp's number is its seconds.
        warmed: called once after the warm-up with its rows.
        references: one and the same request alone, before each block and after the last.
        complete: whether `run` came to its end.
    """

    plan: Plan
    workload: Workload
    corpora: Sequence[str | None] = (None,)
    tell: Callable[[Block, int], None] = lambda *_: None
    warmed: Callable[[Sequence[Row]], None] = lambda _: None
    blocks: list[Block] = field(default_factory=list)
    warm_up: list[Row] = field(default_factory=list)
    references: list[Row] = field(default_factory=list)
    samples: list[ReplicaSample] = field(default_factory=list)
    started_at: str = ""
    model: str | None = None
    complete: bool = False

    @property
    def rows(self) -> list[Row]:
        """Every request that has ended: warm-up, references, blocks."""
        return [*self.warm_up, *self.references, *(row for block in self.blocks for row in block.rows)]

    async def run(self) -> None:
        """Measure. What is there when it is cancelled stays, and can be reported.

        Raises:
            ServiceUnusableError: in the warm-up; later failures are rows.
        """
        plan = self.plan
        self.started_at = datetime.now(UTC).isoformat(timespec="seconds")
        # A ramp's replicas are watched beside its clients, which must not wait for that.
        connections = OPEN_CONNECTIONS if plan.rates else max([1, *plan.concurrency, *(c + 1 for c in plan.ramp)])
        async with Sender(plan.url, connections) as sender:
            driver = Driver(sender, self.workload, plan.seed)
            for method in plan.methods:
                await self._warm_up(driver, method)
            self.model = _served_model(await sender.text("/v1/models"))
            self.warmed(self.warm_up)
            if plan.ramp:
                await self._ramps(driver)
            blocks = [] if plan.ramp else schedule(plan.methods, plan.loads, plan.requests, plan.seed)
            for block, count, first in blocks:
                await self._refer(driver)
                self.blocks.append(block)
                driver.tell = lambda _, block=block: self.tell(block, len(block.rows))
                send = driver.open if block.load.concurrency is None else driver.closed
                await send(block, count, first)
            if blocks:
                await self._refer(driver)
        self.complete = True

    async def _warm_up(self, driver: Driver, method: str) -> None:
        block = Block(-1, method, Load(concurrency=1))
        for number in range(self.plan.warm_up):
            row = await self._first(driver, block, number)
            if row.error is not None:
                raise ServiceUnusableError(_why(row, driver.sender.url))
            self.warm_up.append(row)

    async def _first(self, driver: Driver, block: Block, number: int) -> Row:
        """A warm-up request that is given time when the service is busy, and another corpus when there is none."""
        corpora = list(self.corpora)
        for _ in range(_TRIES):
            if corpora[0] is not None:
                self.workload.rag = {**self.workload.rag, "corpus": corpora[0]}
            row = await driver.one(block, number, "warm-up")
            if row.error == "404 corpus_not_found" and len(corpora) > 1:
                corpora = corpora[1:]
                self.corpora = corpora
                self.workload.rag = {key: value for key, value in self.workload.rag.items() if key != "corpus"}
            elif row.status in _BUSY:
                await asyncio.sleep(row.wait_s or _BUSY_WAIT_S)
            else:
                break
        return row

    async def _refer(self, driver: Driver) -> None:
        """Ask the idle service the same again: how its speed changes during the run."""
        block = Block(-1, self.plan.reference_method, Load(concurrency=1))
        driver.tell = lambda _: self.tell(block, 1)
        self.references.append(await driver.one(block, 0, "reference"))

    async def _ramps(self, driver: Driver) -> None:
        plan = self.plan
        for method in plan.methods:
            at = len(self.blocks)
            steps = [Block(at + i, method, Load(concurrency=c, step=i)) for i, c in enumerate(plan.ramp)]
            self.blocks += steps
            began = driver.sender.now()
            driver.tell = lambda _, one=steps[0], began=began: self.tell(one, int(driver.sender.now() - began))
            watch = asyncio.create_task(self._watch(driver.sender))
            try:
                await driver.ramp(steps, plan.step_s)
            finally:
                watch.cancel()
                with suppress(asyncio.CancelledError):
                    await watch

    async def _watch(self, sender: Sender) -> None:
        while True:
            if replicas := replicas_in(await sender.text("/metrics") or ""):
                self.samples.append(ReplicaSample(sender.now(), replicas))
            elif not self.samples:
                return  # it does not tell; later, a loaded service may only have been too slow to
            await asyncio.sleep(SAMPLE_S)

    def report(self) -> dict[str, Any]:
        """`{"cells": [...], "config": {...}}`, and `"timeline"` of a ramp; see `summary` and `timeline`."""
        places = {load: place for place, load in enumerate(self.plan.loads)}  # a ramp's steps stay as they are
        blocks = sorted(self.blocks, key=lambda block: places.get(block.load, len(places)))
        report = {
            "cells": summarise(blocks, self.plan.slo_ttft_ms, [_reference_ms(row) for row in self.references]),
            "config": self._config(),
        }
        if self.plan.ramp:
            report["timeline"] = timeline(self.blocks, self.samples)
        return report

    def _config(self) -> dict[str, Any]:
        plan, workload = self.plan, self.workload
        questions = json.dumps([one.model_dump() for one in workload.questions], sort_keys=True)
        return {
            "url": plan.url,
            "model": self.model,
            "methods": list(plan.methods),
            "concurrency": list(plan.concurrency),
            "rates_rps": list(plan.rates),
            "ramp": list(plan.ramp),
            "step_s": plan.step_s if plan.ramp else None,
            "requests": plan.requests,
            "warm_up": plan.warm_up,
            "seed": plan.seed,
            "slo_ttft_ms": plan.slo_ttft_ms,
            "max_tokens": workload.max_tokens,
            "rag": dict(workload.rag),
            "questions": len(workload.questions),
            "questions_sha256": hashlib.sha256(questions.encode()).hexdigest(),
            "blocks": [[block.method, *block.load[:2]] for block in self.blocks],
            "complete": self.complete,
            "started_at": self.started_at,
            "cachemend": version("cachemend"),
            "client": f"Python {platform.python_version()}, {platform.machine()}",
        }


def _reference_ms(row: Row) -> float | None:
    """TTFT per prompt token: its number makes the same question find other chunks at times."""
    return None if row.error or row.fallback else row.ttft_ms / max(row.prompt_tokens, 1)


def _why(row: Row, url: str) -> str:
    if row.status is None:
        return (
            f"no service at {url} ({row.error}): start one with `serve run serve_app:app`, or name another with --url"
        )
    if row.error in ("404 not_found", "404", "405", "not a stream"):
        return f"{url} is not the address of the service ({row.error}: {row.message}): name it with --url"
    return f"method {row.method}: the service answered {row.error}: {row.message}"


def _served_model(text: str | None) -> str | None:
    try:
        return json.loads(text or "")["data"][0]["id"]
    except (ValueError, KeyError, IndexError, TypeError):
        return None
