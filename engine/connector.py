# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV connector: loads a repaired prefix from its hand-off into the paged cache.

vLLM makes two of these: one beside its scheduler, which decides how many prompt tokens a request need not compute, and
one in each worker, which writes their KV. The ticket of the hand-off rides in `SamplingParams.extra_args`, set by our
service only. A ticket that is wrong or gone is a counted miss: the engine computes the whole prompt.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.models.utils import extract_layer_index

from engine.lifetime import end_with_parent
from kvcache.arena import LeaseError
from kvcache.chunk import token_digest
from kvcache.geometry import Geometry
from kvcache.handoff import HandoffError, HandoffIdentity, HandoffReader

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


@dataclass
class Load:
    """One request's load: the first `tokens` rows of the hand-off go to these blocks."""

    request_id: str
    ticket: dict[str, Any]
    tokens: int
    block_ids: list[int]


@dataclass
class LoadPlan(KVConnectorMetadata):
    """Scheduler -> worker: what to load before this step's forward pass."""

    loads: list[Load] = field(default_factory=list)


@dataclass
class LoadReport(KVConnectorWorkerMetadata):
    """Worker -> scheduler: seconds per loaded request, and why others were not."""

    seconds: dict[str, float] = field(default_factory=dict)
    misses: dict[str, str] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> LoadReport:
        """Ranks load side by side: the slowest counts, and one miss is a miss."""
        assert isinstance(other, LoadReport)
        both = self.seconds.keys() | other.seconds.keys()
        slowest = {key: max(self.seconds.get(key, 0.0), other.seconds.get(key, 0.0)) for key in both}
        return LoadReport(slowest, {**self.misses, **other.misses})


class CacheMendConnector(KVConnectorBase_V1):
    """Loads hand-offs. Extra config: `fingerprint` and `geometry` of the engine's target."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        end_with_parent()
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._reader = HandoffReader(
            extra["fingerprint"], Geometry(**extra["geometry"]), vllm_config.model_config.dtype
        )
        self._block_size = vllm_config.cache_config.block_size
        # Scheduler side.
        self._pending: dict[str, Load] = {}
        self._loading: dict[str, dict[str, Any]] = {}
        self._spent: set[str] = set()
        self._outcome: dict[str, dict[str, Any]] = {}
        # Worker side.
        self._report = LoadReport()
        self._bad_blocks: set[int] = set()

    # Scheduler side

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Prompt tokens the hand-off stands for; one is always left for the engine to compute."""
        ticket = request.kv_transfer_params
        if not ticket or request.request_id in self._spent:
            return 0, False  # no hand-off, or preempted after its load: computed exactly this time
        try:
            identity = self._reader.identify(ticket)
            _check_request(identity, request)
            self._reader.open(ticket)
        except (HandoffError, LeaseError) as error:
            logger.warning("hand-off refused, prompt computed in full: %s", error)
            self._spent.add(request.request_id)
            self._note(request.request_id, {"handoff_miss": type(error).__name__})
            return 0, False
        rows = min(identity.rows, request.num_prompt_tokens - 1)
        return max(rows - num_computed_tokens, 0), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Remember the load; blocks are known now."""
        if num_external_tokens > 0:
            (block_ids,) = blocks.get_block_ids()
            load = Load(request.request_id, request.kv_transfer_params, num_external_tokens, block_ids)
            self._pending[request.request_id] = load
            self._loading[request.request_id] = load.ticket
            self._spent.add(request.request_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> LoadPlan:
        """Hand this step's loads to the workers."""
        plan = LoadPlan(list(self._pending.values()))
        self._pending.clear()
        return plan

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the workers' reports."""
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, LoadReport):
            for request_id, seconds in report.seconds.items():
                self._note(request_id, {"inject_s": seconds})
            for request_id, reason in report.misses.items():
                self._note(request_id, {"handoff_miss": reason})
            for request_id in report.seconds.keys() | report.misses.keys():
                if ticket := self._loading.pop(request_id, None):
                    self._reader.release(ticket)

    def _note(self, request_id: str, outcome: dict[str, Any]) -> None:
        if request_id in self._spent:  # it may have finished in the very step that loaded it
            self._outcome[request_id] = outcome

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Tell the client side how its hand-off fared, in the last output's `kv_transfer_params`."""
        if self._pending.pop(request.request_id, None):
            self._loading.pop(request.request_id)  # never sent to the workers, so no report will come
        self._spent.discard(request.request_id)
        return False, self._outcome.pop(request.request_id, None)

    # Worker side

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Write each load's rows into the paged cache, layer by layer, through the backend's own kernel."""
        plan = self._get_connector_metadata()
        assert isinstance(plan, LoadPlan)
        if not plan.loads:
            return
        layers = [
            (extract_layer_index(name), layer)
            for name, layer in forward_context.no_compile_layers.items()
            if hasattr(layer, "kv_cache") and hasattr(layer.impl, "do_kv_cache_update")
        ]
        for load in plan.loads:
            begin = time.perf_counter()
            try:
                self._load(load, layers)
                self._report.seconds[load.request_id] = time.perf_counter() - begin
            except (HandoffError, LeaseError) as error:
                logger.warning("hand-off lost while loading, prompt computed in full: %s", error)
                self._report.misses[load.request_id] = type(error).__name__
                self._bad_blocks.update(load.block_ids[: -(-load.tokens // self._block_size)])

    def _load(self, load: Load, layers: list[tuple[int, Any]]) -> None:
        k_LTHD, v_LTHD = self._reader.open(load.ticket)
        if {index for index, _ in layers} != set(range(k_LTHD.shape[0])):
            raise HandoffError(f"hand-off has {k_LTHD.shape[0]} layers, the engine {len(layers)}")
        device = layers[0][1].kv_cache.device
        slots_T = _slots(load.block_ids, self._block_size, load.tokens).to(device)
        heads = _local_heads(k_LTHD.shape[2])
        for index, layer in layers:
            k_THD, v_THD = (kv[index, : load.tokens, heads].to(device, non_blocking=True) for kv in (k_LTHD, v_LTHD))
            layer.impl.do_kv_cache_update(layer, k_THD, v_THD, layer.kv_cache, slots_T)
        if device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # the maker may reuse the memory once it is confirmed
        self._reader.confirm(load.ticket)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose load failed this step: vLLM computes them again."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def build_connector_worker_meta(self) -> LoadReport | None:
        """This step's report, if there is anything to say."""
        report, self._report = self._report, LoadReport()
        return report if report.seconds or report.misses else None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are done before the forward pass."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved: caches are made by the precompute job."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""


def _check_request(identity: HandoffIdentity, request: Request) -> None:
    # vLLM appends eight random characters to the id it was given.
    if request.request_id != identity.request_id and request.request_id[:-9] != identity.request_id:
        raise HandoffError(f"hand-off of request {identity.request_id}, not {request.request_id}")
    if identity.rows > request.num_prompt_tokens:
        raise HandoffError(f"hand-off of {identity.rows} rows for {request.num_prompt_tokens} prompt tokens")
    if token_digest(request.prompt_token_ids[: identity.rows]) != identity.token_digest:
        raise HandoffError("hand-off of other tokens than the prompt's")


def _slots(block_ids: list[int], block_size: int, tokens: int) -> torch.Tensor:
    """Slot numbers int64 `[T]` of the first `tokens` positions."""
    offsets = torch.arange(tokens)
    return torch.as_tensor(block_ids)[offsets // block_size] * block_size + offsets % block_size


def _local_heads(n_kv_heads: int) -> slice:
    """This tensor-parallel rank's KV heads; ranks share a head when there are more ranks than heads."""
    world, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
    per_rank = max(1, n_kv_heads // world)
    first = rank * n_kv_heads // world
    return slice(first, first + per_rank)
