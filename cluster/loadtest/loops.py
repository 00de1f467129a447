# SPDX-License-Identifier: Apache-2.0
"""The two ways of sending, and the ramp: each fills a block's rows as answers come."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field

import numpy as np

from cluster.loadtest.rows import Block, Load, Row
from cluster.loadtest.sender import Sender
from cluster.loadtest.workload import Workload

STEADY = 2
"""A block of fewer counted requests than this many per client is never steady: all of it is its window."""


@dataclass
class Driver:
    """Sends the requests of blocks.

    Attributes:
        sender: to the service.
        workload: what to ask.
        seed: of the random arrivals.
        tell: called with every finished row.
    """

    sender: Sender
    workload: Workload
    seed: int = 0
    tell: Callable[[Row], None] = lambda _: None
    _run: str = field(default_factory=lambda: secrets.token_hex(4))
    _sent: int = 0

    async def one(self, block: Block, number: int, phase: str, due: float | None = None) -> Row:
        """Send request `number` of a cell; the row joins the block when it has ended.

        Args:
            due: when it should have been sent; now when left out.
        """
        question = self.workload.question(number)
        self._sent += 1
        row = Row(
            method=block.method,
            concurrency=block.load.concurrency,
            rate=block.load.rate,
            block=block.number,
            phase=phase,
            number=number,
            question_id=question.id,
            request_id=f"loadtest-{self._run}-{self._sent}",
            submit_s=self.sender.now() if due is None else due,
        )
        await self.sender.send(row, self.workload.body(block.method, question), question.answers)
        block.rows.append(row)
        self.tell(row)
        return row

    async def closed(self, block: Block, count: int, first: int = 0) -> None:
        """Keep C requests outstanding: a client sends the next when its last is answered.

        Every client's first request is *lead-in*: it met a service that was empty, or new to this method, and is not
        counted. The block's window goes from the end of the lead-in until a client first finds nothing left to ask: all
        C are outstanding throughout. With fewer than `STEADY` counted requests per client that time is too short, and
        the window is the whole block.

        Args:
            block: its load has a concurrency.
            count: counted requests.
            first: number of the first counted request within the cell.
        """
        clients = block.load.concurrency
        assert clients is not None
        jobs = iter(
            [(first + count + place, "lead-in") for place in range(clients)]
            + [(number, "counted") for number in range(first, first + count)]
        )
        began = led_in = self.sender.now()
        dry: float | None = None

        async def client() -> None:
            nonlocal dry, led_in
            for number, phase in jobs:
                row = await self.one(block, number, phase)
                if phase == "lead-in":
                    led_in = max(led_in, row.end_s)
                if row.wait_s:
                    await asyncio.sleep(row.wait_s)
            dry = self.sender.now() if dry is None else dry

        try:
            await _all([client() for _ in range(clients)])
        finally:
            until = self.sender.now() if dry is None else dry
            steady = count >= STEADY * clients and led_in < until
            block.window = (led_in, until) if steady else (began, self.sender.now())

    async def open(self, block: Block, count: int, first: int = 0) -> None:
        """Send at random times, Poisson, whether or not the service keeps up.

        Args:
            block: its load has a rate; its window ends with the last answer.
            count: requests.
            first: number of the first request within the cell.
        """
        assert block.load.rate is not None
        # Seeded by load and place, not by method: every method meets the same arrivals.
        random = np.random.default_rng([self.seed, first, round(block.load.rate * 1e6)])
        began = self.sender.now()
        due = began + np.cumsum(random.exponential(1 / block.load.rate, count))

        async def request(number: int, at: float) -> None:
            await asyncio.sleep(max(0.0, at - self.sender.now()))
            await self.one(block, number, "counted", due=at)

        try:
            await _all([request(first + index, float(at)) for index, at in enumerate(due)])
        finally:
            block.window = (began, self.sender.now())

    async def ramp(self, blocks: Sequence[Block], step_s: float) -> None:
        """Change the number of clients every `step_s` seconds; a client that is too many ends with its request.

        Args:
            blocks: a step each; a row belongs to the step in which it was sent.
        """
        wanted, numbers, clients = 0, iter(range(2**62)), set[asyncio.Task[None]]()
        current = blocks[0]

        async def client(place: int) -> None:
            while place < wanted:
                row = await self.one(current, next(numbers), "counted")
                if row.wait_s:
                    await asyncio.sleep(row.wait_s)

        working: dict[int, asyncio.Task[None]] = {}
        try:
            began = self.sender.now()
            for number, block in enumerate(blocks, start=1):
                current, wanted = block, block.load.concurrency or 0
                block.window = (self.sender.now(), self.sender.now())
                for place in range(wanted):
                    if place not in working or working[place].done():
                        working[place] = asyncio.create_task(client(place))
                        clients.add(working[place])
                await asyncio.sleep(began + number * step_s - self.sender.now())
                block.window = (block.window[0], self.sender.now())
            wanted = 0
            await asyncio.gather(*clients)
        finally:
            if wanted:  # stopped in the middle of a step
                current.window = (current.window[0], self.sender.now())
            for task in clients:
                task.cancel()
            await asyncio.gather(*clients, return_exceptions=True)


async def _all(jobs: Sequence[Coroutine[None, None, None]]) -> None:
    """Run all; when one raises or the run is stopped, none is left running."""
    try:
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(job)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None  # one says more than the group's own text


def blocks_of(requests: int, load: Load) -> int:
    """Blocks that a cell's requests are split into: as many as leave each long enough to be steady, at most four.

    Open loop has one: a queue that grows without bound takes time to be seen.
    """
    if load.concurrency is None:
        return 1
    if requests >= 16 * load.concurrency:
        return 4
    return 2 if requests >= 2 * STEADY * load.concurrency else 1


def schedule(methods: Sequence[str], loads: Sequence[Load], requests: int, seed: int) -> list[tuple[Block, int, int]]:
    """Blocks in the order they are sent, each with its number of requests and the number of its first.

    A machine that slowly gets faster or slower, or another program that runs for a while, is to fall on all cells
    alike. So the passes over a load are spread evenly over the run, however many there are, around the middle of it.
    Methods take turns: in one pass a random order, in the next that order backwards (A B C C B A), then another random
    order and its reverse. So do loads with as many passes. Loads with a single pass (open loops among them) follow each
    other in the middle of the run: what drifts between those is not cancelled.

    Args:
        methods: to compare.
        loads: each once.
        requests: per method and load.
        seed: of the orders.
    """
    random = np.random.default_rng(seed)
    spread: list[tuple[float, int, str, Load, int, int]] = []
    for place, load in enumerate(loads):
        passes = blocks_of(requests, load)
        order = list(methods)
        for number in range(passes):
            order = [methods[i] for i in random.permutation(len(methods))] if number % 2 == 0 else order[::-1]
            first, after = requests * number // passes, requests * (number + 1) // passes
            when = (number + 0.5) / passes, place if number % 2 == 0 else -place
            spread += [(*when, method, load, after - first, first) for method in order]
    spread.sort(key=lambda one: one[:2])
    return [(Block(at, method, load), count, first) for at, (*_, method, load, count, first) in enumerate(spread)]
