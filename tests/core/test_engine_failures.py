"""Whatever keeps an engine from being built or trusted: one message, and nothing written."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from conftest import lock_data, quiet, write_lock
from engine_cases import build_repository, contents, copied, machine
from fake_tensorrt import MAJORS
from triptych.base.errors import UserError
from triptych.core.engine.graph import read_graph
from triptych.core.engine.stage import EngineFailure, build_engine

NAME = "packed_fp16"


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
    """The error of a build that fails and leaves everything as it was."""
    before = contents(repository)
    with pytest.raises(UserError) as raised:
        build_engine(repository, name, quiet)
    assert contents(repository) == before
    assert raised.value.remedy
    return raised.value


SAID = {
    "out of memory": (
        [
            (
                "ERROR",
                "[defaultAllocator.cpp::allocate::31] Error Code 1: Cuda Runtime (out of memory)",
            ),
            ("ERROR", "Could not find any implementation for node {ForeignNode[a...b]}."),
        ],
        "GPU memory",
    ),
    "out of memory, old": (
        [("ERROR", "2: [virtualMemoryBuffer.cpp::resizePhysical::145] Error Code 2: OutOfMemory")],
        "GPU memory",
    ),
    "memory told as a warning": (
        [("WARNING", "Requested amount of GPU memory (17179869184 bytes) could not be allocated.")],
        "GPU memory",
    ),
    "workspace": (
        [
            (
                "WARNING",
                "Could not find any implementation for node /a due to insufficient workspace.",
            )
        ],
        "core.engine.workspace_mib",
    ),
    "no kernel": (
        [("ERROR", "Error Code 10: Could not find any implementation for node /a/MatMul.")],
        "core.precision",
    ),
    "profile": (
        [("ERROR", "Specified optimization profiles must satisfy MIN<=OPT<=MAX.")],
        "plan.engine.profiles",
    ),
    "disk": ([("ERROR", "write failed: No space left on device")], "disk"),
    "unknown": ([("ERROR", "Error Code 99: something new")], "tensorrt"),
    "nothing": ([], "tensorrt"),
}


@pytest.mark.parametrize("case", SAID)
def test_a_failed_build_is_told_in_one_message(
    repository: Path, on: Callable[[str], Any], case: str
) -> None:
    play = on("10")._play
    play.log, field = SAID[case]
    play.build_fails = True
    error = refused(repository)
    assert error.field == field
    assert error.given == "no reason" or any(
        error.given in " ".join(text.split()) for _, text in play.log
    )


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        ("UNSUPPORTED_NODE", "operators"),
        ("INVALID_NODE", "rejected"),
        ("INVALID_GRAPH", "rejected"),
    ],
)
def test_what_the_parser_refuses_is_told_with_node_and_operator(
    repository: Path, on: Callable[[str], Any], code: str, rule: str
) -> None:
    import onnx

    play = on("10")._play
    nodes = onnx.load(repository / f"{NAME}_core/1/model.onnx").graph.node
    named = {"node": 3, "node_name": nodes[3].name, "node_operator": nodes[3].op_type}
    play.parser_errors = [{"code": code, "desc": "it is odd", **named}] * 2
    error = refused(repository)
    assert error.field == "model.onnx"
    assert rule in error.rule
    assert f"node {nodes[3].name} ({nodes[3].op_type}), " in error.given
    assert ": it is odd (and 1 more)" in error.given


@pytest.mark.parametrize("major", MAJORS)
def test_a_missing_gpu_is_told_by_the_driver_or_by_tensorrt(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, major: str
) -> None:
    machine(monkeypatch, tmp_path, major)._play.no_gpu = True
    error = refused(repository)
    assert (error.field, error.given) == ("GPU", "CUDA initialization failure with error: 35")
    machine(monkeypatch, tmp_path, major, gpu=None)
    error = refused(repository)
    assert (error.field, error.given) == ("GPU", "NVIDIA's driver shows no GPU to this process")


def test_without_tensorrt_the_container_is_named(
    repository: Path, on: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    on("10")
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    error = refused(repository)
    assert error.field == "tensorrt"
    assert "make engine-in-container" in error.remedy


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


def test_a_release_before_10_is_refused(repository: Path, on: Callable[[str], Any]) -> None:
    on("10").__dict__["__version__"] = "8.6.1"
    assert "10 or newer" in refused(repository).rule


@pytest.mark.parametrize("major", MAJORS)
def test_a_plan_that_does_not_load_is_not_written(
    repository: Path, on: Callable[[str], Any], major: str
) -> None:
    on(major)._play.stale = True
    error = refused(repository)
    assert error.field == "model.plan"
    assert "Version tag does not match" in error.given or "plan" in error.given


@pytest.mark.parametrize("major", MAJORS)
def test_a_profile_that_got_lost_is_noticed(
    repository: Path, on: Callable[[str], Any], major: str
) -> None:
    on(major)._play.lost_profile = True
    error = refused(repository)
    assert (error.field, error.given) == ("model.plan", "0 instead of 1")


@pytest.mark.parametrize("major", MAJORS)
def test_a_layer_in_fp32_in_secret_fails_the_build_by_name(
    repository: Path, on: Callable[[str], Any], major: str
) -> None:
    graph = read_graph(repository / f"{NAME}_core/1/model.onnx")
    node = next(name for name, kind in graph.products.items() if kind == "fp16")
    on(major)._play.layer_types = {node: "FLOAT"}
    error = refused(repository)
    assert error.field == "core.precision"
    assert error.given == f"{node} (fp32 instead of fp16)"


@pytest.mark.parametrize("major", MAJORS)
def test_an_engine_that_shows_no_types_passes_only_if_its_size_tells(
    repository: Path, on: Callable[[str], Any], major: str
) -> None:
    graph = read_graph(repository / f"{NAME}_core/1/model.onnx")
    play = on(major)._play
    play.fused = True
    play.layer_types = dict.fromkeys(graph.products, "FLOAT")
    error = refused(repository)
    assert error.field == "core.precision"
    assert "none of 16 matrix products shows its type" in error.rule
    play.layer_types = {}
    record = build_engine(repository, NAME, quiet).record
    assert (record.witness, record.matmuls["unseen"]) == ("size", 17)


def broken(outputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value + 0.3 for name, value in outputs.items()}


def not_finite(outputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value * float("nan") for name, value in outputs.items()}


def cut(outputs: dict[str, Any]) -> dict[str, Any]:
    import numpy as np

    return {name: np.zeros_like(value) for name, value in outputs.items()}


@pytest.mark.parametrize("fault", [broken, not_finite, cut])
@pytest.mark.parametrize("major", MAJORS)
def test_an_engine_that_computes_something_else_is_not_written(
    repository: Path, on: Callable[[str], Any], major: str, fault: Any
) -> None:
    on(major)._play.miscompute = fault
    before = contents(repository)
    with pytest.raises(EngineFailure) as raised:
        build_engine(repository, NAME, quiet)
    assert raised.value.gate.failures
    assert contents(repository) == before


def test_the_command_prints_what_failed_and_exits_with_1(
    repository: Path, on: Callable[[str], Any]
) -> None:
    from triptych.interface.cli import app

    trt = on("11")
    arguments = ["engine", NAME, "--repository", str(repository), "--json"]
    trt._play.miscompute = broken
    failed = CliRunner().invoke(app, arguments)
    assert failed.exit_code == 1
    assert json.loads(failed.stdout)["gate"]["failures"]
    assert "Failed metrics" in failed.stderr
    trt._play.miscompute = None
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0
    (result,) = json.loads(done.stdout)
    assert result["changed"] == [NAME, f"{NAME}_core"]
    plain = CliRunner().invoke(app, arguments[:-1])
    assert plain.stdout == (f"{NAME}_core: TensorRT 11.1.0.106, NVIDIA H200, fp16: up to date\n")


def test_a_pipeline_that_is_not_there_is_named(repository: Path) -> None:
    error = refused(repository, "missing")
    assert (error.field, error.remedy) == ("missing", "Run `triptych build missing` first")


def change_lock(repository: Path, change: Callable[[dict[str, Any]], None]) -> None:
    lock = lock_data(repository, NAME)
    change(lock)
    write_lock(repository, NAME, lock)


def test_another_backend_has_no_engine(repository: Path) -> None:
    change_lock(repository, lambda lock: lock["spec"]["core"].update(backend="onnxruntime"))
    assert refused(repository).field == "core.backend"


@pytest.mark.parametrize("field", ["engine", "core"])
def test_an_old_lock_asks_for_a_build(repository: Path, field: str) -> None:
    change_lock(repository, lambda lock: lock["plan"].pop(field))
    assert refused(repository).remedy == f"Run `triptych build {NAME}` again"


@pytest.mark.parametrize(
    "file", [f"{NAME}_core/1/model.onnx", f"{NAME}/engine_samples.npz", f"{NAME}_core/config.pbtxt"]
)
def test_files_newer_than_the_lock_ask_for_a_build(
    repository: Path, on: Callable[[str], Any], file: str
) -> None:
    on("10")
    (repository / file).write_bytes((repository / file).read_bytes() + b"\n")
    assert refused(repository).field == file
    (repository / file).unlink()
    assert refused(repository).field == file


def test_a_build_that_ends_meanwhile_wins(repository: Path, on: Callable[[str], Any]) -> None:
    on("10")
    told: list[str] = []

    def meddle(stage: str, _line: str) -> None:
        if stage == "check" and not told:
            told.append(stage)
            change_lock(repository, lambda lock: lock.update(built_at="now"))

    with pytest.raises(UserError, match="changed while the engine"):
        build_engine(repository, NAME, meddle)
    assert not (repository / f"{NAME}_core/1/model.plan").exists()


@pytest.mark.parametrize(
    "place", ["triptych.repository.store._stage", "triptych.core.engine.make.save"]
)
def test_a_full_disk_is_told_and_harms_nothing(
    repository: Path, on: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    on("10")
    monkeypatch.setattr(place, full)
    error = refused(repository)
    assert error.rule == "has too little free space"
