# SPDX-License-Identifier: Apache-2.0
"""What the service answers: OpenAI's response shapes, and a `rag` object with citations and stage times."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field


class Citation(BaseModel):
    """A chunk that stood before the question."""

    chunk_id: str
    document_id: str
    title: str
    score: float = Field(description="Retrieval score, higher is better; 0 for chunks named by the client.")
    text: str


class RagInfo(BaseModel):
    """How the answer came about."""

    corpus: str
    generation: str = Field(description="Index generation that answered.")
    method: str = Field(description="Repair method that was used.")
    fallback: str | None = Field(None, description="Why the prefix was computed in full instead, if it was.")
    chunk_hits: dict[str, int] = Field(default_factory=dict, description="Chunk caches by where they were found.")
    chunk_misses: dict[str, int] = Field(default_factory=dict, description="Chunks computed on the spot, by reason.")
    citations: list[Citation] = Field(default_factory=list)


class PromptTokensDetails(BaseModel):
    cached_tokens: int = Field(0, description="Prompt tokens whose KV was loaded, not computed.")


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class LogprobsContent(BaseModel):
    content: list[dict[str, Any]]


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    index: int = 0
    message: ChatMessage
    logprobs: LogprobsContent | None = None
    finish_reason: str | None


class ChatReply(BaseModel):
    """Answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    rag: RagInfo
    stages_ms: dict[str, float] = Field(description="Milliseconds by stage; also in the Server-Timing header.")


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int = 0
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None


class CompletionReply(BaseModel):
    """Answer of `/v1/completions`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    rag: RagInfo | None = Field(None, description="Present when the request had a `rag` object.")
    stages_ms: dict[str, float]


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "cachemend"


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """Every answer that is not 200."""

    error: ErrorDetail


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    """Token counts of an answer."""
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
    )


def completion_logprobs(entries: list[dict[str, Any]], offset: int = 0) -> CompletionLogprobs:
    """Per-token entries of the chat API in the older shape of `/v1/completions`.

    Args:
        entries: `{"token", "logprob", "top_logprobs"}` per token.
        offset: characters of the answer before the first entry.
    """
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry["token"])
    return CompletionLogprobs(
        tokens=[entry["token"] for entry in entries],
        token_logprobs=[entry["logprob"] for entry in entries],
        top_logprobs=[{top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in entries],
        text_offset=offsets,
    )
