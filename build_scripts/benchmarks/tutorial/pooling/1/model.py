"""The pooling step as tutorials write it: it receives the hidden states of every token."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Hidden states to one vector of length 1 a text."""

    def execute(self, requests: list) -> list:
        """Mean over the tokens that are no padding, then the norm."""
        responses = []
        for request in requests:
            hidden = pb_utils.get_input_tensor_by_name(request, "last_hidden_state").as_numpy()
            mask = pb_utils.get_input_tensor_by_name(request, "attention_mask").as_numpy()
            weights = mask[..., None].astype(np.float32)
            mean = (hidden * weights).sum(axis=1) / np.clip(weights.sum(axis=1), 1e-9, None)
            embedding = mean / np.linalg.norm(mean, axis=1, keepdims=True)
            tensor = pb_utils.Tensor("embedding", embedding.astype(np.float32))
            responses.append(pb_utils.InferenceResponse(output_tensors=[tensor]))
        return responses
