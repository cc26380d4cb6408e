"""`triptych engine`: an engine is built, inspected, checked and written, or nothing is."""

import errno
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

from tests.support.container_cases import L4
from tests.support.engine_cases import (
    build_repository,
    change_plan,
    contents,
    copied,
    header_of,
    machine,
)
from tests.support.fake_tensorrt.records import make_enum
from tests.support.project import build_into, lock_data, quiet, write_lock
from tests.support.task_pipelines import write_task
from triptych.base.errors import UserError
from triptych.core.engine.api import Api, installed_rtx_version
from triptych.core.engine.graph import read_graph
from triptych.core.engine.stage import EngineFailure, build_engine
from triptych.interface.cli import app
from triptych.repository.records import plain_record
from triptych.repository.store import hash_files
from triptych.spec.engine_plan import EnginePlan

pytestmark = pytest.mark.build

NAME = "packed_fp16"
DRY_RUN = "packed_int8"
"""A dry run takes seconds: only this pipeline has one."""
ONNX_FILE, PLAN_FILE = f"{NAME}_core/1/model.onnx", f"{NAME}_core/1/model.plan"
Lines = list[tuple[str, str]]


@pytest.fixture(scope="module")
def built(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = (NAME, DRY_RUN, "bucketed_fp16")
    base = tmp_path_factory.mktemp("engines")
    return build_repository(tiny_model, base, *names, engine_dry_runs=(DRY_RUN,))


@pytest.fixture
def repository(built: Path, tmp_path: Path) -> Path:
    """A copy of `NAME` that a test may change."""
    return copied(built, tmp_path / "repository", NAME)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Any]:
    """Makes this the machine of one release; returns the fake module."""
    return lambda major: machine(monkeypatch, tmp_path, major)


@pytest.mark.parametrize(("major", "name"), [("10", "packed_int8"), ("11", "bucketed_fp16")])
def test_an_engine_is_built_into_the_repository_and_recorded(
    built: Path, tmp_path: Path, on: Callable[[str], Any], major: str, name: str
) -> None:
    trt = on(major)
    repository = copied(built, tmp_path / "repository", name)
    before = contents(repository)
    result = build_engine(repository, name, quiet)
    (asked,) = trt._play.builds
    # Types come from the graph: 11 always takes them, 10 has a flag for that.
    assert asked["network"] == (["STRONGLY_TYPED"] if major == "10" else [])
    assert asked["flags"] == []
    assert result.changed == (name, f"{name}_core")
    after = contents(repository)
    plan, manifest = f"{name}_core/1/model.plan", f"{name}/triptych.lock.json"
    assert set(after) - set(before) == {plan}
    assert {path for path in before if after[path] != before[path]} == {manifest}
    lock = lock_data(repository, name)
    files = {path: repository / path for path in lock["files"] if (repository / path).is_file()}
    assert plan in files
    assert hash_files(files, {}) == {path: lock["files"][path] for path in files}
    record = lock["engine"]
    assert record == plain_record(result.record)
    assert record["plan_sha256"] == lock["files"][plan]
    assert record["onnx_sha256"] == lock["files"][f"{name}_core/1/model.onnx"]
    fields = ("tensorrt", "cuda", "driver", "gpu", "compute_capability")
    expected = [trt.__version__, "13.2", "590.48.01", "NVIDIA H200", "9.0"]
    assert [record[field] for field in fields] == expected
    wanted = EnginePlan.from_dict(lock["plan"]["engine"]).profiles
    assert header_of(repository / plan)["profiles"] == [
        {n: [list(s.minimum), list(s.optimum), list(s.maximum)] for n, s in profile.items()}
        for profile in wanted
    ]
    assert record["matmuls"][name.split("_")[1]] > 0
    assert record["matmuls"]["unseen"] == 0
    assert record["check"]["verdicts"]
    assert record["check"]["rows"] > 50


def test_a_build_without_a_gpu_makes_a_dry_run_that_can_be_left_out_and_made_later(
    built: Path, tmp_path: Path
) -> None:
    """The pooling stays in fp32; each of the two layers has six linear layers."""

    def triptych(*arguments: str) -> Any:
        done = CliRunner().invoke(app, [*arguments, "--repository", str(repository)])
        assert done.exit_code == 0, done.output
        return done

    name = DRY_RUN
    repository = copied(built, tmp_path / "repository", name)
    dry_run = lock_data(repository, name)["dry_run"]
    assert dry_run["tensorrt_rtx"] == installed_rtx_version()
    assert dry_run["products"] == {"fp16": 4, "fp32": 1, "int8": 12}
    assert dry_run["layers"] > 400
    assert dry_run["size_bytes"] > 1_000_000
    pipelines = ["--pipelines", str(built.parent / "pipelines")]
    triptych("build", name, *pipelines, "--reports", str(tmp_path), "--no-dry-run")
    assert lock_data(repository, name)["dry_run"] is None
    inspected = triptych("inspect", name, *pipelines).stdout
    assert "dry_run                none yet: `triptych build`" in inspected
    alone = triptych("engine", name, "--dry-run")
    assert alone.stdout.startswith(f"{name}_core: TensorRT for RTX {installed_rtx_version()} for ")
    assert "(cached): a dry run, not the engine" in alone.stderr
    assert lock_data(repository, name)["dry_run"] == dry_run
    assert not (repository / f"{name}_core/1/model.plan").exists()
    (again,) = json.loads(triptych("engine", name, "--dry-run", "--json").stdout)
    assert (again["changed"], again["record"]) == ([], dry_run)
    assert "12 int8" in triptych("inspect", name, *pipelines).stdout


def test_each_option_reaches_the_builder_or_is_refused(
    repository: Path, on: Callable[[str], Any]
) -> None:
    trt = on("10")
    flags = ("refit", "tf32", "version_compatible", "weight_streaming")
    options = {"workspace_mib": 64, "optimization_level": 5, "hardware": "ampere_plus"}
    change_plan(repository, NAME, **dict.fromkeys(flags, True), **options)
    build_engine(repository, NAME, quiet)
    (asked,) = trt._play.builds
    assert asked["flags"] == [flag.upper() for flag in flags]
    assert asked["limits"] == {"WORKSPACE": 64 << 20}
    assert (asked["level"], asked["hardware"]) == (5, "AMPERE_PLUS")
    level = "same_compute_capability"
    assert Api().hardware_level(level).name == level.upper()
    members = {"NONE": 0, "AMPERE_PLUS": 1}  # as 10.4 has them
    trt.__dict__["HardwareCompatibilityLevel"] = make_enum("Level", members)
    change_plan(repository, NAME, hardware=level)
    with pytest.raises(UserError) as raised:
        build_engine(repository, NAME, quiet)
    assert raised.value.field == "core.engine.hardware"
    assert "TensorRT 10." in raised.value.message


def test_an_engine_is_built_again_for_another_gpu_release_or_option_alone(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trt = machine(monkeypatch, tmp_path, "10")
    first = build_engine(repository, NAME, quiet)
    before = contents(repository)
    lines: Lines = []
    second = build_engine(repository, NAME, lambda *line: lines.append(line))
    assert (second.changed, second.record) == ((), first.record)
    assert contents(repository) == before
    assert lines == [("engine", "packed_fp16_core/1/model.plan: up to date")]
    (repository / PLAN_FILE).unlink()
    result = build_engine(repository, NAME, lambda *line: lines.append(line))
    assert result.changed == ("packed_fp16_core",)
    assert contents(repository) == before
    assert len(trt._play.builds) == 1
    assert any("cached" in line for _, line in lines)
    assert any(stage == "check" and "passed" in line for stage, line in lines)
    keys = {first.record.key}
    for major, gpu, level in (("10", L4, None), ("11", L4, None), ("11", L4, 1)):
        trt = machine(monkeypatch, tmp_path, major, gpu=gpu)
        change_plan(repository, NAME, optimization_level=level)
        keys.add(build_engine(repository, NAME, quiet).record.key)
        assert len(trt._play.builds) == 1
    assert len(keys) == 4


def test_times_of_kernels_are_reused_unless_they_cannot_be_used(
    built: Path, tmp_path: Path, on: Callable[[str], Any]
) -> None:
    trt = on("10")
    for name in (NAME, "bucketed_fp16"):
        build_engine(copied(built, tmp_path / name, name), name, quiet)
    assert [asked["times"] for asked in trt._play.builds] == [0, 1]
    (file,) = (tmp_path / "cache/timing").iterdir()
    assert file.name == f"{trt.__version__}_NVIDIA_H200_9.0.cache"
    assert file.read_bytes().count(b"kernels") == 2
    for level, content in enumerate((b"rubbish", b'FAKE-TIMES\n["9.9.9", ["x"]]')):
        file.write_bytes(content)
        change_plan(tmp_path / NAME, NAME, optimization_level=level)
        build_engine(tmp_path / NAME, NAME, quiet)
        assert trt._play.builds[-1]["times"] == 0, content
        assert file.read_bytes().count(b"kernels") == 1, content


def test_the_check_splits_batches_that_are_too_large_for_the_engine(
    repository: Path, on: Callable[[str], Any]
) -> None:
    on("10")
    lock = lock_data(repository, NAME)
    tokens = lock["plan"]["engine"]["profiles"][0]["input_ids"]
    tokens.update(optimum=[500], maximum=[lock["plan"]["max_length"]])
    write_lock(repository, NAME, lock)
    record = build_engine(repository, NAME, quiet).record
    assert record.profiles[0]["input_ids"].maximum == (512,)
    assert all(verdict.passed for verdict in record.check.verdicts)


def test_the_engine_of_a_shared_core_is_built_in_its_owner(
    repository: Path, on: Callable[[str], Any]
) -> None:
    on("10")
    lock = lock_data(repository, NAME)
    lock["spec"]["core"]["shared_from"] = NAME
    (repository / "sharer").mkdir()
    (repository / "sharer/triptych.lock.json").write_text(json.dumps(lock))
    lines: Lines = []
    result = build_engine(repository, "sharer", lambda *line: lines.append(line))
    assert (result.pipeline, result.owner) == ("sharer", NAME)
    assert (repository / PLAN_FILE).is_file()
    assert "shares the core of packed_fp16" in lines[0][1]


def refused(repository: Path, name: str = NAME) -> UserError:
    """Return the error of a build that fails and leaves everything as it was."""
    before = contents(repository)
    with pytest.raises(UserError) as raised:
        build_engine(repository, name, quiet)
    assert contents(repository) == before
    assert raised.value.remedy
    return raised.value


ALLOCATION = "[defaultAllocator.cpp::allocate::31] Error Code 1: Cuda Runtime (out of memory)"
NO_KERNEL = "Could not find any implementation for node {ForeignNode[a...b]}."
LOGS: list[tuple[str, list[tuple[str, str]]]] = [
    ("GPU memory", [("ERROR", ALLOCATION), ("ERROR", NO_KERNEL)]),
    ("GPU memory", [("ERROR", "2: [virtualMemoryBuffer.cpp::145] Error Code 2: OutOfMemory")]),
    ("GPU memory", [("WARNING", "Requested amount of GPU memory could not be allocated.")]),
    (
        "core.engine.workspace_mib",
        [("WARNING", "No implementation for node /a due to insufficient workspace.")],
    ),
    ("core.precision", [("ERROR", f"Error Code 10: {NO_KERNEL}")]),
    ("plan.engine.profiles", [("ERROR", "Specified profiles must satisfy MIN<=OPT<=MAX.")]),
    ("disk", [("ERROR", "write failed: No space left on device")]),
    ("tensorrt", [("ERROR", "Error Code 99: something new")]),
    ("tensorrt", []),
]
"""The field that an error names, by TensorRT's messages while a build fails."""


def test_the_log_of_a_failed_build_becomes_one_message(
    repository: Path, on: Callable[[str], Any]
) -> None:
    play = on("10")._play
    play.build_fails = True
    for field, play.log in LOGS:
        error = refused(repository)
        assert error.field == field, play.log
        assert error.given in (
            " ".join(text.split()) for _, text in play.log or [("", "no reason")]
        )
    node = onnx.load(repository / ONNX_FILE).graph.node[3]
    named = {"node": 3, "node_name": node.name, "node_operator": node.op_type, "desc": "it is odd"}
    for code, rule in (("UNSUPPORTED_NODE", "operators"), ("INVALID_GRAPH", "rejected")):
        play.parser_errors = [{"code": code, **named}] * 2
        error = refused(repository)
        assert error.field == "model.onnx"
        assert rule in error.rule
        assert f"node {node.name} ({node.op_type}), " in error.given
        assert ": it is odd (and 1 more)" in error.given


def test_a_missing_gpu_or_tensorrt_is_reported(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, tmp_path, "11")._play.no_gpu = True
    error = refused(repository)
    assert (error.field, error.given) == ("GPU", "CUDA initialization failure with error: 35")
    machine(monkeypatch, tmp_path, "11", gpu=None)
    error = refused(repository)
    assert (error.field, error.given) == ("GPU", "NVIDIA's driver shows no GPU to this process")
    machine(monkeypatch, tmp_path, "10").__dict__["__version__"] = "8.6.1"
    assert "10 or newer" in refused(repository).rule
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    error = refused(repository)
    assert error.field == "tensorrt"
    assert "make engine-in-container" in error.remedy


def test_an_engine_that_is_not_what_was_planned_is_not_written(
    repository: Path, on: Callable[[str], Any]
) -> None:
    play = on("10")._play
    play.stale = True
    error = refused(repository)
    assert error.field == "model.plan"
    assert "Version tag does not match" in error.given
    play.stale, play.lost_profile = False, True
    error = refused(repository)
    assert (error.field, error.given) == ("model.plan", "0 instead of 1")
    play.lost_profile = False
    products = read_graph(repository / ONNX_FILE).products
    node = next(name for name, kind in products.items() if kind == "fp16")
    play.layer_types = {node: "FLOAT"}
    error = refused(repository)
    assert error.field == "core.precision"
    assert error.given == f"{node} (fp32 instead of fp16)"
    # An engine that shows no types: its size tells.
    play.fused = True
    play.layer_types = dict.fromkeys(products, "FLOAT")
    error = refused(repository)
    assert error.field == "core.precision"
    assert "none of 16 matrix products shows its type" in error.rule
    play.layer_types = {}
    record = build_engine(repository, NAME, quiet).record
    assert (record.witness, record.matmuls["unseen"]) == ("size", 17)


REFUSE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "transformers", "onnxscript", "huggingface_hub",
                                      "safetensors", "tokenizers"}:
            raise ImportError(name + " is not installed here")
sys.meta_path.insert(0, Refuse())
import triptych.interface.cli.pipelines, triptych.core.engine.stage, triptych.core.requests
"""


def test_the_engine_stage_needs_no_library_that_makes_models() -> None:
    done = subprocess.run([sys.executable, "-c", REFUSE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_engine_that_computes_something_else_is_not_written_and_the_command_exits_with_1(
    repository: Path, on: Callable[[str], Any]
) -> None:
    play = on("11")._play
    before = contents(repository)
    play.miscompute = lambda outputs: {name: value * 0 for name, value in outputs.items()}
    arguments = ["engine", NAME, "--repository", str(repository), "--json"]
    failed = CliRunner().invoke(app, arguments)
    assert failed.exit_code == 1
    assert json.loads(failed.stdout)["gate"]["failures"]
    assert contents(repository) == before
    assert "Failed metrics" in failed.stderr
    play.miscompute = None
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0
    (result,) = json.loads(done.stdout)
    assert result["changed"] == [NAME, f"{NAME}_core"]
    plain = CliRunner().invoke(app, arguments[:-1])
    assert plain.stdout == (f"{NAME}_core: TensorRT 11.1.0.106, NVIDIA H200, fp16: up to date\n")


def test_a_repository_without_what_an_engine_is_built_of_asks_for_a_build(
    repository: Path, on: Callable[[str], Any]
) -> None:
    error = refused(repository, "missing")
    assert (error.field, error.remedy) == ("missing", "Run `triptych build missing` first")
    on("10")
    lock = lock_data(repository, NAME)
    core = {**lock["spec"]["core"], "backend": "onnxruntime"}
    write_lock(repository, NAME, {**lock, "spec": {**lock["spec"], "core": core}})
    assert refused(repository).field == "core.backend"
    for field in ("engine", "core"):
        plan = {name: value for name, value in lock["plan"].items() if name != field}
        write_lock(repository, NAME, {**lock, "plan": plan})
        assert refused(repository).remedy == f"Run `triptych build {NAME}` again"
    write_lock(repository, NAME, lock)
    for file in (ONNX_FILE, f"{NAME}/engine_samples.npz", f"{NAME}_core/config.pbtxt"):
        content = (repository / file).read_bytes()
        (repository / file).write_bytes(content + b"\n")
        assert refused(repository).field == file
        (repository / file).unlink()
        assert refused(repository).field == file
        (repository / file).write_bytes(content)


def test_a_build_that_ends_while_the_engine_is_built_wins(
    repository: Path, on: Callable[[str], Any]
) -> None:
    on("10")
    stages: list[str] = []

    def change_once(stage: str, _line: str) -> None:
        if stage == "check" and "check" not in stages:
            write_lock(repository, NAME, {**lock_data(repository, NAME), "built_at": "now"})
        stages.append(stage)

    with pytest.raises(UserError, match="changed while the engine"):
        build_engine(repository, NAME, change_once)
    assert not (repository / PLAN_FILE).exists()


def test_a_full_disk_is_reported_and_changes_nothing(
    repository: Path, on: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    on("10")
    for place in ("triptych.core.engine.make.save", "triptych.repository.store._stage"):
        with monkeypatch.context() as patch:
            patch.setattr(place, full)
            assert refused(repository).rule == "has too little free space", place


CASES = (
    pytest.param("topics", "bucketed", "fp16", marks=pytest.mark.long),
    ("tags", "packed", "fp16"),
    pytest.param("answers", "bucketed", "fp32", marks=pytest.mark.long),
    ("images", "fixed", "fp16"),
)
"""Pipeline of `MODELS`, layout, precision: classes of rows and of tokens, spans, and images."""
Outputs = dict[str, Any]


def wrong_class(outputs: Outputs) -> Outputs:
    """Integers one off; floats swapped from row to row where there are no integers."""
    whole = [name for name, value in outputs.items() if value.dtype.kind == "i"]
    if whole:
        return {n: v + 1 if n in whole else v for n, v in outputs.items()}
    return {n: np.roll(v, 1, axis=-1) for n, v in outputs.items()}


def wild_class(outputs: Outputs) -> Outputs:
    """A class that cannot be, as uninitialized memory holds; no number where none are chosen."""
    return {
        n: v * 0 + 2_000_000_000 if v.dtype.kind == "i" else v * np.nan for n, v in outputs.items()
    }


@pytest.mark.parametrize(("name", "layout", "precision"), CASES)
def test_the_right_engine_of_every_task_passes_and_wrong_ones_fail(
    name: str,
    layout: str,
    precision: str,
    minilm_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    core: dict[str, Any] = {"backend": "tensorrt", "precision": precision, "max_batch_size": 4}
    if layout != "fixed":
        core["layout"] = layout
    repository = tmp_path / "repository"
    build_into(write_task(tmp_path, name, minilm_folder, core=core), repository)
    trt = machine(monkeypatch, tmp_path, "10")
    for fault in (wrong_class, wild_class):
        trt._play.miscompute = fault
        with pytest.raises(EngineFailure):
            build_engine(repository, name, quiet)
        assert not (repository / f"{name}_core/1/model.plan").exists()
    trt._play.miscompute = None
    record = build_engine(repository, name, quiet).record
    assert all(verdict.passed for verdict in record.check.verdicts)
    assert lock_data(repository, name)["engine"] == plain_record(record)
