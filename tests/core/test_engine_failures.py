"""Whatever keeps an engine from being built or trusted: one message, and nothing written."""

import errno
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from typer.testing import CliRunner

from conftest import lock_data, quiet, write_lock
from engine_cases import build_repository, contents, copied, machine
from triptych.base.errors import UserError
from triptych.core.engine.graph import read_graph
from triptych.core.engine.stage import EngineFailure, build_engine
from triptych.interface.cli import app

NAME = "packed_fp16"
ONNX_FILE = f"{NAME}_core/1/model.onnx"


@pytest.fixture(scope="module")
def built(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_repository(tiny_model, tmp_path_factory.mktemp("engines"), NAME)


@pytest.fixture
def repository(built: Path, tmp_path: Path) -> Path:
    return copied(built, tmp_path / "repository", NAME)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Any]:
    """Makes this the machine of one release; returns the fake module."""
    return lambda major: machine(monkeypatch, tmp_path, major)


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


FAULTS: dict[str, Callable[[Any], Any]] = {
    "shifted": lambda value: value + 0.3,
    "not a number": lambda value: value * float("nan"),
    "zero": lambda value: value * 0,
}


def test_an_engine_that_computes_something_else_is_not_written_and_the_command_exits_with_1(
    repository: Path, on: Callable[[str], Any]
) -> None:
    play = on("11")._play
    before = contents(repository)
    for name, fault in FAULTS.items():
        play.miscompute = lambda outputs, fault=fault: {n: fault(v) for n, v in outputs.items()}
        with pytest.raises(EngineFailure) as raised:
            build_engine(repository, NAME, quiet)
        assert raised.value.gate.failures, name
        assert contents(repository) == before, name
    arguments = ["engine", NAME, "--repository", str(repository), "--json"]
    failed = CliRunner().invoke(app, arguments)
    assert failed.exit_code == 1
    assert json.loads(failed.stdout)["gate"]["failures"]
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
    assert not (repository / f"{NAME}_core/1/model.plan").exists()


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
