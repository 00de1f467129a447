# SPDX-License-Identifier: Apache-2.0
"""Stale KV: direct reuse with positions moved; the floor for cost, and the quality to beat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from kvcache.settings import Settings
from kvcache.target import TargetLLM
from repair.base import RepairedPrefix, RepairRequest, joined, no_params


class StaleKV:
    """Puts the chunks' caches side by side; keys are rotated to their new positions, values are as they were.

    Chunks have never attended to each other. The same as naive position-aligned assembly of the literature
    (methods, section 2); the first token of every chunk is kept.
    """

    name: ClassVar[str] = "stale"
    needs_stale: ClassVar[bool] = True
    needs_query: ClassVar[bool] = False
    needs_target: ClassVar[bool] = False

    def __init__(self, target: TargetLLM, settings: Settings) -> None:
        """Needs neither."""

    def check_params(self, params: Mapping[str, Any]) -> None:
        """Takes none."""
        no_params(self.name, params)

    def repair(self, request: RepairRequest) -> RepairedPrefix:
        """Every row of every chunk, in order; nothing is copied."""
        return RepairedPrefix(joined(request.chunks), tuple((chunk.k, chunk.v) for chunk in request.stale))
