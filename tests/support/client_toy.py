"""A small pipeline that writes down what it executes, on a real server, and calls to it."""

import asyncio
import hashlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.client_play import PLAY, PLAY_CONFIG, PLAYED, play_config
from triptych.client import AsyncClient, Client
from triptych.serving.server import Server

DIM = 8
MAX_BATCH_SIZE = 16

EMBED = """
import hashlib, json, time
from pathlib import Path
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.dim = int(config["output"][0]["dims"][0])
        self.seen = Path(args["model_repository"]) / "seen.jsonl"
        self.begun = Path(args["model_repository"]) / "begun.txt"

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        rows = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()[:, 0]
        with self.begun.open("ab") as file:
            file.write(b"\\n".join([*rows, b""]))
        parameters = json.loads(request.parameters())
        vectors, error = [], None
        for row, text in enumerate(rows):
            try:
                vectors.append(self.embed(text, parameters, request))
            except UnicodeDecodeError as broken:
                error = (f"[invalid_request row={row}] `text` must be valid UTF-8. Given: byte "
                         f"0x{text[broken.start]:02x} at position {broken.start}. Send UTF-8.")
            except ValueError as broken:
                error = f"[invalid_request row={row}] {broken}"
            if error:
                break
        with self.seen.open("a") as file:
            texts = [text.decode(errors="replace") for text in rows]
            file.write(json.dumps({"texts": texts, "cancelled": request.is_cancelled(),
                                   "parameters": parameters}) + "\\n")
        if error:
            refusal = pb_utils.TritonError(error, pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse([], error=refusal)
        tensor = pb_utils.Tensor("embedding", np.array(vectors, np.float32))
        return pb_utils.InferenceResponse([tensor])

    def embed(self, text, parameters, request):
        decoded = parameters.get("prompt", "") + text.decode()
        if decoded.startswith("refuse"):
            self.wait_for_another(decoded.partition(" after ")[2].encode())
            raise ValueError("`text` must not be refused. Given: row 0: x. Send another.")
        if decoded == "break":
            raise KeyError("the step is broken")
        if decoded.startswith("sleep:"):
            end = time.monotonic() + float(decoded[6:].split()[0])
            while time.monotonic() < end and not request.is_cancelled():
                time.sleep(0.01)
        if decoded.startswith("hold:"):
            while not (self.begun.with_name(decoded[5:]).exists() or request.is_cancelled()):
                time.sleep(0.01)
        vector = np.frombuffer(hashlib.sha256(decoded.encode()).digest()[:self.dim], np.uint8) + 1.0
        vector = vector[:parameters.get("dimensions")]
        return vector / np.linalg.norm(vector)

    def wait_for_another(self, mark):
        end = time.monotonic() + 300
        while mark and self.begun.read_bytes().count(mark) < 2 and time.monotonic() < end:
            time.sleep(0.01)
"""

STEP = """
backend: "python"
max_batch_size: {max_batch_size}
input {{ name: "text" data_type: TYPE_STRING dims: [1] }}
output {{ name: "embedding" data_type: TYPE_FP32 dims: [{dim}] }}
instance_group {{ kind: KIND_CPU count: {instances} }}
dynamic_batching {{ {queue_policy} }}
"""

# A policy makes Triton 24.10 pause for up to half a second between batches when no request comes
# in meanwhile, so only the pipeline that is there to be overloaded has one.
QUEUE_OF_TWO = """
  default_queue_policy {
    max_queue_size: 2 default_timeout_microseconds: 600000000 allow_timeout_override: true
  }
"""

ENSEMBLE = """
platform: "ensemble"
max_batch_size: {max_batch_size}
input {{ name: "text" data_type: TYPE_STRING dims: [1] }}
output {{ name: "embedding" data_type: TYPE_FP32 dims: [{dim}] }}
ensemble_scheduling {{
  step {{
    model_name: "{step}" model_version: -1
    input_map {{ key: "text" value: "text" }}
    output_map {{ key: "embedding" value: "embedding" }}
  }}
}}
"""


def write_repository(root: Path) -> Path:
    """Ensembles of one step: `toy`, `single` (2 instances, batches of 1), `narrow` (queue of 2).

    `counted` is as `toy`, for one test of its statistics. Beside them there are those of `PLAYED`.
    """
    for name, rows, instances, policy in (
        ("toy", MAX_BATCH_SIZE, 1, ""),
        ("counted", MAX_BATCH_SIZE, 1, ""),
        ("single", 1, 2, ""),
        ("narrow", 1, 1, QUEUE_OF_TWO),
    ):
        shape: dict[str, Any] = {"max_batch_size": rows, "dim": DIM}
        step = STEP.format(**shape, instances=instances, queue_policy=policy)
        write_model(root / f"{name}_step", step, EMBED)
        write_model(root / name, ENSEMBLE.format(**shape, step=f"{name}_step"))
    write_model(root / "play", PLAY_CONFIG, PLAY)
    for name, (inputs, outputs) in PLAYED.items():
        write_model(root / name, play_config(inputs, outputs))
    return root


def write_model(folder: Path, config: str, code: str = "") -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config)
    if code:
        (folder / "1" / "model.py").write_text(code)


def expected(text: str, dimensions: int | None = None) -> NDArray[np.float32]:
    digest = hashlib.sha256(text.encode()).digest()[:DIM]
    vector = (np.frombuffer(digest, np.uint8) + 1.0)[:dimensions]
    return np.asarray(vector / np.linalg.norm(vector), np.float32)


def expected_all(texts: list[str]) -> NDArray[np.float32]:
    return np.stack([expected(text) for text in texts])


@dataclass(frozen=True)
class Seen:
    """A request that a step executed."""

    texts: list[str]
    cancelled: bool
    parameters: dict[str, Any]


@dataclass(frozen=True)
class Toy:
    """The running server."""

    url: str
    repository: Path
    operator_headers: Mapping[str, str] = field(default_factory=dict)
    http_url: str = ""
    metrics_url: str = ""

    def seen(self, containing: str, step: str = "toy_step") -> list[Seen]:
        """What `step` executed with a text that contains the string."""
        file = self.repository / step / "seen.jsonl"
        text = file.read_text() if file.exists() else ""
        lines = text.rpartition("\n")[0].splitlines()  # without one that is still being written
        requests = [Seen(**json.loads(line)) for line in lines]
        return [seen for seen in requests if any(containing in text for text in seen.texts)]

    def wait_seen(self, containing: str, step: str = "toy_step") -> list[Seen]:
        """The same, once there is some."""
        wait_until(lambda: self.seen(containing, step), f"{step} executed {containing!r}")
        return self.seen(containing, step)

    def has_begun(self, containing: str, step: str = "toy_step") -> bool:
        """Whether `step` has begun, and perhaps ended, a request with the string in a text."""
        file = self.repository / step / "begun.txt"
        return file.exists() and containing.encode() in file.read_bytes()

    def wait_begun(self, containing: str, step: str = "toy_step") -> None:
        wait_until(lambda: self.has_begun(containing, step), f"{step} has begun {containing!r}")

    def release(self, name: str, step: str = "toy_step") -> None:
        """Let the texts ``hold:NAME`` of `step` be answered."""
        (self.repository / step / name).touch()


def wait_until(fulfilled: Callable[[], Any], what: str, within_s: float = 60.0) -> None:
    """Wait for a condition; it fails with `what` was waited for."""
    pause = threading.Event()
    for _ in range(int(within_s / 0.02)):
        if fulfilled():
            return
        pause.wait(0.02)
    raise AssertionError(f"{what}: not within {within_s:g} s")


@contextmanager
def serve_toy(folder: Path) -> Iterator[Toy]:
    """Serve all of the toys from `folder`."""
    repository = write_repository(folder)
    # By name, so that the server lets a test unload one of them.
    names = ("toy", "counted", "single", "narrow", *PLAYED)
    with Server(repository, models=names) as server:
        urls = server.http_url, server.metrics_url
        yield Toy(server.grpc_url, repository, server.operator_headers, *urls)
        os.kill(server.pid, signal.SIGKILL)  # to end politely takes seconds


Call = Callable[..., Any]


def caller(style: str, url: str | Sequence[str]) -> Call:
    """A function that makes one call with a fresh client of either kind.

    Its arguments are the pipeline, the method, what the method takes, and the client's `options`.
    """

    def call(
        pipeline: str,
        method: str,
        *args: object,
        options: dict[str, Any] | None = None,
        **kwargs: object,
    ) -> Any:
        with opened(
            style, pipeline, **{"url": url, "timeout_s": 300.0, **(options or {})}
        ) as start:
            return start(method, *args, **kwargs).result()

    return call


Start = Callable[..., "Future[Any]"]


@contextmanager
def opened(style: str, pipeline: str, url: str | Sequence[str], **options: Any) -> Iterator[Start]:
    """Open one client of either kind; yields a function that starts a call of it.

    Its arguments are the method and what the method takes; ``close`` is a method, too.
    """
    if style == "sync":
        with ThreadPoolExecutor(16) as pool, Client(pipeline, url, **options) as blocking:
            yield lambda method, *args, **kwargs: pool.submit(
                getattr(blocking, method), *args, **kwargs
            )
        return
    loop, client = asyncio.new_event_loop(), AsyncClient(pipeline, url, **options)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def start(method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(getattr(client, method)(*args, **kwargs), loop)

    try:
        yield start
    finally:
        start("close").result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def texts_of_many_lengths(count: int, mark: str) -> list[str]:
    lengths = np.random.default_rng(7).integers(0, 400, count)
    return [f"{mark} {index} " + "é" * int(length) for index, length in enumerate(lengths)]
