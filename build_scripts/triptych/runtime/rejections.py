"""Errors of a server that takes no more requests: it is overloaded, or it is stopping."""

from __future__ import annotations

from .request_errors import StepError

OVERLOADED = "overloaded"
STOPPING = "stopping"
RETRY_AFTER_MS = "retry_after_ms"


class Overloaded(StepError):
    """A limit of the pipeline is reached; `retry_after_ms` is the time until the next attempt."""

    code = OVERLOADED
    status = "UNAVAILABLE"

    def __init__(self, text: str, retry_after_ms: float) -> None:
        super().__init__(text, **{RETRY_AFTER_MS: max(0, round(retry_after_ms))})


class Stopping(StepError):
    """The server is stopping and rejects all requests."""

    code = STOPPING
    status = "UNAVAILABLE"

    def __init__(self) -> None:
        super().__init__("The server is stopping. Send the request to another server, or later.")
