"""Preprocess with the function `before` of a user, or inputs for the function `after`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from .hooking import call_before, find_hook, make_forwarded
from .preprocess import Job, Preprocess
from .row_types import CoreRows


class CallingBefore(Preprocess):
    """Preprocess that calls `before` on the inputs, and forwards them to postprocess."""

    def initialize(self, args: Mapping[str, str]) -> None:
        super().initialize(args)
        self._before = find_hook(self.folder, "before", self.settings.get("labels", ()))
        self._forwards = "forwarded_inputs" in self.settings

    def read(self, index: int, request: pb_utils.InferenceRequest) -> Job:
        job = super().read(index, request)
        if self._before is not None:
            columns, encoded = job.inputs.columns, self.settings.get("encoded_inputs", ())
            rows = [
                dict(zip(columns, values, strict=True))
                for values in zip(*columns.values(), strict=True)
            ]
            rows = call_before(self._before, rows, self.fields, encoded=encoded)
            changed = {field: [row[field] for row in rows] for field in self.fields}
            job.inputs = job.inputs._replace(columns=changed)
        return job

    def tensors(self, job: Job, core_rows: CoreRows) -> dict[str, NDArray[Any]]:
        tensors = super().tensors(job, core_rows)
        if self._forwards:
            tensors |= make_forwarded(job.inputs.columns, core_rows.row_count)
        return tensors
