"""infinity-emb, LitServe and MLServer: each in its own environment, over its own HTTP API."""

from __future__ import annotations

import hashlib
import http.client
import json
import shutil
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from benchmarks.ensemble import CHECK_CLIENTS, RESPONSE_TIMEOUT_S
from benchmarks.harness import closed_loop, say
from benchmarks.model import CACHE, model_folder
from triptych.serving.bench.baselines import ChildProcess
from triptych.serving.ports import reserve_ports

HOST = "127.0.0.1"
MODEL = "minilm"
MAX_BATCH_TIME_S = 0.01
_READY_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 20.0
_OFFLINE = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "INFINITY_ANONYMOUS_USAGE_STATS": "0",
    "NO_PROXY": HOST,
}


def install(name: str) -> Path:
    """Install ``NAME-requirements.txt`` into a virtual environment; return its ``bin``.

    An environment that was installed from the same file is used again.
    """
    requirements = Path(__file__).with_name(f"{name}-requirements.txt")
    environment = CACHE / name
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()
    stamp = environment / "requirements.sha256"
    if not stamp.is_file() or stamp.read_text(encoding="ascii") != digest:
        say(f"installing {name} into {environment}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
        pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "--requirement", str(requirements)], check=True)
        stamp.write_text(digest, encoding="ascii")
    return environment / "bin"


@dataclass
class HttpServer(ABC):
    """A server in a child process while the context lasts."""

    name: str
    package: ClassVar[str]
    """Name of the environment and of its requirements file."""
    endpoint: ClassVar[str]
    """URL path to which texts are posted."""
    health: ClassVar[str]
    """URL path that returns 200 once the server is ready."""

    @abstractmethod
    def command(self, programs: Path, scratch: Path, port: int) -> list[str]:
        """Return the command of the server, which listens at `port` in the foreground.

        Args:
            programs: ``bin`` folder of the environment.
            scratch: Empty working directory of the server.
        """

    def body(self, text: str) -> dict[str, Any]:
        """Return the JSON request for the vector of `text`; by default in OpenAI's form."""
        return {"model": MODEL, "input": text, "encoding_format": "float"}

    def vector(self, response: Any) -> list[float]:
        """Return the vector of a JSON response; by default in OpenAI's form."""
        row: list[float] = response["data"][0]["embedding"]
        return row

    def __enter__(self) -> Self:
        programs = install(self.package)
        self._port = reserve_ports(HOST, {"port": 0})["port"]
        self._scratch = tempfile.TemporaryDirectory(prefix="triptych-benchmarks-")
        scratch, log = Path(self._scratch.name, "work"), Path(self._scratch.name, "log.txt")
        scratch.mkdir()
        command = self.command(programs, scratch, self._port)
        self._process = ChildProcess(command, log, folder=scratch, variables=_OFFLINE)
        try:
            self._wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.end(_STOP_TIMEOUT_S)
        self._scratch.cleanup()

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return vectors ``[texts, dim]``, requested concurrently with one text a request."""

        def embed_one(text: str) -> list[float]:
            status, content = self._request("POST", self.endpoint, json.dumps(self.body(text)))
            if status != http.client.OK:
                raise RuntimeError(f"{self.name} returned {status}: {content.decode()}")
            return self.vector(json.loads(content))

        with ThreadPoolExecutor(CHECK_CLIENTS) as pool:
            return np.array(list(pool.map(embed_one, texts)), np.float32)

    def load(self, texts: Sequence[str], *, clients: int, seconds: float) -> dict[str, float]:
        """Return the metrics of a closed loop."""
        bodies = [json.dumps(self.body(text)) for text in texts]
        url = f"{HOST}:{self._port}"
        return closed_loop(
            url, MODEL, bodies, clients=clients, seconds=seconds, http_path=self.endpoint
        )

    def _request(self, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=RESPONSE_TIMEOUT_S)
        try:
            connection.request(method, f"/{path}", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while time.monotonic() < deadline and not self._process.has_ended:
            try:
                if self._request("GET", self.health)[0] == http.client.OK:
                    return
            except OSError:
                pass
            time.sleep(0.2)
        log = self._process.log.read_text(encoding="utf-8", errors="replace")
        raise RuntimeError(f"{self.name} did not start:\n{log[-3000:]}")


@dataclass
class Infinity(HttpServer):
    """infinity-emb with torch on the CPU and its defaults."""

    package = "infinity"
    endpoint = "embeddings"
    health = "health"

    def command(self, programs: Path, scratch: Path, port: int) -> list[str]:
        command = [str(programs / "infinity_emb"), "v2", "--model-id", str(model_folder())]
        command += ["--served-model-name", MODEL, "--engine", "torch", "--device", "cpu"]
        return [*command, "--host", HOST, "--port", str(port)]


@dataclass
class LitServe(HttpServer):
    """LitServe with one worker and its OpenAI form of embeddings, `litserve_app.py`."""

    batch_size: int = 1
    """Maximum number of texts in a batch."""

    package = "litserve"
    endpoint = "v1/embeddings"
    health = "health"

    def command(self, programs: Path, scratch: Path, port: int) -> list[str]:
        app = Path(__file__).with_name("litserve_app.py")
        command = [str(programs / "python"), str(app), str(model_folder()), str(port)]
        return [*command, str(self.batch_size)]


@dataclass
class MLServer(HttpServer):
    """MLServer with one worker and a custom runtime, `mlserver_runtime.py`, over v2 HTTP.

    perf_analyzer cannot drive MLServer as a Triton server, because MLServer does not return the
    configuration of a model.
    """

    batch_size: int = 1
    """Maximum number of texts in a batch."""

    package = "mlserver"
    endpoint = f"v2/models/{MODEL}/infer"
    health = f"v2/models/{MODEL}/ready"

    def command(self, programs: Path, scratch: Path, port: int) -> list[str]:
        runtime = Path(__file__).with_name("mlserver_runtime.py")
        shutil.copy(runtime, scratch)
        ports = reserve_ports(HOST, {"grpc_port": 0, "metrics_port": 0})
        server = {"host": HOST, "http_port": port, **ports}
        model = {
            "name": MODEL,
            "implementation": f"{runtime.stem}.Embeddings",
            "max_batch_size": self.batch_size,
            "max_batch_time": MAX_BATCH_TIME_S,
            "parameters": {"uri": str(model_folder())},
        }
        for name, settings in (("settings", server), ("model-settings", model)):
            (scratch / f"{name}.json").write_text(json.dumps(settings), encoding="utf-8")
        return [str(programs / "mlserver"), "start", str(scratch)]

    def body(self, text: str) -> dict[str, Any]:
        tensor = {"name": "text", "shape": [1, 1], "datatype": "BYTES", "data": [text]}
        return {"inputs": [tensor]}

    def vector(self, response: Any) -> list[float]:
        row: list[float] = response["outputs"][0]["data"]
        return row
