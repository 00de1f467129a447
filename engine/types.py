# SPDX-License-Identifier: Apache-2.0
"""What one asks of the engine, and what it gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class GenerateRequest:
    """Ask the engine for an answer."""

    request_id: str
    prompt_ids: tuple[int, ...]
    """The ids that stand for the prefix, then the question's."""
    handoff: dict[str, Any] | None
    """Ticket of the hand-off; None computes the whole prompt."""
    sampling: dict[str, Any]
    """Fields of vLLM's SamplingParams that a client may set: max_tokens, temperature, top_p, stop, seed ..."""
    node: str = ""
    """Ray's id of the node whose memory holds the hand-off, where that is known."""


@dataclass(frozen=True)
class GenerateDelta:
    """A piece of an answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    cached_tokens: int = 0
    """Prompt tokens whose KV was loaded, not computed."""
    logprobs: list[dict[str, Any]] | None = None
    """Per new token, as in OpenAI's chat API: token_id, token, logprob, bytes, top_logprobs (best first)."""
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds by stage: `queue` and `first_token` on the first delta, with `inbox` for a hand-off from another node;
    `inject` on the last."""
    handoff_miss: str | None = None
    """On the last delta: why the hand-off was not loaded and the whole prompt computed, if so."""
