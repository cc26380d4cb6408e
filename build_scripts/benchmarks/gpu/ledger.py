"""What a run could not do, with the reason, and what failed: nothing is left out without a word."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import floor, inf


@dataclass(frozen=True)
class Entry:
    """One thing that gave no figures.

    Attributes:
        what: as the tables would have named it.
        reason: why not.
    """

    what: str
    reason: str


@dataclass
class Ledger:
    """Entries as they come up; each is told at once, and printed again at the end.

    Attributes:
        tell: gets each line.
        not_run: what the machine or the time did not allow.
        failed: what went wrong, or came out wrong.
        notes: what else a reader of the figures must know.
    """

    tell: Callable[[str], None]
    not_run: list[Entry] = field(default_factory=list)
    failed: list[Entry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def skip(self, what: str, reason: str) -> None:
        """Something was not run."""
        self.not_run.append(Entry(what, one_line(reason)))
        self.tell(f"not run: {what}: {self.not_run[-1].reason}")

    def fail(self, what: str, reason: str) -> None:
        """Something failed."""
        self.failed.append(Entry(what, one_line(reason)))
        self.tell(f"FAILED: {what}: {self.failed[-1].reason}")

    def note(self, line: str) -> None:
        """Something is less than it was to be."""
        if line not in self.notes:
            self.notes.append(line)
            self.tell(line)


class Budget:
    """The time that a run may take.

    Args:
        seconds: from now on; infinite for no limit.
        clock: seconds of some clock that never goes back.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    def left(self) -> float:
        """Seconds that are left; 0 at least."""
        return max(0.0, self._end - self._clock())

    def share(self, part: float) -> Budget:
        """A budget of `part` of what is left."""
        return Budget(self.left() * part, self._clock)


def fit(rounds: int, turns: int, turn_s: float, left_s: float) -> tuple[int, int]:
    """Rounds and turns of each that fit: first rounds are dropped, then turns; none may be left.

    Args:
        rounds: wanted.
        turns: wanted in each round.
        turn_s: what a turn takes.
        left_s: what all of them may take.
    """
    if left_s == inf or rounds * turns * turn_s <= left_s:
        return rounds, turns
    fitting = floor(left_s / turn_s)
    if fitting < turns:
        return (1, fitting) if fitting else (0, 0)
    return fitting // turns, turns


def one_line(error: object, most: int = 300) -> str:
    """An error's message without line breaks, and not too long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= most else text[: most - 1] + "…"
