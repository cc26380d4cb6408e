"""The start-up check: engines that fit this machine pass, others are refused in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from container_cases import H100, H200, L4, T4, machine, write_pipeline
from triptych.base.errors import UserError
from triptych.container.lock_check import check_repository, has_version_compatible_plans, main
from triptych.container.machine import Machine, VisibleGpu, find_driver, find_gpus, find_tensorrt
from triptych.container.manifests import remove_byte_code

HERE = machine(H200)


def check(repository: Path, here: Machine | None = HERE, **options: bool) -> str:
    """The lines of all verdicts; empty where all is well."""
    return "\n".join(map(str, check_repository(repository, here, **options)))


def test_an_engine_of_this_machine_passes(tmp_path: Path) -> None:
    assert check(write_pipeline(tmp_path)) == ""


def test_a_mismatch_says_built_for_here_and_remedy_in_one_line(tmp_path: Path) -> None:
    assert check(write_pipeline(tmp_path), machine(L4, tensorrt="11.2.1")) == (
        "error: minilm: the engine was built for TensorRT 10.16.1.11 on NVIDIA H200 (9.0), here "
        "are TensorRT 11.2.1 and NVIDIA L4 (8.9): rebuild it with `triptych engine minilm` in "
        "this image"
    )


@pytest.mark.parametrize(
    ("compatible", "built", "here", "fits"),
    [
        (False, "10.16.1.11", "10.16.1", True),
        (False, "10.16.1.11", "10.16.1.12", False),
        (False, "10.16.1.11", "10.16.2", False),
        (True, "10.16.1.11", "10.16.2", True),
        (True, "10.16.1.11", "11.2.1", True),
        (True, "8.6.1.6", "10.16.1", True),
        (True, "10.16.1.11", "10.15.1", False),
        (True, "11.2.1.2", "10.16.1", False),
        (True, "8.6.1.6", "11.2.1", False),
    ],
)
def test_a_plan_runs_on_later_releases_only_where_it_was_built_to(
    compatible: bool, built: str, here: str, fits: bool, tmp_path: Path
) -> None:
    write_pipeline(tmp_path, tensorrt=built, version_compatible=compatible)
    said = check(tmp_path, machine(H200, tensorrt=here))
    assert (said == "") == fits, said
    assert has_version_compatible_plans(tmp_path) == compatible


@pytest.mark.parametrize(
    ("hardware", "gpu", "fits"),
    [
        ("none", H200, True),
        ("none", H100, False),
        ("none", L4, False),
        ("same_compute_capability", H100, True),
        ("same_compute_capability", L4, False),
        ("ampere_plus", L4, True),
        ("ampere_plus", T4, False),
    ],
    ids=str,
)
def test_a_plan_runs_on_other_gpus_only_where_it_was_built_to(
    hardware: str, gpu: VisibleGpu, fits: bool, tmp_path: Path
) -> None:
    said = check(write_pipeline(tmp_path, hardware=hardware), machine(gpu))
    assert (said == "") == fits, said
    assert fits or f"and {gpu}: rebuild" in said


@pytest.mark.parametrize(
    ("pipeline", "here", "wrong"),
    [
        ({"built": False}, machine(H200), "has not been built: build it with `triptych engine"),
        ({"plan": None}, machine(H200), "minilm_core/1/model.plan is missing"),
        ({"plan": b""}, machine(H200), "minilm_core/1/model.plan is empty"),
        ({"plan": b"another"}, machine(H200), "is not the file that the build manifest describes"),
        ({"onnx_sha256": "old"}, machine(H200), "built from another graph"),
        ({}, machine(), "needs a GPU, here is none: start the container with `--gpus all`"),
        ({"gpus": (0, 1)}, machine(H200), "runs on GPU 1, here are 1"),
        ({"gpus": (0, 1)}, machine(H200, L4), "and NVIDIA L4 (8.9)"),
        ({"gpus": "all"}, machine(H200, L4), "and NVIDIA L4 (8.9)"),
    ],
)
def test_what_cannot_be_served_is_refused(
    pipeline: dict[str, Any], here: Machine, wrong: str, tmp_path: Path
) -> None:
    said = check(write_pipeline(tmp_path, **pipeline), here)
    assert wrong in said
    assert said.startswith("error: minilm: ")
    assert "\n" not in said


@pytest.mark.parametrize(
    ("pipeline", "here", "told"),
    [
        ({}, machine(H200, tensorrt=None), "no TensorRT was found here"),
        ({}, machine(H200, driver="570.1"), "built with NVIDIA driver 590, here is the older 570"),
    ],
)
def test_what_may_go_wrong_is_a_warning(
    pipeline: dict[str, Any], here: Machine, told: str, tmp_path: Path
) -> None:
    said = check(write_pipeline(tmp_path, **pipeline), here)
    assert told in said
    assert said.startswith("warning: minilm: ")


def test_the_hash_of_a_huge_plan_may_be_skipped(tmp_path: Path) -> None:
    assert check(write_pipeline(tmp_path, plan=b"another"), hashes=False) == ""


def damage(repository: Path) -> int:
    path = repository / "minilm_core/1/model.onnx"
    return path.write_bytes(path.read_bytes()[:-1] + bytes(1))


def put_a_folder(repository: Path) -> None:
    path = repository / "minilm_core/1/model.onnx"
    path.unlink()
    path.mkdir()


ONNX: dict[str, Any] = {"backend": "onnxruntime", "built": False, "plan": None}
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "other weights": (
        damage,
        "minilm_core/1/model.onnx is not the file that the build manifest describes",
    ),
    "another config": (
        lambda r: (r / "minilm/config.pbtxt").write_text('platform: "ensemble"'),
        "minilm/config.pbtxt is not the file that the build manifest describes",
    ),
    "no config, no ensemble": (
        lambda r: (r / "minilm/config.pbtxt").unlink(),
        "minilm/config.pbtxt is missing",
    ),
    "a file is missing": (
        lambda r: (r / "minilm_core/1/model.onnx").unlink(),
        "minilm_core/1/model.onnx is missing",
    ),
    "a folder in its place": (
        put_a_folder,
        "minilm_core/1/model.onnx is missing",
    ),
    "an empty file": (
        lambda r: (r / "minilm_core/1/model.onnx").write_bytes(b""),
        "minilm_core/1/model.onnx is empty",
    ),
    "a file too many": (
        lambda r: (r / "minilm_core/1/hooks.py").touch(),
        "minilm_core/1/hooks.py is not in the build manifest",
    ),
    "a newer version": (
        lambda r: shutil.copytree(r / "minilm_core/1", r / "minilm_core/2"),
        "minilm_core/2/model.onnx is not in the build manifest",
    ),
    "two faults": (
        lambda r: (damage(r), (r / "minilm_core/1/hooks.py").write_text("")),
        "minilm_core/1/model.onnx is not the file that the build manifest describes (and 1 more)",
    ),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_what_is_not_as_it_was_built_is_refused(case: str, tmp_path: Path) -> None:
    write_pipeline(tmp_path, **ONNX)
    do, wrong = DAMAGES[case]
    do(tmp_path)
    remedy = "build it again with `triptych build minilm`, or copy it again"
    for here in (HERE, None):
        assert check(tmp_path, here) == f"error: minilm: {wrong}: {remedy}"


def test_what_no_server_loads_is_no_difference(tmp_path: Path) -> None:
    version = write_pipeline(tmp_path, **ONNX) / "minilm_core/1"
    (version / ".DS_Store").touch()
    (tmp_path / "minilm_core/notes.txt").touch()
    assert check(tmp_path) == ""


def test_byte_code_and_linked_folders_are_a_difference(tmp_path: Path) -> None:
    version = write_pipeline(tmp_path, **ONNX) / "minilm_core/1"
    caches = [version / "__pycache__", version / "deep/__pycache__"]
    for cache in caches:
        cache.mkdir(parents=True)
        (cache / "model.cpython-310.pyc").touch()
    path = "minilm_core/1/__pycache__"
    fault = f"{path} holds byte code, which Python runs in place of the files that are checked"
    assert check(tmp_path) == f"error: minilm: {fault} (and 1 more): remove it"
    assert remove_byte_code(tmp_path) == []
    assert not any(cache.exists() for cache in caches)
    assert check(tmp_path) == ""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    caches[0].symlink_to(elsewhere)
    assert check(tmp_path) == f"error: minilm: {fault}: remove it"
    assert remove_byte_code(tmp_path) == []
    assert elsewhere.exists()
    (version / "linked").symlink_to(elsewhere)
    assert "minilm_core/1/linked is not in the build manifest" in check(tmp_path)


def test_without_hashes_files_must_only_be_there(tmp_path: Path) -> None:
    write_pipeline(tmp_path, **ONNX)
    damage(tmp_path)
    assert check(tmp_path, hashes=False) == ""
    (tmp_path / "minilm_core/1/model.onnx").unlink()
    assert "is missing" in check(tmp_path, hashes=False)


def test_pipelines_on_onnxruntime_pass_without_a_gpu(tmp_path: Path) -> None:
    write_pipeline(tmp_path, backend="onnxruntime", built=False, plan=None)
    assert check(tmp_path, machine(tensorrt=None, driver=None)) == ""


def test_a_shared_core_is_checked_with_its_owner_only(tmp_path: Path) -> None:
    write_pipeline(tmp_path, "guest", built=False, plan=None)
    lock = tmp_path / "guest/triptych.lock.json"
    content = json.loads(lock.read_text())
    content["spec"]["core"]["shared_from"] = "minilm"
    lock.write_text(json.dumps(content))
    assert check(tmp_path) == ""


def test_a_pipeline_without_a_lock_is_a_warning(tmp_path: Path) -> None:
    write_pipeline(tmp_path)
    (tmp_path / "minilm/triptych.lock.json").unlink()
    assert check(tmp_path) == "warning: minilm: has no build manifest: nothing could be checked"


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"spec": {}}',
        '{"spec": {"core": {"backend": "tensorrt"}}}',
        '{"spec": {"core": {"backend": "onnxruntime"}}, "files": {}}',
        "\xff",
        "[" * 100_000,
    ],
)
def test_a_lock_that_cannot_be_read_is_refused(content: str, tmp_path: Path) -> None:
    write_pipeline(tmp_path)
    (tmp_path / "minilm/triptych.lock.json").write_bytes(content.encode("latin-1"))
    said = check(tmp_path)
    assert said.startswith("error: minilm: its build manifest cannot be used (")
    assert "\n" not in said


def test_each_pipeline_has_its_own_line(tmp_path: Path) -> None:
    write_pipeline(tmp_path, "one", built=False)
    write_pipeline(tmp_path, "two", plan=None)
    write_pipeline(tmp_path, "well")
    assert [verdict.pipeline for verdict in check_repository(tmp_path, machine(H200))] == [
        "one",
        "two",
    ]


def test_no_repository_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="TRIPTYCH_REPOSITORY"):
        check_repository(tmp_path / "none", machine())


@pytest.mark.parametrize(
    ("mode", "exit_code", "told"), [("enforce", 1, True), ("warn", 0, True), ("off", 0, False)]
)
def test_the_operator_decides_what_a_refusal_does(
    mode: str,
    exit_code: int,
    told: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TRIPTYCH_LOCK_CHECK", mode)
    assert main([str(write_pipeline(tmp_path, built=False))]) == exit_code
    assert ("error: minilm" in capsys.readouterr().err) == told


def test_no_repository_has_an_exit_code_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "none")]) == 2
    assert "TRIPTYCH_REPOSITORY" in capsys.readouterr().err


def test_tensorrt_is_known_by_the_name_of_its_library(tmp_path: Path) -> None:
    for folder, names in {
        "path": ("libnvinfer.so.11", "libnvinfer_plugin.so.11.2.1"),
        "image": ("libnvinfer.so.9.9.9", "libnvinfer.so.10.16.1", "libnvinfer.so.10"),
    }.items():
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).touch()
    folders = (str(tmp_path / "image"),)
    assert find_tensorrt({"LD_LIBRARY_PATH": str(tmp_path / "path")}, folders) == "10.16.1"
    (tmp_path / "path/libnvinfer.so.11.2.1").touch()
    assert find_tensorrt({"LD_LIBRARY_PATH": str(tmp_path / "path")}, folders) == "11.2.1"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("590.48.01\n", "590.48.01"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module  615.61  Release Build", "615.61"),
        ("nothing", None),
    ],
)
def test_the_driver_is_known_by_the_kernels_files(
    text: str, version: str | None, tmp_path: Path
) -> None:
    (tmp_path / "version").write_text(text)
    assert find_driver((str(tmp_path / "none"), str(tmp_path / "version"))) == version


def test_gpus_come_from_the_drivers_library(tmp_path: Path) -> None:
    assert find_gpus(str(tmp_path / "none")) == ()
    assert find_gpus(str(build_fake_driver(tmp_path))) == (H200, L4)


def build_fake_driver(folder: Path) -> Path:
    """A fake libcuda with two GPUs, compiled here."""
    import shutil
    import subprocess

    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    source = folder / "fake.c"
    source.write_text("""
#include <string.h>
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal + 40; return 0; }
int cuDeviceGetName(char *name, int length, int device) {
  strncpy(name, device == 40 ? "NVIDIA H200" : "NVIDIA L4", length); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? (device == 40 ? 9 : 8) : (device == 40 ? 0 : 9); return 0; }
""")
    library = folder / "libfake.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return library
