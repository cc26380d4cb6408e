"""`triptych engine`: one code path builds, inspects, checks and writes with every TensorRT."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from conftest import lock_data, quiet, write_lock
from container_cases import H200, L4
from engine_cases import build_repository, change_plan, contents, copied, header_of, machine
from fake_tensorrt.records import make_enum
from triptych.base.errors import UserError
from triptych.core.engine.api import Api, installed_rtx_version
from triptych.core.engine.stage import build_engine
from triptych.interface.cli import app
from triptych.repository.records import plain_record
from triptych.repository.store import hash_files
from triptych.spec.engine_plan import EnginePlan

NAMES = ("packed_fp16", "packed_int8", "bucketed_fp16")
Lines = list[tuple[str, str]]
DRY_RUN = "packed_int8"
"""A dry run takes seconds: only this pipeline has one."""


@pytest.fixture(scope="module")
def built(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("engines")
    return build_repository(tiny_model, base, *NAMES, engine_dry_runs=(DRY_RUN,))


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
    built: Path, tmp_path: Path, on: Callable[[str], Any]
) -> None:
    trt = on("10")
    repository = copied(built, tmp_path / "repository", "packed_fp16")
    flags = ("refit", "tf32", "version_compatible", "weight_streaming")
    options = {"workspace_mib": 64, "optimization_level": 5, "hardware": "ampere_plus"}
    change_plan(repository, "packed_fp16", **dict.fromkeys(flags, True), **options)
    build_engine(repository, "packed_fp16", quiet)
    (asked,) = trt._play.builds
    assert asked["flags"] == [flag.upper() for flag in flags]
    assert asked["limits"] == {"WORKSPACE": 64 << 20}
    assert (asked["level"], asked["hardware"]) == (5, "AMPERE_PLUS")
    level = "same_compute_capability"
    assert Api().hardware_level(level).name == level.upper()
    members = {"NONE": 0, "AMPERE_PLUS": 1}  # as 10.4 has them
    trt.__dict__["HardwareCompatibilityLevel"] = make_enum("Level", members)
    change_plan(repository, "packed_fp16", hardware=level)
    with pytest.raises(UserError) as raised:
        build_engine(repository, "packed_fp16", quiet)
    assert raised.value.field == "core.engine.hardware"
    assert "TensorRT 10." in raised.value.message


def test_a_second_run_does_nothing_and_a_lost_plan_comes_from_the_cache(
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
    assert lines == [("engine", "packed_fp16_core/1/model.plan: up to date")]
    (repository / "packed_fp16_core/1/model.plan").unlink()
    result = build_engine(repository, "packed_fp16", lambda *line: lines.append(line))
    assert result.changed == ("packed_fp16_core",)
    assert contents(repository) == before
    assert len(trt._play.builds) == 1
    assert any("cached" in line for _, line in lines)
    assert any(stage == "check" and "passed" in line for stage, line in lines)


def test_another_gpu_release_or_option_makes_another_engine(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = copied(built, tmp_path / "repository", "packed_fp16")
    keys = set()
    for major, gpu, level in (("10", L4, 3), ("11", L4, 3), ("11", L4, 1), ("11", H200, 1)):
        trt = machine(monkeypatch, tmp_path, major, gpu=gpu)
        change_plan(repository, "packed_fp16", optimization_level=level)
        keys.add(build_engine(repository, "packed_fp16", quiet).record.key)
        assert len(trt._play.builds) == 1
    assert len(keys) == 4


def test_times_of_kernels_are_reused_unless_they_cannot_be_used(
    built: Path, tmp_path: Path, on: Callable[[str], Any]
) -> None:
    trt = on("10")
    for name in ("packed_fp16", "bucketed_fp16"):
        build_engine(copied(built, tmp_path / name, name), name, quiet)
    assert [asked["times"] for asked in trt._play.builds] == [0, 1]
    (file,) = (tmp_path / "cache/timing").iterdir()
    assert file.name == f"{trt.__version__}_NVIDIA_H200_9.0.cache"
    assert file.read_bytes().count(b"kernels") == 2
    for level, content in enumerate((b"rubbish", b'FAKE-TIMES\n["9.9.9", ["x"]]')):
        file.write_bytes(content)
        change_plan(tmp_path / "packed_fp16", "packed_fp16", optimization_level=level)
        build_engine(tmp_path / "packed_fp16", "packed_fp16", quiet)
        assert trt._play.builds[-1]["times"] == 0, content
        assert file.read_bytes().count(b"kernels") == 1, content


def test_the_check_splits_batches_that_are_too_large_for_the_engine(
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


def test_the_engine_of_a_shared_core_is_built_in_its_owner(
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
