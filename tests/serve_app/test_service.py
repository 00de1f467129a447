# SPDX-License-Identifier: Apache-2.0
"""Overload, leaving clients, deadlines, dead replicas, ids and metrics, over real Serve."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.serve_app.conftest import ONGOING, QUEUED, Service

PATIENCE_S = 30.0


def eventually(check: Callable[[], bool], seconds: float = PATIENCE_S) -> bool:
    deadline = time.monotonic() + seconds
    while not check():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def in_flight(service: Service) -> int:
    parts = [service.counts(part) for part in ("Retriever", "Repairer", "Engine")]
    return sum(2 * counts["started"] - sum(counts.values()) for counts in parts)


async def _ask_and_leave(service: Service, question: str, stream: bool, seconds: float) -> None:
    body = {"messages": [{"role": "user", "content": question}], "stream": stream}
    with pytest.raises(TimeoutError):
        async with (
            asyncio.timeout(seconds),
            httpx.AsyncClient(timeout=60) as client,
            client.stream("POST", f"{service.url}/v1/chat/completions", json=body) as answer,
        ):
            async for _ in answer.aiter_raw():
                pass


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(
    ("part", "question"),
    [
        ("Retriever", "[[retrieve_s=60]]"),
        ("Repairer", "[[mend_s=60]]"),
        ("Engine", "[[first_s=60]]"),
        ("Engine", "[[token_s=60]]"),
    ],
    ids=["retrieving", "mending", "prefilling", "decoding"],
)
def test_a_client_that_leaves_stops_the_work(service: Service, part: str, question: str, stream: bool) -> None:
    before = service.counts(part)["cancelled"]
    asyncio.run(_ask_and_leave(service, question, stream, 3.0))
    assert eventually(lambda: service.counts(part)["cancelled"] == before + 1), service.counts(part)
    assert eventually(lambda: in_flight(service) == 0 and service.live_handoffs() == 0)
    assert service.ask().status_code == 200


def test_many_leave_at_once(service: Service) -> None:
    async def crowd() -> None:
        questions = ["[[token_s=0.3]] [[words=60]]", "[[mend_s=60]]", "[[first_s=60]]"]
        await asyncio.gather(*(_ask_and_leave(service, questions[i % 3], True, 4.0) for i in range(ONGOING)))

    asyncio.run(crowd())
    assert eventually(lambda: in_flight(service) == 0 and service.live_handoffs() == 0)
    assert service.ask().status_code == 200


async def test_overload_is_429_with_retry_after(service: Service) -> None:
    body = {"messages": [{"role": "user", "content": "[[first_s=2.5]] Who?"}]}
    url = f"{service.url}/v1/chat/completions"
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=100)) as client:
        asks = [asyncio.create_task(client.post(url, json=body)) for _ in range(2 * (ONGOING + QUEUED))]
        await asyncio.wait(asks, return_when=asyncio.FIRST_COMPLETED)
        # Health is answered also when requests are not: a full service is not one that is down.
        assert (await client.get(f"{service.url}/healthz")).status_code == 200
        ready = await client.get(f"{service.url}/readyz")
        assert ready.status_code == 200, ready.text
        answers = [await ask for ask in asks]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert refused and {answer.status_code for answer in answers} <= {200, 429}
    assert len(answers) - len(refused) >= ONGOING
    for answer in refused:
        assert answer.json()["error"]["type"] == "rate_limit_error" and int(answer.headers["retry-after"]) >= 1
        assert answer.elapsed.total_seconds() < 2.5
    assert service.ask().status_code == 200


@pytest.mark.parametrize("question", ["[[retrieve_s=60]]", "[[mend_s=60]]", "[[first_s=60]]"])
def test_the_deadline_of_the_first_token_ends_the_work(service: Service, question: str) -> None:
    began = time.monotonic()
    answer = service.ask(question)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert "retry-after" in answer.headers
    assert time.monotonic() - began < service.settings.serve.first_token_timeout_s + 10
    assert eventually(lambda: in_flight(service) == 0 and service.live_handoffs() == 0)


def test_a_failing_engine_is_a_500_without_details_and_ends_the_handoff(service: Service) -> None:
    answer = service.ask("[[fail=1]]")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
    assert "told to fail" not in answer.text
    assert eventually(lambda: service.live_handoffs() == 0)


def test_a_lost_handoff_is_reported(service: Service) -> None:
    answer = service.ask("[[lose=1]]").json()
    assert answer["rag"]["fallback"] == "LeaseError"
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_the_request_id_is_echoed_once(service: Service) -> None:
    headers = {"x-request-id": "mine-42"}
    body = {"messages": [{"role": "user", "content": "Who?"}]}
    answer = httpx.post(f"{service.url}/v1/chat/completions", json=body, headers=headers)
    assert answer.headers.get_list("x-request-id") == ["mine-42"]
    made = [service.ask().headers["x-request-id"] for _ in range(2)]
    assert len(set(made)) == 2
    # The same id at the same time is two requests.
    with ThreadPoolExecutor(2) as pool:
        asks = [
            pool.submit(httpx.post, f"{service.url}/v1/chat/completions", json=body, headers=headers) for _ in range(2)
        ]
        ids = {ask.result().json()["id"] for ask in asks}
    assert len(ids) == 2


def test_stage_times_are_in_the_headers(service: Service) -> None:
    for stream in (False, True):
        headers = service.ask(stream=stream).headers
        stages = dict(part.split(";dur=") for part in headers["server-timing"].split(", "))
        assert {"retrieve", "mend", "engine", "ttft", "fetch", "search"} <= stages.keys()
        parts = sum(float(stages[name]) for name in ("retrieve", "mend", "engine"))
        assert 0 < parts <= float(stages["ttft"]) == float(headers["x-cachemend-ttft-ms"])


def test_health_and_readiness(service: Service) -> None:
    assert httpx.get(f"{service.url}/healthz").json() == {"status": "alive"}
    ready = httpx.get(f"{service.url}/readyz")
    assert ready.status_code == 200
    assert ready.json()["deployments"] == {"Retriever": "ready", "Repairer": "ready", "Engine": "ready"}


def test_metrics(service: Service) -> None:
    service.ask()
    service.ask("[[lose=1]]")
    service.ask(rag={"top_k": 0})
    wanted = [
        "rag_requests",
        "rag_stage_seconds",
        "rag_chunk_hits",
        "rag_fallback_full_prefill",
        'status="400"',
        'status="200"',
        'method="stale"',
        'reason="LeaseError"',
    ]
    text = ""

    def there() -> bool:
        nonlocal text
        text = httpx.get(f"{service.url}/metrics", timeout=10).text
        return all(word in text for word in wanted)

    assert eventually(there, 60), [word for word in wanted if word not in text]


def test_a_replica_that_dies_is_a_503_and_is_replaced(service: Service) -> None:
    began = time.monotonic()
    answer = service.ask("[[die=1]]")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable"), answer.text
    assert "retry-after" in answer.headers and time.monotonic() - began < 20
    assert eventually(lambda: httpx.get(f"{service.url}/readyz", timeout=20).status_code == 200, 90)
    assert service.ask().status_code == 200
    assert eventually(lambda: service.live_handoffs() == 0)
