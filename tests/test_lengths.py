"""The counters of row lengths on a real metrics page: right, additive, never in the way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from client_toy import write_model
from conftest import LAYOUTS
from triptych.load.metrics_page import fetch_samples
from triptych.serving.client import Client, InvalidRequest
from triptych.serving.server import Server

RUNTIME = Path(__file__).parents[1] / "build_scripts/triptych/runtime"
NAME = "triptych_row_tokens"
FLUSH_S = 2.0
EDGES = [4, 5, 6, 8, 10, 13, 16, 20, 25, 32, 40, 51, 63, 64]
pytestmark = pytest.mark.server

MODEL = """
import json, os, time
import numpy as np
import triton_python_backend_utils as pb_utils
from .lengths import RowTokens
from .row_types import CoreRows

def refuse(**given):
    raise pb_utils.TritonModelException("no metrics here")

refuse.COUNTER = 0

class Broken:
    COUNTER = 0

    def __init__(self, **given):
        pass

    def Metric(self, labels):
        return self

    def increment(self, value):
        raise pb_utils.TritonModelException("gone")

class TritonPythonModel:
    def initialize(self, args):
        pb_utils.MetricFamily = {family}  # Triton sets it after the import
        self.tokens = RowTokens({settings})

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        asked = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()
        lengths = [json.loads(text) for text in asked.ravel()]
        rows = [CoreRows({{"row_length": np.array([[n] for n in own], np.int32)}}, [], 0)
                for own in lengths]
        self.tokens.count(rows)
        if len(lengths) > 1:
            self.tokens.flush()
        time.sleep(0.2)
        answer = np.full((len(asked), 1), str(os.getpid()).encode(), np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor("pid", answer)])

    def finalize(self):
        self.tokens.flush()
"""

CONFIG = """
backend: "python"
max_batch_size: 8
input {{ name: "text" data_type: TYPE_STRING dims: [1] }}
output {{ name: "pid" data_type: TYPE_STRING dims: [1] }}
instance_group {{ kind: KIND_CPU count: {instances} }}
"""

SETTINGS = {"pipeline": "counted", "max_length": 64, "bucket_edges": [20, 64]}
WHOLE = "pb_utils.MetricFamily"
MODELS: dict[str, tuple[int, dict[str, object], str]] = {
    "counted": (2, SETTINGS, WHOLE),
    "again": (1, {**SETTINGS, "pipeline": "again"}, WHOLE),
    "images": (1, {"pipeline": "images"}, WHOLE),
    "refused": (1, {**SETTINGS, "pipeline": "refused"}, "refuse"),
    "broken": (1, {**SETTINGS, "pipeline": "broken"}, "Broken"),
    "old": (1, {**SETTINGS, "pipeline": "old"}, "None"),
}


def write_counting(root: Path) -> Path:
    for name, (instances, settings, family) in MODELS.items():
        code = MODEL.format(settings=settings, family=family)
        write_model(root / name, CONFIG.format(instances=instances), code)
        for module in ("lengths.py", "row_types.py"):
            (root / name / "1" / module).write_bytes((RUNTIME / module).read_bytes())
    return root


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = write_counting(tmp_path_factory.mktemp("counting"))
    with Server(repository, models=tuple(MODELS)) as server:
        yield server


def ask(server: Server, model: str, *lengths: list[int]) -> str:
    """Have the model count a request of so many rows for each of `lengths`; returns its process."""
    texts = np.array([[str(own).encode()] for own in lengths], np.object_)
    wanted = triton.InferInput("text", list(texts.shape), "BYTES")
    wanted.set_data_from_numpy(texts)
    with triton.InferenceServerClient(server.grpc_url) as client:
        found = client.infer(model, [wanted]).as_numpy("pid")
    return str(found[0, 0].decode())


def counters(server: Server, pipeline: str) -> dict[str, float]:
    """``le``, ``count`` and ``sum`` to their values."""
    return {
        labels.get("le", name.removeprefix(f"{NAME}_")): value
        for name, labels, value in fetch_samples(server.metrics_url)
        if name.startswith(NAME) and labels["pipeline"] == pipeline
    }


def expected(lengths: list[int], edges: list[int]) -> dict[str, float]:
    up_to = {str(edge): float(sum(n <= edge for n in lengths)) for edge in edges}
    rows = float(len(lengths))
    return {**up_to, "+Inf": rows, "count": rows, "sum": float(sum(lengths))}


def test_two_instances_add_up_and_nothing_is_lost_at_the_end(server: Server) -> None:
    assert counters(server, "counted") == expected([], EDGES)
    seen: set[str] = set()
    sent: list[int] = []
    while len(seen) < 2:
        with ThreadPoolExecutor(4) as pool:
            lengths = [[3, 4, 5], [64], [63, 20], [21, 8]]
            seen |= set(pool.map(lambda own: ask(server, "counted", own, [7]), lengths))
            sent += [3, 4, 5, 64, 63, 20, 21, 8, 7, 7, 7, 7]
    assert counters(server, "counted") == expected(sent, EDGES)
    for _ in range(4):
        ask(server, "counted", [9, 10])  # waits for the next flush
        sent += [9, 10]
    with triton.InferenceServerClient(server.grpc_url) as client:
        client.unload_model("counted")
    for _ in range(100):
        if counters(server, "counted") == expected(sent, EDGES):
            return
        time.sleep(0.1)
    assert counters(server, "counted") == expected(sent, EDGES)


def test_a_batch_flushes_what_has_waited(server: Server) -> None:
    ask(server, "again", [5])
    assert counters(server, "again")["count"] == 1
    ask(server, "again", [6])
    assert counters(server, "again")["count"] == 1
    time.sleep(FLUSH_S)
    ask(server, "again", [7, 7])
    assert counters(server, "again") == expected([5, 6, 7, 7], EDGES)


@pytest.mark.parametrize("model", ["images", "refused", "broken", "old"])
def test_without_counters_requests_are_answered_all_the_same(server: Server, model: str) -> None:
    assert ask(server, model, [3], [4])
    assert ask(server, model, [3], [4])
    assert counters(server, model) == {}


def test_metrics_may_be_off(tmp_path: Path) -> None:
    repository = write_counting(tmp_path)
    off = ["--allow-metrics=false"]
    with Server(repository, models=["again"], extra_args=off) as server:
        assert ask(server, "again", [3], [4])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pipeline_counts_the_rows_it_answers(minilm_server: Any, layout: str) -> None:
    pipeline = f"minilm_{layout}"
    with Client(pipeline, minilm_server.grpc_url) as client:
        time.sleep(FLUSH_S)
        client.embed(["a"])  # flushes what other tests left
        before = counters(minilm_server, pipeline)
        client.embed(["one two three", "one"])
        client.embed(["word " * 900])
        with pytest.raises(InvalidRequest):
            client.embed(["x" * 200_000])
        time.sleep(FLUSH_S)
        client.embed(["a"])
    after = counters(minilm_server, pipeline)
    edges = sorted(int(end) for end in after if end.isdecimal())
    assert {255, 256} <= set(edges)
    assert max(edges) == 256
    delta = {end: value - before[end] for end, value in after.items()}
    assert delta == expected([5, 3, 256, 3], edges)
    names = {end for end in after if end.isdecimal()}
    assert len(names) == len(edges)
