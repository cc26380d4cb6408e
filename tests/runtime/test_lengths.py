"""The counters of row lengths on a real metrics page: right, additive, never in the way."""

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import tritonclient.grpc as triton

from client_toy import wait_until, write_model
from conftest import LAYOUTS, TRAFFIC_ROWS, quiet, traffic_texts
from triptych.client import Client, InvalidRequestError
from triptych.core.inputs import read_inputs
from triptych.operate.tune.drift import check_drift
from triptych.operate.tune.new_traffic import count_page
from triptych.repository.render import make_token_bounds
from triptych.runtime.counters import FLUSH_S, RowTokens
from triptych.serving.bench.resources import fetch_metrics
from triptych.serving.server import Server
from triptych.spec.spec import load_spec

RUNTIME = Path(__file__).parents[2] / "build_scripts/triptych/runtime"
NAME = "triptych_row_tokens"
EDGES = [4, 5, 6, 8, 10, 13, 16, 20, 25, 32, 40, 51, 63, 64]
pytestmark = pytest.mark.server

MODEL = """
import json, os, time
import numpy as np
import triton_python_backend_utils as pb_utils
from .counters import RowTokens

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
        self.tokens.count([np.array([[n] for n in own], np.int32) for own in lengths])
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

SETTINGS: dict[str, object] = {
    "pipeline": "counted",
    "token_bounds": make_token_bounds(64, [20, 64]),
}
WHOLE = "pb_utils.MetricFamily"
MODELS: dict[str, tuple[int, dict[str, object], str]] = {
    "counted": (2, SETTINGS, WHOLE),
    "refused": (1, {**SETTINGS, "pipeline": "refused"}, "refuse"),
    "broken": (1, {**SETTINGS, "pipeline": "broken"}, "Broken"),
    "old": (1, {**SETTINGS, "pipeline": "old"}, "None"),
}


def write_counting(root: Path) -> Path:
    for name, (instances, settings, family) in MODELS.items():
        code = MODEL.format(settings=settings, family=family)
        write_model(root / name, CONFIG.format(instances=instances), code)
        for module in ("counters.py",):
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
        for name, labels, value in fetch_metrics(server.metrics_url)
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
        client.unload_model("counted", headers=server.operator_headers)
    wait_until(lambda: counters(server, "counted") == expected(sent, EDGES), "all rows")


def test_a_batch_flushes_what_has_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    triton, now = MagicMock(), 100.0
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", triton)
    monkeypatch.setattr("time.monotonic", lambda: now)
    increment = triton.MetricFamily.return_value.Metric.return_value.increment
    tokens = RowTokens(SETTINGS)
    tokens.count([np.array([5])])
    increment.assert_called_with(5)  # the sum comes last
    increment.reset_mock()
    tokens.count([np.array([6])])
    increment.assert_not_called()
    now += FLUSH_S
    tokens.count([np.array([7, 7])])
    increment.assert_called_with(6 + 7 + 7)


@pytest.mark.parametrize("model", ["refused", "broken", "old"])
def test_without_counters_requests_are_answered_all_the_same(server: Server, model: str) -> None:
    assert ask(server, model, [3], [4])
    assert ask(server, model, [3], [4])
    assert counters(server, model) == {}


def test_metrics_may_be_off(tmp_path: Path) -> None:
    repository = write_counting(tmp_path)
    off = ["--allow-metrics=false"]
    with Server(repository, models=["counted"], extra_args=off) as server:
        assert ask(server, "counted", [3], [4])


@pytest.fixture(scope="module")
def pipelines(minilm_repository: Path) -> Iterator[Server]:
    """A server whose counters begin at 0."""
    with Server(minilm_repository) as server:
        yield server


def wait_counted(server: Server, client: Client, pipeline: str, sent: list[int]) -> None:
    """Send short texts until all that was sent shows, exactly."""
    wanted: dict[str, float] = {}
    for _ in range(60):
        client.embed(["a"])
        sent.append(3)
        for _ in range(5):  # the bucketed layout answers first and counts then
            found = counters(server, pipeline)
            wanted = expected(sent, [int(end) for end in found if end.isdecimal()])
            if found == wanted:
                return
            time.sleep(0.1)
    assert found == wanted


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pipeline_counts_the_rows_it_answers(pipelines: Server, layout: str) -> None:
    pipeline = f"minilm_{layout}"
    with Client(pipeline, pipelines.grpc_url) as client:
        sent = [5, 3, 256]
        client.embed(["one two three", "one"])
        client.embed(["word " * 900])
        with pytest.raises(InvalidRequestError):
            client.embed(["x" * 200_000])
        wait_counted(pipelines, client, pipeline, sent)
    edges = {int(end) for end in counters(pipelines, pipeline) if end.isdecimal()}
    assert {32, 64, 255, 256} <= edges
    assert max(edges) == 256


def test_what_a_server_counted_is_judged(pipelines: Server, minilm_repository: Path) -> None:
    pipeline = "minilm_bucketed"
    inputs = read_inputs(load_spec(minilm_repository.parent / "pipelines" / pipeline), quiet)
    plan = inputs.plan
    assert plan.lengths is not None
    with Client(pipeline, pipelines.grpc_url) as client:
        before = fetch_metrics(pipelines.metrics_url)
        wanted = counters(pipelines, pipeline)["count"] + plan.lengths.rows
        client.embed(traffic_texts()[:TRAFFIC_ROWS])
        for _ in range(60):
            if counters(pipelines, pipeline)["count"] >= wanted:
                break
            time.sleep(0.5)
            client.embed(["a"])
    found = count_page(plan, fetch_metrics(pipelines.metrics_url), "page", before=before)
    drift = check_drift(inputs, found)
    assert set(plan.bucket_edges) <= set(found.edges)
    assert not drift.drifted
    assert drift.action == "keep"
