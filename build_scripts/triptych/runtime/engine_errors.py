"""Errors of the engine that generates text."""

from __future__ import annotations

from .request_errors import StepError

ENGINE_FAILED = "engine_failed"
ENGINE_DIED = "engine_died"


class EngineFailed(StepError):
    """The engine that generates text failed on a request."""

    code = ENGINE_FAILED


class EngineDied(StepError):
    """The engine that generates text has ended, for a reason in a few words."""

    code = ENGINE_DIED
    status = "UNAVAILABLE"

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"The engine that generates text has ended ({reason}). The server restarts it. Send "
            "the request again, to another server or later."
        )
