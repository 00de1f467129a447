# SPDX-License-Identifier: Apache-2.0
"""The Ingress deployment: HTTP in, validated requests through the flow, OpenAI-shaped answers out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import DeploymentStatus
from starlette.types import Receive, Scope, Send

from kvcache.settings import Settings
from kvcache.target import load_tokenizer
from serve_app.bounds import check_request_id, parse, read_body
from serve_app.errors import CLIENT_GONE, ApiError, overloaded, to_api_error, unavailable
from serve_app.flow import Answer, Flow, new_answer
from serve_app.metrics import NodeMetrics, RequestMetrics
from serve_app.prompts import Prompts
from serve_app.replies import Model, ModelList
from serve_app.request_log import log_request
from serve_app.routes import build_api
from serve_app.schemas import ChatRequest, CompletionRequest
from serve_app.writers import ChatWriter, CompletionWriter, stage_headers

logger = logging.getLogger("ray.serve")

READY_TIMEOUT_S = 5.0
_SLEEPERS = ("Repairer", "Engine")


@serve.ingress()
class Ingress:
    """Serves the HTTP API.

    Args:
        settings: everything.
        retriever, repairer, engine: handles of the deployments behind it.
    """

    def __init__(
        self, settings: Settings, retriever: DeploymentHandle, repairer: DeploymentHandle, engine: DeploymentHandle
    ) -> None:
        self._settings = settings
        self._parts = {"Retriever": retriever, "Repairer": repairer, "Engine": engine}
        self._metrics = RequestMetrics()
        self._node_metrics = NodeMetrics()
        prompts = Prompts(load_tokenizer(settings), settings.prompt)
        self._flow = Flow(settings, prompts, retriever, repairer, engine, self._metrics)
        self._in_flight = 0
        self._started = int(time.time())

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_api(self)

    async def chat(self, request: HttpRequest) -> Response:
        """`POST /v1/chat/completions`."""
        return await self._answer(request, ChatRequest, ChatWriter)

    async def completions(self, request: HttpRequest) -> Response:
        """`POST /v1/completions`."""
        return await self._answer(request, CompletionRequest, CompletionWriter)

    async def models(self) -> ModelList:
        """`GET /v1/models`: the one target."""
        return ModelList(data=[Model(id=self._settings.target.model, created=self._started)])

    async def metrics(self) -> Response:
        """`GET /metrics`: Prometheus text of this node."""
        return PlainTextResponse(await self._node_metrics.text(), media_type="text/plain; version=0.0.4")

    async def ready(self) -> Response:
        """`GET /readyz`: whether every deployment answers; the Retriever only does when its corpora can be read."""
        serving = self._settings.serve
        full = self._in_flight >= serving.max_ongoing_requests // serving.ingress_replicas
        # A question would wake those that sleep, and keep them awake.
        asleep = _SLEEPERS if serving.autoscaling.enabled and serving.autoscaling.scale_to_zero else ()
        asked = {name: handle for name, handle in self._parts.items() if name not in asleep}
        found = await asyncio.gather(*(_state(name, handle, full) for name, handle in asked.items()))
        states = dict(zip(asked, found, strict=True))
        if any(state.startswith("not") for state in states.values()):
            error = unavailable("not ready: " + ", ".join(f"{k} {v}" for k, v in states.items() if v.startswith("not")))
            return JSONResponse({**error.body(), "deployments": states}, error.status, error.headers())
        return JSONResponse({"status": "ready", "deployments": states})

    async def check_health(self) -> None:
        """Serve's health check."""
        self._metrics.in_flight(self._in_flight)

    async def _answer(
        self,
        http: HttpRequest,
        model: type[ChatRequest] | type[CompletionRequest],
        writer_of: type[ChatWriter] | type[CompletionWriter],
    ) -> Response:
        answer = new_answer(writer_of.id_prefix)
        self._enter()
        try:
            check_request_id(http.headers)
            request = parse(await read_body(http, self._settings.api.max_body_bytes), model, self._settings)
            await self._flow.start(request, answer)
            writer = writer_of(answer, self._settings.target.model, request)
            if request.stream:
                return _EventStream(writer, stage_headers(answer), lambda status: self._leave(answer, status))
            reply = await writer.whole()
        except asyncio.CancelledError:
            self._leave(answer, CLIENT_GONE)
            raise
        except Exception as error:
            mapped = _mapped(error, answer)
            self._leave(answer, mapped.status)
            raise mapped from error
        self._leave(answer, 200)
        body = reply.model_dump_json(exclude_none=True)
        return Response(body, media_type="application/json", headers=stage_headers(answer))

    def _enter(self) -> None:
        serving = self._settings.serve
        most = serving.max_ongoing_requests + serving.max_queued_requests
        if serving.max_queued_requests >= 0 and self._in_flight >= most:
            self._metrics.ended("none", 429, {})
            raise overloaded(f"{most} requests in flight")
        self._in_flight += 1
        self._metrics.in_flight(self._in_flight)

    def _leave(self, answer: Answer, status: int) -> None:
        answer.close()
        self._in_flight -= 1
        self._metrics.in_flight(self._in_flight)
        fallback = answer.rag.fallback if answer.rag else None
        self._metrics.ended(answer.method, status, answer.stages, fallback)
        log_request(
            "answered",
            answer.reply_id,
            answer.stages,
            status=status,
            method=answer.method,
            prompt_tokens=answer.prompt_tokens,
            fallback=fallback,
        )


class _EventStream(StreamingResponse):
    """A streamed answer. `ended` is called with its status exactly once, however the stream ends."""

    def __init__(self, writer: ChatWriter | CompletionWriter, headers: dict[str, str], ended: Callable[[int], None]):
        super().__init__(
            self._events(writer), media_type="text/event-stream", headers={"cache-control": "no-cache", **headers}
        )
        self._ended, self._outcome = ended, CLIENT_GONE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Not in the generator's own `finally`: a client that leaves before the first event never starts it.
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ended(self._outcome)

    async def _events(self, writer: ChatWriter | CompletionWriter) -> AsyncIterator[bytes]:
        try:
            async for event in writer.events():
                yield event
            self._outcome = 200
        except Exception as error:
            # The status line is out: the error goes where the client reads, in the same shape.
            mapped = _mapped(error, writer.answer)
            self._outcome = mapped.status
            yield writer.error(mapped)


def _mapped(error: Exception, answer: Answer) -> ApiError:
    mapped = to_api_error(error)
    if mapped.status >= 500:
        logger.error("%s: %s", answer.reply_id, mapped, exc_info=error)
    return mapped


async def _state(name: str, handle: DeploymentHandle, full: bool) -> str:
    response = handle.ready.remote()
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            await response
    except TimeoutError:
        response.cancel()
        # Behind other requests the question waits its turn: a part that is full is not a part that is down.
        return "busy" if full and await asyncio.to_thread(_healthy, name) else "not ready (no answer)"
    except Exception as error:
        response.cancel()
        return f"not ready ({type(error).__name__})"
    return "ready"


def _healthy(name: str) -> bool:
    application = serve.status().applications[serve.get_replica_context().app_name]
    return application.deployments[name].status == DeploymentStatus.HEALTHY
