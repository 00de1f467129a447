# SPDX-License-Identifier: Apache-2.0
"""Write an answer as OpenAI's JSON: whole, or as server-sent events."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any

from serve_app.errors import ApiError
from serve_app.flow import Answer
from serve_app.messages import GenerateDelta
from serve_app.replies import (
    ChatChoice,
    ChatMessage,
    ChatReply,
    CompletionChoice,
    CompletionReply,
    LogprobsContent,
    Usage,
    completion_logprobs,
    usage,
)
from serve_app.request_log import milliseconds
from serve_app.schemas import ChatRequest, CompletionRequest


class _Writer(ABC):
    """What both kinds share.

    Args:
        answer: started, see `serve_app.flow`.
        model: name of the served model.
        request: as validated.
    """

    id_prefix: str
    chunk_object: str

    def __init__(self, answer: Answer, model: str, request: ChatRequest | CompletionRequest) -> None:
        self.answer = answer
        self._request = request
        self._head = {"id": answer.reply_id, "created": int(time.time()), "model": model}
        self._tokens = 0
        self._cached = 0
        self._chars = 0

    async def _pieces(self) -> AsyncIterator[GenerateDelta]:
        async for delta in self.answer.deltas():
            self._tokens += len(delta.token_ids)
            self._cached = delta.cached_tokens  # the last word counts: a hand-off may turn out lost
            yield delta

    async def _collect(self) -> tuple[str, str | None, list[dict[str, Any]] | None]:
        text, logprobs, reason = [], [], None
        async for delta in self._pieces():
            text.append(delta.text)
            logprobs += delta.logprobs or []
            reason = delta.finish_reason or reason
        return "".join(text), reason, logprobs if self._request.top_count is not None else None

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events. The one with the finish reason also carries `rag` and `stages_ms`."""
        options = self._request.stream_options
        include_usage = bool(options and options.include_usage)
        first = True
        async for delta in self._pieces():
            event = {**self._head, "object": self.chunk_object, "choices": [self._choice(delta, first)]}
            first = False
            if include_usage:
                event["usage"] = None
            if delta.finish_reason:
                if self.answer.rag is not None:
                    event["rag"] = self.answer.rag.model_dump(exclude_none=True)
                event["stages_ms"] = milliseconds(self.answer.stages)
            yield _event(event)
        if include_usage:
            tail = {**self._head, "object": self.chunk_object, "choices": [], "usage": self._usage().model_dump()}
            yield _event(tail)
        yield b"data: [DONE]\n\n"

    def error(self, error: ApiError) -> bytes:
        """An error inside a stream."""
        return _event(error.body())

    def _usage(self) -> Usage:
        return usage(self.answer.prompt_tokens, self._tokens, self._cached)

    @abstractmethod
    def _choice(self, delta: GenerateDelta, first: bool) -> dict[str, Any]:
        """One streamed choice, in the shape of the endpoint."""


class ChatWriter(_Writer):
    """`/v1/chat/completions`."""

    id_prefix = "chatcmpl"
    chunk_object = "chat.completion.chunk"

    async def whole(self) -> ChatReply:
        """The whole answer."""
        text, reason, logprobs = await self._collect()
        assert self.answer.rag is not None
        choice = ChatChoice(
            message=ChatMessage(content=text),
            finish_reason=reason,
            logprobs=LogprobsContent(content=logprobs) if logprobs is not None else None,
        )
        return ChatReply(
            **self._head,
            choices=[choice],
            usage=self._usage(),
            rag=self.answer.rag,
            stages_ms=milliseconds(self.answer.stages),
        )

    def _choice(self, delta: GenerateDelta, first: bool) -> dict[str, Any]:
        content: dict[str, Any] = {"role": "assistant"} if first else {}
        if delta.text or first:
            content["content"] = delta.text
        choice = {"index": 0, "delta": content, "finish_reason": delta.finish_reason}
        if delta.logprobs is not None:
            choice["logprobs"] = {"content": delta.logprobs}
        return choice


class CompletionWriter(_Writer):
    """`/v1/completions`."""

    id_prefix = "cmpl"
    chunk_object = "text_completion"

    async def whole(self) -> CompletionReply:
        """The whole answer."""
        text, reason, logprobs = await self._collect()
        choice = CompletionChoice(
            text=text,
            finish_reason=reason,
            logprobs=completion_logprobs(logprobs) if logprobs is not None else None,
        )
        return CompletionReply(
            **self._head,
            choices=[choice],
            usage=self._usage(),
            rag=self.answer.rag,
            stages_ms=milliseconds(self.answer.stages),
        )

    def _choice(self, delta: GenerateDelta, first: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "text": delta.text, "finish_reason": delta.finish_reason}
        if delta.logprobs is not None:
            choice["logprobs"] = completion_logprobs(delta.logprobs, self._chars).model_dump()
        self._chars += len(delta.text)
        return choice


def stage_headers(answer: Answer) -> dict[str, str]:
    """Stage times so far as a Server-Timing header, and the time to the first token on its own."""
    stages = milliseconds(answer.stages)
    timing = ", ".join(f"{stage};dur={value}" for stage, value in stages.items())
    return {"server-timing": timing, "x-cachemend-ttft-ms": str(stages["ttft"])}


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
