"""What a call to a pipeline can end in besides an answer: one root, one class a cause."""

from __future__ import annotations

import re
from collections.abc import Sequence


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
        error.address = self.address
        return error


class InvalidRequest(InferenceError):
    """The request breaks a rule of the pipeline; sending it again cannot help."""


class Overloaded(InferenceError):
    """The pipeline has more work than its queue takes; later, or slower, it may answer.

    Attributes:
        again_s: when the server expects to have room, in seconds; 0 where it did not say.
    """

    @property
    def again_s(self) -> float:
        said = _AGAIN.search(self.message)
        return int(said[1]) / 1e3 if said else 0.0


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


# Triton says UNAVAILABLE for a full queue as well as gRPC does for a refused connection, so the
# text decides; the first row that fits does. A text that no row knows leaves it to `_CODES`.
_TEXTS: tuple[tuple[str, str, type[InferenceError]], ...] = (
    ("UNAVAILABLE", "requests under way", Overloaded),  # `runtime.admission`
    ("UNAVAILABLE", "exceeds maximum queue size", Overloaded),
    ("UNAVAILABLE", "request timeout expired", Overloaded),
    ("UNAVAILABLE", "protocol is restricted", AccessDenied),
    ("UNAVAILABLE", "request for unknown model", PipelineNotReady),
    ("UNAVAILABLE", "is not ready", PipelineNotReady),
    ("UNAVAILABLE", "server is stopping", PipelineNotReady),  # `runtime.admission`
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
_OURS = (
    ("this is a bug of the pipeline", "INTERNAL"),  # `runtime.stub_io`
    ("the engine failed", "INTERNAL"),  # `runtime.generation_core`
    (" must ", "INVALID_ARGUMENT"),  # `runtime.faults`
)
"""What a pipeline's steps say in a stream, first match first."""
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
_AGAIN = re.compile(r"Try again in (\d+) ms")  # `runtime.admission`
# An address in gRPC's own words.
_PLACE = re.compile(r"\bipv[46]:(\[[0-9a-fA-F:%]+\]:\d+|[\d.]+:\d+)")
# What Triton puts before a step's own message.
_PREFIX = re.compile(r"(?:in ensemble '[^']*', |\[request id: [^\]]*\] )*(?:row (\d+): )?")


def status_error(code: str, details: str, *, url: str, rows: Sequence[int] = ()) -> InferenceError:
    """The typed error for a gRPC status.

    Args:
        code: name of the status code, ``UNAVAILABLE``.
        details: the status' message.
        url: where the client's requests go, for the message.
        rows: the caller's index of each row of the request: a message that names a row of the
            request (``row 0: …``) becomes an error that names the caller's row.
    """
    prefix = _PREFIX.match(details)
    said = details[prefix.end() :] if prefix else details
    row = None
    if prefix and prefix[1] is not None and int(prefix[1]) < len(rows):
        row = rows[int(prefix[1])]
    kind = _kind(code, said.lower())
    if kind is ServerUnreachable:
        said = f"No Triton server answered at {url}: {said}"
    elif kind is InvalidRequest and code == "RESOURCE_EXHAUSTED":
        said = f"{said}. Lower `rows_per_request` or raise `max_message_bytes`"
    remedy = _REMEDIES.get(kind)
    message = said if remedy is None else f"{said.rstrip('.')}. {remedy}."
    error = kind(message, row)
    place = _PLACE.search(details)
    error.address = place[1] if place else url
    return error


def stream_error(said: str, *, url: str) -> InferenceError:
    """The typed error for the text of a stream's response, which Triton sends without a code.

    With the header ``triton_grpc_error`` it ends the stream with a status, but may then read the
    stream's state after it is freed: 32 clients' refused requests aborted 24.10 in 2 of 3 runs.
    """
    uncoded = ((text, code) for code, text, _ in _TEXTS)
    codes = (code for text, code in (*_UNCODED, *uncoded, *_OURS) if text in said.lower())
    return status_error(next(codes, "INTERNAL"), said, url=url)


def _kind(code: str, said: str) -> type[InferenceError]:
    for row_code, text, kind in _TEXTS:
        if row_code == code and text in said:
            return kind
    return _CODES.get(code, PipelineFailed)
