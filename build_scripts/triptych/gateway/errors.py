"""Errors of the gateway: HTTP status, code and parameter, in the format of each API."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pydantic import ValidationError
from pydantic_core import to_json

from triptych.client import (
    AccessDeniedError,
    BatchFailedError,
    CanceledError,
    DeadlineExceededError,
    InferenceError,
    InvalidRequestError,
    OverloadedError,
    PipelineFailedError,
    PipelineNotFoundError,
    PipelineNotReadyError,
    ServerUnreachableError,
)

CLIENT_CLOSED = 499
"""Status, in metrics only, of a request whose client disconnected."""


class ApiError(Exception):
    """A request without a result.

    Attributes:
        status: HTTP status.
        code: Stable name of the error, for programs.
        message: Field, rule, given value and remedy, as sentences.
        param: Field of the request that is at fault, such as ``input[3]``; None if none is.
        retry_after_s: Time after which the server expects to take the request; None if unknown.
        closes: Whether the connection is closed, because the body was not read to its end.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        closes: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.closes = closes

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response in addition to those of every response."""
        headers = {"connection": "close"} if self.closes else {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.status == 415:
            headers["accept-encoding"] = "identity"
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
            headers["retry-after-ms"] = str(math.ceil(1000 * self.retry_after_s))
        return headers


_MAX_SHOWN = 120
"""Maximum number of characters of a given value in a message."""


def as_json(value: object) -> str:
    """Return the beginning of a value of a request as JSON."""
    return to_json(value, inf_nan_mode="constants").decode()[:_MAX_SHOWN]


def invalid(field: str, rule: str, given: str, remedy: str, *, status: int = 400) -> ApiError:
    """Return the error of a request whose `field` breaks a rule."""
    shown = f" Given: {given:.{_MAX_SHOWN}}." if given else ""
    message = f"`{field}` {rule}.{shown} {remedy}."
    return ApiError(status, "invalid_value", message, param=field)


_STATUSES: dict[type[InferenceError], tuple[int, str]] = {
    InvalidRequestError: (400, "invalid_value"),
    PipelineNotFoundError: (404, "model_not_found"),
    OverloadedError: (429, "rate_limit_exceeded"),
    PipelineFailedError: (500, "pipeline_failed"),
    BatchFailedError: (500, "pipeline_failed"),
    # The gateway's own credentials, which its clients cannot change.
    AccessDeniedError: (502, "upstream_access_denied"),
    PipelineNotReadyError: (503, "pipeline_not_ready"),
    ServerUnreachableError: (503, "server_unreachable"),
    CanceledError: (503, "canceled"),
    DeadlineExceededError: (504, "deadline_exceeded"),
}
RETRY_S = 1.0
"""Time to retry, in seconds, after errors of a server that restarts or loads a pipeline."""


def from_inference(error: InferenceError, rows: str | Callable[[int], str]) -> ApiError:
    """Return the error for the client of an HTTP request.

    Args:
        error: Error of the request to the pipeline.
        rows: Name of the list of rows in the request, or a function that returns the name of one.
    """
    status, code = _STATUSES.get(type(error), (500, "internal"))
    param = None
    if error.row is not None:
        param = rows(error.row) if callable(rows) else f"{rows}[{error.row}]"
    message = error.message if param is None else f"{param}: {error.message}"
    if isinstance(error, ServerUnreachableError):  # the address is the operator's
        message = "The Triton server of the gateway does not answer. Try again later."
    retry_after_s = None
    if isinstance(error, OverloadedError):
        retry_after_s = error.again_s or RETRY_S
    elif status == 503:
        retry_after_s = RETRY_S
    return ApiError(status, code, message, param=param, retry_after_s=retry_after_s)


_MAX_ERRORS = 100
"""Maximum number of errors that are read; a million of them would take gigabytes."""


def from_validation(error: ValidationError) -> ApiError:
    """Return the error of a body that does not fit the type of the request."""
    if error.error_count() > _MAX_ERRORS:
        return invalid(
            "body",
            "must fit the type of the request",
            f"{error.error_count()} mistakes",
            "See /openapi.json",
            status=422,
        )
    # Each member of a union has an error; that with the longest path fits the most.
    first = max(error.errors(include_url=False), key=lambda each: len(each["loc"]))
    # A member of a union, such as `str`, `list[str]` or `Document`, is no field of the request.
    path = [part for part in first["loc"] if isinstance(part, int) or _is_field(part)]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    name = name.removeprefix(".")[:_MAX_SHOWN] or "body"
    rule = first["msg"].removeprefix("Value error, ").partition(" or instance of")[0].rstrip(".")
    if first["type"] == "extra_forbidden":
        rule = "is not supported by this endpoint"
    no_value = {"missing": "", "json_invalid": " Given: other bytes."}.get(first["type"])
    shown = f" Given: {as_json(first['input'])}." if no_value is None else no_value
    message = f"`{name}`: {rule}.{shown} See /openapi.json for the type of the request."
    status = 400 if first["type"] == "json_invalid" else 422
    return ApiError(status, "invalid_value", message, param=name)


def _is_field(part: str) -> bool:
    return part.isidentifier() and part.islower() and part not in {"str", "int", "bool", "float"}


@dataclass(frozen=True)
class ErrorFormat:
    """Body and statuses of the errors of one API.

    Attributes:
        body: Returns the body of an error as plain data.
        statuses: Other statuses of this API, by the status of the error.
        schema: JSON schema of the body.
    """

    body: Callable[[ApiError], Mapping[str, object]]
    statuses: Mapping[int, int]
    schema: Mapping[str, object]

    def status(self, error: ApiError) -> int:
        return self.statuses.get(error.status, error.status)


_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def _openai(error: ApiError) -> dict[str, object]:
    default = "server_error" if error.status >= 500 else "invalid_request_error"
    kind = _OPENAI_TYPES.get(error.status, default)
    shown = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return {"error": shown}


def _cohere(error: ApiError) -> dict[str, object]:
    # Clients of Cohere read `message`, those of Jina `detail`.
    return {"message": error.message, "detail": error.message, "code": error.code}


_TEI_TYPES = {401: "Unauthorized", 413: "Validation", 429: "Overloaded", 503: "Unhealthy"}


def _tei(error: ApiError) -> dict[str, object]:
    default = "Backend" if error.status >= 500 else "Validation"
    return {"error": error.message, "error_type": _TEI_TYPES.get(error.status, default)}


def _schema(**properties: object) -> dict[str, object]:
    return {"type": "object", "properties": properties, "required": list(properties)}


_TEXT = {"type": "string"}
_TEXT_OR_NULL = {"type": ["string", "null"]}
_OPENAI_ERROR = _schema(message=_TEXT, type=_TEXT, param=_TEXT_OR_NULL, code=_TEXT)
# OpenAI answers 400 to a body of another type.
OPENAI = ErrorFormat(_openai, {422: 400}, _schema(error=_OPENAI_ERROR))
COHERE = ErrorFormat(_cohere, {}, _schema(message=_TEXT, detail=_TEXT, code=_TEXT))
TEI = ErrorFormat(_tei, {400: 422, 500: 424}, _schema(error=_TEXT, error_type=_TEXT))
