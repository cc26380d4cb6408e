"""Errors of the steps, and the code in front of each message that a program can read.

A message is ``[CODE NAME=NUMBER ...] TEXT``, for example ``[overloaded retry_after_ms=250] ...`` or
``[invalid_request row=2] ...``. Codes and names are part of the interface; texts may change.
"""

from __future__ import annotations

import re
from typing import NamedTuple

INVALID_REQUEST = "invalid_request"
OVERLOADED = "overloaded"
STOPPING = "stopping"
INTERNAL = "internal"
ENGINE_FAILED = "engine_failed"
ENGINE_DIED = "engine_died"

ROW = "row"
RETRY_AFTER_MS = "retry_after_ms"

TRITON_PREFIX = r"(?:in ensemble '[^']*', |\[request id: [^\]]*\] )*"
"""Pattern of what Triton puts before a model's own message."""
_HEADER = re.compile(TRITON_PREFIX + r"\[([a-z_]+)((?: [a-z_]+=\d+)*)\] ")


class StepError(Exception):
    """Error of a step with a code for programs.

    Args:
        text: Description of the error and its remedy.
        numbers: Values of the code, such as ``row`` or ``retry_after_ms``; each at least 0.

    Attributes:
        code: Error code of this module.
        status: Name of its status in Triton's `TritonError`.
    """

    code = INTERNAL
    status = "INTERNAL"

    def __init__(self, text: str, **numbers: int) -> None:
        super().__init__(text)
        self.text = text
        self.numbers = numbers

    @property
    def message(self) -> str:
        """The text with the code in front, as a client receives it."""
        values = "".join(f" {name}={number}" for name, number in self.numbers.items())
        return f"[{self.code}{values}] {self.text}"


class RequestError(StepError):
    """A request breaks a rule; `row` is the index of the row that does, if one does."""

    code = INVALID_REQUEST
    status = "INVALID_ARG"

    def __init__(
        self, field: str, rule: str, given: object, remedy: str, row: int | None = None
    ) -> None:
        numbers = {} if row is None else {ROW: row}
        shown = "" if given == "" else f" Given: {given}."
        super().__init__(f"`{field}` {rule}.{shown} {remedy}.", **numbers)

    def __str__(self) -> str:
        return f"row {self.numbers[ROW]}: {self.text}" if ROW in self.numbers else self.text


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


class HookFailure(RuntimeError):
    """A hook raised an exception; `row` is the first row for which it raises alone, if one is."""

    def __init__(self, text: str, row: int | None) -> None:
        super().__init__(text)
        self.row = row


class InternalError(StepError):
    """Internal error of a step, or of a hook with its row."""

    def __init__(self, cause: BaseException) -> None:
        row = cause.row if isinstance(cause, HookFailure) else None
        numbers = {} if row is None else {ROW: row}
        function = re.match(r"hooks\.(\w+)", str(cause))
        blame = (
            f"Correct `{function[1]}` in hooks.py" if function else "This is a bug of the pipeline"
        )
        super().__init__(f"{type(cause).__name__}: {cause}. {blame}.", **numbers)


class ReadError(NamedTuple):
    """Parsed message of a step.

    Attributes:
        code: Error code of this module, or one of a newer server.
        numbers: Values of the code by name.
        text: The message without Triton's prefix and without the code.
    """

    code: str
    numbers: dict[str, int]
    text: str


def read_step_error(message: str) -> ReadError | None:
    """Return the parsed message of a failed response; None if no step of this project wrote it."""
    header = _HEADER.match(message)
    if header is None:
        return None
    pairs = (pair.split("=") for pair in header[2].split())
    return ReadError(
        header[1], {name: int(number) for name, number in pairs}, message[header.end() :]
    )
