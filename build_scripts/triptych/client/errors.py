"""What a call to a pipeline can end in besides an answer: one root, one class a cause."""

from __future__ import annotations

import re
from collections.abc import Sequence

from triptych.runtime.faults import (
    ENGINE_FAILED,
    INTERNAL,
    INVALID_REQUEST,
    OVERLOADED,
    RETRY_AFTER_MS,
    ROW,
    STOPPING,
    TRITON_PREFIX,
    read_step_error,
)


class InferenceError(Exception):
    """A call that got no answer.

    Attributes:
        message: what happened and what to do about it, without the row.
        row: index, in the list the caller gave, of the row at fault; None where no single row is.
        address: of the server that could not be reached; else the client's, for gRPC does not tell
            which server answered.
    """

    address: str = ""

    def __init__(self, message: str, row: int | None = None) -> None:
        # Both go to `args`, so that the error survives a trip between processes.
        super().__init__(message, row)
        self.message = message
        self.row = row

    def __str__(self) -> str:
        return self.message if self.row is None else f"row {self.row}: {self.message}"

    def after(self, told: str) -> InferenceError:
        """The same, and what had been tried before; itself where that is nothing."""
        if not told:
            return self
        error = type(self)(f"{self.message} {told}", self.row)
        vars(error).update(vars(self) | {"message": error.message})
        return error


class InvalidRequest(InferenceError):
    """The request breaks a rule of the pipeline; sending it again cannot help."""


class Overloaded(InferenceError):
    """The pipeline has more work than its queue takes; later, or slower, it may answer.

    Attributes:
        again_s: Time after which the server expects to take a request, in seconds; 0 if it did not
            give one.
    """

    again_s: float = 0.0


class NeighbourFailed(InferenceError):
    """Another client's broken request failed all that were batched with it; sent again as it is.

    Triton checks the lengths in a text input only when it hands a whole batch to a Python step.
    The client's own lengths are right.
    """


class DeadlineExceeded(InferenceError):
    """The time the caller gave passed; what was still under way has been cancelled."""


class Cancelled(InferenceError):
    """The client was closed while the call was under way, or the server gave the request up."""


class PipelineNotFound(InferenceError):
    """The server runs but knows no pipeline of that name."""


class PipelineNotReady(InferenceError):
    """The server knows the pipeline but is loading it, unloading it or going down."""


class PipelineFailed(InferenceError):
    """A step of the pipeline broke; the message is the server's own."""


class AccessDenied(InferenceError):
    """The server, or a proxy before it, wants a header that was missing or not accepted."""


class ServerUnreachable(InferenceError):
    """No server answered: wrong address, not running, not the same TLS, or the line was cut."""


_STEPS: dict[str, type[InferenceError]] = {
    INVALID_REQUEST: InvalidRequest,
    OVERLOADED: Overloaded,
    STOPPING: PipelineNotReady,
    INTERNAL: PipelineFailed,
    ENGINE_FAILED: PipelineFailed,
}
"""Error class of each code that a step of a pipeline gives."""
# What Triton itself says has no code. It answers UNAVAILABLE for a full queue, as gRPC does for a
# refused connection, so the text decides; the first row that fits does. A text that no row knows
# leaves it to `_CODES`.
_TEXTS: tuple[tuple[str, str, type[InferenceError]], ...] = (
    ("UNAVAILABLE", "exceeds maximum queue size", Overloaded),
    ("UNAVAILABLE", "request timeout expired", Overloaded),
    ("UNAVAILABLE", "protocol is restricted", AccessDenied),
    ("UNAVAILABLE", "request for unknown model", PipelineNotReady),
    ("UNAVAILABLE", "is not ready", PipelineNotReady),
    ("UNAVAILABLE", "server exiting", PipelineNotReady),
    ("NOT_FOUND", "has no available versions", PipelineNotReady),
    ("RESOURCE_EXHAUSTED", "message larger than max", InvalidRequest),
    ("INVALID_ARGUMENT", "incomplete string data", NeighbourFailed),
)
_UNCODED = (
    ("is not found", "NOT_FOUND"),
    ("inputs but got", "INVALID_ARGUMENT"),
    ("unexpected inference input", "INVALID_ARGUMENT"),
)
"""What Triton says of a stream's request before any model has seen it."""
_CODES: dict[str, type[InferenceError]] = {
    "INVALID_ARGUMENT": InvalidRequest,
    "OUT_OF_RANGE": InvalidRequest,
    "UNIMPLEMENTED": InvalidRequest,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "CANCELLED": Cancelled,
    "NOT_FOUND": PipelineNotFound,
    "PERMISSION_DENIED": AccessDenied,
    "UNAUTHENTICATED": AccessDenied,
    "RESOURCE_EXHAUSTED": Overloaded,
    "UNAVAILABLE": ServerUnreachable,
}
_REMEDIES: dict[type[InferenceError], str] = {
    Overloaded: "Try again later, send less at once, or give the client a `retry`",
    PipelineNotFound: "Check the name, and that the server's repository holds it",
    PipelineNotReady: "Wait until the server reports the pipeline ready",
    AccessDenied: "Give the header in `headers`",
    ServerUnreachable: "Check the address and `tls`, and that the server is running",
}
# An address in gRPC's own words.
_PLACE = re.compile(r"\bipv[46]:(\[[0-9a-fA-F:%]+\]:\d+|[\d.]+:\d+)")
_PREFIX = re.compile(f"^{TRITON_PREFIX}")


def status_error(code: str, details: str, *, url: str, rows: Sequence[int] = ()) -> InferenceError:
    """Return the typed error for a gRPC status.

    Args:
        code: Name of the status code, ``UNAVAILABLE``.
        details: Message of the status. If a step of a pipeline wrote it, it begins with a code
            (`triptych.runtime.faults`), which decides alone.
        url: Address that the client's requests go to, for the message.
        rows: The caller's index of each row of the request: an error of a row of the request
            becomes an error of the caller's row.
    """
    step = read_step_error(details)
    row, again_s = None, 0.0
    if step is not None:
        said = step.text
        kind = _STEPS.get(step.code) or _CODES.get(code, PipelineFailed)
        number = step.numbers.get(ROW)
        row = rows[number] if number is not None and number < len(rows) else None
        again_s = step.numbers.get(RETRY_AFTER_MS, 0) / 1e3
    else:
        said = _PREFIX.sub("", details, count=1)
        kind = _kind(code, said.lower())
    if kind is ServerUnreachable:
        said = f"No Triton server answered at {url}: {said}"
    elif kind is InvalidRequest and code == "RESOURCE_EXHAUSTED":
        said = f"{said}. Lower `rows_per_request` or raise `max_message_bytes`"
    remedy = _REMEDIES.get(kind)
    message = said if remedy is None else f"{said.rstrip('.')}. {remedy}."
    error = kind(message, row)
    if isinstance(error, Overloaded):
        error.again_s = again_s
    place = _PLACE.search(details)
    error.address = place[1] if place else url
    return error


def stream_error(said: str, *, url: str) -> InferenceError:
    """Return the typed error for the text of a stream's response, which has no gRPC status.

    With the header ``triton_grpc_error`` it ends the stream with a status, but may then read the
    stream's state after it is freed: 32 clients' refused requests aborted 24.10 in 2 of 3 runs.
    """
    uncoded = ((text, code) for code, text, _ in _TEXTS)
    codes = (code for text, code in (*_UNCODED, *uncoded) if text in said.lower())
    return status_error(next(codes, "INTERNAL"), said, url=url)


def _kind(code: str, said: str) -> type[InferenceError]:
    for row_code, text, kind in _TEXTS:
        if row_code == code and text in said:
            return kind
    return _CODES.get(code, PipelineFailed)
