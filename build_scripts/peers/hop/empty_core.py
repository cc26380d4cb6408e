"""A core that answers at once: the same vector for every row, whatever came in."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Stands in for a packed or bucketed core of a text embedding."""

    def initialize(self, args: dict[str, str]) -> None:
        """Take the output's name and width from the config of the core that it replaces."""
        (output,) = json.loads(args["model_config"])["output"]
        self.name = output["name"]
        self.row = np.zeros((1, int(output["dims"][-1])), np.float32)

    def execute(self, requests: list) -> list:
        """As many rows out as in."""
        responses = []
        for request in requests:
            rows = pb_utils.get_input_tensor_by_name(request, "row_length").as_numpy().shape[0]
            tensor = pb_utils.Tensor(self.name, np.repeat(self.row, rows, axis=0))
            responses.append(pb_utils.InferenceResponse(output_tensors=[tensor]))
        return responses
