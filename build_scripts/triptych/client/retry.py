"""Whether a request is sent again, when, and what it says once it is not."""

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
    """How often, and after what pause, a request is sent again.

    That is done where it met a full queue, where the connection was refused or broke before the
    answer, and where the server was going down or was still loading the pipeline; of several
    servers another one may then take it. A request whose connection broke may be computed twice.

    Of several servers gRPC may choose the one that is going down again and again. What that one
    refuses costs nobody anything: it is not of the budget, and is sent again five times as often.

    The pause is what a full queue asked for, and a time drawn at random between 0 and a limit that
    doubles with every attempt, up to `longest_pause_s`, so that many clients do not come back at
    the same moment. A pause that would outlast the deadline is not begun.

    Attributes:
        attempts: most sendings of one request, the first among them.
        first_pause_s: the limit of the first pause.
        longest_pause_s: that of all.
        budget: how many requests one client may send again at once for any reason but a full
            queue; when they are spent, errors are raised at once.
        budget_share: how much of one such sending each answer earns anew, up to `budget`: where
            all servers fail, this bounds the load that clients add to it.
    """

    attempts: int = 5
    first_pause_s: float = 0.05
    longest_pause_s: float = 2.0
    budget: int = 100
    budget_share: float = 0.2

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise UserError("retry.attempts", "must be 1 or more", given=self.attempts)
        if self.budget < 0:
            raise UserError("retry.budget", "must be 0 or more", given=self.budget)
        if not 0 <= self.budget_share <= 1:
            raise UserError("retry.budget_share", "must be from 0 to 1", given=self.budget_share)

    def pause_s(self, attempt: int) -> float:
        """A random pause after `attempt` sendings."""
        # Beyond 2**60 a float has no more use for it.
        limit = min(self.longest_pause_s, self.first_pause_s * 2 ** min(attempt - 1, 60))
        return random.uniform(0, limit)


@dataclass(frozen=True)
class Deadline:
    """The moment (on the clock of `time.monotonic`) a call must be over by; may be infinity."""

    timeout_s: float
    at_s: float

    @classmethod
    def after(cls, timeout_s: float | None) -> Deadline:
        limit = math.inf if timeout_s is None else timeout_s
        return cls(limit, time.monotonic() + limit)

    def left_s(self) -> float | None:
        """Time left, in the form gRPC takes: None waits for ever.

        Raises:
            DeadlineExceededError: none is left.
        """
        if math.isinf(self.at_s):
            return None
        left = self.at_s - time.monotonic()
        if left <= 0:
            raise self.passed()
        return left

    def passed(self, answered: tuple[int, int] | None = None) -> DeadlineExceededError:
        """What the caller is told; `answered` is how many rows were, of how many."""
        rows = "" if answered is None else f"{answered[0]} of {answered[1]} rows were answered. "
        return DeadlineExceededError(
            f"The deadline of {self.timeout_s:g} s passed. {rows}"
            "Raise `timeout_s`, or send fewer rows a call."
        )


class Retries:
    """What one client sends again, and its budget; for any number of threads."""

    def __init__(self, retry: Retry | None, *, is_several: bool = False) -> None:
        """`is_several`: the client has more than one server."""
        self._retry = retry
        self._is_several = is_several
        self._left = 0.0 if retry is None else float(retry.budget)
        self._turn = threading.Lock()

    def answered(self) -> None:
        """An answer came: it earns a share of a sending."""
        retry = self._retry
        if retry is not None and self._left < retry.budget:
            with self._turn:
                self._left = min(self._left + retry.budget_share, retry.budget)

    def pause_s(self, error: InferenceError, tried: Sequence[str], deadline: Deadline) -> float:
        """The pause before a request is sent again that ended in `error`.

        Args:
            error: of the last sending.
            tried: the address of each sending so far, the last among them.
            deadline: of the call.

        Raises:
            InferenceError: it is not sent again: `error`, with what was tried.
        """
        retry = self._retry
        if retry is None or not isinstance(error, _SENT_AGAIN):
            raise error.after(_told(tried, "")) from None
        pause_s, attempts = retry.pause_s(len(tried)), retry.attempts
        if is_free := isinstance(error, OverloadedError):
            pause_s += error.again_s
        elif self._is_several and isinstance(error, PipelineNotReadyError):
            is_free, attempts = True, 1 + _MORE_ELSEWHERE * (attempts - 1)
        why = ""
        if len(tried) >= attempts:
            why = f"`retry` allows {attempts}"
        elif time.monotonic() + pause_s >= deadline.at_s:
            why = f"the deadline of {deadline.timeout_s:g} s leaves no time for another"
        elif not is_free and not self._pay():
            why = "the client's budget for more is spent"
        if why:
            raise error.after(_told(tried, why)) from None
        return pause_s

    def _pay(self) -> bool:
        with self._turn:
            if self._left < 1:
                return False
            self._left -= 1
            return True


_MORE_ELSEWHERE = 5
_SENT_AGAIN = (OverloadedError, ServerUnreachableError, PipelineNotReadyError)


def _told(tried: Sequence[str], why: str) -> str:
    """What became of all sendings; empty where there was one and no more were asked for."""
    if len(tried) < 2 and not why:
        return ""
    places = ", ".join(
        f"{address} ({count} times)" if count > 1 else address
        for address, count in Counter(tried).items()
    )
    times = "once" if len(tried) == 1 else f"{len(tried)} times"
    return f"Tried {times}, at {places}" + (f"; {why}." if why else ".")
