"""MLServer's custom runtime for sentence embeddings: texts in, FP32 ``[texts, dim]`` out.

Runs in MLServer's own environment, so it imports nothing of this package.
"""

from __future__ import annotations

from mlserver import MLModel  # type: ignore[import-not-found]
from mlserver.codecs import NumpyCodec, StringCodec  # type: ignore[import-not-found]
from mlserver.types import InferenceRequest, InferenceResponse  # type: ignore[import-not-found]
from sentence_transformers import SentenceTransformer


class Embeddings(MLModel):  # type: ignore[misc]
    """A batch that MLServer gathered to its vectors."""

    async def load(self) -> bool:
        """Load the model in the worker's process."""
        self._model = SentenceTransformer(self.settings.parameters.uri, device="cpu")
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Input ``text``, BYTES ``[texts, 1]``; output ``embedding``."""
        texts = StringCodec.decode_input(payload.inputs[0])
        vectors = self._model.encode(texts, show_progress_bar=False)
        output = NumpyCodec.encode_output("embedding", vectors)
        return InferenceResponse(model_name=self.name, outputs=[output])
