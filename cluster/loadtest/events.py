# SPDX-License-Identifier: Apache-2.0
"""The events of a streamed answer, as far as a load test reads them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
from pydantic import BaseModel, FiniteFloat, ValidationError


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


async def read_events(response: httpx.Response) -> AsyncIterator[Event]:
    """Events of a stream of server-sent events, up to its `[DONE]`.

    What comes behind it, the end of the body, is read as well: httpx closes a connection that is left before, and the
    next request would pay for a new one.

    Raises:
        StreamError: one that is none of ours, one that tells of a failure, or an end before `[DONE]`.
    """
    done = False
    async for line in response.aiter_lines():
        if done or not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            done = True
            continue
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
    if not done:
        raise StreamError("broken stream", "the stream ended before the answer was whole")
