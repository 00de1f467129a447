# SPDX-License-Identifier: Apache-2.0
"""The interface behind which every repair method stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from kvcache.chunk import ChunkKV
from kvcache.geometry import Rotary
from kvcache.settings import Settings
from kvcache.target import TargetLLM


class MethodParamsError(ValueError):
    """A parameter the method does not take, or a value out of its range; the text says what it takes."""


@dataclass(frozen=True)
class RepairRequest:
    """What a repairer works on.

    Attributes:
        chunks: token ids per chunk in prompt order, header chunk first.
        stale: their stale KV, likewise; empty when the method does not need it.
        question_ids: ids that follow the prefix.
        params: the method's own parameters, checked by `check_params`.
    """

    chunks: Sequence[Sequence[int]]
    stale: Sequence[ChunkKV] = ()
    question_ids: Sequence[int] = ()
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RepairedPrefix:
    """What a repairer returns.

    Attributes:
        token_ids: ids that stand for the rows; the prompt is these, then the question, which starts at position `rows`.
        kv: canonical keys and values `[L, T_i, H, D]` of consecutive pieces; the lengths add up to `rows`.
        stages: seconds by stage of the repair itself.
        macs: dense matrix multiply-accumulates of the repair, see `repair.macs`; what the engine computes not included.
        shares: what the method chose, as shares of the rows: `recomputed` by the target, mean over layers; `context`
            that these attend to, where it is sparse.
    """

    token_ids: tuple[int, ...]
    kv: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    stages: Mapping[str, float] = field(default_factory=dict)
    macs: int = 0
    shares: Mapping[str, float] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """KV rows, `T`."""
        return sum(k.shape[1] for k, _ in self.kv)

    def write(self, rotary: Rotary, k_out: torch.Tensor, v_out: torch.Tensor) -> None:
        """Write global KV: keys rotated to positions 0 .. rows - 1, straight into the destination.

        Args:
            rotary: the target's.
            k_out: `[L, T, H, D]`, any dtype, e.g. a hand-off's memory.
            v_out: likewise.
        """
        start = 0
        for k, v in self.kv:
            end = start + k.shape[1]
            rotary.rotate(k, torch.arange(start, end), out=k_out[:, start:end])
            v_out[:, start:end].copy_(v)
            start = end


class Repairer(Protocol):
    """Turns the stale KV of an ordered list of chunks into the KV the engine loads.

    A new method is one file with such a class, one line in `repair.registry`, one row in `tests/repair/methods.py`.
    """

    name: ClassVar[str]
    """Registry key, and the request's `method`."""
    needs_stale: ClassVar[bool]
    """Works on chunk caches; without them the engine computes the prompt itself."""
    needs_query: ClassVar[bool]
    """Selection guided by the question."""
    needs_target: ClassVar[bool]
    """Runs layers of the target LLM."""

    def __init__(self, target: TargetLLM, settings: Settings) -> None: ...

    def check_params(self, params: Mapping[str, Any]) -> None:
        """Raises MethodParamsError when a request must not be worked on."""
        ...

    def repair(self, request: RepairRequest) -> RepairedPrefix:
        """Mend a prefix. Called in a worker thread, one call at a time."""
        ...


@runtime_checkable
class BatchRepairer(Repairer, Protocol):
    """A repairer that gains from several requests at once: those that queued up together are mended together."""

    def repair_batch(self, requests: Sequence[RepairRequest]) -> list[RepairedPrefix]:
        """Mend prefixes, each as if alone. Called in a worker thread, one call at a time."""
        ...


def no_params(name: str, params: Mapping[str, Any]) -> None:
    """For methods without parameters."""
    if params:
        raise MethodParamsError(f"method {name!r} takes no method_params, got {', '.join(sorted(params))}")


def joined(chunks: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The ids of all chunks, in order."""
    return tuple(token for ids in chunks for token in ids)
