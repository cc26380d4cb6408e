"""LitServe as its users serve sentence embeddings: ``python litserve_app.py MODEL_FOLDER PORT``.

Runs in LitServe's own environment, so it imports nothing of this package.
"""

from __future__ import annotations

import sys
from typing import Any

import litserve  # type: ignore[import-not-found]
from sentence_transformers import SentenceTransformer

BATCH_SIZE = 32
BATCH_TIMEOUT_S = 0.01


class Embeddings(litserve.LitAPI):  # type: ignore[misc]
    """A batch of texts to their vectors; LitServe's own OpenAI form does the rest."""

    def __init__(self, folder: str) -> None:
        """Keep the model's folder until a worker loads it."""
        super().__init__(
            max_batch_size=BATCH_SIZE,
            batch_timeout=BATCH_TIMEOUT_S,
            spec=litserve.OpenAIEmbeddingSpec(),
        )
        self._folder = folder

    def setup(self, device: str) -> None:
        """Load the model in the worker's process."""
        self._model = SentenceTransformer(self._folder, device=device)

    def predict(self, texts: list[str]) -> Any:
        """FP32 ``[texts, dim]``."""
        return self._model.encode(texts, batch_size=BATCH_SIZE, show_progress_bar=False)


if __name__ == "__main__":
    server = litserve.LitServer(Embeddings(sys.argv[1]), accelerator="cpu")
    server.run(host="127.0.0.1", port=int(sys.argv[2]), generate_client_file=False)
