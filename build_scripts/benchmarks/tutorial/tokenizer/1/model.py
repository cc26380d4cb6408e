"""The tokenizer step as tutorials write it: the texts of one request, padded to its longest."""

from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils
from transformers import AutoTokenizer

NAMES = ["input_ids", "attention_mask", "token_type_ids"]


class TritonPythonModel:
    """Text to the three inputs of BERT."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer that lies beside this file."""
        self.tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parent / "tokenizer")

    def execute(self, requests: list) -> list:
        """One tokenizer call for each request."""
        responses = []
        for request in requests:
            texts = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()
            tokens = self.tokenizer(
                [text.decode("utf-8") for text in texts.reshape(-1)],
                padding=True,
                truncation=True,
                max_length=256,
                return_tensors="np",
            )
            tensors = [pb_utils.Tensor(name, tokens[name].astype(np.int64)) for name in NAMES]
            responses.append(pb_utils.InferenceResponse(output_tensors=tensors))
        return responses
