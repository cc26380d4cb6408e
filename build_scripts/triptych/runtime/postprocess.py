"""Run the postprocess step of every task: from outputs of the core to those of the ensemble."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import triton_python_backend_utils as pb_utils

from .request_errors import RequestError
from .row_types import PAYLOAD, Arrays, Parameters, find_class, read_payload
from .triton_io import (
    Inputs,
    check_parameters,
    error_response,
    make_private,
    read_bytes,
    read_inputs,
    read_settings,
)


class Postprocess:
    """Step that decodes the core's outputs ``[core rows, …]`` to the ensemble's ``[n, …]``.

    The ``model.py`` of a pipeline adds the classes in ``postprocess_*.py`` that it uses.
    """

    def initialize(self, args: Mapping[str, str]) -> None:
        self.folder = Path(__file__).parent
        self.settings = settings = read_settings(self.folder)
        self._core_outputs: list[str] = settings["core_outputs"]
        self._rules: Mapping[str, Mapping[str, object]] = settings["request_parameters"]
        self._defaults: Mapping[str, object] = settings["parameters"]
        self.decoder = find_class(settings["decoder"])(settings, self.folder)
        self._names = [each["name"] for each in settings["outputs"]]
        self._optional = {each["name"] for each in settings["outputs"] if each["optional"]}
        make_private()

    def execute(
        self, requests: Sequence[pb_utils.InferenceRequest]
    ) -> list[pb_utils.InferenceResponse]:
        """Return a response to every request; an invalid request gets its own error."""
        return [self._respond(request) for request in requests]

    def _respond(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
        try:
            result = self.answer(read_inputs(request), request.parameters())
            return pb_utils.InferenceResponse(
                [
                    pb_utils.Tensor(name, result[name])
                    for name in self._names
                    if name in result and (result[name].size or name not in self._optional)
                ]
            )
        except Exception as error:
            return error_response(error)

    def answer(self, inputs: Inputs, given: str) -> Arrays:
        """Return the outputs of a request by name.

        Args:
            inputs: Tensors of the core, and those that went past it.
            given: Parameters of the request (JSON text), unless the payload has some.
        """
        if PAYLOAD in inputs:
            given = read_options(inputs)[0] or given
        parameters = check_parameters(given, self._rules, self._defaults)
        results = {}
        for name in self._core_outputs:
            results[name] = inputs[name].as_numpy()
            if not results[name].size:  # see `overflow`
                raise RequestError(
                    name, "must have elements", "none", "Send the results of the core"
                )
        return self.decode(inputs, results, parameters)

    def decode(self, inputs: Inputs, results: Arrays, parameters: Parameters) -> Arrays:
        """Return the results of the core as outputs of the ensemble."""
        outputs: Arrays = self.decoder.decode(results, (), parameters)
        return outputs


def read_options(inputs: Inputs) -> tuple[str, bytes]:
    """Return the options and the sample of a request with a payload; see `read_payload`."""
    payload = read_bytes(inputs, PAYLOAD)[0]
    try:
        return read_payload(payload)
    except (ValueError, struct.error) as error:
        raise RequestError(
            PAYLOAD,
            "must be a payload of the preprocess step",
            repr(payload)[:80],
            "Send the request to the ensemble, or leave out the payload",
        ) from error
