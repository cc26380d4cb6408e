"""infinity-emb: its own virtual environment, its server, and perf_analyzer over its HTTP API."""

from __future__ import annotations

import csv
import hashlib
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from peers.measurement import Measurement
from peers.model import CACHE, model_folder
from triptych.load.perf_binary import find_perf_analyzer
from triptych.serving.ports import claim_ports

_HOST = "127.0.0.1"
_NAME = "minilm"
_REQUIREMENTS = Path(__file__).parent / "infinity-requirements.txt"
_READY_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 20.0
_ANSWER_TIMEOUT_S = 120.0
_EMBED_CLIENTS = 16
_OFFLINE = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "INFINITY_ANONYMOUS_USAGE_STATS": "0",
    "NO_PROXY": _HOST,
}


def install() -> Path:
    """The environment's ``bin``; made by the ordinary venv and pip where it is not there yet."""
    environment = CACHE / "infinity"
    wanted = hashlib.sha256(_REQUIREMENTS.read_bytes()).hexdigest()
    stamp = environment / "requirements.sha256"
    if not stamp.is_file() or stamp.read_text(encoding="ascii") != wanted:
        print("installing infinity-emb into", environment, file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
        pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "--requirement", str(_REQUIREMENTS)], check=True)
        stamp.write_text(wanted, encoding="ascii")
    return environment / "bin"


@dataclass
class Infinity:
    """An infinity server of this process's own while the context lasts.

    Attributes:
        name: the contender's name in the table.
        options: flags of infinity's own, over its defaults.
        encoding: how vectors come back: ``float`` (JSON numbers) or ``base64``.
    """

    name: str
    options: tuple[str, ...] = ()
    encoding: str = "float"

    def __enter__(self) -> Infinity:
        command = [str(install() / "infinity_emb"), "v2", "--model-id", str(model_folder())]
        self._port = claim_ports(_HOST, {"port": 0})["port"]
        command += ["--served-model-name", _NAME, "--engine", "torch", "--device", "cpu"]
        command += ["--host", _HOST, "--port", str(self._port), *self.options]
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **_OFFLINE},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        try:
            self._wait_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors ``[texts, dim]``: one text a request, many at the same time, as under load."""

        def ask(text: str) -> list[float]:
            body = json.dumps({"model": _NAME, "input": text})
            answer = json.loads(self._request("POST", "/embeddings", body))
            row: list[float] = answer["data"][0]["embedding"]
            return row

        with ThreadPoolExecutor(_EMBED_CLIENTS) as pool:
            return np.array(list(pool.map(ask, texts)), np.float32)

    def load(self, texts: Sequence[str], *, clients: int, seconds: float) -> Measurement:
        """Closed loop with `clients`, after a short warm-up: perf_analyzer as for Triton."""
        body = {"model": _NAME, "encoding_format": self.encoding}
        analyzer = find_perf_analyzer()
        with tempfile.TemporaryDirectory(prefix="triptych-peers-") as name:
            data, report = Path(name) / "requests.json", Path(name) / "report.csv"
            rows = [{"payload": [{**body, "input": text}]} for text in texts]
            data.write_text(json.dumps({"data": rows}), encoding="ascii")
            command = [str(analyzer.binary.resolve()), "--service-kind=openai", "-m", _NAME]
            command += ["--endpoint=embeddings", "-u", f"{_HOST}:{self._port}", "--async", "-v"]
            command += [f"--input-data={data}", f"--concurrency-range={clients}"]
            command += ["--percentile=99", "--stability-percentage=1e6"]
            command += [f"--max-threads={max(1, (os.cpu_count() or 2) // 2)}"]
            for measure in (
                [f"--request-count={2 * clients + 20}"],
                [f"--measurement-interval={round(seconds * 1000 / 3)}", "-f", str(report)],
            ):
                done = subprocess.run(
                    [*command, *measure],
                    env={**analyzer.environment(), **_OFFLINE},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    timeout=60 + 20 * seconds,
                    check=False,
                )
                if done.returncode != 0:
                    raise RuntimeError(f"perf_analyzer failed:\n{done.stdout}")
            row = next(csv.DictReader(report.read_text(encoding="utf-8").splitlines()))
        counted = re.search(r"Request count: (\d+)", done.stdout)
        return Measurement(
            contender=self.name,
            clients=clients,
            throughput_per_s=float(row["Inferences/Second"]),
            p50_ms=float(row["p50 latency"]) / 1e3,
            p99_ms=float(row["p99 latency"]) / 1e3,
            notes={"requests": int(counted[1]) if counted else 0},
        )

    def _request(self, method: str, path: str, body: str | None = None) -> bytes:
        connection = http.client.HTTPConnection(_HOST, self._port, timeout=_ANSWER_TIMEOUT_S)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if answer.status != http.client.OK:
            raise RuntimeError(f"infinity answered {answer.status}: {content.decode()}")
        return content

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                self._request("GET", "/health")
                return
            except OSError:
                time.sleep(0.2)
        self._log.seek(0)
        raise RuntimeError(f"infinity did not start:\n{self._log.read().decode()[-3000:]}")

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
