"""Preprocess with flow control ``triptych``, which decides when a request goes to the core."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import triton_python_backend_utils as pb_utils

from .flow_control import FlowControl
from .preprocess import Job, Preprocess, Results
from .row_types import NO_TICKET, TICKET
from .triton_io import error_response, send


@dataclass(eq=False)
class CountedJob(Job):
    """A job that flow control applies to, unless it was sent to the step itself.

    Attributes:
        is_counted: Whether flow control applies to it.
        rows: Estimated number of model rows.
        left_s: Seconds until the deadline; None if there is none.
        since: Time of arrival by `time.monotonic`.
        is_newest: Whether flow control chose the request as the newest one.
    """

    is_counted: bool = False
    rows: int = 1
    left_s: float | None = None
    since: float = 0.0
    is_newest: bool = False


class Admitting(Preprocess):
    """Preprocess that hands over requests when `FlowControl` says so.

    The ensemble does not use the output ``direct_call`` of the step. A request for it, or for
    outputs without the ticket, was sent to the step itself and is not counted.
    """

    job_type = CountedJob

    def initialize(self, args: Mapping[str, str]) -> None:
        super().initialize(args)
        self._rows_read = self._rows_made = 1  # in all requests so far
        self._making = threading.Lock()
        self.flow = FlowControl(self.settings, self.make, _send)

    def take(self, jobs: list[Job]) -> Results:
        direct, counted = list[Job](), list[CountedJob]()
        for job in jobs:
            names = job.request.requested_output_names()
            if isinstance(job, CountedJob) and TICKET in names and "direct_call" not in names:
                read = len(job.inputs.columns[self.fields[0]])
                job.is_counted = True
                job.rows = read * self._rows_made // self._rows_read or 1
                # In microseconds, and 0 without a deadline.
                job.left_s = job.request.timeout() / 1e6 or None
                counted.append(job)
            else:
                direct.append(job)
        results = self.make(direct) if direct else []
        if counted:
            results += [(job, _respond(result)) for job, result in self.flow.take(counted)]
        return results

    def make(self, jobs: Sequence[Job]) -> Results:
        with self._making:  # flow control has a thread of its own
            return super().make(jobs)

    def ticket(self, job: Job, count: int) -> Sequence[int]:
        self._rows_read += len(job.inputs.columns[self.fields[0]])
        self._rows_made += count
        is_counted = isinstance(job, CountedJob) and job.is_counted
        return self.flow.admit(count, job) if is_counted else NO_TICKET


def _respond(result: pb_utils.InferenceResponse | Exception) -> pb_utils.InferenceResponse:
    return error_response(result) if isinstance(result, Exception) else result


def _send(job: Job, result: pb_utils.InferenceResponse | Exception) -> None:
    send(job.sender, _respond(result))
