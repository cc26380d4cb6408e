"""Reasons for everything that did not run or failed, and the time budget of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple


class Entry(NamedTuple):
    """Something without figures, by its name in the tables, and the reason."""

    what: str
    reason: str


@dataclass
class Ledger:
    """Entries of a run, each of which `report` also receives at once, as a line."""

    report: Callable[[str], None]
    not_run: list[Entry] = field(default_factory=list)
    failed: list[Entry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def skip(self, what: str, reason: str) -> None:
        """Add something that did not run."""
        self.not_run.append(Entry(what, one_line(reason)))
        self.report(f"not run: {what}: {self.not_run[-1].reason}")

    def fail(self, what: str, reason: object) -> None:
        """Add something that failed."""
        text = f"{type(reason).__name__}: {reason}" if isinstance(reason, Exception) else reason
        self.failed.append(Entry(what, one_line(text)))
        self.report(f"FAILED: {what}: {self.failed[-1].reason}")

    def note(self, line: str) -> None:
        """Add a remark, once."""
        if line not in self.notes:
            self.notes.append(line)
            self.report(line)

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Run the block; whatever it raises makes `what` fail and ends only the block."""
        try:
            yield
        except Exception as error:
            self.fail(what, error)


class Budget:
    """Time that a run may take, from its creation on."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    def left(self) -> float:
        """Return the remaining seconds, at least 0."""
        return max(0.0, self._end - self._clock())

    def share(self, ratio: float) -> Budget:
        """Return a budget of a part of the remaining time."""
        return Budget(self.left() * ratio, self._clock)


def one_line(error: object, max_length: int = 300) -> str:
    """Return the message of an error without line breaks, shortened to `max_length`."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= max_length else text[: max_length - 1] + "…"
