# SPDX-License-Identifier: Apache-2.0
"""EPIC's LegoLink-0: chunks computed behind dummy tokens, which take the sinks with them (methods, section 5)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar

from kvcache.chunk import ChunkKV
from kvcache.settings import Settings
from kvcache.target import TargetLLM
from repair.base import RepairedPrefix, RepairRequest, joined, no_params
from repair.macs import CostModel

DUMMIES = 4
"""Three dummy tokens, and the one that a chunk has of its own in the published code."""


class LegoLink0:
    """Puts chunk caches side by side that were computed behind four dummy tokens, whose own rows are dropped.

    Nothing is recomputed when chunks are linked: the sink that every chunk computed alone makes of its first tokens
    falls on the dummies. The header chunk stays as it is.

    The chunk store holds plain chunks, so this computes its own when a request comes: the answers are the method's,
    time and MACs are those of computing the chunks, which the published method does ahead of time.
    """

    name: ClassVar[str] = "legolink-0"
    needs_stale: ClassVar[bool] = True
    needs_query: ClassVar[bool] = False
    needs_target: ClassVar[bool] = True

    def __init__(self, target: TargetLLM, settings: Settings) -> None:
        """The dummy is the tokenizer's BOS, or where it has none (Qwen) the token that ends a text."""
        self._target = target
        tokenizer = target.tokenizer
        dummy = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.pad_token_id
        self._dummies = [dummy if dummy is not None else tokenizer.eos_token_id] * DUMMIES
        self._cost = CostModel.of(target.model.config)

    def check_params(self, params: Mapping[str, Any]) -> None:
        """Takes none."""
        no_params(self.name, params)

    def repair(self, request: RepairRequest) -> RepairedPrefix:
        """Compute every chunk but the first behind the dummies."""
        begin = time.perf_counter()
        header, *chunks = request.stale
        linked = [header, *(self._linked(chunk) for chunk in chunks)]
        lengths = [DUMMIES + len(chunk.token_ids) for chunk in chunks]
        return RepairedPrefix(
            joined(request.chunks),
            tuple((chunk.k, chunk.v) for chunk in linked),
            {"repair": time.perf_counter() - begin},
            self._cost.n_layers * sum(self._cost.rows(length, length) for length in lengths),
        )

    def _linked(self, chunk: ChunkKV) -> ChunkKV:
        (behind,) = self._target.stale_kv([[*self._dummies, *chunk.token_ids]])
        return ChunkKV(chunk.token_ids, behind.k[:, DUMMIES:], behind.v[:, DUMMIES:])
