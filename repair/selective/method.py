# SPDX-License-Identifier: Apache-2.0
"""What the selective repairers share: parameters in, chunks side by side, mended prefixes out."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import torch

from kvcache.settings import Settings
from kvcache.target import TargetLLM
from repair.base import MethodParamsError, RepairedPrefix, RepairRequest, joined
from repair.macs import CostModel
from repair.selective.params import MethodParams
from repair.selective.prefix import AssembledPrefix

P = TypeVar("P", bound=MethodParams)


@dataclass(frozen=True)
class Mended:
    """A prefix, mended.

    Attributes:
        prefix: its rows.
        macs: what that took, see `repair.macs`.
        shares: see `RepairedPrefix.shares`.
    """

    prefix: AssembledPrefix
    macs: int
    shares: Mapping[str, float]


@dataclass
class Stopwatch:
    """Seconds by stage, on a device that works while the program goes on."""

    device: torch.device
    stages: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count what happens inside."""
        begin = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.stages[name] = self.stages.get(name, 0.0) + time.perf_counter() - begin


class SelectiveRepairer(ABC, Generic[P]):
    """Base of the repairers that run the target LLM again for selected rows.

    A prefix of one chunk lacks nothing and is passed through. The header chunk, chunk 0, is exact: nothing comes before
    it. Requests that agree in their parameters go through the layers together.

    Stages: `transfer` (to the device and back), `select`, `repair`.
    """

    name: ClassVar[str]
    needs_stale: ClassVar[bool] = True
    needs_query: ClassVar[bool] = False
    needs_target: ClassVar[bool] = True
    params: ClassVar[type[MethodParams]]
    """Its parameters."""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]]
    """Published settings by name; the method parameter `preset` takes one."""

    def __init__(self, target: TargetLLM, settings: Settings) -> None:
        self._target = target
        self._bounds = settings.repair.selective
        self._cost = CostModel.of(target.model.config)

    @abstractmethod
    def mend(self, requests: Sequence[RepairRequest], params: P, watch: Stopwatch) -> list[Mended]:
        """Mend prefixes of several chunks, under inference mode."""

    def check_target(self, params: P) -> None:
        """Raises MethodParamsError for parameters that the target has no layers for."""

    def check_params(self, params: Mapping[str, Any]) -> None:
        """Takes the fields of `params`, and `preset`."""
        self._parse(params)

    def repair(self, request: RepairRequest) -> RepairedPrefix:
        """Mend one prefix."""
        return self.repair_batch([request])[0]

    @torch.inference_mode()
    def repair_batch(self, requests: Sequence[RepairRequest]) -> list[RepairedPrefix]:
        """Mend several prefixes, each as if alone, to rounding.

        Raises:
            MethodParamsError: a request whose parameters do not fit, or that needs a question and has none.
        """
        results = {
            index: RepairedPrefix(joined(request.chunks), tuple((chunk.k, chunk.v) for chunk in request.stale))
            for index, request in enumerate(requests)
            if len(request.chunks) < 2
        }
        alike: dict[P, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            if index not in results:
                alike[self._parse(request.params)].append(index)
            if self.needs_query and not request.question_ids:
                raise MethodParamsError(f"method {self.name!r} is guided by the question, which is empty")
        for params, indices in alike.items():
            mended = self._timed([requests[index] for index in indices], params)
            results |= zip(indices, mended, strict=True)
        return [results[index] for index in range(len(requests))]

    def _timed(self, requests: Sequence[RepairRequest], params: P) -> list[RepairedPrefix]:
        watch = Stopwatch(self._target.device)
        mended = self.mend(requests, params, watch)
        with watch.stage("transfer"):
            caches = [each.prefix.kv() for each in mended]
        return [
            RepairedPrefix(each.prefix.ids(), (kv,), watch.stages, each.macs, each.shares)
            for each, kv in zip(mended, caches, strict=True)
        ]

    def assemble(self, requests: Sequence[RepairRequest], watch: Stopwatch) -> list[AssembledPrefix]:
        """The requests' prefixes, with room for the question where the method needs it."""
        with watch.stage("transfer"):
            return [
                AssembledPrefix.of(self._target, request.stale, request.question_ids if self.needs_query else ())
                for request in requests
            ]

    def _parse(self, params: Mapping[str, Any]) -> P:
        parsed = self.params.parse(self.name, params, self.presets, self._bounds)
        self.check_target(parsed)
        return parsed

    def mended(
        self,
        request: RepairRequest,
        prefix: AssembledPrefix,
        rows: Sequence[torch.Tensor],
        keys: Sequence[int] | None = None,
        shares: Mapping[str, float] | None = None,
        **extra: int,
    ) -> Mended:
        """A prefix with its account.

        Args:
            request: what was asked.
            prefix: what came of it.
            rows: those refreshed in each layer.
            keys: size of each layer's context; None is the whole prompt.
            shares: more of them.
            extra: `projected` and `probe` of `CostModel.selective`.
        """
        counts = [len(each) for each in rows]
        tokens = prefix.rows + len(request.question_ids)
        macs = self._cost.selective(counts, tokens if keys is None else keys, **extra)
        recomputed = sum(counts) / (len(counts) * prefix.rows)
        return Mended(prefix, macs, {"recomputed": recomputed, **(shares or {})})

    def probe_macs(self, question: int, prefix: AssembledPrefix, layers: Sequence[int]) -> int:
        """Of running the question up to the last of `layers`."""
        return (max(layers) + 1) * self._cost.rows(question, prefix.rows + question)
