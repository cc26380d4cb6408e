"""One call's rows split into requests, and their answers put back together; does no I/O.

Both clients drive the same `Work`: they send what `take` hands out and report each end with
`answered` or `failed`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.client.errors import (
    BatchNeighborError,
    DeadlineExceededError,
    InferenceError,
    InvalidRequestError,
    OverloadedError,
    PipelineFailedError,
)
from triptych.client.retry import Deadline, Retries
from triptych.client.wire import (
    EncodedRows,
    Parameter,
    PipelineConfig,
    infer_request,
    read_outputs,
)

_QUEUE_GRACE_S = 0.25
_MAX_SENDINGS = 20
"""Of one request that fails with its neighbors."""
# With these two, requests of up to 8 rows of real texts of mixed length carried 15 % padding, up
# to 32 rows 25 %; without them, only sorted, 19 % and 67 %. Few bytes are like any few.
_MIN_LIKE_SHARE = 0.8
_LIKE_BYTES = 16


@dataclass(frozen=True)
class Portion:
    """Some of a call's rows (indexes in the caller's list), sent as one request.

    `tried` has the address of each sending that failed; it is not sent before `due_s` on the clock
    of `time.monotonic`.
    """

    rows: tuple[int, ...]
    tried: tuple[str, ...] = ()
    due_s: float = 0.0


def split_rows(rows: Sequence[int], sizes: Sequence[int], limit: int) -> list[tuple[int, ...]]:
    """Share `rows` out to requests of at most `limit` rows of like size.

    The server pads the rows of one request to the longest of them. So a request ends where its
    next row would be much shorter than its first; and the longest rows go first, so that no long
    one is left to run alone at the end.

    Args:
        rows: the indexes to share out.
        sizes: size in bytes by index.
        limit: most rows of a request.
    """
    requests: list[list[int]] = []
    for row in sorted(rows, key=sizes.__getitem__, reverse=True):
        least = _MIN_LIKE_SHARE * sizes[requests[-1][0]] - _LIKE_BYTES if requests else 0.0
        if requests and len(requests[-1]) < limit and sizes[row] >= least:
            requests[-1].append(row)
        else:
            requests.append([row])
    return [tuple(request) for request in requests]


class Work:
    """The state of one call.

    Attributes:
        refused: row -> why the pipeline will not answer it; only grows where `keep_going` is set.

    A full queue ends the call, but not before what is under way has ended: Triton 24.10 crashes
    when an ensemble's request is cancelled in the moment a step's full queue turns it away.
    """

    def __init__(
        self,
        pipeline: str,
        encoded: EncodedRows,
        parameters: Mapping[str, Parameter],
        *,
        config: PipelineConfig | None,
        rows_per_request: int | None,
        deadline: Deadline,
        retries: Retries,
        keep_going: bool,
        only: Sequence[str] = (),
    ) -> None:
        """Split the rows into requests; with `keep_going` a refused row does not end the call.

        `only` are the outputs to ask for; empty asks for all.

        Raises:
            InvalidRequestError: a row cannot be sent, unless `keep_going`.
        """
        if encoded.refused and not keep_going:
            raise encoded.refused[min(encoded.refused)]
        self.refused = dict(encoded.refused)
        self._pipeline = pipeline
        self._encoded = encoded
        self._parameters = parameters
        self._deadline = deadline
        self._retries = retries
        self._keep_going = keep_going
        self._only = only
        self._outputs = config.no_rows() if config and not encoded.count else {}
        self._rows_answered = 0
        self._overload: OverloadedError | None = None
        sizes = [
            sum(map(len, elements)) for elements in zip(*encoded.columns.values(), strict=True)
        ]
        rows = [row for row in range(encoded.count) if row not in self.refused]
        # A call of one row does without the config. A quarter of the pipeline's limit, so that
        # requests batch with each other and little is padded.
        limit = 1 if config is None else config.max_batch_size
        most = min(limit, rows_per_request or math.ceil(limit / 4))
        self._waiting = deque(Portion(part) for part in split_rows(rows, sizes, most))

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def take(self) -> Portion | None:
        """The next request to send; None where none waits or its pause is not over."""
        if not self._waiting or self._waiting[0].due_s > time.monotonic():
            return None
        return self._waiting.popleft()

    def pause_s(self) -> float | None:
        """How long until `take` has something; None where only an answer can change that."""
        if not self._waiting:
            return None
        return max(0.0, self._waiting[0].due_s - time.monotonic())

    def request(self, portion: Portion) -> tuple[Any, float | None]:
        """The message of a request, and how many seconds it may take (None: any).

        Raises:
            DeadlineExceededError: there is no time left to send it.
            InvalidRequestError: a parameter is of no type that can be sent.
        """
        try:
            left_s = self._deadline.left_s()
        except DeadlineExceededError:
            raise self._too_late() from None
        parameters = dict(self._parameters)
        if left_s is not None:
            # A step's queue does not see that an ensemble's request was cancelled. This lets it
            # drop work no one waits for any more, where its policy allows it; a little late, for
            # it is the caller's own deadline that shall end the call.
            parameters.setdefault("timeout", int((left_s + _QUEUE_GRACE_S) * 1e6))
        columns = self._encoded.columns
        request = infer_request(self._pipeline, columns, portion.rows, parameters, self._only)
        return request, left_s

    def answered(self, portion: Portion, response: Any) -> None:
        """Put the answer of `portion` where its rows belong.

        Raises:
            PipelineFailedError: the answer does not have one result a row.
        """
        self._retries.answered()
        rows = list(portion.rows)
        for name, array in read_outputs(response).items():
            if array.shape[:1] != (len(rows),):
                raise PipelineFailedError(
                    f"Output `{name}` must have one result a row. Given: shape "
                    f"{list(array.shape)} for {len(rows)} rows. This is a bug of the pipeline."
                )
            result = self._outputs.get(name)
            if result is None:
                shape = (self._encoded.count, *array.shape[1:])
                result = self._outputs[name] = np.empty(shape, array.dtype)
            if result.shape[1:] != array.shape[1:]:
                raise PipelineFailedError(
                    f"Output `{name}` must have one shape for all rows. Given: "
                    f"{list(result.shape[1:])} and {list(array.shape[1:])}. Send fewer rows a call."
                )
            result[rows] = array
        self._rows_answered += len(rows)

    def failed(self, portion: Portion, error: InferenceError) -> None:
        """Decide what an error means for the call: raise it, or send some rows again.

        Raises:
            InferenceError: `error`, where the call cannot go on.
        """
        if self._overload:
            return
        if isinstance(error, InvalidRequestError) and error.row is not None and self._keep_going:
            self.refused[error.row] = error
            others = tuple(row for row in portion.rows if row != error.row)
            if others:
                self._waiting.appendleft(Portion(others))
            return
        if isinstance(error, InvalidRequestError) and error.row is None and len(portion.rows) > 1:
            # Its rows together may be too much: texts times labels, say, or windows of contexts.
            middle = len(portion.rows) // 2
            halves = portion.rows[middle:], portion.rows[:middle]
            self._waiting.extendleft(Portion(half) for half in halves)
            return
        tried = (*portion.tried, error.address)
        if isinstance(error, BatchNeighborError) and len(tried) < _MAX_SENDINGS:
            self._waiting.appendleft(replace(portion, tried=tried))
            return
        if isinstance(error, DeadlineExceededError):
            # `from None`: the status this error was made of says nothing more.
            raise self._too_late() from None
        try:
            pause_s = self._retries.pause_s(error, tried, self._deadline)
        except OverloadedError as overload:
            self._overload = overload
            self._waiting.clear()
            return
        self._put_off(replace(portion, tried=tried, due_s=time.monotonic() + pause_s))

    def outputs(self) -> dict[str, NDArray[Any]]:
        """Every output, [rows, …]; the entries of refused rows are arbitrary.

        Raises:
            OverloadedError: the pipeline's queue stayed full.
        """
        if self._overload:
            raise self._overload
        return self._outputs

    def each(self) -> list[dict[str, NDArray[Any]] | InvalidRequestError]:
        """For every row its outputs, or why it was refused.

        Raises:
            OverloadedError: the pipeline's queue stayed full.
        """
        outputs = self.outputs()
        return [
            self.refused[row]
            if row in self.refused
            else {name: array[row] for name, array in outputs.items()}
            for row in range(self._encoded.count)
        ]

    def _too_late(self) -> DeadlineExceededError:
        return self._deadline.passed(answered=(self._rows_answered, self._encoded.count))

    def _put_off(self, portion: Portion) -> None:
        # Behind those due earlier: what has no pause must not wait for what has one.
        place = next(
            (at for at, other in enumerate(self._waiting) if other.due_s > portion.due_s),
            len(self._waiting),
        )
        self._waiting.insert(place, portion)
