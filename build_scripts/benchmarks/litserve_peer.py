"""LitServe with its own OpenAI form of embeddings: `litserve_app.py`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.http_server import HttpServer
from benchmarks.model import model_folder

_APP = Path(__file__).with_name("litserve_app.py")


@dataclass
class LitServe(HttpServer):
    """A LitServe server.

    Attributes:
        batch_size: most texts of a batch; 1 for no batching.
    """

    batch_size: int = 1

    package = "litserve"
    endpoint = "v1/embeddings"
    health = "health"

    def command(self, programs: Path, scratch: Path, port: int) -> list[str]:
        """One worker on the CPU."""
        command = [str(programs / "python"), str(_APP), str(model_folder()), str(port)]
        return [*command, str(self.batch_size)]
