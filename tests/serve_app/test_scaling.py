# SPDX-License-Identifier: Apache-2.0
"""Replicas follow the load, and none of its requests fails meanwhile, on real Serve with mocks that take time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from ray import serve

from cluster.loadtest.loops import Driver
from cluster.loadtest.rows import Block, Load
from cluster.loadtest.sender import Sender
from cluster.loadtest.workload import Question, Workload
from kvcache.settings import Settings
from serve_app.app import bind
from serve_app.paced_mocks import PACED, UNLOADED_TTFT_S
from tests.serve_app.conftest import Service

APP = "scaled"
CLIENTS = 6
PATIENCE_S = 180.0
"""For a replica to start on a busy machine: what is waited for is the event."""
ASKED = {"messages": [{"role": "user", "content": "topic-1 Who?"}]}


def settings_of(service: Service, system: str, **scaling: Any) -> Settings:
    most = {"max_repairer_replicas": 2, "max_engine_replicas": 1}
    scaling = {"enabled": True, "slo_ttft_s": 2 * UNLOADED_TTFT_S, **most, **scaling}
    serving = {**service.settings.serve.model_dump(), "max_ongoing_requests": 32, "autoscaling": scaling}
    changed = {"prompt": {"system": system}, "repair": {"methods": ("cacherepair",)}}
    patient = {"shutdown_timeout_s": 10.0, "first_token_timeout_s": PATIENCE_S}
    return Settings(**{**service.settings.model_dump(), **changed, "serve": {**serving, **patient}})


@pytest.fixture
def url(service: Service) -> Iterator[str]:
    serve.run(bind(settings_of(service, "First."), PACED), name=APP, route_prefix="/scaled")
    yield f"{service.url}/scaled"
    serve.delete(APP)


def running(part: str) -> int:
    return serve.status().applications[APP].deployments[part].replica_states.get("RUNNING", 0)


async def load_until(done: asyncio.Event, url: str) -> Block:
    """Clients that ask again when they are answered, until something has happened."""
    block = Block(0, "cacherepair", Load(concurrency=CLIENTS))

    async def client(driver: Driver, number: int) -> None:
        while not done.is_set():
            await driver.one(block, number, "counted")

    async with Sender(url, CLIENTS) as sender:
        driver = Driver(sender, Workload([Question(id="1", question="topic-1 Who?")], max_tokens=8))
        await asyncio.gather(*(client(driver, number) for number in range(CLIENTS)))
    return block


async def test_repairers_follow_the_load_and_a_new_version_fails_no_request(service: Service, url: str) -> None:
    done = asyncio.Event()
    load = asyncio.create_task(load_until(done, url))
    try:
        deadline = time.monotonic() + PATIENCE_S
        while await asyncio.to_thread(running, "Repairer") < 2:
            assert time.monotonic() < deadline, "six clients at one repairer, and there is no second"
            await asyncio.sleep(0.5)
        second = bind(settings_of(service, "A second version, of another length."), PACED)
        await asyncio.to_thread(serve.run, second, name=APP, route_prefix="/scaled")
        await asyncio.sleep(4 * UNLOADED_TTFT_S)
    finally:
        done.set()
    rows = (await load).rows
    assert [(row.error, row.message) for row in rows if row.error] == []
    assert len({row.prompt_tokens for row in rows}) == 2  # answers of both versions


def test_the_last_ones_stop_when_nothing_comes_and_the_next_request_wakes_them(service: Service) -> None:
    settings = settings_of(service, "Sleep.", scale_to_zero=True, idle_s=1.0, downscale_delay_s=1.0)
    serve.run(bind(settings, PACED), name=APP, route_prefix="/scaled")
    try:
        deadline = time.monotonic() + PATIENCE_S
        while running("Repairer") + running("Engine"):
            assert time.monotonic() < deadline, "nothing comes, and they go on"
            time.sleep(0.5)
        ready = httpx.get(f"{service.url}/scaled/readyz")
        assert (ready.status_code, ready.json()["deployments"]) == (200, {"Retriever": "ready"})
        assert running("Repairer") + running("Engine") == 0
        answer = httpx.post(f"{service.url}/scaled/v1/chat/completions", json=ASKED, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"].startswith("word")
    finally:
        serve.delete(APP)
