"""The preprocess step of every task: requests in, the core's rows out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from .admission import Admission, InFlight
from .faults import Overloaded
from .hooking import call_before, find_hook
from .lengths import RowTokens
from .parameters import check_parameters
from .row_types import CoreRows, RowInputs
from .rows import RowMaker
from .stub_io import error_response, read_bytes, read_texts, settings_of


class TritonPythonModel:
    """The ensemble's inputs, BYTES ``[n, 1]`` each, to what the task's row maker makes of them.

    ``ticket`` INT64 ``[core rows, 1]`` goes past the core to postprocess, and so does ``carry``
    BYTES ``[core rows, 1]`` where the task has one.
    """

    def initialize(self, args: Mapping[str, str]) -> None:
        settings = settings_of(args)
        folder = Path(__file__).parent
        self._fields = settings["inputs"]
        self._encoded = settings["encoded_inputs"]
        self._max_text_bytes = settings["max_text_bytes"]
        self._rules = settings["request_parameters"]
        self._defaults = settings["parameters"]
        self._by_width = settings["layout"] == "bucketed"
        self._carries = settings["carries"]
        self._maker = RowMaker(settings, folder)
        self._before = find_hook(folder, "before")
        self._limit = settings["max_requests"]
        self._max_rows = settings["max_core_rows"]
        self._admission = Admission(InFlight(settings["pipeline"]), self._limit)
        self._row_tokens = RowTokens(settings)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer every request; a request at fault gets its own error."""
        responses: list[Any] = [None] * len(requests)
        widths = [0] * len(requests)
        row_inputs: dict[int, RowInputs] = {}
        room = self._admission.room()
        for index, request in enumerate(requests):
            try:
                if len(row_inputs) >= room:
                    raise Overloaded(
                        f"`queue` must have at most {self._limit} requests under way. Given: one "
                        "more. Try again later, or raise serving.queue.max_size in the pipeline."
                    )
                row_inputs[index] = self._read(request)
            except Exception as error:
                responses[index] = error_response(error)
        made = self._maker.make(list(row_inputs.values())) if row_inputs else []
        answered: list[CoreRows] = []
        for index, core_rows in zip(row_inputs, made, strict=True):
            try:
                if isinstance(core_rows, Exception):
                    raise core_rows
                responses[index], widths[index] = self._respond(core_rows), core_rows.width
                answered.append(core_rows)
            except Exception as error:
                responses[index] = error_response(error)
        if self._by_width:
            responses = _release_by_width(requests, responses, widths)
        self._row_tokens.count(answered)
        return responses

    def finalize(self) -> None:
        self._row_tokens.flush()

    def _read(self, request: Any) -> RowInputs:
        parameters = check_parameters(request.parameters(), self._rules, self._defaults)
        columns: dict[str, list[Any]] = {
            field: read_bytes(request, field)
            if field in self._encoded
            else read_texts(request, field, self._max_text_bytes)
            for field in self._fields
        }
        if self._before is not None:
            rows = [
                dict(zip(columns, values, strict=True))
                for values in zip(*columns.values(), strict=True)
            ]
            rows = call_before(self._before, rows, self._fields, encoded=self._encoded)
            columns = {field: [row[field] for row in rows] for field in self._fields}
        return RowInputs(columns, parameters)

    def _respond(self, core_rows: CoreRows) -> Any:
        count = len(next(iter(core_rows.tensors.values())))
        tensors = [pb_utils.Tensor(name, value) for name, value in core_rows.tensors.items()]
        if self._carries:
            carries = np.array(core_rows.carries, dtype=np.object_).reshape(-1, 1)
            tensors.append(pb_utils.Tensor("carry", carries))
        tensors.append(pb_utils.Tensor("ticket", np.full((count, 1), self._admission.admit())))
        return pb_utils.InferenceResponse(tensors)


def _release_by_width(
    requests: Sequence[Any], responses: Sequence[Any], widths: Sequence[int]
) -> list[Any]:
    """Send the responses in the order of their widths.

    Triton joins only neighbours of equal shape into one batch of the core: released in this order,
    equal shapes stand side by side in its queue.
    """
    for index in sorted(range(len(requests)), key=widths.__getitem__):
        requests[index].get_response_sender().send(
            responses[index], flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        )
    return [None] * len(requests)
