# SPDX-License-Identifier: Apache-2.0
"""Sends one request and notes what came back when."""

from __future__ import annotations

import time
from typing import Any, Self

import httpx

from cluster.loadtest.events import StreamError, read_end, read_events
from cluster.loadtest.rows import Row
from pipelines.qa.metrics import f1

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 300.0
GONE_WAIT_S = 0.2
"""A client whose service is gone waits this long before it tries again: it must not spin."""
LONGEST_WAIT_S = 60.0
KEEP_ALIVE_S = 60.0
_PATH = "/v1/chat/completions"
_PARSE_ERRORS = (ValueError, KeyError, TypeError, AttributeError)


class Sender:
    """Streams requests to one service; use as an async context manager.

    Args:
        url: address of the service.
        connections: most connections at a time. A request beyond them waits, and its time runs.
    """

    def __init__(self, url: str, connections: int) -> None:
        self.url = url.rstrip("/")
        self._zero = time.perf_counter()
        self._http = httpx.AsyncClient(
            base_url=self.url,
            trust_env=False,  # a proxy on the way would be measured too
            timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S, pool=None),
            limits=httpx.Limits(
                max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=KEEP_ALIVE_S
            ),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    def now(self) -> float:
        """Seconds since the start, on a clock that nobody sets."""
        return time.perf_counter() - self._zero

    async def send(self, row: Row, body: dict[str, Any], golds: tuple[str, ...] = ()) -> Row:
        """Send `body` and fill `row`; a failure is a row with an error, never an exception.

        Args:
            row: with `submit_s` set.
            body: of the chat completion, streamed.
            golds: accepted answers.
        """
        try:
            headers = {"x-request-id": row.request_id}
            async with self._http.stream("POST", _PATH, json=body, headers=headers) as response:
                row.status = response.status_code
                if response.status_code != 200:
                    await response.aread()
                    row.error, row.message = _refusal(response)
                    row.wait_s = _retry_after(response)
                else:
                    await self._read(row, response)
        except StreamError as error:
            row.error, row.message = error.args
        except httpx.ConnectError as error:
            row.error, row.message, row.wait_s = "no connection", str(error), GONE_WAIT_S
        except httpx.TimeoutException as error:
            row.error, row.message = "timeout", type(error).__name__
        except httpx.HTTPError as error:
            row.error, row.message = "broken connection", f"{type(error).__name__} {error}".rstrip()
            row.wait_s = GONE_WAIT_S
        row.end_s = row.end_s or self.now()
        if row.error is None:
            row.first_token_s = row.token_s[0] if row.token_s else row.end_s
            row.f1 = f1(row.answer, golds) if golds else None
        return row

    async def _read(self, row: Row, response: httpx.Response) -> None:
        if "text/event-stream" not in response.headers.get("content-type", ""):
            kind = response.headers.get("content-type", "nothing")
            raise StreamError("not a stream", f"{self.url}{_PATH} answered {kind}, not server-sent events")
        pieces, lines = [], response.aiter_lines()
        async for event in read_events(lines):
            for choice in event.choices or ():
                if choice.delta and choice.delta.content:
                    row.token_s.append(self.now())
                    pieces.append(choice.delta.content)
            if usage := event.usage:
                row.prompt_tokens = usage.prompt_tokens or 0
                row.completion_tokens = usage.completion_tokens or 0
                details = usage.prompt_tokens_details
                row.cached_tokens = (details and details.cached_tokens) or 0
            row.stages_ms.update(event.stages_ms or {})
            row.fallback = (event.rag and event.rag.fallback) or row.fallback
        row.answer, row.end_s = "".join(pieces), self.now()
        await read_end(lines)

    async def text(self, path: str) -> str | None:
        """Text of another page of the service; None where there is none."""
        try:
            response = await self._http.get(path, timeout=CONNECT_TIMEOUT_S)
        except httpx.HTTPError:
            return None
        return response.text if response.status_code == 200 else None


def _refusal(response: httpx.Response) -> tuple[str, str]:
    """Kind, such as `429 overloaded`, and message."""
    try:
        error = response.json()["error"]
        code, message = error.get("code"), error["message"]
    except _PARSE_ERRORS:
        code, message = None, response.text[:200]
    return f"{response.status_code} {code or ''}".rstrip(), message


def _retry_after(response: httpx.Response) -> float:
    """Seconds that the service asks for; 0 when it does not (a date would need a clock that both agree on)."""
    value = response.headers.get("retry-after", "")
    return min(float(value), LONGEST_WAIT_S) if value.isdecimal() else 0.0
