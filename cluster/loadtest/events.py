# SPDX-License-Identifier: Apache-2.0
"""The events of a streamed answer, as far as a load test reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import httpx
from pydantic import BaseModel, FiniteFloat, ValidationError

END_S = 1.0


class StreamError(Exception):
    """An answer that began and did not come whole; kind and message."""


class Delta(BaseModel):
    """A piece of text."""

    content: str | None = None


class Choice(BaseModel):
    """One of the answers; there is one."""

    delta: Delta | None = None


class PromptDetails(BaseModel):
    """Tokens of the prompt that were not computed."""

    cached_tokens: int | None = None


class Usage(BaseModel):
    """Tokens of a whole answer."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None


class Rag(BaseModel):
    """What the service says of the retrieved part."""

    fallback: str | None = None


class Failure(BaseModel):
    """Why a stream ended early."""

    code: str | int | None = None
    message: str | None = None


class Event(BaseModel):
    """An event; a gateway may put a plain text into `error`."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    stages_ms: dict[str, FiniteFloat] | None = None
    rag: Rag | None = None
    error: Failure | str | None = None


async def read_events(lines: AsyncIterator[str]) -> AsyncIterator[Event]:
    """Events of a stream of server-sent events, up to its `[DONE]`.

    Raises:
        StreamError: one that is none of ours, one that tells of a failure, or an end before `[DONE]`.
    """
    async for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            event = Event.model_validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"])) or "an event"
            raise StreamError("not a stream", f"{field}: {first['msg']}: {data[:80]}") from None
        if isinstance(event.error, str):
            raise StreamError("failed in stream", event.error)
        if event.error:
            raise StreamError(f"failed in stream {event.error.code or ''}".rstrip(), event.error.message)
        yield event
    raise StreamError("broken stream", "the stream ended before the answer was whole")


async def read_end(lines: AsyncIterator[str]) -> None:
    """Read what comes behind `[DONE]`, the end of the body, if it comes soon.

    httpx closes a connection that is left before it, and the next request would pay for a new one.
    """
    with suppress(TimeoutError, httpx.HTTPError):
        async with asyncio.timeout(END_S):
            async for _ in lines:
                pass
