"""A contender that tritonserver serves: started, asked for vectors, loaded, stopped."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.measurement import Measurement, closed_loop
from triptych.serving.server import Server

_ANSWER_TIMEOUT_S = 120.0
_EMBED_CLIENTS = 16


@dataclass
class Ensemble:
    """A model of a repository, on a server of its own while the context lasts.

    Attributes:
        name: the contender's name in the table.
        repository: the model repository.
        model: the ensemble (or model) that gets the texts.
        output: the tensor that holds the vectors.
        flags: of tritonserver, besides its own.
    """

    name: str
    repository: Path
    model: str
    output: str = "embedding"
    flags: Sequence[str] = ()

    def __enter__(self) -> Ensemble:
        self._server = Server(self.repository, extra_args=self.flags).__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._server.__exit__(*error)

    @property
    def pid(self) -> int:
        """Of the server."""
        return self._server.pid

    @property
    def grpc_url(self) -> str:
        """Of the server."""
        return self._server.grpc_url

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors ``[texts, dim]``: one text a request, many at the same time, as under load."""
        from tritonclient import grpc

        def ask(text: str) -> NDArray[np.float32]:
            tensor = grpc.InferInput("text", [1, 1], "BYTES")
            tensor.set_data_from_numpy(np.array([[text.encode()]], dtype=np.object_))
            answer = client.infer(self.model, [tensor], client_timeout=_ANSWER_TIMEOUT_S)
            row: NDArray[np.float32] = answer.as_numpy(self.output)[0]
            return row

        with (
            grpc.InferenceServerClient(self.grpc_url) as client,
            ThreadPoolExecutor(_EMBED_CLIENTS) as pool,
        ):
            return np.stack(list(pool.map(ask, texts)))

    def load(self, texts: Sequence[str], *, clients: int, seconds: float) -> Measurement:
        """Closed loop with `clients`, after a short warm-up."""
        return closed_loop(
            self.name, self.grpc_url, self.model, texts, clients=clients, seconds=seconds
        )
