"""A check that may block, repeated in a thread while others look after the server."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor, Future

HEALTH_INTERVAL_S = 2.0
"""Interval of the health check: a request of one row to each pipeline."""
REPLACED_AFTER = 2
"""Number of failed checks in a row until a server is restarted. The check itself allows for what
the server computes; the second one excludes a lost connection."""


class PeriodicCheck:
    """A check that is run again and again in a thread of a pool; at most one run is in progress.

    Attributes:
        failures: Number of failed runs in a row.
        fault: Fault that the last run found; empty if it found none.

    Args:
        pool: Executor of the runs.
        find_fault: The check; it returns a fault in a few words, or None.
        interval_s: Time between two runs in seconds.
    """

    def __init__(
        self, pool: Executor, find_fault: Callable[[], str | None], interval_s: float
    ) -> None:
        self._pool = pool
        self._find_fault = find_fault
        self._interval_s = interval_s
        self.failures = 0
        self.fault = ""
        self._run: Future[str | None] | None = None
        self._next_at = time.monotonic() + self._interval_s

    def has_result(self) -> bool:
        """Start a run if one is due; return whether one has ended since the last call."""
        if self._run is None:
            if time.monotonic() >= self._next_at:
                self._run = self._pool.submit(self._find_fault)
            return False
        if not self._run.done():
            return False
        self.fault = self._run.result() or ""
        self.failures = self.failures + 1 if self.fault else 0
        self._run = None
        self._next_at = time.monotonic() + self._interval_s
        return True
