"""Errors of the steps, and the code in front of each message that a program can read.

A message is ``[CODE NAME=NUMBER ...] TEXT``, for example ``[overloaded retry_after_ms=250] ...`` or
``[invalid_request row=2] ...``. Codes and names are part of the interface; texts may change.
"""

from __future__ import annotations

import re

INVALID_REQUEST = "invalid_request"
INTERNAL = "internal"

ROW = "row"


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


class InternalError(StepError):
    """Internal error of a step, or of a hook with its row."""

    def __init__(self, cause: BaseException) -> None:
        row = getattr(cause, "row", None)  # of a hook; see `hooking.HookFailure`
        numbers = {} if row is None else {ROW: row}
        function = re.match(r"hooks\.(\w+)", str(cause))
        blame = (
            f"Correct `{function[1]}` in hooks.py" if function else "This is a bug of the pipeline"
        )
        super().__init__(f"{type(cause).__name__}: {cause}. {blame}.", **numbers)
