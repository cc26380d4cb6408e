"""infinity-emb over its own HTTP API."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.http_server import HOST, MODEL, HttpServer
from benchmarks.model import model_folder


@dataclass
class Infinity(HttpServer):
    """An infinity server.

    Attributes:
        options: flags of infinity's own, over its defaults.
        encoding: how vectors come back: ``float`` (JSON numbers) or ``base64``.
    """

    options: tuple[str, ...] = ()
    encoding: str = "float"

    package = "infinity"
    endpoint = "embeddings"
    health = "health"
    variables = {"INFINITY_ANONYMOUS_USAGE_STATS": "0"}  # noqa: RUF012 - a ClassVar of the base

    def command(self, programs: Path, scratch: Path, port: int) -> list[str]:
        """With torch on the CPU."""
        command = [str(programs / "infinity_emb"), "v2", "--model-id", str(model_folder())]
        command += ["--served-model-name", MODEL, "--engine", "torch", "--device", "cpu"]
        return [*command, "--host", HOST, "--port", str(port), *self.options]

    def body(self, text: str) -> dict[str, Any]:
        """OpenAI's form."""
        return {**super().body(text), "encoding_format": self.encoding}
