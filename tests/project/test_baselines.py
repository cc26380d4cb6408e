"""Baselines: results of the model, and processes measured in turns until one is killed."""

from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.baselines import (
    MAX_BATCH,
    ROWS_A_CALL,
    Baselines,
    _measure,
    open_call,
    open_rows,
    plan_calls,
    requests_of,
)
from benchmarks.torch_model import TorchModel
from tests.support.project import quiet, write_pipeline
from tests.support.task_pipelines import write_task
from triptych.core.export.to_onnx import export_onnx
from triptych.core.gate.reference import reference_outputs
from triptych.core.gate.runs import open_onnx
from triptych.core.inputs import PipelineInputs, read_inputs
from triptych.spec.spec import load_spec

pytestmark = pytest.mark.build


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A pipeline, and the core of its repository."""
    base = tmp_path_factory.mktemp("baselines")
    write_pipeline(base / "tiny", model={"source": str(tiny_model)})
    inputs = read_tiny(base)
    plan, target = inputs.plan, base / "repository/tiny_core/1"
    target.mkdir(parents=True)
    export_onnx(
        *(inputs.model_folder, plan.info, plan.core, plan.core_inputs),
        packed=plan.packed,
        target=target,
    )
    return base


def read_tiny(base: Path) -> PipelineInputs:
    return read_inputs(load_spec(base / "tiny"), quiet)


def test_baselines_are_measured_in_turns_until_one_is_killed(base: Path) -> None:
    names = ("torch batched", "onnxruntime")
    running = Baselines(base / "tiny", base / "repository", names)
    with running:
        assert (running.names, running.failures) == (names, {})
        for name in names * 2:
            found = running.measure(name, 0.2)
            assert 0 < found["p50_ms"] <= found["p99_ms"]
            assert found["rate_per_s"] > 0
        running.processes["onnxruntime"].kill()
        with pytest.raises(RuntimeError, match="onnxruntime ended: its process was killed"):
            running.measure("onnxruntime", 0.2)
        assert [*running.processes] == ["torch batched"]
        assert running.measure("torch batched", 0.2)["rate_per_s"] > 0
    assert not running.processes


def test_the_latency_of_a_batch_counts_for_each_of_its_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([0.0, 1.0, 3.0, 4.0])
    monkeypatch.setattr("benchmarks.baselines.time.perf_counter", lambda: next(times))
    turns: Any = cycle([[{}], [{}, {}, {}]])
    found = _measure(len, turns, 3.5)
    assert found["rate_per_s"] == 5 / 4
    assert (found["p50_ms"], round(found["p99_ms"])) == (2000, 2000)


def test_a_baseline_that_does_not_load_or_takes_too_long_is_left_out(base: Path) -> None:
    with Baselines(base / "tiny", base / "nothing", ("onnxruntime",)) as started:
        assert started.names == ()
    assert "nothing/tiny_core/1/model.onnx" in started.failures["onnxruntime"]
    late = Baselines(base / "tiny", base / "repository", ("torch.compile",), start_limit_s=0.01)
    with late:
        assert late.failures == {"torch.compile": "no answer within 0.01 s"}


def test_calls_hold_the_whole_traffic_once_after_the_hook(base: Path, tiny_model: Path) -> None:
    folder = write_pipeline(base / "hooked", model={"source": str(tiny_model)})
    (folder / "hooks.py").write_text(
        'def before(rows):\n    return [{"text": row["text"].upper()} for row in rows]\n',
        encoding="utf-8",
    )
    inputs = read_inputs(load_spec(folder), quiet)
    requests = requests_of(inputs)
    texts = [str(request["text"]).upper() for request in inputs.traffic]
    assert [one["text"] for one in requests] == texts
    for name, size in ROWS_A_CALL.items():
        calls = plan_calls(name, requests)
        assert sorted(one["text"] for call in calls for one in call) == sorted(texts)
        assert all(len(call) <= size for call in calls)
    lengths = [[len(one["text"]) for one in call] for call in plan_calls("torch batched", requests)]
    widths = [(min(each), max(each)) for each in lengths]
    assert widths != sorted(widths)
    assert all(before[1] <= after[0] for before, after in pairwise(sorted(widths)))


def test_vectors_are_those_of_the_reference(base: Path) -> None:
    inputs = read_tiny(base)
    plan = inputs.plan
    samples = open_rows(inputs)(requests_of(inputs)[:5])
    assert len({len(sample.ids) for sample in samples}) > 1  # type: ignore[union-attr]
    model = TorchModel(inputs.model_folder, plan.info, plan.core, compiled=False)
    file = base / "repository/tiny_core/1/model.onnx"
    core = open_onnx(file, plan.core, plan.core_inputs, pad_token_id=plan.info.pad_token_id)
    expected = reference_outputs(
        inputs.model_folder, plan.info, plan.core, samples, loader=plan.task.loader
    )
    wanted = np.array(expected)[:, 0]
    np.testing.assert_allclose(model(samples)[0].numpy(), wanted, atol=1e-5)
    (output,) = plan.core.outputs
    np.testing.assert_allclose([row[output.name] for row in core(samples)], wanted, atol=1e-5)


@pytest.mark.parametrize("name", ["answers", "images", "tags"])
def test_padded_batches_give_what_the_reference_gives(
    name: str, tmp_path: Path, minilm_folder: Path
) -> None:
    inputs = read_inputs(load_spec(write_task(tmp_path, name, minilm_folder)), quiet)
    info, core = inputs.plan.info, inputs.plan.core
    samples = open_rows(inputs)(requests_of(inputs)[:5])
    outputs = TorchModel(inputs.model_folder, info, core, compiled=False)(samples)
    expected = reference_outputs(inputs.model_folder, info, core, samples)
    for index, (sample, wanted) in enumerate(zip(samples, expected, strict=True)):
        rows: list[Any] = [output[index] for output in outputs]
        if core.token_outputs:
            rows = [row[: len(sample.ids)] for row in rows]  # type: ignore[union-attr]
        if name != "answers":
            rows = [row.softmax(-1) for row in rows]
        for mine, theirs in zip(rows, wanted, strict=True):
            np.testing.assert_allclose(mine.numpy(), theirs, atol=1e-4)


def test_a_request_of_several_rows_runs_in_batches_of_no_more_than_the_limit(
    tmp_path: Path, minilm_folder: Path
) -> None:
    inputs = read_inputs(load_spec(write_task(tmp_path, "hypotheses", minilm_folder)), quiet)
    results: Any = open_call("torch batched", inputs, tmp_path)(requests_of(inputs)[:32])
    assert [len(logits) for (logits,) in results] == [MAX_BATCH] * 3
