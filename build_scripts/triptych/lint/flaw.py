"""What a lint check yields: a `Finding` that does not know its id yet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from triptych.errors import Severity


@dataclass(frozen=True)
class Flaw:
    """One broken rule; the table of checks adds the id.

    Severity: ``error`` when the server refuses to load it, or requests fail, hang or come back
    wrong; ``warning`` when it serves but is slow, fragile or not what was meant; ``info`` when it
    is as planned and worth knowing.
    """

    severity: Severity
    file: str
    rule: str
    given: str
    remedy: str


def error(file: str, rule: str, *, given: str, remedy: str) -> Flaw:
    """The server refuses it, or requests fail, hang or come back wrong."""
    return Flaw("error", file, rule, given, remedy)


def warning(file: str, rule: str, *, given: str, remedy: str) -> Flaw:
    """It serves, but slowly, fragilely or not as meant."""
    return Flaw("warning", file, rule, given, remedy)


def info(file: str, rule: str, *, given: str, remedy: str) -> Flaw:
    """As planned, and worth knowing."""
    return Flaw("info", file, rule, given, remedy)


def names(items: Iterable[object]) -> str:
    """A sorted list for a message; ``none`` when there is nothing."""
    return ", ".join(sorted({str(item) for item in items})) or "none"


def dims_text(dims: Iterable[int]) -> str:
    """Dims as in config.pbtxt: ``[-1, 384]``."""
    return f"[{', '.join(str(dim) for dim in dims)}]"
