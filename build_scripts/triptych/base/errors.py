"""Errors and findings reported to users, progress, and escaping of untrusted text for terminals."""

from __future__ import annotations

import difflib
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple, TypeVar

Severity = Literal["error", "warning", "info"]
Progress = Callable[[str, str], None]
"""Callback with the name of a stage and its result."""


def no_progress(_stage: str, _line: str) -> None:
    """Ignore the result of a stage: the `Progress` of a caller that shows none."""


_JOINERS = {"\u200c", "\u200d"}  # part of Persian and Indic spelling, and of emoji
_UNSEEN = {"Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp"}


def is_unseen(character: str) -> bool:
    """Return whether a character is a control character or invisible."""
    return character not in _JOINERS and unicodedata.category(character) in _UNSEEN


def escape_for_terminal(text: str) -> str:
    """Return `text` with control and invisible characters but newlines escaped for a terminal."""
    return "".join(
        f"[U+{ord(character):04X}]" if is_unseen(character) and character != "\n" else character
        for character in text
    )


def print_line(line: str) -> None:
    """Print a line on standard error at once, escaped for a terminal."""
    print(escape_for_terminal(line), file=sys.stderr, flush=True)


def closest(given: str, known: Iterable[str]) -> str:
    """Return ``Did you mean `…`? `` if one of `known` is similar to `given`, else an empty text."""
    found = difflib.get_close_matches(given, list(known), n=1, cutoff=0.6)
    return f"Did you mean `{found[0]}`? " if found else ""


class UserError(Exception):
    """A mistake that the user can fix; commands print it without a traceback and exit with 2.

    Attributes:
        field: Cause as the user wrote it (``core.max_batch_size``, a file, an option).
        rule: Rule that is broken, as a fact that reads alone.
        given: Value found; empty if there is none to show.
        remedy: Instruction that fixes the mistake.
    """

    def __init__(self, field: str, rule: str, *, given: object = "", remedy: str = "") -> None:
        self.field = field
        self.rule = rule
        self.given = str(given)
        self.remedy = remedy
        super().__init__(self.message)

    @property
    def message(self) -> str:
        """Field and rule, given value and remedy, a sentence each."""
        parts = [f"`{self.field}` {self.rule.rstrip('.')}."]
        if self.given:
            parts.append(f"Given: {self.given.rstrip('.')}.")
        if self.remedy:
            parts.append(
                self.remedy if self.remedy.endswith("?") else f"{self.remedy.rstrip('.')}."
            )
        return " ".join(parts)

    def as_dict(self) -> dict[str, str]:
        """Return the four parts, for ``--json``."""
        return {
            "field": self.field,
            "rule": self.rule,
            "given": self.given,
            "remedy": self.remedy,
        }


@dataclass(frozen=True)
class Finding:
    """Result of `lint` or `doctor`: the broken rule, its place and a remedy."""

    id: str  # Stable name of the check, in kebab case (``ensemble-wiring``)
    severity: Severity  # ``error`` makes the command exit with 1; ``warning`` and ``info`` do not
    file: str  # Path relative to the checked folder; empty for the machine itself
    rule: str  # Rule that is broken
    given: str  # Value found
    remedy: str  # Instruction that fixes it

    def as_dict(self) -> dict[str, str]:
        """Return the six parts, for ``--json``."""
        return asdict(self)


_T = TypeVar("_T")


class Count(NamedTuple):
    """Progress of a loop."""

    done: int  # Number of items done
    total: int  # Number of all items
    unit: str  # Noun of the items, in the plural
    per_s: float  # Items done per second; 0 if unknown
    note: str = ""  # Text after the rate, or empty

    def __str__(self) -> str:
        text = f"{self.done:,} of {self.total:,} {self.unit}"
        if self.per_s:
            left_s = (self.total - self.done) / self.per_s
            left = f"{left_s / 60:,.0f} min" if left_s >= 90 else f"{left_s:.0f} s"
            rate = f"{self.per_s:,.0f}" if self.per_s >= 10 else f"{self.per_s:.2g}"
            text += f", {rate} {self.unit}/s, {left} left"
        return text + self.note


REPORT: ContextVar[Callable[[Count], None] | None] = ContextVar("REPORT", default=None)
"""Function that shows the progress of the loops in this context."""


def counted(items: Iterable[_T], unit: str, total: int) -> Iterator[_T]:
    """Yield items, and report after each how many of `total` are done."""
    report, began = REPORT.get(), time.monotonic()
    for number, item in enumerate(items, start=1):
        yield item
        if report is not None:
            passed_s = time.monotonic() - began
            report(Count(number, total, unit, number / passed_s if passed_s else 0.0))
