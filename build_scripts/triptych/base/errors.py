"""What a command tells its caller: a user's mistake, a finding of a check, progress, inert."""

from __future__ import annotations

import difflib
import unicodedata
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Literal

Severity = Literal["error", "warning", "info"]
Progress = Callable[[str, str], None]
"""Called with the name of a stage and what became of it."""

_JOINERS = {"\u200c", "\u200d"}  # part of Persian and Indic spelling, and of emoji
_UNSEEN = {"Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp"}


def is_unseen(character: str) -> bool:
    """Whether a character is a command or shows nothing."""
    return character not in _JOINERS and unicodedata.category(character) in _UNSEEN


def inert(text: str) -> str:
    """`text` for a terminal: lines as they are, what it would obey or not show spelled out."""
    return "".join(
        f"[U+{ord(character):04X}]" if is_unseen(character) and character != "\n" else character
        for character in text
    )


def closest(given: str, known: Iterable[str]) -> str:
    """``Did you mean `…`? `` for a remedy, where one of `known` is like `given`; else nothing."""
    found = difflib.get_close_matches(given, list(known), n=1, cutoff=0.6)
    return f"Did you mean `{found[0]}`? " if found else ""


class RenamedWarning(FutureWarning):
    """Use of a former name, which a later release will no longer accept."""


def warn_renamed(old: str, new: str) -> None:
    """Warn that `old` has a new name; the command line prints the warning as one line."""
    warnings.warn(
        f"`{old}` is now called `{new}`. The old name will be removed in a later release.",
        RenamedWarning,
        stacklevel=3,
    )


class UserError(Exception):
    """A mistake the user can mend. The command line prints it without a traceback and exits with 2.

    Attributes:
        field: what is wrong, as the user wrote it (``core.max_batch_size``, a file, a flag).
        rule: what must hold.
        given: what was found instead; empty where there is nothing to show.
        remedy: what to do about it.
    """

    def __init__(self, field: str, rule: str, *, given: object = "", remedy: str = "") -> None:
        self.field = field
        self.rule = rule
        self.given = str(given)
        self.remedy = remedy
        super().__init__(self.message)

    @property
    def message(self) -> str:
        """One sentence each: field and rule, given, remedy."""
        parts = [f"`{self.field}` {self.rule.rstrip('.')}."]
        if self.given:
            parts.append(f"Given: {self.given.rstrip('.')}.")
        if self.remedy:
            parts.append(f"{self.remedy.rstrip('.')}.")
        return " ".join(parts)

    def as_dict(self) -> dict[str, str]:
        """The four parts, for ``--json``."""
        return {
            "field": self.field,
            "rule": self.rule,
            "given": self.given,
            "remedy": self.remedy,
        }


@dataclass(frozen=True)
class Finding:
    """One result of `lint` or `doctor`: what rule is broken, where, and what mends it.

    Attributes:
        id: stable name of the check, in kebab case (``ensemble-wiring``).
        severity: ``error`` makes the command exit with 1; ``warning`` and ``info`` do not.
        file: path relative to what was checked; empty for the machine itself.
        rule: what must hold.
        given: what was found.
        remedy: what to do about it.
    """

    id: str
    severity: Severity
    file: str
    rule: str
    given: str
    remedy: str

    def as_dict(self) -> dict[str, str]:
        """The six parts, for ``--json``."""
        return asdict(self)
