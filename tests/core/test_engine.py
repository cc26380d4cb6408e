"""`triptych engine`: one code path builds, inspects, checks and writes with every TensorRT."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from conftest import lock_data, quiet, write_lock
from container_cases import H200, L4
from engine_cases import build_repository, change_plan, contents, copied, header_of, machine
from fake_tensorrt import MAJORS
from fake_tensorrt.records import make_enum
from triptych.base.errors import UserError
from triptych.core.engine.api import Api, installed_rtx_version
from triptych.core.engine.stage import build_engine
from triptych.repository.records import plain_record
from triptych.repository.store import hash_files
from triptych.spec.engine_plan import EnginePlan

NAMES = ("packed_fp32", "packed_fp16", "packed_int8", "bucketed_fp16")
PRECISION = {name: name.split("_")[1] for name in NAMES}
Lines = list[tuple[str, str]]


@pytest.fixture(scope="module")
def built(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_repository(tiny_model, tmp_path_factory.mktemp("engines"), *NAMES)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Any]:
    """Makes this the machine of one release; returns the fake module."""
    return lambda major: machine(monkeypatch, tmp_path, major)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("major", MAJORS)
def test_every_release_builds_every_graph_into_the_repository(
    built: Path, tmp_path: Path, on: Callable[[str], Any], major: str, name: str
) -> None:
    trt = on(major)
    repository = copied(built, tmp_path / "repository", name)
    before = contents(repository)
    result = build_engine(repository, name, quiet)
    assert result.changed == (name, f"{name}_core")
    after = contents(repository)
    plan = f"{name}_core/1/model.plan"
    assert set(after) - set(before) == {plan}
    assert {path for path in before if after[path] != before[path]} == {
        f"{name}/triptych.lock.json"
    }
    lock = lock_data(repository, name)
    files = {path: repository / path for path in lock["files"] if (repository / path).is_file()}
    assert plan in files
    assert hash_files(files, {}) == {path: lock["files"][path] for path in files}
    record = lock["engine"]
    assert record == plain_record(result.record)
    assert record["plan_sha256"] == lock["files"][plan]
    assert record["onnx_sha256"] == lock["files"][f"{name}_core/1/model.onnx"]
    assert {
        key: record[key] for key in ("tensorrt", "cuda", "driver", "gpu", "compute_capability")
    } == {
        "tensorrt": trt.__version__,
        "cuda": "13.2",
        "driver": "590.48.01",
        "gpu": "NVIDIA H200",
        "compute_capability": "9.0",
    }
    wanted = EnginePlan.from_dict(lock["plan"]["engine"]).profiles
    assert header_of(repository / plan)["profiles"] == [
        {n: [list(s.minimum), list(s.optimum), list(s.maximum)] for n, s in profile.items()}
        for profile in wanted
    ]
    assert record["matmuls"][PRECISION[name]] > 0
    assert record["matmuls"]["unseen"] == 0
    assert record["check"]["verdicts"]
    assert record["check"]["rows"] > 50


PRODUCTS = {
    "packed_fp32": {"fp32": 17},
    "packed_fp16": {"fp16": 16, "fp32": 1},
    "packed_int8": {"fp16": 4, "fp32": 1, "int8": 12},
    "bucketed_fp16": {"fp16": 16, "fp32": 1},
}
"""Of the pooling, which stays in fp32, and of two layers with six linear layers each."""


def test_a_build_without_a_gpu_rehearses_each_engine(built: Path) -> None:
    for name in NAMES:
        record = lock_data(built, name)["dry_run"]
        assert record["tensorrt_rtx"] == installed_rtx_version(), name
        assert record["products"] == PRODUCTS[name], name
        assert record["layers"] > 400, name
        assert record["size_bytes"] > 1_000_000, name


def test_a_rehearsal_is_left_out_made_later_and_shown(built: Path, tmp_path: Path) -> None:
    from triptych.interface.cli import app

    def triptych(*arguments: str) -> Any:
        done = CliRunner().invoke(app, [*arguments, "--repository", str(repository)])
        assert done.exit_code == 0, done.output
        return done

    name = "packed_fp16"
    repository = copied(built, tmp_path / "repository", name)
    rehearsed = lock_data(repository, name)["dry_run"]
    pipelines = ["--pipelines", str(built.parent / "pipelines")]
    triptych("build", name, *pipelines, "--reports", str(tmp_path), "--no-dry-run")
    assert lock_data(repository, name)["dry_run"] is None
    assert (
        "dry_run                none yet: `triptych build`"
        in triptych("inspect", name, *pipelines).stdout
    )
    alone = triptych("engine", name, "--dry-run")
    assert alone.stdout.startswith(f"{name}_core: TensorRT for RTX {installed_rtx_version()} for ")
    assert "(cached): a dry run, not the engine" in alone.stderr
    assert lock_data(repository, name)["dry_run"] == rehearsed
    assert not (repository / f"{name}_core/1/model.plan").exists()
    (again,) = json.loads(triptych("engine", name, "--dry-run", "--json").stdout)
    assert (again["changed"], again["record"]) == ([], rehearsed)
    assert "16 fp16, 1 fp32" in triptych("inspect", name, *pipelines).stdout


@pytest.mark.parametrize("name", ["packed_fp32", "packed_fp16", "packed_int8"])
@pytest.mark.parametrize("major", MAJORS)
def test_types_come_from_the_graph_in_each_releases_own_way(
    built: Path, tmp_path: Path, on: Callable[[str], Any], major: str, name: str
) -> None:
    trt = on(major)
    repository = copied(built, tmp_path / "repository", name)
    build_engine(repository, name, quiet)
    (asked,) = trt._play.builds
    assert asked["network"] == (["STRONGLY_TYPED"] if major == "10" else [])
    assert asked["flags"] == []


OPTIONS: dict[str, tuple[dict[str, Any], str, Any]] = {
    "tf32": ({"tf32": True}, "flags", ["TF32"]),
    "version compatible": ({"version_compatible": True}, "flags", ["VERSION_COMPATIBLE"]),
    "refit": ({"refit": True}, "flags", ["REFIT"]),
    "weight streaming": ({"weight_streaming": True}, "flags", ["WEIGHT_STREAMING"]),
    "workspace": ({"workspace_mib": 64}, "limits", {"WORKSPACE": 64 << 20}),
    "level": ({"optimization_level": 5}, "level", 5),
    "hardware": ({"hardware": "ampere_plus"}, "hardware", "AMPERE_PLUS"),
    "nothing": ({}, "flags", []),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_reaches_the_builder(
    built: Path, tmp_path: Path, on: Callable[[str], Any], option: str
) -> None:
    trt = on("10")
    options, field, value = OPTIONS[option]
    repository = copied(built, tmp_path / "repository", "packed_fp32")
    change_plan(repository, "packed_fp32", **options)
    build_engine(repository, "packed_fp32", quiet)
    assert trt._play.builds[0][field] == value


def test_a_hardware_level_of_newer_releases_is_refused_by_an_older_one(
    built: Path, tmp_path: Path, on: Callable[[str], Any]
) -> None:
    for major in MAJORS:
        on(major)
        level = Api().hardware_level("same_compute_capability")
        assert level.name == "SAME_COMPUTE_CAPABILITY"
    members = {"NONE": 0, "AMPERE_PLUS": 1}  # as 10.4 has them
    on("10").__dict__["HardwareCompatibilityLevel"] = make_enum("Level", members)
    repository = copied(built, tmp_path / "repository", "packed_fp32")
    change_plan(repository, "packed_fp32", hardware="same_compute_capability")
    with pytest.raises(UserError) as raised:
        build_engine(repository, "packed_fp32", quiet)
    assert raised.value.field == "core.engine.hardware"
    assert "TensorRT 10." in raised.value.message


def test_a_second_run_does_nothing_and_says_so(
    built: Path, tmp_path: Path, on: Callable[[str], Any]
) -> None:
    trt = on("10")
    repository = copied(built, tmp_path / "repository", "packed_fp16")
    first = build_engine(repository, "packed_fp16", quiet)
    before = contents(repository)
    lines: Lines = []
    second = build_engine(repository, "packed_fp16", lambda *line: lines.append(line))
    assert (second.changed, second.record) == ((), first.record)
    assert contents(repository) == before
    assert len(trt._play.builds) == 1
    assert lines == [("engine", "packed_fp16_core/1/model.plan: up to date")]


def test_a_lost_plan_comes_from_the_cache_and_is_checked_again(
    built: Path, tmp_path: Path, on: Callable[[str], Any]
) -> None:
    trt = on("10")
    repository = copied(built, tmp_path / "repository", "packed_fp16")
    build_engine(repository, "packed_fp16", quiet)
    before = contents(repository)
    (repository / "packed_fp16_core/1/model.plan").unlink()
    lines: Lines = []
    result = build_engine(repository, "packed_fp16", lambda *line: lines.append(line))
    assert len(trt._play.builds) == 1
    assert result.changed == ("packed_fp16_core",)
    assert contents(repository) == before
    assert any("cached" in line for _, line in lines)
    assert any(stage == "check" and "passed" in line for stage, line in lines)


@pytest.mark.parametrize("other", ["another release", "another GPU", "another option"])
def test_what_decides_the_engine_builds_it_again(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    machine(monkeypatch, tmp_path, "10")
    repository = copied(built, tmp_path / "repository", "packed_fp16")
    first = build_engine(repository, "packed_fp16", quiet)
    gpu = L4 if other == "another GPU" else H200
    trt = machine(monkeypatch, tmp_path, "11" if other == "another release" else "10", gpu=gpu)
    if other == "another option":
        change_plan(repository, "packed_fp16", optimization_level=1)
    second = build_engine(repository, "packed_fp16", quiet)
    assert len(trt._play.builds) == 1
    assert second.record.key != first.record.key


def test_times_of_kernels_serve_the_next_build(
    built: Path, tmp_path: Path, on: Callable[[str], Any]
) -> None:
    trt = on("10")
    for name in ("packed_fp16", "bucketed_fp16"):
        build_engine(copied(built, tmp_path / name, name), name, quiet)
    assert [asked["times"] for asked in trt._play.builds] == [0, 1]
    (file,) = (tmp_path / "cache/timing").iterdir()
    assert file.name == f"{trt.__version__}_NVIDIA_H200_9.0.cache"
    assert file.read_bytes().count(b"kernels") == 2


@pytest.mark.parametrize("content", [b"", b"rubbish", b'FAKE-TIMES\n["9.9.9", ["x"]]'])
def test_times_that_cannot_be_used_are_measured_again(
    built: Path, tmp_path: Path, on: Callable[[str], Any], content: bytes
) -> None:
    trt = on("10")
    build_engine(copied(built, tmp_path / "first", "packed_fp32"), "packed_fp32", quiet)
    (file,) = (tmp_path / "cache/timing").iterdir()
    file.write_bytes(content)
    build_engine(copied(built, tmp_path / "second", "packed_fp16"), "packed_fp16", quiet)
    assert trt._play.builds[1]["times"] == 0
    assert file.read_bytes().count(b"kernels") == 1


def test_a_long_build_says_where_it_is(
    built: Path, tmp_path: Path, on: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    on("10")
    monkeypatch.setattr("triptych.core.engine.make.TELL_EVERY_S", 0.0)
    lines: Lines = []
    repository = copied(built, tmp_path / "repository", "packed_fp32")
    build_engine(repository, "packed_fp32", lambda *line: lines.append(line))
    assert ("engine", "Building engine: 1 of 1") in lines


def test_the_check_deals_out_batches_that_the_engine_does_not_take(
    built: Path, tmp_path: Path, on: Callable[[str], Any]
) -> None:
    on("10")
    repository = copied(built, tmp_path / "repository", "packed_fp16")
    lock = lock_data(repository, "packed_fp16")
    tokens = lock["plan"]["engine"]["profiles"][0]["input_ids"]
    tokens.update(optimum=[500], maximum=[lock["plan"]["max_length"]])
    write_lock(repository, "packed_fp16", lock)
    record = build_engine(repository, "packed_fp16", quiet).record
    assert record.profiles[0]["input_ids"].maximum == (512,)
    assert all(verdict.passed for verdict in record.check.verdicts)


def test_a_shared_core_means_its_owners_engine(
    built: Path, tmp_path: Path, on: Callable[[str], Any]
) -> None:
    on("10")
    repository = copied(built, tmp_path / "repository", "packed_fp16")
    lock = lock_data(repository, "packed_fp16")
    lock["spec"]["core"]["shared_from"] = "packed_fp16"
    (repository / "sharer").mkdir()
    (repository / "sharer/triptych.lock.json").write_text(json.dumps(lock))
    lines: Lines = []
    result = build_engine(repository, "sharer", lambda *line: lines.append(line))
    assert (result.pipeline, result.owner) == ("sharer", "packed_fp16")
    assert (repository / "packed_fp16_core/1/model.plan").is_file()
    assert "shares the core of packed_fp16" in lines[0][1]
