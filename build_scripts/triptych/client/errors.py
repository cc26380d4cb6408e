"""Errors of calls to a pipeline: a common base and one class per cause."""

from __future__ import annotations

import re
from collections.abc import Sequence

from typing_extensions import Self

from triptych.runtime.engine_errors import ENGINE_DIED, ENGINE_FAILED
from triptych.runtime.error_messages import TRITON_PREFIX, read_step_error
from triptych.runtime.rejections import OVERLOADED, RETRY_AFTER_MS, STOPPING
from triptych.runtime.request_errors import INTERNAL, INVALID_REQUEST, ROW


class InferenceError(Exception):
    """A call without a result.

    Attributes:
        message: Cause and remedy, without the row.
        row: Index of the faulty row in the caller's list; None if no single row is at fault.
        address: Address of the server that could not be reached; else the client's address, because
            gRPC does not say which server responded.
    """

    address: str = ""

    def __init__(self, message: str, row: int | None = None) -> None:
        # Both are in `args`, so that the error can be pickled.
        super().__init__(message, row)
        self.message = message
        self.row = row

    def __str__(self) -> str:
        return self.message if self.row is None else f"row {self.row}: {self.message}"

    def with_attempts(self, attempts: str) -> Self:
        """Return the error with a description of earlier attempts, or itself if there were none."""
        if not attempts:
            return self
        error = type(self)(f"{self.message} {attempts}", self.row)
        vars(error).update(vars(self) | {"message": error.message})
        return error


class InvalidRequestError(InferenceError):
    """The request breaks a rule of the pipeline; sending it again cannot help."""


class OverloadedError(InferenceError):
    """The queue of the pipeline is full; the request may succeed later or at a lower rate.

    Attributes:
        again_s: Time after which the server expects to take a request, in seconds; 0 if it did not
            give one.
    """

    again_s: float = 0.0


class DeadlineExceededError(InferenceError):
    """The deadline passed; requests in flight were canceled."""


class CanceledError(InferenceError):
    """The client was closed during the call, or the server canceled the request."""


class PipelineNotFoundError(InferenceError):
    """The server has no pipeline of that name."""


class PipelineNotReadyError(InferenceError):
    """The server is loading or unloading the pipeline, or shutting down."""


class PipelineFailedError(InferenceError):
    """A step of the pipeline failed; the message is the server's."""


class BatchFailedError(PipelineFailedError):
    """A step failed on a whole batch; a row of another request may be the cause.

    The client has sent each row again alone, if its `retry` allows it.
    """


class AccessDeniedError(InferenceError):
    """The server, or a proxy, requires a header that is missing or was rejected."""


class ServerUnreachableError(InferenceError):
    """No server responded: wrong address, not running, other TLS settings, or a lost connection.

    Attributes:
        reason: Reason in a few words, such as ``nothing listens there``.
        remedy: Instruction that fixes it.
    """

    reason: str = ""
    remedy: str = ""


RowError = InvalidRequestError | PipelineFailedError
"""Error of a single row of a call."""

_STEPS: dict[str, type[InferenceError]] = {
    INVALID_REQUEST: InvalidRequestError,
    OVERLOADED: OverloadedError,
    STOPPING: PipelineNotReadyError,
    INTERNAL: PipelineFailedError,
    ENGINE_FAILED: PipelineFailedError,
    ENGINE_DIED: PipelineNotReadyError,
}
"""Error class of each code that a step of a pipeline gives."""
# Triton's own messages have no code. Triton reports UNAVAILABLE for a full queue, as gRPC does for
# a refused connection, so the first row whose text matches decides; otherwise `_CODES` does.
_TEXTS: tuple[tuple[str, str, type[InferenceError]], ...] = (
    ("UNAVAILABLE", "exceeds maximum queue size", OverloadedError),
    ("UNAVAILABLE", "request timeout expired", OverloadedError),
    ("UNAVAILABLE", "protocol is restricted", AccessDeniedError),
    ("UNAVAILABLE", "request for unknown model", PipelineNotReadyError),
    ("UNAVAILABLE", "is not ready", PipelineNotReadyError),
    ("UNAVAILABLE", "server exiting", PipelineNotReadyError),
    ("UNAVAILABLE", "server is stopping", PipelineNotReadyError),
    ("NOT_FOUND", "has no available versions", PipelineNotReadyError),
    # The process of a Python step ended; its server restarts.
    ("INTERNAL", "is not healthy", PipelineNotReadyError),
    # A step whose process ends passes a part of its tensors to the next one (seen in 24.10).
    ("INVALID_ARGUMENT", "_core'. got input(s)", PipelineNotReadyError),
    ("INVALID_ARGUMENT", "_postprocess'. got input(s)", PipelineNotReadyError),
    ("RESOURCE_EXHAUSTED", "message larger than max", InvalidRequestError),
    # Triton checks the lengths of texts only as it passes a whole batch to a Python step.
    ("INVALID_ARGUMENT", "incomplete string data", BatchFailedError),
    # The core returned fewer rows than the requests of a batch have.
    ("UNIMPLEMENTED", "failed to split the output tensor", BatchFailedError),
)
_UNCODED = (
    # Errors of a proxy, which it sends as the name of a model.
    ("per second of the key is reached", "RESOURCE_EXHAUSTED"),
    ("the key may not use", "PERMISSION_DENIED"),
    ("is not found", "NOT_FOUND"),
    ("inputs but got", "INVALID_ARGUMENT"),
    ("unexpected inference input", "INVALID_ARGUMENT"),
)
"""Messages of Triton about a stream's request before a model has received it."""
_CODES: dict[str, type[InferenceError]] = {
    "INVALID_ARGUMENT": InvalidRequestError,
    "OUT_OF_RANGE": InvalidRequestError,
    "UNIMPLEMENTED": InvalidRequestError,
    "INTERNAL": BatchFailedError,
    "DEADLINE_EXCEEDED": DeadlineExceededError,
    "CANCELLED": CanceledError,
    "NOT_FOUND": PipelineNotFoundError,
    "PERMISSION_DENIED": AccessDeniedError,
    "UNAUTHENTICATED": AccessDeniedError,
    "RESOURCE_EXHAUSTED": OverloadedError,
    "UNAVAILABLE": ServerUnreachableError,
}
_REMEDIES: dict[type[InferenceError], str] = {
    OverloadedError: "Try again later, send less at once, or give the client a `retry`",
    PipelineNotFoundError: "Check the name, and that the server's repository contains it",
    PipelineNotReadyError: "Wait until the server reports the pipeline ready",
    AccessDeniedError: "Give the header in `headers`",
    BatchFailedError: "A row of another request of its batch may be the cause, too",
}
_UNCONNECTED = re.compile(
    r"^(?:connections to all backends failing|failed to connect to all addresses); last error: "
    r"(?:[A-Z_]+: )?(?:ipv[46]:\S+: )?"
)
"""Start of gRPC's messages before the reason why no connection was made."""
_OTHER_PORT = "Check the address and `tls`: the port of gRPC is 8001 by default, that of HTTP 8000"
_UNREACHABLE = (
    (
        "connection refused",
        "nothing listens there",
        "Start a server with `triptych serve`, or give the address of one",
    ),
    (
        "socket closed",
        "the server closes connections of gRPC, as ports of HTTP and of TLS do",
        _OTHER_PORT,
    ),
    ("failed parsing http/2", "the port has another protocol than gRPC", _OTHER_PORT),
)
"""Part of gRPC's reason why no connection was made, the reason in words, and the remedy."""
# An address in gRPC's messages.
_ADDRESS = re.compile(r"\bipv[46]:(\[[0-9a-fA-F:%]+\]:\d+|[\d.]+:\d+)")
_PREFIX = re.compile(f"^{TRITON_PREFIX}")


def status_error(code: str, details: str, *, url: str, rows: Sequence[int] = ()) -> InferenceError:
    """Return the typed error for a gRPC status.

    Args:
        code: Name of the status code, ``UNAVAILABLE``.
        details: Message of the status. If a step of a pipeline wrote it, it begins with a code
            (`triptych.runtime.request_errors`), which decides alone.
        url: Address that the client's requests go to, for the message.
        rows: The caller's index of each row of the request: an error of a row of the request
            becomes an error of the caller's row.
    """
    step = read_step_error(details)
    row, again_s = None, 0.0
    if step is not None:
        text = step.text
        kind = _STEPS.get(step.code) or _CODES.get(code, PipelineFailedError)
        number = step.numbers.get(ROW)
        row = rows[number] if number is not None and number < len(rows) else None
        again_s = step.numbers.get(RETRY_AFTER_MS, 0) / 1e3
    elif code == details == "CANCELLED":
        # gRPC's own text: a server that ends, from 25.05 on, so ends what it has not answered.
        kind, text = ServerUnreachableError, "the server ended before its response"
    else:
        text = _PREFIX.sub("", details, count=1)
        kind = _kind(code, text.lower())
    reason, remedy = "", _REMEDIES.get(kind)
    if kind is ServerUnreachableError:
        reason, remedy = _explain_unreachable(text)
        text = f"No Triton server answered at {url}: {reason}"
    elif kind is InvalidRequestError and code == "RESOURCE_EXHAUSTED":
        text = f"{text}. Lower `rows_per_request` or raise `max_message_bytes`"
    message = text if remedy is None else f"{text.rstrip('.')}. {remedy}."
    error = kind(message, row)
    if isinstance(error, OverloadedError):
        error.again_s = again_s
    if isinstance(error, ServerUnreachableError):
        error.reason, error.remedy = reason, remedy or ""
    address = _ADDRESS.search(details)
    error.address = address[1] if address else url
    return error


def _explain_unreachable(text: str) -> tuple[str, str]:
    """Return the reason why no server was reached, from gRPC's text, and the remedy."""
    reason = _UNCONNECTED.sub("", text)
    unconnected = reason != text or reason.startswith("Failed parsing")
    for part, words, remedy in _UNREACHABLE if unconnected else ():
        if part in reason.lower():
            return words, remedy
    return reason, "Check the address and `tls`, and that the server is running"


def stream_error(text: str, *, url: str) -> InferenceError:
    """Return the typed error for the text of a stream's response, which has no gRPC status.

    With the header ``triton_grpc_error`` it ends the stream with a status, but may then read the
    stream's state after it is freed: rejected requests of 32 clients aborted 24.10 in 2 of 3 runs.
    """
    uncoded = ((part, code) for code, part, _ in _TEXTS)
    codes = (code for part, code in (*_UNCODED, *uncoded) if part in text.lower())
    return status_error(next(codes, "UNKNOWN"), text, url=url)


def _kind(code: str, message: str) -> type[InferenceError]:
    for row_code, text, kind in _TEXTS:
        if row_code == code and text in message:
            return kind
    return _CODES.get(code, PipelineFailedError)
