"""One Python model and no ensemble, which returns the text that it receives."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """The cheapest thing that a Python backend can do."""

    def execute(self, requests: list) -> list:
        """Echo each request."""
        responses = []
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()
            tensor = pb_utils.Tensor("echo", text)
            responses.append(pb_utils.InferenceResponse(output_tensors=[tensor]))
        return responses
