# SPDX-License-Identifier: Apache-2.0
"""EPIC's LegoLink-0: chunks computed behind dummy tokens, which take the sinks with them (methods, section 5)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from kvcache.chunk import ChunkKV
from kvcache.settings import Settings
from kvcache.target import TargetLLM
from repair.base import MethodParamsError, RepairedPrefix, RepairRequest, joined
from repair.macs import CostModel

DUMMIES = 4
"""Three dummy tokens, and the one that a chunk has of its own in the published code."""
_FRONTS = ("dummies", "header")


class LegoLink0:
    """Puts chunk caches side by side that were computed behind four dummy tokens, whose own rows are dropped.

    Nothing is recomputed when chunks are linked: the sink that every chunk computed alone makes of its first tokens
    falls on the dummies. The header chunk stays as it is.

    Method parameters:
        front: "dummies" (default), or "header": the prompt's first chunk in their place, which is its header chunk.
            (InfoFlow's published code puts a short header before every chunk likewise; methods, section 0.5.) What that
            leaves wrong is what a chunk does not know of other chunks, and no more; such chunks belong to one header.

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
        """Takes `front`."""
        if unknown := sorted(params.keys() - {"front"}):
            raise MethodParamsError(f"method {self.name!r} takes front, not {', '.join(unknown)}")
        if params.get("front", "dummies") not in _FRONTS:
            raise MethodParamsError(f"front must be one of {', '.join(_FRONTS)}, got {params['front']!r}")

    def repair(self, request: RepairRequest) -> RepairedPrefix:
        """Compute every chunk but the first behind the front."""
        begin = time.perf_counter()
        header, *chunks = request.stale
        front = header.token_ids if request.params.get("front") == "header" else self._dummies
        linked = [header, *(self._linked(front, chunk) for chunk in chunks)]
        lengths = [len(front) + len(chunk.token_ids) for chunk in chunks]
        return RepairedPrefix(
            joined(request.chunks),
            tuple((chunk.k, chunk.v) for chunk in linked),
            {"repair": time.perf_counter() - begin},
            self._cost.n_layers * sum(self._cost.rows(length, length) for length in lengths),
        )

    def _linked(self, front: Sequence[int], chunk: ChunkKV) -> ChunkKV:
        (behind,) = self._target.stale_kv([[*front, *chunk.token_ids]])
        return ChunkKV(chunk.token_ids, behind.k[:, len(front) :], behind.v[:, len(front) :])
