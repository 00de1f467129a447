# SPDX-License-Identifier: Apache-2.0
"""What the deployments say to each other. Plain dataclasses: they are pickled by Ray inside the trusted cluster."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.types import GenerateDelta, GenerateRequest
from repair.types import MendRequest, MendResult
from retrieval.types import RetrievedChunk

__all__ = ["GenerateDelta", "GenerateRequest", "MendRequest", "MendResult", "RetrieveRequest", "RetrieveResult"]


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
