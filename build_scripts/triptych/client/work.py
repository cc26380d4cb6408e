"""Split a call's rows into requests and join the results, without I/O.

Both clients drive the same `Work`: they send what `take` returns and report each end with
`answered` or `failed`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from triptych.client.errors import (
    BatchFailedError,
    DeadlineExceededError,
    InferenceError,
    InvalidRequestError,
    OverloadedError,
    PipelineFailedError,
    RowError,
)
from triptych.client.retry import Deadline, Retries, describe_attempts
from triptych.client.wire import (
    EncodedRows,
    Parameter,
    PipelineConfig,
    infer_request,
    read_outputs,
)

if TYPE_CHECKING:
    from tritonclient.grpc import service_pb2

END_S = 0.1
"""Time in seconds in which requests beside one that failed may end before they are canceled.

Triton 24.10 may abort (``ASSERTION FAILED: prior > 0``) if a request is canceled as it ends.
"""
_QUEUE_GRACE_S = 0.25
# With these limits, requests of up to 8 rows of real texts of mixed length had 15 % padding, up to
# 32 rows 25 %; with sorting alone 19 % and 67 %. The 16-byte slack lets very short rows share a
# request whatever their relative length.
_MIN_SIZE_RATIO = 0.8
_SIZE_SLACK_BYTES = 16


@dataclass(frozen=True)
class Portion:
    """Rows of a call (indexes in the caller's list) that are sent as one request.

    `tried` has the address of each failed attempt; the request is not sent before `due_s` on the
    clock of `time.monotonic`. With an `error` this is reported then, and nothing is sent.
    """

    rows: tuple[int, ...]
    tried: tuple[str, ...] = ()
    due_s: float = 0.0
    error: PipelineFailedError | None = None


def split_rows(rows: Sequence[int], sizes: Sequence[int], limit: int) -> list[tuple[int, ...]]:
    """Distribute `rows` over requests of at most `limit` rows of similar size.

    The server pads the rows of a request to the longest. A request therefore ends where its next
    row would be much shorter than its first. The longest rows go first, so that no long row runs
    alone at the end.

    Args:
        rows: Indexes to distribute.
        sizes: Size in bytes by index.
        limit: Maximum number of rows in a request.
    """
    requests: list[list[int]] = []
    for row in sorted(rows, key=sizes.__getitem__, reverse=True):
        least = _MIN_SIZE_RATIO * sizes[requests[-1][0]] - _SIZE_SLACK_BYTES if requests else 0.0
        if requests and len(requests[-1]) < limit and sizes[row] >= least:
            requests[-1].append(row)
        else:
            requests.append([row])
    return [tuple(request) for request in requests]


def _fill(array: NDArray[np.generic], shape: tuple[int, ...]) -> NDArray[np.generic]:
    """Return an array filled up with 0, false or an empty text, as a step does for its rows."""
    filled = np.full(shape, "" if array.dtype == np.object_ else 0, array.dtype)
    filled[tuple(map(slice, array.shape))] = array
    return filled


class Work:
    """State of one call.

    A full queue ends the call only after the requests in flight have ended: Triton 24.10 crashes
    when an ensemble's request is canceled while a step's full queue rejects it.

    Attributes:
        refused: Error of each rejected row; only filled with `keep_going`.
        requested: Outputs that responses have; all if it is empty.
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
    ) -> None:
        """Split the rows into requests; with `keep_going` a rejected row does not end the call.

        Raises:
            InvalidRequestError: A row cannot be sent, unless `keep_going`.
        """
        if encoded.refused and not keep_going:
            raise encoded.refused[min(encoded.refused)]
        self.refused: dict[int, RowError] = dict(encoded.refused)
        self.requested: Sequence[str] = ()
        self._pipeline = pipeline
        self._encoded = encoded
        self._parameters = parameters
        self._deadline = deadline
        self._retries = retries
        self._keep_going = keep_going
        # The key of the response cache has tensors, but not parameters.
        self._options = config.options if config and config.caches else {}
        self._outputs = config.no_rows() if config and not encoded.count else {}
        self._rows_answered = 0
        self._overload: OverloadedError | None = None
        sizes = [
            sum(map(len, elements)) for elements in zip(*encoded.columns.values(), strict=True)
        ]
        rows = [row for row in range(encoded.count) if row not in self.refused]
        # A call of one row needs no config. Requests have a quarter of the pipeline's limit, so
        # that they batch with each other and need little padding.
        limit = 1 if config is None else config.max_batch_size
        self._free = () if config is None else config.free_outputs
        self._shapes: dict[tuple[str, int], tuple[int, ...]] = {}
        if keep_going and self._free:
            rows_per_request = 1  # rows of one request have outputs of one size
        most = min(limit, rows_per_request or math.ceil(limit / 4))
        groups = encoded.by_shape(rows) if encoded.shapes else [rows]
        self._waiting = deque(
            Portion(part) for group in groups for part in split_rows(group, sizes, most)
        )

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def take(self) -> Portion | None:
        """Return the next request to send; None if none waits or its pause is not over.

        Raises:
            PipelineFailedError: The pause before the report of an error is over.
        """
        while self._waiting and self._waiting[0].due_s <= time.monotonic():
            portion = self._waiting.popleft()
            if portion.error is None:
                return portion
            self._report(portion.rows, portion.error, portion.tried)
        return None

    def pause_s(self) -> float | None:
        """Return the seconds until `take` has a request; None if only a response changes that."""
        if not self._waiting:
            return None
        return max(0.0, self._waiting[0].due_s - time.monotonic())

    def request(self, portion: Portion) -> tuple[service_pb2.ModelInferRequest, float | None]:
        """Return the message of a request and its time limit in seconds (None: no limit).

        Raises:
            DeadlineExceededError: The deadline has passed.
            InvalidRequestError: A parameter has a type that cannot be sent.
        """
        try:
            remaining_s = self._deadline.remaining_s()
        except DeadlineExceededError:
            raise self._deadline_error() from None
        parameters = dict(self._parameters)
        if remaining_s is not None:
            # A step's queue does not see that an ensemble's request was canceled. The timeout lets
            # the queue drop such requests if its policy allows it. It is slightly later than the
            # deadline, so that the caller's own deadline ends the call.
            parameters.setdefault("timeout", int((remaining_s + _QUEUE_GRACE_S) * 1e6))
        columns = self._encoded.columns
        request = infer_request(
            self._pipeline,
            columns,
            portion.rows,
            parameters,
            self._options,
            self._encoded,
            self.requested,
        )
        return request, remaining_s

    def answered(self, portion: Portion, response: service_pb2.ModelInferResponse) -> None:
        """Store the result of `portion`.

        Raises:
            PipelineFailedError: The response does not have one result per row.
        """
        self._retries.answered()
        rows = list(portion.rows)
        outputs = read_outputs(response)
        if not outputs:
            raise PipelineFailedError(
                "A response must have an output. Given: none. This is a bug of the pipeline."
            )
        for name, array in outputs.items():
            if array.shape[:1] != (len(rows),):
                raise PipelineFailedError(
                    f"Output `{name}` must have one result a row. Given: shape "
                    f"{list(array.shape)} for {len(rows)} rows. This is a bug of the pipeline."
                )
            result, shape = self._outputs.get(name), array.shape[1:]
            if result is None:
                whole = (self._encoded.count, *shape)
                result = self._outputs[name] = np.empty(whole, array.dtype)
            if result.shape[1:] != array.shape[1:]:
                if result.ndim != array.ndim:
                    raise PipelineFailedError(
                        f"Output `{name}` must have the same number of axes for all rows. Given: "
                        f"{list(result.shape[1:])} and {list(array.shape[1:])}. This is a bug of "
                        "the pipeline."
                    )
                sizes = np.maximum(result.shape[1:], array.shape[1:])
                result = self._outputs[name] = _fill(result, (len(result), *sizes))
                array = _fill(array, (len(array), *sizes))
            result[rows] = array
            if name in self._free:
                self._shapes |= dict.fromkeys([(name, row) for row in rows], shape)
        self._rows_answered += len(rows)

    def failed(self, portion: Portion, error: InferenceError) -> None:
        """Handle an error: raise it, or schedule some rows again.

        Raises:
            InferenceError: The call cannot continue.
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
            # The rows may be too many together, such as texts times labels, or context windows.
            middle = len(portion.rows) // 2
            halves = portion.rows[middle:], portion.rows[:middle]
            self._waiting.extendleft(Portion(half) for half in halves)
            return
        tried = (*portion.tried, error.address)
        if isinstance(error, PipelineFailedError) and (
            self._keep_going or isinstance(error, BatchFailedError)
        ):
            self._send_alone(portion.rows, error, tried)
            return
        if isinstance(error, DeadlineExceededError):
            # `from None`: the status behind this error has no further information.
            raise self._deadline_error() from None
        try:
            pause_s = self._retries.pause_s(error, tried, self._deadline)
        except OverloadedError as overload:
            self._overload = overload
            self._waiting.clear()
            return
        self._postpone(replace(portion, tried=tried, due_s=time.monotonic() + pause_s))

    def _send_alone(
        self, rows: tuple[int, ...], error: PipelineFailedError, tried: tuple[str, ...]
    ) -> None:
        """Schedule the rows of a failed request again, each alone, or report them.

        Raises:
            PipelineFailedError: They are not sent again, unless it is one row and `keep_going`.
        """
        is_batch = isinstance(error, BatchFailedError)
        pause_s = 0.0
        # The error of a Python step concerns its request alone.
        if is_batch or len(rows) > 1:
            pause_s, is_paid = self._retries.pause_alone_s(len(rows), len(tried), self._deadline)
            due_s = time.monotonic() + pause_s
            if is_paid:
                for row in rows:
                    self._postpone(Portion((row,), tried, due_s))
                return
        if is_batch and pause_s:
            self._postpone(Portion(rows, tried, due_s, error))
        else:
            self._report(rows, error, tried)

    def _report(
        self, rows: tuple[int, ...], error: PipelineFailedError, tried: tuple[str, ...]
    ) -> None:
        """Raise the error of a request, or keep it as that of its only row with `keep_going`."""
        error = error.with_attempts(describe_attempts(tried))
        if len(rows) == 1 and len(tried) > 1:
            error.row = rows[0]
        if len(rows) > 1 or not self._keep_going:
            raise error from None
        self.refused[rows[0]] = error

    def outputs(self) -> dict[str, NDArray[np.generic]]:
        """Return every output, [rows, …]; the entries of rejected rows are arbitrary.

        Raises:
            OverloadedError: The pipeline's queue stayed full.
        """
        if self._overload:
            raise self._overload
        return self._outputs

    def each(self) -> list[dict[str, NDArray[np.generic]] | RowError]:
        """Return for every row its outputs, or the error why it was rejected.

        Raises:
            OverloadedError: The pipeline's queue stayed full.
        """
        outputs = self.outputs()
        return [
            self.refused[row]
            if row in self.refused
            else {name: self._row(name, array, row) for name, array in outputs.items()}
            for row in range(self._encoded.count)
        ]

    def _row(self, name: str, array: NDArray[np.generic], row: int) -> NDArray[np.generic]:
        """Return the output of a row without what other rows of the call filled up."""
        shape = self._shapes.get((name, row), array.shape[1:])
        part: NDArray[np.generic] = array[row][tuple(map(slice, shape))]
        return part

    def _deadline_error(self) -> DeadlineExceededError:
        return self._deadline.exceeded_error(answered=(self._rows_answered, self._encoded.count))

    def _postpone(self, portion: Portion) -> None:
        # Insert by due time, because requests without a pause must not wait for others.
        index = next(
            (at for at, other in enumerate(self._waiting) if other.due_s > portion.due_s),
            len(self._waiting),
        )
        self._waiting.insert(index, portion)
