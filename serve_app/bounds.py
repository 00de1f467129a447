# SPDX-License-Identifier: Apache-2.0
"""What a client may send, part two: the body on the wire, and bounds that depend on the settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

from fastapi import Request as HttpRequest
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from kvcache.settings import Settings
from serve_app.errors import CLIENT_GONE, ApiError, bad_request, from_validation, nearest
from serve_app.schemas import ChatRequest, CompletionRequest, RagOptions

AnyRequest = TypeVar("AnyRequest", ChatRequest, CompletionRequest)

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def check_request_id(headers: Mapping[str, str]) -> str:
    """The request's id: the client's `X-Request-ID`, or the one that Serve's proxy made.

    Raises:
        ApiError: 400, not 1 to 128 printable ASCII characters (ids go into logs and response headers).
    """
    value = headers.get("x-request-id", "")
    if not _REQUEST_ID.fullmatch(value):
        raise bad_request(
            "the X-Request-ID header must be 1 to 128 printable ASCII characters without spaces", param="x-request-id"
        )
    return value


async def read_body(request: HttpRequest, limit: int) -> bytes:
    """Read the body, at most `limit` bytes of it, whatever `content-length` says.

    Raises:
        ApiError: 415 for another content type, 413 for a longer body, 400 for bytes that are not UTF-8, 499 where the
            client leaves before its end.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415, f"content type {kind or 'none'} is not supported: send application/json", code="unsupported_media_type"
        )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_long(limit)
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > limit:
                raise _too_long(limit)
    except ClientDisconnect:
        raise ApiError(CLIENT_GONE, "the client left before the end of its body", code="client_gone") from None
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise bad_request(
            f"the body is not valid UTF-8 (byte {error.start}): encode it as UTF-8", code="invalid_encoding"
        ) from None
    return bytes(body)


def _too_long(limit: int) -> ApiError:
    return ApiError(413, f"the body is longer than {limit} bytes: shorten the request", code="body_too_large")


def parse(body: bytes, model: type[AnyRequest], settings: Settings) -> AnyRequest:
    """Parse and check a request.

    Raises:
        ApiError: 400 or 404, naming the field and what to change.
    """
    try:
        request = model.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error, model) from None
    served = settings.target.model
    if request.model not in (None, served):
        raise ApiError(
            404, f"model {request.model!r} is not served here: use {served!r}", param="model", code="model_not_found"
        )
    most = settings.engine.max_model_len
    if isinstance(request, CompletionRequest) and request.token_ids is not None and len(request.token_ids) >= most:
        raise _context_exceeded(request, len(request.token_ids), settings)
    _check_texts(request, settings)
    if request.rag is not None:
        _check_rag(request.rag, settings)
    if request.answer_tokens is not None and request.answer_tokens >= most:
        raise _context_exceeded(request, None, settings)
    return request


def _check_texts(request: ChatRequest | CompletionRequest, settings: Settings) -> None:
    limit = settings.api.max_question_chars
    param = "messages" if isinstance(request, ChatRequest) else "prompt"
    texts = [message.text for message in request.messages] if isinstance(request, ChatRequest) else [request.question]
    for text in texts:
        if len(text) > limit:
            raise bad_request(
                f"a text of {len(text)} characters is longer than {limit}: shorten it",
                param=param,
                code="text_too_long",
            )
    if not request.question.strip() and not (isinstance(request, CompletionRequest) and request.token_ids):
        raise bad_request("the question is empty: ask something", param=param, code="empty_question")


def _check_rag(rag: RagOptions, settings: Settings) -> None:
    most = settings.retrieval.max_top_k
    if rag.top_k is not None and rag.top_k > most:
        raise bad_request(f"`rag.top_k` is {rag.top_k}: ask for 1 to {most} chunks", param="rag.top_k")
    if rag.chunk_ids is not None and len(rag.chunk_ids) > most:
        raise bad_request(f"`rag.chunk_ids` names {len(rag.chunk_ids)} chunks: name 1 to {most}", param="rag.chunk_ids")
    methods = settings.repair.methods
    if rag.method is not None and rag.method not in methods:
        raise bad_request(
            f"`rag.method` {rag.method!r} is not offered; offered are {', '.join(methods)} "
            f"(nearest: {nearest(rag.method, methods)})",
            param="rag.method",
            code="unknown_method",
        )


def check_context(request: ChatRequest | CompletionRequest, prompt_tokens: int, settings: Settings) -> int:
    """The answer length that fits behind a prompt: what the client asks for, or as much of the default as fits.

    Args:
        request: the client's.
        prompt_tokens: tokens of the whole prompt.
        settings: context and default length.

    Raises:
        ApiError: 400 `context_length_exceeded`.
    """
    asked, room = request.answer_tokens, settings.engine.max_model_len - prompt_tokens
    if room < 1 or (asked is not None and asked > room):
        raise _context_exceeded(request, prompt_tokens, settings)
    return min(asked or settings.api.default_max_tokens, room)


def _context_exceeded(
    request: ChatRequest | CompletionRequest, prompt_tokens: int | None, settings: Settings
) -> ApiError:
    """The error OpenAI's clients know for prompts and answers that do not fit."""
    most, wanted = settings.engine.max_model_len, request.answer_tokens or settings.api.default_max_tokens
    is_chat = isinstance(request, ChatRequest)
    length = "max_completion_tokens" if is_chat and request.max_completion_tokens is not None else "max_tokens"
    if prompt_tokens is None:
        message = f"`{length}` is {wanted}, but the model's context is {most} tokens in all: ask for fewer"
    else:
        shorter = f"shorten the {'question' if is_chat else 'prompt'}"
        fewer = ""
        if is_chat or request.rag is not None:
            named = request.rag is not None and request.rag.chunk_ids is not None
            fewer = ", name fewer `rag.chunk_ids`," if named else ", lower `rag.top_k`,"
        message = (
            f"the prompt has {prompt_tokens} tokens and the answer up to {wanted}, together more than the model's "
            f"context of {most}: {shorter}{fewer} or lower `{length}`"
        )
    param = "messages" if is_chat else "prompt"
    if prompt_tokens is None or prompt_tokens < most:
        param = length
    return bad_request(message, param=param, code="context_length_exceeded")


def check_token_ids(ids: list[int], vocabulary: int) -> tuple[int, ...]:
    """Token ids of a plain completion.

    Raises:
        ApiError: 400, an id outside the vocabulary.
    """
    for token in ids:
        if token >= vocabulary:
            raise bad_request(
                f"token id {token} is outside the vocabulary: ids go from 0 to {vocabulary - 1}",
                param="prompt",
                code="invalid_token_id",
            )
    return tuple(ids)
