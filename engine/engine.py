# SPDX-License-Identifier: Apache-2.0
"""vLLM's async engine with our KV connector; used by the service and by batch jobs."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

import torch
from vllm import SamplingParams, TokensPrompt
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from engine.executor import OneProcessExecutor
from engine.types import GenerateDelta, GenerateRequest
from kvcache.arena import Arena, ArenaFullError, LeaseError
from kvcache.geometry import Geometry
from kvcache.handoff import HandoffError, SharedMemoryTransport, localise, release
from kvcache.settings import Settings
from kvcache.target import load_config, target_device, target_directory, target_dtype, target_fingerprint

LOST = "LostInWorker"
"""`handoff_miss` of a request whose hand-off went away between vLLM's planning and its load."""
_LOAD_FAILED = "error"
"""vLLM's finish reason for a failed load under the policy "fail"."""


class BadRequestError(ValueError):
    """vLLM refuses the request: a sampling parameter or a token id out of range."""


class EngineDeadError(RuntimeError):
    """vLLM's engine process has ended; the replica must be replaced."""


class Engine:
    """One vLLM engine. Start it on the event loop that will use it.

    Args:
        settings: `engine`, `target` and `handoff` count here.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._llm: AsyncLLM | None = None
        # Hand-offs that came from another node wait here; nothing is touched until one does.
        self._inbox = SharedMemoryTransport(Arena(settings.handoff.arena_bytes, settings.handoff.lease_s))

    async def start(self) -> None:
        """Load the model and start vLLM's processes (about a minute on CPU)."""
        _set_environment(self._settings)
        # What torch keeps here of tensors that are gone (the proof's target) is not free to vLLM's own processes.
        torch.cuda.empty_cache()
        self._llm = AsyncLLM.from_engine_args(_engine_args(self._settings))

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        """Answer a request, piece by piece. Closing the iterator aborts it; its hand-off ends on every path.

        Raises:
            BadRequestError: sampling parameters or prompt that vLLM refuses.
            EngineDeadError: the engine is gone.
        """
        ticket, miss, stages = request.handoff, None, {}
        try:
            if ticket is not None:
                begin, sent = time.perf_counter(), ticket
                try:
                    ticket = await localise(ticket, self._inbox, self._settings.handoff.wait_s)
                except (HandoffError, LeaseError, ArenaFullError) as error:
                    ticket, miss = None, type(error).__name__
                if ticket is not sent:
                    stages["inbox"] = time.perf_counter() - begin
            async for delta in self._attempt(request, request.request_id, ticket, miss, stages):
                if delta.finish_reason == _LOAD_FAILED and ticket is not None:
                    break
                yield delta
            else:
                return
            # The worker lost the hand-off between vLLM's planning and its load; nothing has been said yet.
            async for delta in self._attempt(request, f"{request.request_id}-again", None, LOST, stages):
                yield delta
        finally:
            release(ticket)

    async def _attempt(
        self,
        request: GenerateRequest,
        request_id: str,
        ticket: dict[str, Any] | None,
        miss: str | None,
        before: dict[str, float],
    ) -> AsyncIterator[GenerateDelta]:
        assert self._llm is not None, "start the engine first"
        prompt = TokensPrompt(prompt_token_ids=list(request.prompt_ids))
        begin, first = time.perf_counter(), True
        try:
            async for output in self._llm.generate(prompt, _sampling(request.sampling, ticket), request_id):
                stages = {**before, "first_token": time.perf_counter() - begin} if first else {}
                yield self._delta(output, stages, miss)
                first = False
        except (VLLMValidationError, ValueError) as error:
            raise BadRequestError(str(error)) from error
        except Exception as error:
            if self._llm.errored:
                raise EngineDeadError(f"the vLLM engine has ended: {self._llm.dead_error}") from error
            raise

    def check_health(self) -> None:
        """Raises EngineDeadError when vLLM's processes are gone."""
        if self._llm is None or self._llm.errored:
            raise EngineDeadError("the vLLM engine is not running")

    def shutdown(self) -> None:
        """End vLLM's processes."""
        if self._llm is not None:
            self._llm.shutdown()
            self._llm = None

    def _delta(self, output: RequestOutput, stages: dict[str, float], miss: str | None) -> GenerateDelta:
        (completion,) = output.outputs
        report = output.kv_transfer_params or {}
        miss = miss or report.get("handoff_miss")
        if "inject_s" in report:
            stages["inject"] = report["inject_s"]
        if output.metrics is not None and "first_token" in stages:
            stages["queue"] = max(0.0, output.metrics.scheduled_ts - output.metrics.queued_ts)
        return GenerateDelta(
            text=completion.text,
            token_ids=tuple(completion.token_ids),
            finish_reason=completion.finish_reason,
            cached_tokens=0 if miss else output.num_cached_tokens or 0,
            logprobs=_logprobs(completion.logprobs, completion.token_ids) if completion.logprobs else None,
            stages=stages,
            handoff_miss=miss,
        )


def _set_environment(settings: Settings) -> None:
    # vLLM reads these where it starts its processes. Two thread pools on the same cores slow each other down.
    threads = settings.engine.threads or len(os.sched_getaffinity(0))
    os.environ["OMP_NUM_THREADS"] = str(threads)
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def _engine_args(settings: Settings) -> AsyncEngineArgs:
    engine = settings.engine
    on_cpu = target_device(settings.target).type == "cpu"
    extra = {
        "fingerprint": target_fingerprint(settings),
        "geometry": asdict(Geometry.of(load_config(settings))),
    }
    return AsyncEngineArgs(
        model=target_directory(settings),
        dtype=str(target_dtype(settings)).removeprefix("torch."),
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        block_size=engine.block_size,
        kv_cache_memory_bytes=engine.kv_cache_bytes if on_cpu else None,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        tensor_parallel_size=engine.tensor_parallel_size,
        distributed_executor_backend=OneProcessExecutor if on_cpu and engine.tensor_parallel_size == 1 else None,
        enforce_eager=engine.enforce_eager,
        # Repaired KV is approximate: it must never answer for the same tokens in another request.
        enable_prefix_caching=False,
        kv_transfer_config=KVTransferConfig(
            kv_connector="CacheMendConnector",
            kv_connector_module_path="engine.connector",
            kv_role="kv_consumer",
            # Not "recompute": with asynchronous scheduling vLLM 0.32 lets a token of the step in flight, computed on
            # the unloaded blocks, through. A failed load ends the request, and `generate` starts it anew.
            kv_load_failure_policy="fail",
            kv_connector_extra_config=extra,
        ),
    )


def _sampling(fields: dict[str, Any], ticket: dict[str, Any] | None) -> SamplingParams:
    extra = {"kv_transfer_params": ticket} if ticket is not None else None
    return SamplingParams(**fields, extra_args=extra, output_kind=RequestOutputKind.DELTA)


def _logprobs(steps: list[dict[int, Any]], token_ids: list[int]) -> list[dict[str, Any]]:
    result = []
    for token_id, step in zip(token_ids, steps, strict=True):
        entries = {key: _entry(key, value) for key, value in step.items()}
        top = [entries[key] for key in sorted(step, key=lambda key: step[key].rank)]
        result.append({**entries[token_id], "top_logprobs": top})
    return result


def _entry(token_id: int, value: Any) -> dict[str, Any]:
    token = value.decoded_token or ""
    return {"token_id": token_id, "token": token, "logprob": value.logprob, "bytes": list(token.encode())}
