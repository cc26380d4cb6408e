"""Age that separates the requests whose clients were answered from those whose clients had left."""

from __future__ import annotations

import math
from collections.abc import Iterable

LOSS = 4.0
"""Weight of a row that is lost below the learned age, against one that is answered above it."""


def find_separating_age(outcomes: Iterable[tuple[float, int]]) -> float:
    """Return the age in seconds with the least rows lost below it and answered above it.

    Args:
        outcomes: Age and rows of each of the last requests, at least one. Rows are negative if the
            request was lost.

    Returns:
        The age of an answered request; infinity if none was lost, half of the highest age if all
        were.
    """
    ages = sorted(outcomes)
    above = sum(rows for _, rows in ages if rows > 0)
    lost, best, found_s = 0.0, math.inf, ages[-1][0] / 2
    for age_s, rows in ages:
        if rows < 0:
            lost -= LOSS * rows
        else:
            above -= rows
            if lost + above <= best:
                best, found_s = lost + above, age_s
    return found_s if lost else math.inf
