"""A system under test that tritonserver serves."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import closed_loop
from triptych.serving.server import Server

RESPONSE_TIMEOUT_S = 120.0
CHECK_CLIENTS = 16
"""Number of concurrent clients that request the vectors to check."""


@dataclass
class Ensemble:
    """A model of a repository, on its own server while the context lasts.

    Attributes:
        model: Ensemble or model that receives the texts.
        flags: Additional flags of tritonserver.
        environment: Additional environment variables of tritonserver.
    """

    name: str
    repository: Path
    model: str
    flags: Sequence[str] = ()
    environment: dict[str, str] | None = None

    def __enter__(self) -> Ensemble:
        server = Server(self.repository, extra_args=self.flags, environment=self.environment or {})
        self._server = server.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._server.__exit__(*error)

    @property
    def pid(self) -> int:
        return self._server.pid

    @property
    def grpc_url(self) -> str:
        return self._server.grpc_url

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return vectors ``[texts, dim]``, requested concurrently with one text a request."""
        from tritonclient import grpc

        def embed_one(text: str) -> NDArray[np.float32]:
            tensor = grpc.InferInput("text", [1, 1], "BYTES")
            tensor.set_data_from_numpy(np.array([[text.encode()]], dtype=np.object_))
            response = client.infer(self.model, [tensor], client_timeout=RESPONSE_TIMEOUT_S)
            row: NDArray[np.float32] = response.as_numpy("embedding")[0]
            return row

        with (
            grpc.InferenceServerClient(self.grpc_url) as client,
            ThreadPoolExecutor(CHECK_CLIENTS) as pool,
        ):
            return np.stack(list(pool.map(embed_one, texts)))

    def load(self, texts: Sequence[str], *, clients: int, seconds: float) -> dict[str, float]:
        """Return the metrics of a closed loop."""
        return closed_loop(self.grpc_url, self.model, texts, clients=clients, seconds=seconds)
