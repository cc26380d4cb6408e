"""LitServe with batching and its own OpenAI form of embeddings: `litserve_app.py`."""

from __future__ import annotations

from pathlib import Path

from peers.http_server import HttpServer
from peers.model import model_folder

_APP = Path(__file__).with_name("litserve_app.py")


class LitServe(HttpServer):
    """A LitServe server."""

    package = "litserve"
    endpoint = "v1/embeddings"
    health = "health"

    def command(self, programs: Path, scratch: Path, port: int) -> list[str]:
        """One worker on the CPU."""
        return [str(programs / "python"), str(_APP), str(model_folder()), str(port)]
