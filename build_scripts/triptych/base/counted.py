"""Loops that report how far they are; the command line shows their rate and remaining time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import NamedTuple, TypeVar

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
