# SPDX-License-Identifier: Apache-2.0
"""Every error leaves the service in OpenAI's shape, and says what to change.

`{"error": {"message", "type", "param", "code"}}`. Errors that cross a Ray handle arrive as the cause of a
`RayTaskError`, or as Ray's own exceptions when a replica died or a queue was full; `to_api_error` maps all of them.
"""

from __future__ import annotations

import asyncio
import difflib
import math
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from ray.exceptions import RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError

CLIENT_GONE = 499
"""Status of a request whose client left before its answer; nobody gets it, metrics and logs have it."""
RETRY_AFTER_S = 1.0
"""Seconds a refused client is asked to wait."""

SERVICE_OWNED = frozenset({"kv_transfer_params", "cache_salt", "extra_args"})
"""Names of vLLM request fields that only this service may set: they steer what is loaded into the KV cache."""

_CONSIDERED = 48
"""Errors of one request that are looked at; nobody mends more than that at once."""
_LONGEST_NAME = 64
"""Characters of a field's name that are repeated to the client."""


class ApiError(Exception):
    """An answer other than 200.

    Attributes:
        status: HTTP status code.
        message: what is wrong and what to change.
        param: the request field at fault, dotted, if there is one.
        code: short machine-readable name.
        retry_after_s: seconds to wait before trying again, if trying again makes sense.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        # All fields go to the base class, so that the error survives pickling when it crosses a Ray handle.
        super().__init__(status, message, param, code, retry_after_s)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, self.args

    def __str__(self) -> str:
        return self.message

    @property
    def type(self) -> str:
        """OpenAI's error type for the status."""
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Headers that belong to the answer."""
        if self.retry_after_s is None:
            return {}
        return {"retry-after": str(max(1, math.ceil(self.retry_after_s)))}


def _rebuild(status: int, message: str, param: str | None, code: str | None, retry: float | None) -> ApiError:
    return ApiError(status, message, param=param, code=code, retry_after_s=retry)


def bad_request(message: str, *, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """A 400."""
    return ApiError(400, message, param=param, code=code)


def overloaded(detail: str, retry_after_s: float | None = None) -> ApiError:
    """A 429 with Retry-After: the service is up and full, so a 5xx would mislead load balancers."""
    return ApiError(
        429,
        f"the service is at its limit ({detail}); send the request again later",
        code="overloaded",
        retry_after_s=retry_after_s or RETRY_AFTER_S,
    )


def unavailable(detail: str) -> ApiError:
    """A 503 with Retry-After."""
    return ApiError(503, f"{detail}; send the request again later", code="unavailable", retry_after_s=5 * RETRY_AFTER_S)


# Errors that parts raise on purpose, by class name: they come from packages below, whose messages say what is known.
_BY_NAME: dict[str, tuple[int, str | None, str]] = {
    "UnknownCorpusError": (404, "rag.corpus", "corpus_not_found"),
    "UnknownChunkError": (404, "rag.chunk_ids", "chunk_not_found"),
    "UnknownMethodError": (400, "rag.method", "unknown_method"),
    "MethodParamsError": (400, "rag.method_params", "invalid_value"),
    "PromptError": (400, "messages", "invalid_value"),
    "CorpusIntegrityError": (503, None, "unavailable"),
    "CorpusMismatchError": (503, None, "unavailable"),
    "ArenaFullError": (503, None, "unavailable"),
    "EngineDeadError": (503, None, "unavailable"),
}


def to_api_error(error: BaseException) -> ApiError:
    """Map any exception of a request's flow to the answer a client gets."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BackPressureError):
        return overloaded(error.message, error.retry_after_s)
    if isinstance(error, DeploymentUnavailableError | ReplicaUnavailableError):
        return unavailable(error.message)
    if isinstance(error, RayActorError):
        return unavailable("a replica that worked on this request died")
    if isinstance(error, TimeoutError | asyncio.CancelledError | TaskCancelledError):
        return unavailable("the request was not answered in time")
    for kind in type(error).__mro__:
        if kind.__name__ in _BY_NAME:
            status, param, code = _BY_NAME[kind.__name__]
            if status == 503:
                return unavailable(str(error) or kind.__name__)
            return ApiError(status, _message(error), param=param, code=code)
    if isinstance(error, RayError):
        return unavailable(f"the cluster could not run this request ({type(error).__name__})")
    return ApiError(
        500, "the service failed on this request; its logs have the cause under the x-request-id", code="internal"
    )


def _message(error: BaseException) -> str:
    # KeyError's str() is the repr of its argument.
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)


def nearest(name: str, known: Sequence[str]) -> str:
    """The known name most like `name`."""
    return difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]


def from_validation(error: ValidationError, model: type[BaseModel]) -> ApiError:
    """Turn pydantic's errors on a request into one 400: the first names `param`, up to three are in the message."""
    found = error.errors(include_url=False, include_context=False)
    details = _without_union_noise(found[:_CONSIDERED])
    first = details[0]
    if first["type"] == "json_invalid":
        reason = first["msg"].removeprefix("Invalid JSON: ")
        return bad_request(f"the body is not valid JSON: {reason}", code="invalid_json")
    parts = [_explain(detail, model) for detail in details[:3]]
    if len(found) > _CONSIDERED:
        parts.append("and many more")
    elif len(details) > 3:
        parts.append(f"and {len(details) - 3} more")
    code = {"extra_forbidden": "unknown_field", "missing": "missing_field"}.get(first["type"], "invalid_value")
    if any(str(part) in SERVICE_OWNED for part in first["loc"]):
        code = "forbidden_field"
    return bad_request("; ".join(parts), param=_dotted(first["loc"]) or None, code=code)


def _without_union_noise(details: list[Any]) -> list[Any]:
    """Where a union failed, keep what is wrong inside the member that fits, not that other members do not fit."""

    # Paths at which, or below which, something else is wrong than the type of a member next to it.
    known = {
        detail["loc"][:length]
        for detail in details
        for length in range(len(detail["loc"]) + 1)
        if length != len(detail["loc"]) - 1 or not detail["type"].endswith("_type")
    }

    def is_noise(detail: Any) -> bool:
        loc = detail["loc"]
        return detail["type"].endswith("_type") and bool(loc) and not _is_field(loc[-1]) and loc[:-1] in known

    return [detail for detail in details if not is_noise(detail)]


def _explain(detail: Any, model: type[BaseModel]) -> str:
    loc, kind = detail["loc"], detail["type"]
    name = _dotted(loc)
    if kind == "extra_forbidden":
        field = _clipped(str(loc[-1]))
        if field in SERVICE_OWNED:
            return f"`{name}` is set by the service and never by a client: remove it"
        known = _fields_at(loc[:-1], model)
        if not known:
            return f"`{name}` is not a field: remove it"
        return f"`{name}` is not a field: remove it, or did you mean `{nearest(field, known)}`?"
    if kind == "missing":
        return f"`{name}` is required: add it"
    message = detail["msg"].removeprefix("Value error, ")
    if kind == "value_error":
        return f"`{name}`: {message}" if name else message
    return f"`{name}`: {message} (got {_short(detail['input'])})" if name else f"the body: {message}"


def _short(value: Any) -> str:
    return _clipped(repr(value), 60)


def _clipped(text: str, most: int = _LONGEST_NAME) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _is_field(part: int | str) -> bool:
    # Pydantic puts the member of a union into the path (`stop.list[str]`, `content.str`): clients do not know those.
    return isinstance(part, int) or (part.isidentifier() and part not in ("str", "int", "float", "bool"))


def _dotted(loc: Sequence[int | str]) -> str:
    return ".".join(_clipped(str(part)) for part in loc if _is_field(part))


def _fields_at(loc: Sequence[int | str], model: type[BaseModel]) -> list[str]:
    """Field names of the nested model that `loc` leads to."""
    current: Any = model
    for part in loc:
        if isinstance(current, type) and issubclass(current, BaseModel) and part in current.model_fields:
            current = current.model_fields[part].annotation
        models = _models_in(current)
        if len(models) == 1:
            current = models[0]
    return list(current.model_fields) if isinstance(current, type) and issubclass(current, BaseModel) else []


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for inner in getattr(annotation, "__args__", ()) for found in _models_in(inner)]
