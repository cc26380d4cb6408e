"""Send broken requests to a real server, while the responses of another client must stay right.

Usage: ``python build_scripts/benchmarks/fuzz.py model_repository minilm --requests 100000``.
Over gRPC: wrong shapes, types, lengths, names and parameters, for the ensemble and for its steps;
over HTTP: wrong bodies and headers. Each request must end with a response or a status within its
deadline, and the server must not crash. The outcomes are counted; exit code 1 if one is a fault.
"""

from __future__ import annotations

import http.client
import json
import math
import random
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
import psutil
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.grpc.model_config_pb2 import DataType

from benchmarks.harness import finish, make_parser
from benchmarks.results import Table
from triptych.client import Client
from triptych.container.manifests import find_pipelines
from triptych.repository.config import CONFIG_FILE, read_config
from triptych.serving.server import Server

DEADLINE_S = 20.0
CLIENTS = 8
PROBE = "where is my parcel"
TYPES = ("BYTES", "INT32", "INT64", "FP32", "UINT8", "BOOL", "FP16", "", "NONSENSE")
NAMES = (
    "text",
    "text_pair",
    "request_ticket",
    "direct_call",
    "row_metadata",
    "input_ids",
    "row_length",
    "",
    "x" * 999,
)
FAULTS = ("WRONG", "DEADLINE", "UNKNOWN", "INTERNAL", "imeout", "Refused", "Unreachable")
"""Parts of the outcomes that are faults."""
SIZES = (-2, -1, 0, 1, 2, 4, 384, 2**40, 2**62)
ELEMENT_BYTES = {"BOOL": 1, "UINT8": 1, "INT8": 1, "FP16": 2, "INT64": 8, "STRING": 1}
"""Bytes of an element, 4 for other types; Triton counts the elements of strings."""
TEXTS = (b"", b"\xff\xfe", b"\x00" * 50, "漢字 🙂".encode(), b"a " * 900)
PARAMETERS = ("timeout", "priority", "sequence_id", "top_k", "ü", "")
NUMBERS = (-(2**63), -(2**31), -1, 0, 1, 7, 255, 2**31 - 1, 2**40, 2**63 - 1)


def overflowing_requests(config: Any) -> Iterator[Any]:
    """Yield requests for the model of a ModelConfig with a shape whose bytes are 0 in 64 bits.

    Triton takes such an input as complete without data. The other required inputs are zeros.
    """
    for target in config.input:
        if -1 not in target.dims:
            continue
        for rows in (1, 4) if config.max_batch_size >= 4 else (1,):
            batch = [rows] if config.max_batch_size else []
            request = service_pb2.ModelInferRequest(model_name=config.name)
            for tensor in config.input:
                if tensor.optional and tensor is not target:
                    continue
                datatype = DataType.Name(tensor.data_type).removeprefix("TYPE_")
                width = ELEMENT_BYTES.get(datatype, 4)
                shape = batch + [max(size, 1) for size in tensor.dims]
                data = bytes((4 if datatype == "STRING" else width) * math.prod(shape))
                if tensor is target:
                    data = b""
                    axis = len(batch) + list(tensor.dims).index(-1)
                    shape[axis] = min(2**64 // rows // width, 2**63 - 1)
                datatype = "BYTES" if datatype == "STRING" else datatype
                request.inputs.add(name=tensor.name, datatype=datatype).shape.extend(shape)
                request.raw_input_contents.append(data)
            yield request


class Fuzzer:
    """A generator of broken requests with a seed.

    Args:
        models: Names of the models.
        seed: Seed of the random numbers.
        overflowing: Requests with a shape whose size overflows.
    """

    def __init__(self, models: list[str], seed: int, overflowing: Sequence[Any]) -> None:
        self._random = random.Random(seed)
        self._models = models
        self._overflowing = overflowing

    def infer(self) -> tuple[str, Any]:
        """Return the kind of fault and the request."""
        random = self._random
        if random.random() < 0.05:
            return "overflow", random.choice(self._overflowing)
        request = service_pb2.ModelInferRequest(model_name=random.choice(self._models))
        if random.random() < 0.02:
            request.model_name = random.choice(("", "..", "no such", "x" * 5000))
        kind = random.choice(("text", "length", "tensors", "parameters"))
        if kind in ("text", "parameters"):
            rows = random.choice((0, 1, 1, 2, 5, 65, 1000)) if kind == "text" else 1
            texts = [self._make_text() for _ in range(rows)]
            data = b"".join(struct.pack("<I", len(text)) + text for text in texts)
            self._add(request, "text", "BYTES", (rows, 1), data)
        elif kind == "length":
            size = struct.pack("<I", random.choice((0, 3, 4, 1000, 2**31, 2**32 - 1)))
            rest = random.randbytes(random.choice((0, 1, 3, 40)))
            self._add(request, "text", "BYTES", (1, 1), size[: random.randint(0, 4)] + rest)
        else:
            for _ in range(random.randint(0, 5)):
                shape = tuple(random.choices(SIZES, k=random.randint(0, 4)))
                data = random.randbytes(random.choice((0, 1, 4, 8, 32, 1536)))
                self._add(request, random.choice(NAMES), random.choice(TYPES), shape, data)
        if kind == "parameters":
            for _ in range(random.randint(1, 4)):
                target = request.parameters[random.choice(PARAMETERS)]
                target.int64_param = random.choice(NUMBERS)
                if random.random() < 0.5:
                    target.string_param = random.choice(("", "[" * 3000, '{"a":', "\x00", "1e999"))
        return kind, request

    def body(self) -> tuple[str, bytes, dict[str, str]]:
        """Return the kind of fault, an HTTP body and its headers."""
        choose = self._random
        good: dict[str, list[dict[str, Any]]] = {
            "inputs": [{"name": "text", "shape": [1, 1], "datatype": "BYTES", "data": [PROBE]}]
        }
        kind = choose.choice(("deep", "cut", "bytes", "header", "json"))
        text = json.dumps(good).encode()
        if kind == "deep":
            return kind, choose.choice((b"[", b'{"a":')) * choose.choice((10, 20_000)), {}
        if kind == "cut":
            return kind, text[: choose.randint(0, len(text))], {}
        if kind == "bytes":
            return kind, choose.randbytes(choose.choice((0, 1, 100, 5000))), {}
        if kind == "header":
            value = choose.choice(("-1", "0", "5", str(len(text) + 1), "9" * 30, "x"))
            return kind, text, {"Inference-Header-Content-Length": value}
        wrong: Any = choose.choice((None, -1, 1e308, [], {}, [[[]]], "\x00", True, [1, "a", None]))
        good["inputs"][0][choose.choice(("name", "shape", "datatype", "data"))] = wrong
        return kind, json.dumps(good).encode(), {}

    def path(self) -> str:
        """Return the HTTP path of a model."""
        return f"/v2/models/{self._random.choice(self._models)}/infer"

    def _make_text(self) -> bytes:
        return self._random.choice((*TEXTS, self._random.randbytes(20)))

    def _add(
        self, request: Any, name: str, datatype: str, shape: tuple[int, ...], data: bytes
    ) -> None:
        request.inputs.add(name=name, datatype=datatype).shape.extend(shape)
        if self._random.random() < 0.95:  # otherwise the request has fewer contents than inputs
            request.raw_input_contents.append(data)


def send_grpc(url: str, fuzzer: Fuzzer, count: int, ended: Counter[str]) -> None:
    """Send broken gRPC requests and count their outcomes."""
    with grpc.insecure_channel(url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for _ in range(count):
            kind, request = fuzzer.infer()
            try:
                stub.ModelInfer(request, timeout=DEADLINE_S)
                ended[f"grpc {kind}: answered"] += 1
            except grpc.RpcError as error:
                ended[f"grpc {kind}: {error.code().name}"] += 1


def send_http(url: str, fuzzer: Fuzzer, count: int, ended: Counter[str]) -> None:
    """Send broken HTTP requests and count their outcomes."""
    for _ in range(count):
        kind, body, headers = fuzzer.body()
        connection = http.client.HTTPConnection(url, timeout=DEADLINE_S)
        try:
            connection.request("POST", fuzzer.path(), body, headers)
            ended[f"http {kind}: {connection.getresponse().status}"] += 1
        except (OSError, http.client.HTTPException) as error:
            ended[f"http {kind}: {type(error).__name__}"] += 1
        finally:
            connection.close()


def probe_responses(url: str, pipeline: str, over: threading.Event, ended: Counter[str]) -> None:
    """Send a correct request again and again until `over`; its response must never change."""
    with Client(pipeline, url) as client:
        first = client.infer({"text": [PROBE]})
        while not over.wait(0.02):
            try:
                found = client.infer({"text": [PROBE]}, timeout_s=DEADLINE_S)
            except Exception as error:
                ended[f"probe: {type(error).__name__}"] += 1
                continue
            right = all(np.allclose(found[name], first[name], atol=1e-5) for name in first)
            ended["probe: right" if right else "probe: WRONG"] += 1


def fuzz(repository: Path, pipeline: str, requests: int, seed: int) -> tuple[Counter[str], bool]:
    """Return the number of each outcome, and whether none is a fault and the server runs."""
    models = next([p.name, *p.steps] for p in find_pipelines(repository) if p.name == pipeline)
    configs = [read_config(repository / model / CONFIG_FILE) for model in models]
    overflowing = [request for config in configs for request in overflowing_requests(config)]
    ended: Counter[str] = Counter()
    over = threading.Event()
    with Server(repository, models=[pipeline]) as server:
        before = psutil.Process(server.pid).memory_info().rss
        arguments = server.grpc_url, pipeline, over, ended
        probe = threading.Thread(target=probe_responses, args=arguments)
        probe.start()
        share = requests // (2 * CLIENTS)
        senders: list[tuple[Callable[..., None], str]]
        senders = [(send_grpc, server.grpc_url), (send_http, server.http_url)] * CLIENTS
        began = time.monotonic()
        with ThreadPoolExecutor(len(senders)) as pool:
            for number, (send, url) in enumerate(senders):
                fuzzer = Fuzzer(models, seed + number, overflowing)
                pool.submit(send, url, fuzzer, share, ended)
        over.set()
        probe.join()
        alive = server.find_crash(0.0) is None
        grown = (psutil.Process(server.pid).memory_info().rss - before) / 2**20 if alive else 0.0
    seconds = time.monotonic() - began
    print(f"{share * len(senders)} requests in {seconds:.0f} s; the server grew by {grown:.0f} MiB")
    faults = [line for line in ended if any(word in line for word in FAULTS)]
    lost = [line for line in ended if line.startswith("probe") and line != "probe: right"]
    return ended, alive and not lost and not faults


def main() -> int:
    """Send the requests; return 1 if an outcome is a fault or the server crashed."""
    parser = make_parser(__doc__, "fuzz", "Broken requests (`make fuzz`)")
    parser.add_argument("repository", type=Path)
    parser.add_argument("pipeline")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    ended, passed = fuzz(options.repository, options.pipeline, options.requests, options.seed)
    rows = [(line, str(count)) for line, count in sorted(ended.items())]
    table = Table("Requests by outcome", ("outcome", "requests"), rows)
    finish(options, [table], ended, ["passed: no fault, no wrong response" if passed else "FAILED"])
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
