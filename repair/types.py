# SPDX-License-Identifier: Apache-2.0
"""What one asks of the mender, and what it gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class MendRequest:
    """Ask for a repaired prefix, handed off."""

    request_id: str
    method: str
    chunks: tuple[tuple[int, ...], ...]
    """Token ids per chunk; chunk 0 is the header chunk."""
    question_ids: tuple[int, ...]
    params: dict[str, Any] = field(default_factory=dict)
    own_header: bool = False
    """The header chunk is the client's own: computed on a miss, never written to the object store."""


@dataclass(frozen=True)
class MendResult:
    method: str
    prefix_ids: tuple[int, ...]
    """Ids that stand for the prefix; the prompt is these, then the question."""
    handoff: dict[str, Any] | None
    """Ticket the engine loads (see kvcache.handoff); None means the engine computes the prefix."""
    rows: int = 0
    """KV rows handed off."""
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds by stage: `fetch`; `repair_queue`, waiting for the device; `repair`, or what the method reports
    (`transfer`, `mask`, `repair`); `handoff_queue`, waiting for room and for others' writes; `rotary`,
    which turns the keys straight into the hand-off's memory; `handoff`, which publishes it."""
    hits: dict[str, int] = field(default_factory=dict)
    """Chunks by where they were found: `host`, `store`."""
    misses: dict[str, int] = field(default_factory=dict)
    """Chunks computed on the spot, by reason."""
    fallback: str | None = None
    """Why the request fell back to full prefill, if it did."""
    node: str = ""
    """Ray's id of the node whose memory holds the hand-off, where that is known."""
