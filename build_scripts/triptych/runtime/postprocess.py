"""Run the postprocess step of every task: from outputs of the core to those of the ensemble."""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from .request_errors import RequestError
from .row_types import TICKET_NUMBERS, find_class, read_payload, unpack_rows
from .triton_io import (
    check_parameters,
    error_response,
    make_private,
    read_bytes,
    read_inputs,
    read_settings,
)

NO_TICKET = [0] * TICKET_NUMBERS


class TritonPythonModel:
    """Step that decodes the core's outputs ``[core rows, …]`` to the ensemble's ``[n, …]``.

    ``request_ticket`` is optional: a request without it was sent to this step itself.
    """

    def initialize(self, args: Mapping[str, str]) -> None:
        folder = Path(__file__).parent
        settings = read_settings(folder)
        self._core_outputs = settings["core_outputs"]
        self._rules = settings["request_parameters"]
        self._defaults = settings["parameters"]
        self._unpacks = settings["packed_tokens"]
        self._decoder = find_class(settings["decoder"])(settings, folder)
        # A step has only the modules that its pipeline uses.
        self._after: Any = None
        if (folder / "hooks.py").is_file():
            self._after = import_module(".hooking", __package__).find_after(folder, settings)
        self._unpack_metadata: Any = None
        if settings["has_row_metadata"]:
            self._unpack_metadata = import_module(".row_metadata", __package__).unpack_metadata
        self._names = [each["name"] for each in settings["outputs"]]
        self._optional = {each["name"] for each in settings["outputs"] if each["optional"]}
        self._counts: Any = None
        if settings["flow_control"] == "triptych":  # otherwise the module is not installed
            self._counts = import_module(".in_flight", __package__).InFlight(settings["pipeline"])
        make_private()
        self._samples: Any = None
        if "sample" in settings:
            writing = import_module(".sample_writer", __package__)
            self._samples = writing.SampleWriter(settings, folder)

    def finalize(self) -> None:
        if self._samples is not None:
            self._samples.close()

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Return a response to every request; an invalid request gets its own error."""
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        came_at, numbers = time.monotonic(), NO_TICKET
        try:
            inputs, options, sample = read_inputs(request), "", b""
            if "request_ticket" in inputs:
                sent = inputs["request_ticket"].as_numpy()
                numbers = sent[0, :TICKET_NUMBERS].tolist()
                if self._counts and numbers != NO_TICKET and not self._counts.is_valid(numbers):
                    raise _refused(numbers)
                try:
                    options, sample = read_payload(sent)
                except (ValueError, struct.error) as error:
                    raise _refused(numbers) from error
            parameters = check_parameters(
                options or request.parameters(), self._rules, self._defaults
            )
            outputs = {name: inputs[name].as_numpy() for name in self._core_outputs}
            metadata: list[Any] = []
            if self._unpack_metadata is not None:
                packed = read_bytes(inputs, "row_metadata")
                metadata = [self._unpack_metadata(data) for data in packed]
            if self._unpacks:
                lengths = [len(row_metadata.kinds) for row_metadata in metadata]
                outputs = {name: unpack_rows(value, lengths) for name, value in outputs.items()}
            result = self._decoder.decode(outputs, metadata, parameters)
            if self._after is not None:
                result = self._after(result, partial(read_bytes, inputs))
            if self._samples is not None and sample:
                self._samples.put(sample, result)
            return pb_utils.InferenceResponse(
                [
                    pb_utils.Tensor(name, result[name])
                    for name in self._names
                    if result[name].size or name not in self._optional
                ]
            )
        except Exception as error:
            return error_response(error)
        finally:
            if self._counts and numbers != NO_TICKET:  # a shutdown waits for this
                self._counts.mark_finished(numbers, came_at)


def _refused(numbers: list[int]) -> RequestError:
    return RequestError(
        "request_ticket",
        "must be a ticket of this server's preprocess step",
        numbers,
        "Send the request to the ensemble, or leave out the ticket",
    )
