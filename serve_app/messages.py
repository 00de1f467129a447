# SPDX-License-Identifier: Apache-2.0
"""What the deployments say to each other. Plain dataclasses: they are pickled by Ray inside the trusted cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from retrieval.types import RetrievedChunk


@dataclass(frozen=True)
class RetrieveRequest:
    """Ask the Retriever for chunks: by query, or by explicit ids."""

    corpus: str
    query: str
    top_k: int
    chunk_ids: tuple[str, ...] | None = None


@dataclass(frozen=True)
class RetrieveResult:
    chunks: list[RetrievedChunk]
    generation: str
    """Index generation that answered."""
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds by stage: `embed`, `search`."""


@dataclass(frozen=True)
class MendRequest:
    """Ask a Repairer for a repaired prefix."""

    request_id: str
    method: str
    chunks: tuple[tuple[int, ...], ...]
    """Token ids per chunk; chunk 0 is the header chunk."""
    question_ids: tuple[int, ...]
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MendResult:
    method: str
    prefix_ids: tuple[int, ...]
    """Ids that stand for the prefix; the prompt is these, then the question."""
    handoff: dict[str, Any] | None
    """What the engine loads (see kvcache.handoff); None means the engine computes the prefix."""
    rows: int = 0
    """KV rows handed off."""
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds by stage: `fetch`, `repair`, `handoff` ..."""
    hits: dict[str, int] = field(default_factory=dict)
    """Chunks by where they were found: `host`, `store`."""
    misses: dict[str, int] = field(default_factory=dict)
    """Chunks computed on the spot, by reason."""
    fallback: str | None = None
    """Why the request fell back to full prefill, if it did."""


@dataclass(frozen=True)
class GenerateRequest:
    """Ask the Engine for an answer."""

    request_id: str
    prompt_ids: tuple[int, ...]
    handoff: dict[str, Any] | None
    sampling: dict[str, Any]
    """Fields of vLLM's SamplingParams that a client may set: max_tokens, temperature, top_p, stop, seed, logprobs ..."""


@dataclass(frozen=True)
class GenerateDelta:
    """A piece of an answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    cached_tokens: int = 0
    """Prompt tokens whose KV was loaded, not computed."""
    logprobs: list[dict[str, Any]] | None = None
    """Per new token: {"token", "logprob", "bytes", "top_logprobs"} as in OpenAI's chat API."""
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds by stage, on the first delta: `queue`, `inject`, `first_token`."""
