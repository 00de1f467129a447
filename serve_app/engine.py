# SPDX-License-Identifier: Apache-2.0
"""The Engine deployment: prompt and hand-off in, pieces of the answer out."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import aclosing

from kvcache.settings import Settings
from serve_app.errors import bad_request, to_api_error
from serve_app.messages import GenerateDelta, GenerateRequest
from serve_app.meter import ServiceMeter
from serve_app.request_log import log_request

logger = logging.getLogger("ray.serve")


class EngineDeployment:
    """Runs one vLLM engine. A dead engine fails the health check, so that Serve replaces the replica.

    Args:
        settings: target and engine.

    Raises:
        UnsupportedTargetError: reuse is wrong for this target; names what and by how much.
    """

    async def __init__(self, settings: Settings) -> None:
        # Here, not above: importing vLLM takes seconds and memory, and only this replica needs it.
        from engine.engine import Engine
        from engine.proof import EngineProof

        proof = EngineProof(settings) if settings.engine.startup_proof else None
        self._engine = Engine(settings)
        # Serve lets no more in than its own bound.
        slots = min(settings.engine.max_num_seqs, settings.serve.max_ongoing_requests)
        self._meter = ServiceMeter(settings.serve.autoscaling.slo_ttft_s, slots)
        await self._engine.start()
        if proof is not None:
            await proof.check(self._engine)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        """Answer, piece by piece; a cancelled request is aborted in vLLM and its hand-off ended.

        Raises:
            ApiError: nothing else, since the caller could only unpickle vLLM's errors by importing vLLM.
        """
        self._meter.arrived()
        begin, stages, tokens, answered = time.perf_counter(), {"queue": 0.0, "first_token": 0.0}, 0, False
        try:
            async with aclosing(self._engine.generate(request)) as deltas:
                async for delta in deltas:
                    stages |= delta.stages
                    tokens += len(delta.token_ids)
                    yield delta
            log_request(
                "generated",
                request.request_id,
                stages,
                tokens=tokens,
                cached_tokens=delta.cached_tokens,
                handoff_miss=delta.handoff_miss,
            )
            queue_s = stages["queue"]
            waits_s = queue_s + stages.get("inbox", 0.0)
            self._meter.served(time.perf_counter() - begin - waits_s, stages["first_token"] - queue_s)
            answered = True
        except ValueError as error:
            raise bad_request(str(error)) from None
        except Exception as error:
            logger.exception("%s: the engine failed", request.request_id)
            raise to_api_error(error) from None
        finally:
            if not answered:
                self._meter.given_up()

    async def ready(self) -> None:
        """Raises ApiError when the engine is gone."""
        try:
            self._engine.check_health()
        except Exception as error:
            raise to_api_error(error) from None

    def record_autoscaling_stats(self) -> dict[str, float]:
        """For the autoscaling policy."""
        return self._meter.stats()

    async def check_health(self) -> None:
        """Serve's health check."""
        self._engine.check_health()

    def __del__(self) -> None:
        if hasattr(self, "_engine"):
            self._engine.shutdown()
