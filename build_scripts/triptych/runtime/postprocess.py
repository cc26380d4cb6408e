"""Run the postprocess step of every task: from outputs of the core to those of the ensemble."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from .request_errors import RequestError
from .row_types import NO_TICKET, PAYLOAD, TICKET, find_class, read_payload, write_ticket
from .triton_io import (
    Inputs,
    check_parameters,
    error_response,
    make_private,
    read_bytes,
    read_inputs,
    read_settings,
)


class TritonPythonModel:
    """Step that decodes the core's outputs ``[core rows, …]`` to the ensemble's ``[n, …]``.

    The tensors of `row_types.write_ticket` are optional. A step between two cores passes them on,
    and ends the request only if it fails.
    """

    def initialize(self, args: Mapping[str, str]) -> None:
        folder = Path(__file__).parent
        settings = read_settings(folder)
        self._core_outputs = settings["core_outputs"]
        self._rules = settings["request_parameters"]
        self._defaults = settings["parameters"]
        self._unpacks = settings["packed_tokens"]
        self._rows_from: str | None = settings.get("rows_from")
        self._decoder = find_class(settings["decoder"])(settings, folder)
        # A step has only the modules that its pipeline uses.
        self._after: Any = None
        if (folder / "hooks.py").is_file():
            self._after = import_module(".hooking", __package__).find_after(folder, settings)
        self._metadata: Any = None
        if settings["has_row_metadata"]:
            self._metadata = import_module(".row_metadata", __package__)
        self._names = [each["name"] for each in settings["outputs"]]
        self._optional = {each["name"] for each in settings["outputs"] if each["optional"]}
        self._marks: Any = None
        # Otherwise the module is not installed.
        if settings["flow_control"] == "triptych" or "sample" in settings:
            module = import_module(".in_flight", __package__)
            self._marks = module.InFlight(settings["pipeline"])
        make_private()
        if settings["free_dimensions"]:
            import_module(".overflow", __package__).survive_overflow(args["model_config"])
        self._samples: Any = None
        if "sample" in settings:
            writing = import_module(".sample_writer", __package__)
            self._samples = writing.SampleWriter(settings, folder)

    def finalize(self) -> None:
        if self._samples is not None:
            self._samples.close()

    def execute(
        self, requests: Sequence[pb_utils.InferenceRequest]
    ) -> list[pb_utils.InferenceResponse]:
        """Return a response to every request; an invalid request gets its own error."""
        return [self._respond(request) for request in requests]

    def _respond(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
        ticket: Sequence[int] = NO_TICKET
        try:
            inputs = read_inputs(request)
            if TICKET in inputs:
                ticket = inputs[TICKET].as_numpy()[0].tolist()
            payload, options, sample = _read_payload(inputs)
            if sample and self._samples is not None and not self._marks.is_set(ticket):
                self._samples.count_forged()
                sample = b""
            parameters = check_parameters(
                options or request.parameters(), self._rules, self._defaults
            )
            outputs = {name: _read_output(inputs, name) for name in self._core_outputs}
            metadata: list[Any] = []
            if self._metadata is not None:
                packed = read_bytes(inputs, "row_metadata")
                metadata = [self._metadata.unpack_metadata(data) for data in packed]
            if self._unpacks:
                lengths = [len(row_metadata.kinds) for row_metadata in metadata]
                unpack = self._metadata.unpack_rows
                outputs = {name: unpack(value, lengths) for name, value in outputs.items()}
            result = self._decoder.decode(outputs, metadata, parameters)
            if self._after is not None:
                result = self._after(result, partial(read_bytes, inputs))
            if self._samples is not None and sample:
                self._samples.put(sample, result)
            if self._rows_from is not None:
                rows = len(result[self._rows_from])
                result = {**result, **write_ticket(ticket, payload, rows)}
                ticket = NO_TICKET  # the step behind the next core ends the request
            return pb_utils.InferenceResponse(
                [
                    pb_utils.Tensor(name, result[name])
                    for name in self._names
                    if name in result and (result[name].size or name not in self._optional)
                ]
            )
        except Exception as error:
            return error_response(error)
        finally:
            if self._marks is not None:  # a shutdown waits for this
                self._marks.done(ticket)


def _read_payload(inputs: Inputs) -> tuple[bytes, str, bytes]:
    """Return the payload of a request, its options and its sample."""
    if PAYLOAD not in inputs:
        return b"", "", b""
    payload = read_bytes(inputs, PAYLOAD)[0]
    try:
        return payload, *read_payload(payload)
    except (ValueError, struct.error) as error:
        raise RequestError(
            PAYLOAD,
            "must be a payload of the preprocess step",
            repr(payload)[:80],
            "Send the request to the ensemble, or leave out the payload",
        ) from error


def _read_output(inputs: Inputs, name: str) -> NDArray[Any]:
    values: NDArray[Any] = inputs[name].as_numpy()
    if not values.size:  # see `overflow`
        raise RequestError(name, "must have elements", "none", "Send the results of the core")
    return values
