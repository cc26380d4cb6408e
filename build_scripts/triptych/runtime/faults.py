"""What a request can be at fault for, in words its sender can act on."""

from __future__ import annotations


class RequestError(Exception):
    """A request at fault: what is wrong, by row where a row is at fault."""

    def __init__(
        self, field: str, rule: str, given: object, remedy: str, row: int | None = None
    ) -> None:
        where = "" if row is None else f"row {row}: "
        super().__init__(f"{where}`{field}` {rule}. Given: {given}. {remedy}.")


class Overloaded(Exception):
    """There is no room for another request."""


class Stopping(Exception):
    """The server takes no more requests."""
