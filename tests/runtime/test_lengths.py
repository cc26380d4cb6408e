"""Lengths of rows: their counters on a real metrics page, and which are padded further."""

import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import tritonclient.grpc as triton

from tests.support.client_toy import wait_until
from tests.support.project import LAYOUTS, TRAFFIC_ROWS, quiet, traffic_texts
from triptych.client import Client, InvalidRequestError
from triptych.container.supervisor import step_processes
from triptych.core.inputs import read_inputs
from triptych.repository.render import batch_tokens, make_token_bounds
from triptych.runtime.bucketing import choose_padded_lengths, widen_rows
from triptych.runtime.counters import FLUSH_S, RowTokens
from triptych.runtime.row_types import CoreRows
from triptych.serving.bench.resources import fetch_metrics
from triptych.serving.server import Server
from triptych.spec.spec import load_spec

NAME = "triptych_row_tokens"
SETTINGS = {"pipeline": "counted", "token_bounds": make_token_bounds(64, [20, 64])}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, minilm_repository: Path) -> Iterator[Server]:
    """MiniLM's pipelines with counters that begin at 0; preprocess has two instances."""
    repository = shutil.copytree(minilm_repository, tmp_path_factory.mktemp("counting") / "r")
    for layout in LAYOUTS:
        config = repository / f"minilm_{layout}_preprocess/config.pbtxt"
        text = config.read_text(encoding="utf-8")
        assert text.count("instance_group { count: 1") == 1
        config.unlink()
        config.write_text(text.replace("instance_group { count: 1", "instance_group { count: 2"))
    with Server(repository, models=[f"minilm_{layout}" for layout in LAYOUTS]) as server:
        yield server


def counters(server: Server, pipeline: str) -> dict[str, float]:
    """``le``, ``count`` and ``sum`` to their values."""
    return {
        labels.get("le", name.removeprefix(f"{NAME}_")): value
        for name, labels, value in fetch_metrics(server.metrics_url)
        if name.startswith(NAME) and labels["pipeline"] == pipeline
    }


def expected(lengths: list[int], bounds: list[int]) -> dict[str, float]:
    up_to = {str(bound): float(sum(n <= bound for n in lengths)) for bound in bounds}
    rows = float(len(lengths))
    return {**up_to, "+Inf": rows, "count": rows, "sum": float(sum(lengths))}


@pytest.mark.server
@pytest.mark.parametrize("layout", LAYOUTS)
def test_instances_count_the_rows_they_answer_and_lose_none_when_they_end(
    server: Server, minilm_repository: Path, layout: str
) -> None:
    pipeline = f"minilm_{layout}"
    inputs = read_inputs(load_spec(minilm_repository.parent / "pipelines" / pipeline), quiet)
    plan = inputs.plan
    assert plan.lengths is not None
    names = list(step_processes(server.pid).values())
    assert names.count(f"{pipeline}_preprocess") == 2
    zeros = counters(server, pipeline)
    bounds = [int(bound) for bound in zeros if bound.isdecimal()]
    assert zeros == expected([], bounds)
    assert {32, 64, 255, 256} <= set(bounds)
    assert max(bounds) == 256
    texts = traffic_texts()[:TRAFFIC_ROWS]
    with Client(pipeline, server.grpc_url) as client, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda at: client.embed(texts[at::4]), range(4)))
        client.embed(["one two three", "one"])
        client.embed(["word " * 900])
        with pytest.raises(InvalidRequestError):
            client.embed(["x" * 200_000])
    with triton.InferenceServerClient(server.grpc_url) as control:
        control.unload_model(pipeline, headers=server.operator_headers, unload_dependents=True)
    sent = [tokens for tokens, rows in plan.lengths.counts.items() for _ in range(rows)]
    wanted = expected([*sent, 5, 3, 256], bounds)
    wait_until(lambda: counters(server, pipeline) == wanted, "the counts of all rows")
    assert set(plan.bucket_edges) <= set(bounds)


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


def test_metrics_that_fail_fail_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    refused, gone = MagicMock(), MagicMock()
    refused.MetricFamily.side_effect = RuntimeError("no metrics here")
    gone.MetricFamily.return_value.Metric.return_value.increment.side_effect = RuntimeError("gone")
    for backend in (refused, gone, MagicMock(MetricFamily=None)):
        monkeypatch.setitem(sys.modules, "triton_python_backend_utils", backend)
        tokens = RowTokens(SETTINGS)
        for _ in range(2):
            tokens.count([np.array([3])])
            tokens.flush()


def request(width: int, rows: int = 1) -> CoreRows:
    ids = np.arange(1, rows * width + 1, dtype=np.int32).reshape(rows, width)
    return CoreRows({"input_ids": ids, "row_length": np.full((rows, 1), width, np.int32)}, width)


def test_a_request_is_widened_where_that_costs_less_than_a_batch() -> None:
    several = [request(48), request(16), request(80), request(16)]
    for requests, tokens, expected in (
        (several, 0, [48, 16, 80, 16]),  # a processor: padding is never worth it
        (several, 64, [48, 48, 80, 48]),  # 2 x 32 tokens; 3 x 32 more would be 96
        (several, 96, [80, 80, 80, 80]),
        ([request(16), request(80), request(80)], 63, [16, 80, 80]),  # 64 tokens are dearer
        ([request(16, rows=4), request(48)], 127, [16, 48]),  # rows count
        ([request(16, rows=4), request(48)], 128, [48, 48]),
    ):
        assert choose_padded_lengths(requests, batch_tokens=tokens) == expected
    assert [batch_tokens("gpu", hidden) for hidden in (384, 768, 1024, 0)] == [1024, 512, 384, 512]
    assert batch_tokens("cpu", 384) == 0


def test_a_widened_request_keeps_its_tokens_and_lengths() -> None:
    narrow = request(3, rows=2)
    wide = widen_rows(narrow, 5, 7)
    assert wide.tensors["input_ids"].tolist() == [[1, 2, 3, 7, 7], [4, 5, 6, 7, 7]]
    assert wide.tensors["input_ids"].dtype == np.int32
    assert (wide.width, wide.row_count) == (5, 2)
    assert wide.tensors["row_length"] is narrow.tensors["row_length"]
    assert widen_rows(narrow, 3, 7) is narrow
