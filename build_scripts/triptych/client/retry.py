"""Retries: which requests are sent again, after which pause, and the final error."""

from __future__ import annotations

import math
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from triptych.base.errors import UserError
from triptych.client.errors import (
    DeadlineExceededError,
    InferenceError,
    OverloadedError,
    PipelineNotReadyError,
    ServerUnreachableError,
)


@dataclass(frozen=True)
class Retry:
    """Policy for sending requests again.

    A request is sent again if it met a full queue, if the connection was refused or broke before
    the response, or if the server was shutting down or loading the pipeline. With several servers
    another one may then take it. A request whose connection broke may be computed twice.

    With several servers gRPC may choose the one that is shutting down repeatedly. Its rejections
    cost nothing, so they are not charged to the budget and are retried five times as often.

    The pause is the time that a full queue asks for, plus a random time up to a limit. The limit
    doubles with every attempt up to `longest_pause_s`, so that many clients do not return at the
    same moment. No pause is begun that would outlast the deadline.

    Rows of a request whose batch failed are sent again up to three times, each alone, with pauses
    eight times as long each time. Each costs two retries of the budget. When it is spent, the error
    is raised after a pause of up to `longest_pause_s`.

    Attributes:
        attempts: Maximum number of attempts of one request, including the first.
        first_pause_s: Limit of the first random pause in seconds.
        longest_pause_s: Maximum limit of a random pause in seconds.
        budget: Number of retries of one client for reasons other than a full queue; when it is
            spent, errors are raised at once.
        budget_share: Part of a retry that each response adds to the budget, up to `budget`. If all
            servers fail, this bounds the load that clients add.
    """

    attempts: int = 5
    first_pause_s: float = 0.05
    longest_pause_s: float = 2.0
    budget: int = 100
    budget_share: float = 0.2

    def __post_init__(self) -> None:
        minimums = {"attempts": 1, "first_pause_s": 0, "longest_pause_s": 0, "budget": 0}
        for name, minimum in minimums.items():
            if (given := getattr(self, name)) < minimum:
                rule = f"must be {minimum} or more"
                raise UserError(
                    f"retry.{name}", rule, given=given, remedy=f"Give {minimum} or more"
                )
        if not 0 <= self.budget_share <= 1:
            raise UserError(
                "retry.budget_share",
                "must be from 0 to 1",
                given=self.budget_share,
                remedy="Give for example 0.2",
            )

    def pause_s(self, attempt: int) -> float:
        """Return a random pause in seconds after `attempt` attempts."""
        # The limit is reached long before 2**60; larger powers would overflow a float.
        limit = min(self.longest_pause_s, self.first_pause_s * 2 ** min(attempt - 1, 60))
        return random.uniform(0, limit)


@dataclass(frozen=True)
class Deadline:
    """Time, on the clock of `time.monotonic`, at which a call has to be over; may be infinity."""

    timeout_s: float
    at_s: float

    @classmethod
    def after(cls, timeout_s: float | None) -> Deadline:
        limit = math.inf if timeout_s is None else timeout_s
        return cls(limit, time.monotonic() + limit)

    def remaining_s(self) -> float | None:
        """Return the time left in seconds; None for no limit.

        Raises:
            DeadlineExceededError: The deadline has passed.
        """
        if math.isinf(self.at_s):
            return None
        left = self.at_s - time.monotonic()
        if left <= 0:
            raise self.exceeded_error()
        return left

    def exceeded_error(self, answered: tuple[int, int] | None = None) -> DeadlineExceededError:
        """Return the error for the caller; `answered` counts completed and all rows."""
        rows = "" if answered is None else f"{answered[0]} of {answered[1]} rows were answered. "
        return DeadlineExceededError(
            f"The deadline of {self.timeout_s:g} s passed. {rows}"
            "Raise `timeout_s`, or send fewer rows a call."
        )


class Retries:
    """Retries of one client and their budget; safe for threads."""

    def __init__(self, retry: Retry | None, *, is_several: bool = False) -> None:
        """Create the state; `is_several` means that the client has several servers."""
        self._retry = retry
        self._is_several = is_several
        self._left = 0.0 if retry is None else float(retry.budget)
        self._lock = threading.Lock()

    def answered(self) -> None:
        """Add the share of a response to the budget."""
        retry = self._retry
        if retry is not None and self._left < retry.budget:
            with self._lock:
                self._left = min(self._left + retry.budget_share, retry.budget)

    def pause_s(self, error: InferenceError, tried: Sequence[str], deadline: Deadline) -> float:
        """Return the pause in seconds before a failed request is sent again.

        Args:
            error: Error of the last attempt.
            tried: Address of each attempt, the last one included.
            deadline: Deadline of the call.

        Raises:
            InferenceError: The request is not sent again: `error`, with a description of the
                attempts.
        """
        retry = self._retry
        if retry is None or not isinstance(error, _RETRYABLE_ERRORS):
            raise error.with_attempts(describe_attempts(tried)) from None
        pause_s, attempts = retry.pause_s(len(tried)), retry.attempts
        if is_free := isinstance(error, OverloadedError):
            pause_s += error.again_s
        elif self._is_several and isinstance(error, PipelineNotReadyError):
            is_free, attempts = True, 1 + _SEVERAL_SERVERS_FACTOR * (attempts - 1)
        reason = ""
        if len(tried) >= attempts:
            reason = f"`retry` allows {attempts}"
        elif time.monotonic() + pause_s >= deadline.at_s:
            reason = f"the deadline of {deadline.timeout_s:g} s leaves no time for another"
        elif not is_free and not self._pay():
            reason = "the client's budget for more is spent"
        if reason:
            raise error.with_attempts(describe_attempts(tried, reason)) from None
        return pause_s

    def pause_alone_s(self, rows: int, attempts: int, deadline: Deadline) -> tuple[float, bool]:
        """Return the pause in seconds before rows of a failed batch are sent again, each alone.

        The pauses grow fast, and without a budget the error is reported after the longest, so that
        a client whose rows always fail meets few batches of others.

        Args:
            rows: Number of rows to send.
            attempts: Number of attempts so far.
            deadline: Deadline of the call.

        Returns:
            The pause, and whether the rows are sent after it: attempts, budget and deadline allow
            it. Otherwise the error is reported after the pause.
        """
        retry = self._retry
        if retry is None or attempts >= min(retry.attempts, _ALONE_ATTEMPTS):
            return 0.0, False
        left_s = deadline.at_s - time.monotonic()
        pause_s = retry.pause_s(3 * attempts - 2)
        if pause_s >= left_s:
            return 0.0, False
        if self._pay(_ALONE_COST * rows):
            return pause_s, True
        return min(retry.pause_s(_LONGEST), max(0.0, left_s / 2)), False

    def _pay(self, cost: int = 1) -> bool:
        with self._lock:
            if self._left < cost:
                return False
            self._left -= cost
            return True


_SEVERAL_SERVERS_FACTOR = 5
_ALONE_ATTEMPTS = 4
_LONGEST = 60
"""Number of attempts after which a pause is the longest."""
_ALONE_COST = 2
"""Retries of the budget that a row sent alone costs: with a share of 0.2, one in ten requests."""
_RETRYABLE_ERRORS = (OverloadedError, ServerUnreachableError, PipelineNotReadyError)


def describe_attempts(tried: Sequence[str], reason: str = "") -> str:
    """Describe all attempts; empty for a single one without a reason to stop."""
    if len(tried) < 2 and not reason:
        return ""
    addresses = ", ".join(
        f"{address} ({count} times)" if count > 1 else address
        for address, count in Counter(tried).items()
    )
    times = "once" if len(tried) == 1 else f"{len(tried)} times"
    return f"Tried {times}, at {addresses}" + (f"; {reason}." if reason else ".")
