"""The postprocess step of text-embedding: shorten the vector where a request asks for it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from .admission import Ledger
from .stub_io import check_parameters, error_response, parameters_of


class TritonPythonModel:
    """``sentence_embedding`` FP32 ``[n, dim]`` to ``embedding`` FP32 ``[n, dimensions or dim]``."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Read the rules for request parameters."""
        settings = parameters_of(json.loads(args["model_config"]))
        self._rules = json.loads(settings["request_parameters"])
        self._ledger = Ledger(settings["pipeline"])

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer every request; a request at fault gets its own error."""
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        try:
            ticket = pb_utils.get_input_tensor_by_name(request, "ticket").as_numpy()
            self._ledger.settle(int(ticket[0, 0]))
            vectors = pb_utils.get_input_tensor_by_name(request, "sentence_embedding").as_numpy()
            parameters = check_parameters(request.parameters(), self._rules)
            if "dimensions" in parameters:
                vectors = shorten(vectors, parameters["dimensions"])
            return pb_utils.InferenceResponse([pb_utils.Tensor("embedding", vectors)])
        except Exception as error:
            return error_response(error)


def shorten(vectors: NDArray[np.float32], dimensions: int) -> NDArray[np.float32]:
    """The first `dimensions` elements of each row, scaled to length 1 (Matryoshka)."""
    kept = vectors[:, :dimensions]
    length = np.linalg.norm(kept, axis=1, keepdims=True)
    return np.ascontiguousarray(kept / np.maximum(length, 1e-12), dtype=np.float32)
