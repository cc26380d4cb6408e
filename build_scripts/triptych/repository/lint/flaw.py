"""What a lint check yields: a `Finding` without its id, and mostly without its file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from triptych.base.errors import Severity


@dataclass(frozen=True)
class Flaw:
    """One broken rule; its file is the config of what is checked where `file` is empty.

    Severity: ``error`` when the server refuses to load it, or requests fail, hang or come back
    wrong; ``warning`` when it serves but is slow, fragile or not what was meant; ``info`` when it
    is as planned and worth knowing.
    """

    severity: Severity
    rule: str
    given: str
    remedy: str
    file: str = ""


error = partial(Flaw, "error")
warning = partial(Flaw, "warning")
info = partial(Flaw, "info")


def names(items: Iterable[object]) -> str:
    """A sorted list for a message; ``none`` when there is nothing."""
    return ", ".join(sorted({str(item) for item in items})) or "none"


def dims_text(dims: Iterable[int]) -> str:
    """Dims as in config.pbtxt: ``[-1, 384]``."""
    return f"[{', '.join(str(dim) for dim in dims)}]"
