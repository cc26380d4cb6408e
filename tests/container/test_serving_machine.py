"""The machine that a server finds, and the variant of the configs that it uses there."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from triptych.base.errors import UserError
from triptych.container.entrypoint import variant_flags
from triptych.container.serving_machine import (
    GPUS,
    ChosenVariant,
    ServingMachine,
    choose,
    choose_variant,
    find_cores,
    parse_machine,
    variants_in,
    with_gpu,
)
from triptych.container.settings import read_settings

H200 = with_gpu(16, "NVIDIA H200", 139.7)


@pytest.mark.parametrize(
    ("name", "memory_gib", "expected"),
    [
        ("NVIDIA H200", 139.7, "h200"),
        ("NVIDIA H100 80GB HBM3", 79.1, "h100"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100"),
        ("NVIDIA A10G", 22.1, "a10"),
        ("NVIDIA L4", 22.0, "l4"),
        ("NVIDIA L40S", 44.4, "l40s"),
        ("Tesla T4", 14.6, "t4"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9.8, ""),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 39.2, "a100"),
        ("NVIDIA Something New", 200.0, "a100"),
        ("", 0.0, ""),
    ],
)
def test_gpus_are_recognized(name: str, memory_gib: float, expected: str) -> None:
    assert with_gpu(8, name, memory_gib).gpu == expected


def test_names_and_order() -> None:
    for name in ("h200x16", "l4x8", "cpu2"):
        assert parse_machine(name).name == name
    assert [*GPUS] == sorted(GPUS, key=lambda gpu: (GPUS[gpu].teraflops, GPUS[gpu].memory_gib))
    for wrong in ("", "h200", "x4", "cpux4", "h200x0", "H200x4", "h200x4\n", "cpu-1"):
        with pytest.raises(UserError, match="the name of a machine"):
            parse_machine(wrong)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "350000 100000\n"}, 3),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "200000 100000\n"}, 2),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/a\n1:memory:/a\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/a\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
        ({}, 8),
    ],
)
def test_cores_are_those_of_the_control_group(
    tmp_path: Path, files: dict[str, str], expected: int
) -> None:
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert find_cores(tmp_path, affinity=8) == expected


def test_cores_are_at_most_those_of_the_affinity() -> None:
    assert 1 <= find_cores() <= len(os.sched_getaffinity(0))


def test_the_nearest_machine_that_is_not_larger_is_chosen() -> None:
    names = ["cpu2", "cpu8", "l4x8", "h100x8", "h100x32"]
    for machine, expected in {
        "cpu4": "cpu2",
        "cpu64": "cpu8",
        "cpu1": None,
        "t4x16": "cpu8",
        "l4x4": "cpu2",
        "a100x16": "l4x8",
        "h200x16": "h100x8",
        "b200x64": "h100x32",
    }.items():
        assert choose(names, parse_machine(machine)) == expected, machine


def add_pipeline(
    repository: Path, name: str, variants: Sequence[str], machine: str | None = None
) -> None:
    """Write what the start reads of a pipeline: its manifest and its configs."""
    files = {f"{name}/config.pbtxt": "", f"{name}_core/config.pbtxt": ""}
    files |= {f"{name}_core/configs/{variant}.pbtxt": "" for variant in variants}
    for path in files:
        (repository / path).parent.mkdir(parents=True, exist_ok=True)
        (repository / path).write_text('platform: "ensemble"\n' if path[0] != "_" else "")
    spec = {"core": {"backend": "onnxruntime"}, "serving": {"machine": machine}}
    manifest = {"spec": spec, "files": files, "gate": {"precision": "fp32"}}
    (repository / name / "triptych.lock.json").write_text(json.dumps(manifest))
    (repository / f"{name}_core/config.pbtxt").write_text('backend: "onnxruntime"\n')


def test_a_start_uses_the_plan_for_its_machine(tmp_path: Path) -> None:
    add_pipeline(tmp_path, "a", ["l4x8", "h200x16"])
    chosen = choose_variant(tmp_path, H200)
    assert chosen == ChosenVariant("h200x16", ("note: the plan for h200x16 is used on h200x16",))
    nearest = choose_variant(tmp_path, with_gpu(64, "NVIDIA L40S", 44.4))
    assert nearest.name == "l4x8"
    assert "the nearest one" in nearest.lines[0]
    assert choose_variant(tmp_path, ServingMachine("", 16)) == ChosenVariant("")


def test_the_config_of_the_build_may_be_the_plan(tmp_path: Path) -> None:
    add_pipeline(tmp_path, "a", ["l4x8"], machine="h200x16")
    assert choose_variant(tmp_path, H200).name == ""
    assert choose_variant(tmp_path, H200, "l4x8").name == "l4x8"


def test_a_machine_that_is_too_small_gets_the_smallest_plan(tmp_path: Path) -> None:
    add_pipeline(tmp_path, "a", ["l4x8"], machine="h200x16")
    chosen = choose_variant(tmp_path, H200._replace(cores=2))
    assert chosen.name == "l4x8"
    assert "is larger than h200x2" in chosen.lines[0]


def test_pipelines_share_the_cores(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "d"):
        add_pipeline(tmp_path, name, ["h200x4", "h200x16"])
    chosen = choose_variant(tmp_path, H200)
    assert chosen.name == "h200x4"
    assert "shared by 4 pipelines" in chosen.lines[0]


def test_a_pipeline_without_the_plan_is_named(tmp_path: Path) -> None:
    for name in ("a", "b"):
        add_pipeline(tmp_path, name, ["h200x8"])
    add_pipeline(tmp_path, "c", ["cpu4"])
    chosen = choose_variant(tmp_path, with_gpu(24, "NVIDIA H200", 139.7))
    assert chosen.name == "h200x8"
    assert "c has no plan for h200x8" in chosen.lines[1]


def test_builds_without_plans_are_served_as_before(tmp_path: Path) -> None:
    add_pipeline(tmp_path, "a", [])
    (tmp_path / "b").mkdir()
    (tmp_path / "b/config.pbtxt").write_text('platform: "ensemble"\n')
    assert choose_variant(tmp_path, H200) == ChosenVariant("")


def test_a_file_that_no_manifest_lists_is_not_used(tmp_path: Path) -> None:
    add_pipeline(tmp_path, "a", ["l4x8"])
    (tmp_path / "a_core/configs/h200x16.pbtxt").write_text("")
    assert choose_variant(tmp_path, H200).name == "l4x8"


def test_an_operator_names_a_smaller_machine_only(tmp_path: Path) -> None:
    add_pipeline(tmp_path, "a", ["cpu4", "cpu8", "cpu32"])
    found = ServingMachine("", 8)
    assert choose_variant(tmp_path, found, "cpu4").name == "cpu4"
    larger = choose_variant(tmp_path, found, "cpu32")
    assert larger.name == "cpu8"
    assert "has less than cpu32" in larger.lines[0]
    with pytest.raises(UserError, match="TRIPTYCH_MACHINE"):
        choose_variant(tmp_path, found, "huge")


def test_a_release_with_configs_of_its_own_has_variants_of_its_own(tmp_path: Path) -> None:
    found = ServingMachine("", 16)
    add_pipeline(tmp_path, "a", ["24.10", "cpu8", "cpu8-24.10"])
    assert choose_variant(tmp_path, found).name == "cpu8"
    assert choose_variant(tmp_path, found, release="24.10").name == "cpu8-24.10"
    add_pipeline(tmp_path, "b", ["24.10"])  # of a build without variants
    chosen = choose_variant(tmp_path, found, release="24.10")
    assert chosen.name == ""
    assert "b_core" in chosen.lines[-1]


def test_only_names_of_machines_are_variants() -> None:
    files = [
        "a/configs/cpu8.pbtxt",
        "a/configs/24.10.pbtxt",
        "a/configs/axx5.pbtxt",
        "a/cpu2.pbtxt",
    ]
    assert variants_in([*files, "a/configs/cpu8-24.10.pbtxt"]) == {"cpu8"}


def test_the_entry_point_passes_the_plan_to_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_pipeline(tmp_path, "a", ["cpu1", "cpu9999"])
    settings = read_settings({"TRIPTYCH_REPOSITORY": str(tmp_path), "TRIPTYCH_CORES": "1"})
    assert variant_flags(settings, "") == ["--model-config-name=cpu1"]
    assert "the plan for cpu1 is used" in capsys.readouterr().err
