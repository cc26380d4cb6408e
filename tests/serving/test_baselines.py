"""Baselines: the model's right results, real workers measured in turns, and what can go wrong."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import quiet, write_pipeline
from processes import eventually
from task_models import MODELS
from task_pipelines import write_task
from triptych.base.errors import UserError
from triptych.core.export.to_onnx import export_onnx
from triptych.core.gate.reference import reference_outputs
from triptych.core.inputs import PipelineInputs, read_inputs
from triptych.serving.bench import baselines
from triptych.serving.bench.baseline_calls import (
    MAX_BATCH,
    ROWS_A_CALL,
    BaselineWork,
    open_call,
    open_model,
    open_rows,
    plan_calls,
    read_work,
    work_of,
    write_work,
)
from triptych.serving.bench.baselines import ALL, Baselines, WorkerFailed, WorkerProcess
from triptych.serving.bench.results import Measurement, OfferedLoad
from triptych.spec.spec import load_spec

pytestmark = pytest.mark.build

SECONDS = 0.2


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> PipelineInputs:
    folder = tmp_path_factory.mktemp("pipelines") / "tiny"
    write_pipeline(folder, model={"source": str(tiny_model)})
    return read_inputs(load_spec(folder), quiet)


@pytest.fixture(scope="module")
def core_file(tmp_path_factory: pytest.TempPathFactory, tiny: PipelineInputs) -> Path:
    plan, target = tiny.plan, tmp_path_factory.mktemp("core")
    export_onnx(
        *(tiny.model_folder, plan.info, plan.core, plan.core_inputs),
        packed=plan.packed,
        target=target,
    )
    return target / "model.onnx"


def check_measured(measured: Measurement, name: str) -> None:
    """What must hold of each measurement of a baseline."""
    assert measured.seconds >= SECONDS
    assert measured.throughput_per_s == pytest.approx(measured.requests / measured.seconds)
    latencies = [*measured.latencies_us.values(), measured.seconds * 1e6]
    assert latencies == sorted(latencies)
    assert sum(measured.histogram_us.values()) == measured.requests
    assert (measured.errors, measured.steps, measured.parts) == ({}, (), ())
    # The latency of a batch counts for each of its rows; calls of one row fill the time.
    total_us = measured.mean_us * measured.requests
    share = total_us / (measured.seconds * 1e6)
    assert share > 5 if name == "torch batched" else share == pytest.approx(1)
    assert measured.resources is not None
    (process,) = measured.resources.processes
    assert process.name == name
    assert min(process.cpu_cores, process.memory_mib) > 0


def test_baselines_are_measured_in_turns_until_one_is_killed_and_leave_nothing(
    tiny: PipelineInputs, core_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names = ("torch batched", "onnxruntime")
    with Baselines(tiny, core_file, names=names, progress=quiet) as running:
        (scratch,) = tmp_path.iterdir()
        assert scratch.stat().st_mode & 0o077 == 0  # it holds a pickle
        pids = running.pids
        assert (running.names, running.not_runnable) == (names, {})
        assert min(running.ready_s[name] for name in names) > 0
        loads = [OfferedLoad("in_process", rows) for rows in (1, 32, 1, 1)]
        assert [running.load_of(name) for name in ALL] == loads
        for name in names * 2:
            check_measured(running.measure(name, SECONDS), name)

        os.kill(pids["onnxruntime"], signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(UserError, match=r"onnxruntime.*killed by signal 9") as caught:
                running.measure("onnxruntime", SECONDS)
            assert caught.value.remedy
        assert running.names == ("torch batched",)
        assert "signal 9" in running.not_runnable["onnxruntime"]
        assert running.measure("torch batched", SECONDS).requests > 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())
    assert list(tmp_path.iterdir()) == []
    assert not running.names


def test_a_worker_dies_with_its_parent(
    tiny: PipelineInputs, core_file: Path, tmp_path: Path
) -> None:
    write_work(work_of(tiny, core_file), tmp_path / "work")
    code = (
        "import os, sys; from pathlib import Path\n"
        "from triptych.serving.bench.baselines import WorkerProcess\n"
        "base = Path(sys.argv[1]); worker = WorkerProcess(base / 'work', 'onnxruntime', base)\n"
        "worker.answer(240); worker.ask(600); print(worker.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, timeout=300
    )
    assert done.returncode == -signal.SIGKILL
    assert eventually(lambda: not Path(f"/proc/{int(done.stdout)}").exists())


def test_a_model_that_does_not_load_or_takes_too_long_to_compile_is_left_out(
    tiny: PipelineInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    told: list[str] = []

    def start(*names: str) -> Mapping[str, str]:
        with Baselines(
            replace(tiny, model_folder=tmp_path),
            tmp_path / "gone.onnx",
            names=names,
            progress=lambda stage, line: told.append(f"{stage}: {line}"),
            compile_limit_s=0.01,
        ) as started:
            assert (started.names, started.ready_s) == ((), {})
            return started.not_runnable

    reasons = start("torch eager", "onnxruntime")
    assert "is not a model that transformers can load" in reasons["torch eager"]
    assert "gone.onnx" in reasons["onnxruntime"]
    # A worker that waits for its work for ever.
    monkeypatch.setattr(baselines, "write_work", lambda _work, path: os.mkfifo(path))
    assert start("torch.compile") == {"torch.compile": "no answer within 0.01 s"}
    assert [line.split(" ")[1] for line in told] == ["torch", "onnxruntime", "torch.compile"]
    with pytest.raises(UserError, match="must be one of torch eager"):
        Baselines(tiny, tmp_path / "gone.onnx", names=["jax"], progress=quiet)


def test_a_worker_that_cannot_start_tells_its_last_line(tmp_path: Path) -> None:
    (tmp_path / "work").write_bytes(b"no pickle")
    worker = WorkerProcess(tmp_path / "work", "torch eager", tmp_path)
    try:
        with pytest.raises(WorkerFailed, match="UnpicklingError"):
            worker.answer(240)
        with pytest.raises(WorkerFailed, match=r"its process ended \(exit code 1\): .*Unpickling"):
            worker.answer(240)
    finally:
        worker.end()


def test_calls_hold_the_whole_traffic_once(tiny: PipelineInputs, core_file: Path) -> None:
    requests = work_of(tiny, core_file).requests
    assert [dict(request) for request in requests] == [dict(one) for one in tiny.traffic]
    for name, size in ROWS_A_CALL.items():
        calls = plan_calls(name, requests)
        sent = sorted(one["text"] for call in calls for one in call)
        assert sent == sorted(one["text"] for one in requests)
        assert all(len(call) <= size for call in calls)
    lengths = [[len(one["text"]) for one in call] for call in plan_calls("torch batched", requests)]
    widths = [(min(each), max(each)) for each in lengths]
    assert widths != sorted(widths)
    assert all(before[1] <= after[0] for before, after in pairwise(sorted(widths)))


def test_hooks_run_before_the_calls(tmp_path: Path, tiny_model: Path, core_file: Path) -> None:
    folder = write_pipeline(tmp_path / "hooked", model={"source": str(tiny_model)})
    (folder / "hooks.py").write_text(
        'def before(rows):\n    return [{"text": row["text"].upper()} for row in rows]\n',
        encoding="utf-8",
    )
    inputs = read_inputs(load_spec(folder), quiet)
    texts = [request["text"] for request in work_of(inputs, core_file).requests]
    assert texts == [str(request["text"]).upper() for request in inputs.traffic]


@pytest.fixture(scope="module")
def tasks(
    tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path
) -> Callable[[str], BaselineWork]:
    """The work of a pipeline on one of the small models, written and read, without its core."""
    base = tmp_path_factory.mktemp("tasks")

    @cache
    def get(name: str) -> BaselineWork:
        inputs = read_inputs(load_spec(write_task(base, name, minilm_folder)), quiet)
        write_work(work_of(inputs, base / "none.onnx"), base / f"{name}.work")
        return read_work(base / f"{name}.work")

    return get


def result_of(work: BaselineWork, outputs: Any, index: int, sample: Any) -> list[Any]:
    """What belongs to a row of a padded batch, as the reference gives it."""
    core = work.core
    rows = [output[index] for output in outputs]
    if core.reads == "mask":
        rows = [row[sample.ids.index(work.info.mask_token_id)] for row in rows]
    elif core.per_token:
        rows = [row[: len(sample.ids)] for row in rows]
    if core.returns in ("vector", "logits", "spans"):
        return rows
    several = core.reads in ("row", "image") and work.info.activation == "sigmoid"
    return [row.sigmoid() if several else row.softmax(-1) for row in rows]


@pytest.mark.parametrize("name", MODELS)
def test_the_model_in_padded_batches_gives_what_the_reference_gives(
    tasks: Callable[[str], BaselineWork], name: str
) -> None:
    work = tasks(name)
    samples = open_rows(work)(work.requests[:5])
    outputs: Any = open_model("torch batched", work)(samples)
    expected = reference_outputs(work.model_folder, work.info, work.core, samples)
    for index, (sample, wanted) in enumerate(zip(samples, expected, strict=True)):
        found = result_of(work, outputs, index, sample)
        assert len(found) == len(wanted)
        for mine, theirs in zip(found, wanted, strict=True):
            np.testing.assert_allclose(mine.numpy(), theirs, atol=1e-4)


def test_vectors_in_padded_batches_are_those_of_the_reference(
    tiny: PipelineInputs, core_file: Path
) -> None:
    work = work_of(tiny, core_file)
    samples = open_rows(work)(work.requests[:5])
    assert len({len(sample.ids) for sample in samples}) > 1  # type: ignore[union-attr]
    torch_vectors: Any = open_model("torch batched", work)(samples)
    core_vectors: Any = open_model("onnxruntime", work)(samples)
    expected = np.array(reference_outputs(work.model_folder, work.info, work.core, samples))[:, 0]
    np.testing.assert_allclose(torch_vectors[0].numpy(), expected, atol=1e-5)
    (output,) = work.core.outputs
    np.testing.assert_allclose([row[output.name] for row in core_vectors], expected, atol=1e-5)


def test_a_request_of_several_rows_runs_in_batches_of_no_more_than_the_limit(
    tasks: Callable[[str], BaselineWork],
) -> None:
    work = tasks("hypotheses")
    results: Any = open_call("torch batched", work)(work.requests[:32])
    assert [len(logits) for (logits,) in results] == [MAX_BATCH] * 3


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++")
def test_a_compiled_model_is_measured_where_there_is_a_compiler(
    tiny: PipelineInputs, core_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("torch.compile",)
    with Baselines(tiny, core_file, names=names, progress=quiet, compile_limit_s=900) as compiled:
        assert compiled.not_runnable == {}
        assert compiled.measure("torch.compile", SECONDS).requests > 0
    monkeypatch.setenv("CXX", "no-such-compiler")
    with Baselines(tiny, core_file, names=names, progress=quiet) as missing:
        assert "compiler" in missing.not_runnable["torch.compile"].lower()
