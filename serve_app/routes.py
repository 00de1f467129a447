# SPDX-License-Identifier: Apache-2.0
"""The HTTP routes, their OpenAPI description, and the shape of errors."""

from __future__ import annotations

import json
from typing import Any, Protocol

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from serve_app.errors import ApiError
from serve_app.replies import ChatReply, CompletionReply, ErrorReply, ModelList
from serve_app.schemas import ChatRequest, CompletionRequest

_REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {
        "model": ErrorReply,
        "description": "The request cannot be answered as it is; the message says what to change",
    },
    404: {"model": ErrorReply, "description": "No such model, corpus or chunk"},
    413: {"model": ErrorReply, "description": "The body is too long"},
    415: {"model": ErrorReply, "description": "The body is not application/json"},
    429: {"model": ErrorReply, "description": "At the limit; Retry-After says when to try again"},
    503: {"model": ErrorReply, "description": "Not available now; Retry-After says when to try again"},
}


class Service(Protocol):
    """What answers the routes."""

    async def chat(self, request: HttpRequest) -> Response: ...
    async def completions(self, request: HttpRequest) -> Response: ...
    async def models(self) -> ModelList: ...
    async def metrics(self) -> Response: ...
    async def ready(self) -> Response: ...


def build_api(service: Service) -> FastAPI:
    """The HTTP application.

    Bodies are read and parsed by the service, not by FastAPI: limits hold before a byte is parsed, and errors have
    OpenAI's shape. FastAPI routes, and describes what is there.
    """
    api = FastAPI(
        title="CacheMend",
        version="1",
        description="OpenAI-compatible answers from retrieved chunks whose KV caches were computed beforehand.",
        docs_url=None,
        redoc_url=None,
    )
    api.add_exception_handler(ApiError, _api_error)
    api.add_exception_handler(HTTPException, _http_error)

    request_schemas: dict[str, Any] = {}

    def post(path: str, endpoint: Any, request: type[BaseModel], reply: type[BaseModel], summary: str) -> None:
        schema = request.model_json_schema(ref_template="#/components/schemas/{model}")
        request_schemas.update(schema.pop("$defs", {}))
        request_schemas[request.__name__] = schema
        reference = {"$ref": f"#/components/schemas/{request.__name__}"}
        api.add_api_route(
            path,
            endpoint,
            methods=["POST"],
            summary=summary,
            operation_id=endpoint.__name__,
            response_model=None,
            responses={
                200: {
                    "model": reply,
                    "description": "The answer; with `stream`, server-sent events",
                    "content": {"text/event-stream": {"schema": {"type": "string"}}},
                },
                **_REFUSALS,
            },
            openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}},
        )

    post("/v1/chat/completions", service.chat, ChatRequest, ChatReply, "Answer the last message from retrieved chunks")
    post("/v1/completions", service.completions, CompletionRequest, CompletionReply, "Continue a prompt")
    api.add_api_route("/v1/models", service.models, methods=["GET"], response_model=ModelList, summary="The target LLM")
    api.add_api_route("/healthz", _healthz, methods=["GET"], summary="Whether this process is alive")
    unready = {503: _REFUSALS[503]}
    api.add_api_route(
        "/readyz", service.ready, methods=["GET"], responses=unready, summary="Whether requests can be answered"
    )
    api.add_api_route(
        "/metrics",
        service.metrics,
        methods=["GET"],
        response_class=PlainTextResponse,
        responses=unready,
        summary="Prometheus text of this node",
    )
    # FastAPI does not parse the bodies, so it does not know their schemas.
    api.openapi()["components"]["schemas"].update(sorted(request_schemas.items()))
    return api


def openapi_text() -> str:
    """The OpenAPI description as the file in `docs` holds it: `python -m serve_app.routes > docs/openapi.json`."""

    class Described(Service):
        pass

    return json.dumps(build_api(Described()).openapi(), indent=1) + "\n"


async def _healthz() -> dict[str, str]:
    return {"status": "alive"}


async def _api_error(_: HttpRequest, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status, error.headers())


async def _http_error(request: HttpRequest, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    routes = {404: "no such path", 405: f"{request.method} is not allowed here"}
    message = f"{routes.get(error.status_code, error.detail)}: {request.url.path}"
    mapped = ApiError(error.status_code, message, code="not_found" if error.status_code == 404 else "invalid_request")
    return JSONResponse(mapped.body(), mapped.status, error.headers)


if __name__ == "__main__":
    print(openapi_text(), end="")
