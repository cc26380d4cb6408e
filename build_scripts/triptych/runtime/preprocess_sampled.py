"""Preprocess that samples rows of the requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import triton_python_backend_utils as pb_utils

from .in_flight import InFlight
from .preprocess import Job, Preprocess
from .row_types import TICKET
from .sampling import RowSampler


class SamplingRows(Preprocess):
    """Preprocess that sends the inputs of sampled rows to postprocess, with a ticket."""

    def initialize(self, args: Mapping[str, str]) -> None:
        super().initialize(args)
        self._sampler = RowSampler(self.settings["sample"]["rate"])
        self._marks: InFlight | None = None
        if not hasattr(self, "flow"):  # else flow control gives the tickets
            self._marks = InFlight(self.settings["pipeline"], self.settings["core_instances"])

    def read(self, index: int, request: pb_utils.InferenceRequest) -> Job:
        job = super().read(index, request)
        names = request.requested_output_names()
        if TICKET in names and "direct_call" not in names:  # it comes from the ensemble
            given = job.options or request.parameters()
            job.sample = self._sampler.draw(job.inputs.columns, given)
        return job

    def ticket(self, job: Job, count: int) -> Sequence[int]:
        if self._marks is not None and job.sample:
            return self._marks.admit(count)
        return super().ticket(job, count)
