"""Other servers of embeddings on the same GPU, where they are installed: infinity-emb and vLLM."""

from __future__ import annotations

import http.client
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from benchmarks.model import CACHE
from benchmarks.servers import HOST, MODEL, OFFLINE, run_server
from triptych.serving.generation_environment import environment_python, find_environment
from triptych.serving.ports import reserve_ports

_TIMEOUT_S = 120.0
_DTYPES = {"fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class Peer:
    """Another server with the API of OpenAI.

    Attributes:
        package: Module that must be installed.
        endpoint: URL path of the embeddings.
        make_command: Returns the arguments of its Python from folder, device and precision.
    """

    package: str
    endpoint: str
    make_command: Callable[[Path, str, str], list[str]]


def _infinity(folder: Path, device: str, precision: str) -> list[str]:
    start = "import sys; from infinity_emb.cli import cli; sys.argv[0] = 'infinity_emb'; cli()"
    command = ["-c", start, "v2", "--model-id", str(folder), "--served-model-name", MODEL]
    command += ["--engine", "torch", "--device", device, "--dtype", _DTYPES[precision]]
    return [*command, "--batch-size", "128", "--no-bettertransformer"]


def _vllm(folder: Path, _device: str, precision: str) -> list[str]:
    command = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", MODEL, "--runner", "pooling"]
    return [*command, "--dtype", _DTYPES[precision], "--gpu-memory-utilization", "0.3"]


PEERS = {
    "infinity-emb": Peer("infinity_emb", "embeddings", _infinity),
    "vLLM": Peer("vllm", "v1/embeddings", _vllm),
}


def find_python(name: str, given: dict[str, Path]) -> Path:
    """Return the Python in which a peer is installed: as given, this one, or an environment.

    Raises:
        LookupError: None has it.
    """
    if name in given:
        return given[name]
    if importlib.util.find_spec(PEERS[name].package) is not None:
        return Path(sys.executable)
    own = CACHE / "infinity" / "bin" / "python"  # of `make compare`
    if name == "infinity-emb" and own.is_file():
        return own
    if name == "vLLM" and find_environment() is not None:
        return environment_python()
    raise LookupError("it is not installed")


@contextmanager
def run_peer(
    name: str, python: Path, folder: Path, device: str, precision: str
) -> Iterator[tuple[str, str]]:
    """Run a peer while the block runs; yield its ``host:port`` and its endpoint."""
    peer = PEERS[name]
    arguments = [*peer.make_command(folder, device, precision), "--host", HOST]
    with ExitStack() as stack:
        port = stack.enter_context(reserve_ports(HOST, {"port": 0}))["port"]
        command = [str(python), *arguments, "--port", str(port)]
        scratch = stack.enter_context(TemporaryDirectory(prefix="triptych-benchmarks-"))
        stack.enter_context(run_server(name, command, port, "health", Path(scratch), OFFLINE))
        yield f"{HOST}:{port}", peer.endpoint


def make_body(texts: Sequence[str]) -> str:
    """Return the JSON request for texts."""
    return json.dumps({"model": MODEL, "input": [*texts], "encoding_format": "float"})


def embed(url: str, endpoint: str, texts: Sequence[str]) -> NDArray[np.float32]:
    """Return vectors ``[texts, dim]``, normalized, requested in lists of 32."""
    vectors: list[list[float]] = []
    connection = http.client.HTTPConnection(url, timeout=_TIMEOUT_S)
    for start in range(0, len(texts), 32):
        body, headers = make_body(texts[start : start + 32]), {"Content-Type": "application/json"}
        connection.request("POST", f"/{endpoint}", body, headers)
        response = connection.getresponse()
        content = response.read()
        if response.status != http.client.OK:
            raise RuntimeError(f"status {response.status}: {content.decode()}")
        vectors += [row["embedding"] for row in json.loads(content)["data"]]
    connection.close()
    found = np.array(vectors, np.float32)
    norms: NDArray[np.float32] = np.linalg.norm(found, axis=1, keepdims=True)
    return found / norms
