# SPDX-License-Identifier: Apache-2.0
"""Full prefill: no reuse; the reference for quality, and the cost to beat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from kvcache.settings import Settings
from kvcache.target import TargetLLM
from repair.base import RepairedPrefix, RepairRequest, joined, no_params


class FullPrefill:
    """Hands nothing over: the engine prefills the whole prompt (methods, section 1)."""

    name: ClassVar[str] = "full"
    needs_stale: ClassVar[bool] = False
    needs_query: ClassVar[bool] = False
    needs_target: ClassVar[bool] = False

    def __init__(self, target: TargetLLM, settings: Settings) -> None:
        """Needs neither."""

    def check_params(self, params: Mapping[str, Any]) -> None:
        """Takes none."""
        no_params(self.name, params)

    def repair(self, request: RepairRequest) -> RepairedPrefix:
        """The chunks' ids, and no KV rows."""
        return RepairedPrefix(joined(request.chunks), ())
