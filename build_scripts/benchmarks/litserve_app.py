"""LitServe for sentence embeddings: ``python litserve_app.py MODEL PORT BATCH_SIZE``.

Runs in LitServe's own environment, so it imports nothing of this package.
"""

from __future__ import annotations

import sys
from typing import Any

import litserve  # type: ignore[import-not-found]
from sentence_transformers import SentenceTransformer

BATCH_TIMEOUT_S = 0.01


class Embeddings(litserve.LitAPI):  # type: ignore[misc]
    """Texts to their vectors; LitServe's own OpenAI form does the rest."""

    def __init__(self, folder: str, batch_size: int) -> None:
        """Keep the model's folder until a worker loads it."""
        super().__init__(
            max_batch_size=batch_size,
            batch_timeout=BATCH_TIMEOUT_S,
            spec=litserve.OpenAIEmbeddingSpec(),
        )
        self._folder = folder

    def setup(self, device: str) -> None:
        """Load the model in the worker's process."""
        self._model = SentenceTransformer(self._folder, device=device)

    def predict(self, texts: str | list[str]) -> Any:
        """FP32 ``[texts, dim]``; ``[dim]`` of the one text that comes where batches are of 1."""
        return self._model.encode(texts, show_progress_bar=False)


if __name__ == "__main__":
    server = litserve.LitServer(Embeddings(sys.argv[1], int(sys.argv[3])), accelerator="cpu")
    server.run(host="127.0.0.1", port=int(sys.argv[2]), generate_client_file=False)
