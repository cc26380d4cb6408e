"""A contender in an environment of its own, over its own HTTP API: installed, started, loaded."""

from __future__ import annotations

import hashlib
import http.client
import json
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

from benchmarks.measurement import Measurement, closed_loop
from benchmarks.model import CACHE
from triptych.serving.bench.baselines import ChildProcess
from triptych.serving.ports import claim_ports

HOST = "127.0.0.1"
MODEL = "minilm"
_READY_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 20.0
_ANSWER_TIMEOUT_S = 120.0
_EMBED_CLIENTS = 16
_OFFLINE = {"DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "NO_PROXY": HOST}


def install(name: str) -> Path:
    """The ``bin`` of `name`'s environment; made by the ordinary venv and pip where it is not yet.

    What it holds is in ``NAME-requirements.txt``.
    """
    requirements = Path(__file__).with_name(f"{name}-requirements.txt")
    environment = CACHE / name
    wanted = hashlib.sha256(requirements.read_bytes()).hexdigest()
    stamp = environment / "requirements.sha256"
    if not stamp.is_file() or stamp.read_text(encoding="ascii") != wanted:
        print(f"installing {name} into", environment, file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
        pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "--requirement", str(requirements)], check=True)
        stamp.write_text(wanted, encoding="ascii")
    return environment / "bin"


@dataclass
class HttpServer(ABC):
    """A server of this process's own while the context lasts.

    Attributes:
        name: the contender's name in the table.
    """

    name: str
    package: ClassVar[str]
    """Names its requirements and its environment."""
    endpoint: ClassVar[str]
    """Path that texts are posted to."""
    health: ClassVar[str]
    """Path that answers once it is ready."""
    variables: ClassVar[dict[str, str]] = {}
    """Of its environment, besides this process's own."""

    @abstractmethod
    def command(self, programs: Path, scratch: Path, port: int) -> list[str]:
        """What starts it: listening at `port` of `HOST`, in the foreground.

        Args:
            programs: the environment's ``bin``.
            scratch: an empty folder of its own, where it is started.
            port: free.
        """

    def body(self, text: str) -> dict[str, Any]:
        """A request for the vector of `text`; OpenAI's form unless overridden."""
        return {"model": MODEL, "input": text}

    def vector(self, answer: Any) -> list[float]:
        """The vector in an answer; OpenAI's form unless overridden."""
        row: list[float] = answer["data"][0]["embedding"]
        return row

    def __enter__(self) -> Self:
        programs = install(self.package)
        self._port = claim_ports(HOST, {"port": 0})["port"]
        self._scratch = tempfile.TemporaryDirectory(prefix="triptych-benchmarks-")
        scratch, log = Path(self._scratch.name, "work"), Path(self._scratch.name, "log.txt")
        scratch.mkdir()
        self._process = ChildProcess(
            self.command(programs, scratch, self._port),
            log,
            folder=scratch,
            variables={**_OFFLINE, **self.variables},
        )
        try:
            self._wait_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors ``[texts, dim]``: one text a request, many at the same time, as under load."""

        def ask(text: str) -> list[float]:
            status, answer = self._request("POST", self.endpoint, json.dumps(self.body(text)))
            if status != http.client.OK:
                raise RuntimeError(f"{self.name} answered {status}: {answer.decode()}")
            return self.vector(json.loads(answer))

        with ThreadPoolExecutor(_EMBED_CLIENTS) as pool:
            return np.array(list(pool.map(ask, texts)), np.float32)

    def load(self, texts: Sequence[str], *, clients: int, seconds: float) -> Measurement:
        """Closed loop with `clients`, after a short warm-up: perf_analyzer as for Triton."""
        return closed_loop(
            self.name,
            f"{HOST}:{self._port}",
            MODEL,
            [json.dumps(self.body(text)) for text in texts],
            clients=clients,
            seconds=seconds,
            http_path=self.endpoint,
        )

    def _request(self, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=_ANSWER_TIMEOUT_S)
        try:
            connection.request(method, f"/{path}", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
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
        said = self._process.log.read_text(encoding="utf-8", errors="replace")
        raise RuntimeError(f"{self.name} did not start:\n{said[-3000:]}")

    def _stop(self) -> None:
        self._process.end(_STOP_TIMEOUT_S)
        self._scratch.cleanup()
