"""LitServe for sentence embeddings: ``python litserve_app.py MODEL PORT BATCH_SIZE``.

Runs in LitServe's own environment, so it imports nothing of this package.
"""

import sys
from typing import Any

import litserve  # type: ignore[import-not-found]
from sentence_transformers import SentenceTransformer

BATCH_TIMEOUT_S = 0.01


class Embeddings(litserve.LitAPI):  # type: ignore[misc]
    """The vectors of texts, in LitServe's OpenAI form."""

    def setup(self, device: str) -> None:
        """Load the model in the worker's process."""
        self._model = SentenceTransformer(sys.argv[1], device=device)

    def predict(self, texts: str | list[str]) -> Any:
        """Return FP32 ``[texts, dim]``, or ``[dim]`` for a single text without batches."""
        return self._model.encode(texts, show_progress_bar=False)


if __name__ == "__main__":
    form, batch_size = litserve.OpenAIEmbeddingSpec(), int(sys.argv[3])
    api = Embeddings(max_batch_size=batch_size, batch_timeout=BATCH_TIMEOUT_S, spec=form)
    server = litserve.LitServer(api, accelerator="cpu")
    server.run(host="127.0.0.1", port=int(sys.argv[2]), generate_client_file=False)
