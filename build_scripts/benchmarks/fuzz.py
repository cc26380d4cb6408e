"""Send broken requests to a real server, while the responses of another client must stay right.

Usage: ``python build_scripts/benchmarks/fuzz.py model_repository minilm --requests 100000``; with
``--envoy`` behind an Envoy with the configuration of ``triptych deploy``.
Over gRPC: wrong shapes, types, lengths, names and parameters, for the ensemble and for its steps;
over HTTP: wrong bodies and headers. The attacks of `ATTACKS` go over both. Each request must end
with a response or a status within its deadline, and the server must not crash. Behind Envoy no
compressed request may reach a server, and no request for a step over HTTP. A string length that
lies fails its whole batch: requests of a client without retries may fail beside it. Where one lies
beside each attempt of this project's client, the request is sent again until its deadline. The
outcomes are counted; exit code 1 if one is a fault.
"""

from __future__ import annotations

import gzip
import http.client
import json
import math
import random
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
import psutil
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.grpc.model_config_pb2 import DataType

from benchmarks.harness import finish, make_parser
from benchmarks.local_envoy import Addresses, envoy_of_repository
from benchmarks.results import Table
from triptych.client import BatchFailedError, Client
from triptych.client.wire import infer_request
from triptych.container.manifests import find_pipelines
from triptych.repository.config import CONFIG_FILE, read_config
from triptych.runtime.row_types import PAYLOAD, TICKET, make_payload
from triptych.serving.server import Server

DEADLINE_S = 20.0
CLIENTS = 8
PROBE = "where is my parcel"
TYPES = ("BYTES", "INT32", "INT64", "FP32", "UINT8", "BOOL", "FP16", "", "NONSENSE")
NAMES = (
    "text",
    "text_pair",
    TICKET,
    PAYLOAD,
    "direct_call",
    "row_metadata",
    "input_ids",
    "row_length",
    "",
    "x" * 999,
)
ATTACKS = ("step", "compressed", "lying", "forged")
"""Attacks over gRPC and HTTP.

A request for a step, which passes the limits of preprocess; one that is many times as large without
compression; a string length beyond its data, which makes Triton fail a whole batch; and a forged
ticket with a sample."""
BEHIND_ENVOY = {"grpc compressed": "UNIMPLEMENTED", "http compressed": "415", "http step": "404"}
"""Only outcome behind Envoy of attacks that it stops."""
FAULTS = ("WRONG", "DEADLINE", "UNKNOWN", "INTERNAL", "imeout", "Refused", "Unreachable")
"""Parts of the outcomes that are faults."""
SIZES = (-2, -1, 0, 1, 2, 4, 384, 2**40, 2**62)
ELEMENT_BYTES = {"BOOL": 1, "UINT8": 1, "INT8": 1, "FP16": 2, "INT64": 8, "STRING": 1}
"""Bytes of an element, 4 for other types; Triton counts the elements of strings."""
TEXTS = (b"", b"\xff\xfe", b"\x00" * 50, "漢字 🙂".encode(), b"a " * 900)
PARAMETERS = ("timeout", "priority", "sequence_id", "top_k", "ü", "")
NUMBERS = (-(2**63), -(2**31), -1, 0, 1, 7, 255, 2**31 - 1, 2**40, 2**63 - 1)


def fill(config: Any, target: Any = None) -> Any:
    """Return a request for the model of a ModelConfig with one row of zeros in required inputs.

    Args:
        target: Optional input that the request has as well.
    """
    batch = [1] if config.max_batch_size else []
    request = service_pb2.ModelInferRequest(model_name=config.name)
    for tensor in config.input:
        if tensor.optional and tensor is not target:
            continue
        datatype = DataType.Name(tensor.data_type).removeprefix("TYPE_")
        shape = batch + [max(size, 1) for size in tensor.dims]
        width = 4 if datatype == "STRING" else ELEMENT_BYTES.get(datatype, 4)
        datatype = "BYTES" if datatype == "STRING" else datatype
        request.inputs.add(name=tensor.name, datatype=datatype).shape.extend(shape)
        request.raw_input_contents.append(bytes(width * math.prod(shape)))
    return request


def overflowing_requests(config: Any) -> Iterator[Any]:
    """Yield requests for the model of a ModelConfig with a shape whose bytes are 0 in 64 bits.

    Triton takes such an input as complete without data. The other required inputs are zeros.
    """
    for target in config.input:
        if -1 not in target.dims:
            continue
        for rows in (1, 4) if config.max_batch_size >= 4 else (1,):
            request = fill(config, target)
            batch = [rows] if config.max_batch_size else []
            for index, tensor in enumerate(request.inputs):
                shape = [*batch, *tensor.shape[len(batch) :]]
                data = rows * request.raw_input_contents[index]
                if tensor.name == target.name:
                    width = ELEMENT_BYTES.get(DataType.Name(target.data_type)[5:], 4)
                    axis = len(batch) + list(target.dims).index(-1)
                    shape[axis] = min(2**64 // rows // width, 2**63 - 1)
                    data = b""
                tensor.ClearField("shape")
                tensor.shape.extend(shape)
                request.raw_input_contents[index] = data
            yield request


def forged_requests(config: Any) -> Iterator[Any]:
    """Yield requests for a model that takes tickets, with forged ones that have a sample."""
    for target in config.input:
        if target.name not in (TICKET, PAYLOAD):
            continue
        sample = make_payload("", b"forged")
        values = {
            TICKET: [struct.pack("<2q", *numbers) for numbers in ((1, 1), (2**62, -1))],
            PAYLOAD: [struct.pack("<I", len(data)) + data for data in (b"", b"no", sample)],
        }
        for value in values[target.name]:
            request = fill(config, target)
            index = [tensor.name for tensor in request.inputs].index(target.name)
            request.raw_input_contents[index] = value
            yield request


class Fuzzer:
    """A generator of broken requests with a seed.

    Args:
        models: Names of the models.
        seed: Seed of the random numbers.
        configs: ModelConfig of each model; the first is the pipeline's.
    """

    def __init__(self, models: list[str], seed: int, configs: Sequence[Any]) -> None:
        self._random = random.Random(seed)
        self._models, self.pipeline = models, models[0]
        self._steps = [fill(config) for config in configs[1:]]
        self._overflowing = [each for config in configs for each in overflowing_requests(config)]
        self._forged = [each for config in configs for each in forged_requests(config)]

    def infer(self) -> tuple[str, Any]:
        """Return the kind of fault and the request."""
        random = self._random
        if random.random() < 0.2:
            kind = random.choice(("overflow", *ATTACKS))
            return kind, self._attack(kind)
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

    def _attack(self, kind: str) -> Any:
        made = {"overflow": self._overflowing, "step": self._steps, "forged": self._forged}
        if kind in made:
            return self._random.choice(made[kind])
        text = PROBE.encode() if kind == "lying" else b"a " * (1 << 18)
        request = infer_request(self.pipeline, {"text": [text]}, [0], {}, {})
        if kind == "lying":
            length = self._random.choice((len(text) + 1, 1000, 2**31, 2**32 - 1))
            request.raw_input_contents[0] = struct.pack("<I", length) + text
        return request

    def body(self) -> tuple[str, bytes, dict[str, str]]:
        """Return the kind of fault, an HTTP body and its headers."""
        choose = self._random
        good: dict[str, list[dict[str, Any]]] = {
            "inputs": [{"name": "text", "shape": [1, 1], "datatype": "BYTES", "data": [PROBE]}]
        }
        kind = choose.choice(("deep", "cut", "bytes", "header", "json", "compressed", "lying"))
        text = json.dumps(good).encode()
        if kind == "compressed":
            return kind, gzip.compress(text + b" " * (8 << 20)), {"Content-Encoding": "gzip"}
        if kind == "lying":
            data = struct.pack("<I", choose.choice((100, 2**31, 2**32 - 1))) + PROBE.encode()
            del good["inputs"][0]["data"]
            good["inputs"][0]["parameters"] = {"binary_data_size": len(data)}
            text = json.dumps(good).encode()
            return kind, text + data, {"Inference-Header-Content-Length": str(len(text))}
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

    def model(self, kind: str) -> str:
        """Return the name of a model for an HTTP request of this kind."""
        return self._models[0] if kind in ATTACKS else self._random.choice(self._models)

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
            compression = grpc.Compression.Gzip if kind == "compressed" else None
            try:
                stub.ModelInfer(request, timeout=DEADLINE_S, compression=compression)
                ended[f"grpc {kind}: answered"] += 1
            except grpc.RpcError as error:
                ended[f"grpc {kind}: {error.code().name}"] += 1


def send_http(url: str, fuzzer: Fuzzer, count: int, ended: Counter[str]) -> None:
    """Send broken HTTP requests and count their outcomes."""
    for _ in range(count):
        kind, body, headers = fuzzer.body()
        model = fuzzer.model(kind)
        kind = "step" if model != fuzzer.pipeline else kind
        connection = http.client.HTTPConnection(url, timeout=DEADLINE_S)
        try:
            connection.request("POST", f"/v2/models/{model}/infer", body, headers)
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
            until = time.monotonic() + DEADLINE_S
            try:
                found = _infer_beside_lies(client, until)
            except Exception as error:
                ended[f"probe: {type(error).__name__}"] += 1
                continue
            right = all(np.allclose(found[name], first[name], atol=1e-5) for name in first)
            ended["probe: right" if right else "probe: WRONG"] += 1


def _infer_beside_lies(client: Client, until: float) -> Mapping[str, NDArray[np.generic]]:
    """Return the answer to the correct request, sent again until a time of `time.monotonic`."""
    while True:
        try:
            return client.infer({"text": [PROBE]}, timeout_s=DEADLINE_S)
        except BatchFailedError:
            if time.monotonic() > until:
                raise


def send_plain(url: str, pipeline: str, over: threading.Event, ended: Counter[str]) -> None:
    """Send a correct request again and again until `over`, without retries."""
    request = infer_request(pipeline, {"text": [PROBE.encode()]}, [0], {}, {})
    with grpc.insecure_channel(url, [("grpc.enable_retries", 0)]) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        while not over.wait(0.02):
            try:
                stub.ModelInfer(request, timeout=DEADLINE_S)
                ended["plain client: answered"] += 1
            except grpc.RpcError as error:
                ended[f"plain client: {error.code().name}"] += 1


def fuzz(
    repository: Path, pipeline: str, requests: int, seed: int, *, envoy: bool = False
) -> tuple[Counter[str], bool]:
    """Return the number of each outcome, and whether none is a fault and the server runs."""
    models = next([p.name, *p.steps] for p in find_pipelines(repository) if p.name == pipeline)
    configs = [read_config(repository / model / CONFIG_FILE) for model in models]
    ended: Counter[str] = Counter()
    over = threading.Event()
    with ExitStack() as stack:
        server = stack.enter_context(Server(repository, models=[pipeline]))
        target: Addresses = server
        if envoy:
            target = stack.enter_context(envoy_of_repository(server, repository, pipeline))
        before = psutil.Process(server.pid).memory_info().rss
        arguments = target.grpc_url, pipeline, over, ended
        probes = [
            threading.Thread(target=probe, args=arguments)
            for probe in (probe_responses, send_plain)
        ]
        for probe in probes:
            probe.start()
        share = requests // (2 * CLIENTS)
        senders: list[tuple[Callable[..., None], str]]
        senders = [(send_grpc, target.grpc_url), (send_http, target.http_url)] * CLIENTS
        began = time.monotonic()
        with ThreadPoolExecutor(len(senders)) as pool:
            sent = [
                pool.submit(send, url, Fuzzer(models, seed + number, configs), share, ended)
                for number, (send, url) in enumerate(senders)
            ]
        over.set()
        for probe in probes:
            probe.join()
        for each in sent:
            each.result()
        alive = server.find_crash(0.0) is None
        grown = (psutil.Process(server.pid).memory_info().rss - before) / 2**20 if alive else 0.0
    seconds = time.monotonic() - began
    print(f"{share * len(senders)} requests in {seconds:.0f} s; the server grew by {grown:.0f} MiB")
    return ended, alive and not any(_is_fault(line, envoy) for line in ended)


def _is_fault(line: str, envoy: bool) -> bool:
    sender, _, outcome = line.partition(": ")
    if sender == "probe":
        return outcome != "right"
    if sender == "plain client":
        return False
    if envoy and sender in BEHIND_ENVOY:
        return outcome != BEHIND_ENVOY[sender]
    return any(word in line for word in FAULTS)


def main() -> int:
    """Send the requests; return 1 if an outcome is a fault or the server crashed."""
    parser = make_parser(__doc__, "fuzz", "Broken requests (`make fuzz`)")
    parser.add_argument("repository", type=Path)
    parser.add_argument("pipeline")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--envoy", action="store_true")
    options = parser.parse_args()
    ended, passed = fuzz(
        options.repository,
        options.pipeline,
        options.requests,
        options.seed,
        envoy=options.envoy,
    )
    rows = [(line, str(count)) for line, count in sorted(ended.items())]
    table = Table("Requests by outcome", ("outcome", "requests"), rows)
    finish(options, [table], ended, ["passed: no fault, no wrong response" if passed else "FAILED"])
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
