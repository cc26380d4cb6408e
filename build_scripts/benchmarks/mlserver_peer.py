"""MLServer with a custom runtime, over KServe's v2 HTTP.

perf_analyzer cannot drive it as a Triton server: MLServer does not tell a model's configuration.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.http_server import HOST, MODEL, HttpServer
from benchmarks.model import model_folder
from triptych.serving.ports import claim_ports

BATCH_TIME_S = 0.01
_RUNTIME = Path(__file__).with_name("mlserver_runtime.py")


@dataclass
class MLServer(HttpServer):
    """An MLServer server.

    Attributes:
        batch_size: most texts of a batch; 1 for no batching.
    """

    batch_size: int = 1

    package = "mlserver"
    endpoint = f"v2/models/{MODEL}/infer"
    health = f"v2/models/{MODEL}/ready"

    def command(self, programs: Path, scratch: Path, port: int) -> list[str]:
        """One worker on the CPU, as by default."""
        shutil.copy(_RUNTIME, scratch)
        ports = claim_ports(HOST, {"grpc_port": 0, "metrics_port": 0})
        server = {"host": HOST, "http_port": port, **ports}
        model = {
            "name": MODEL,
            "implementation": f"{_RUNTIME.stem}.Embeddings",
            "max_batch_size": self.batch_size,
            "max_batch_time": BATCH_TIME_S,
            "parameters": {"uri": str(model_folder())},
        }
        for name, settings in (("settings", server), ("model-settings", model)):
            (scratch / f"{name}.json").write_text(json.dumps(settings), encoding="utf-8")
        return [str(programs / "mlserver"), "start", str(scratch)]

    def body(self, text: str) -> dict[str, Any]:
        """The v2 form, of one text."""
        tensor = {"name": "text", "shape": [1, 1], "datatype": "BYTES", "data": [text]}
        return {"inputs": [tensor]}

    def vector(self, answer: Any) -> list[float]:
        """The v2 form, of one vector."""
        row: list[float] = answer["outputs"][0]["data"]
        return row
