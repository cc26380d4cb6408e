"""The start-up check: engines that fit this machine pass, others are refused in one line."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import lock_data, write_lock
from container_cases import H100, H200, L4, T4, machine, write_pipeline
from triptych.container import lock_check
from triptych.container.lock_check import check_repository, has_version_compatible_plans, main
from triptych.container.machine import Machine, find_driver, find_gpus, find_tensorrt
from triptych.container.manifests import core_variables, remove_byte_code
from triptych.container.processor import (
    FP32_LIMIT,
    find_instruction_sets,
    find_processor,
    node_label,
    sets_for,
)
from triptych.serving.server import check_and_make_flags

HERE = machine(H200)
ONNX: dict[str, Any] = {"backend": "onnxruntime", "built": False, "plan": None}


def check(repository: Path, here: Machine | None = HERE, **options: bool) -> str:
    """The lines of all verdicts; empty where all is well."""
    return "\n".join(map(str, check_repository(repository, here, **options)))


def test_a_plan_runs_only_on_releases_and_gpus_that_it_was_built_for(tmp_path: Path) -> None:
    of_releases = (
        (False, "10.16.1.11", "10.16.1", True),
        (False, "10.16.1.11", "10.16.1.12", False),
        (False, "10.16.1.11", "10.16.2", False),
        (True, "10.16.1.11", "10.16.2", True),
        (True, "10.16.1.11", "11.2.1", True),
        (True, "8.6.1.6", "10.16.1", True),
        (True, "10.16.1.11", "10.15.1", False),
        (True, "11.2.1.2", "10.16.1", False),
        (True, "8.6.1.6", "11.2.1", False),
    )
    for number, (compatible, built, here, fits) in enumerate(of_releases):
        folder = tmp_path / str(number)
        write_pipeline(folder, tensorrt=built, version_compatible=compatible)
        said = check(folder, machine(H200, tensorrt=here))
        assert (said == "") == fits, (built, here, said)
        assert has_version_compatible_plans(folder) == compatible, built
    for hardware, gpu, fits in (
        ("none", H100, False),
        ("same_compute_capability", H100, True),
        ("same_compute_capability", L4, False),
        ("ampere_plus", L4, True),
        ("ampere_plus", T4, False),
    ):
        folder = write_pipeline(tmp_path / f"{hardware}-{gpu.name}", hardware=hardware)
        said = check(folder, machine(gpu))
        assert (said == "") == fits, (hardware, said)
        assert fits or f"and {gpu}: rebuild" in said, said
    assert check(write_pipeline(tmp_path / "both"), machine(L4, tensorrt="11.2.1")) == (
        "error: minilm: the engine was built for TensorRT 10.16.1.11 on NVIDIA H200 (9.0), here "
        "are TensorRT 11.2.1 and NVIDIA L4 (8.9): rebuild it with `triptych engine minilm` in "
        "this image"
    )


def test_what_cannot_be_served_is_refused_and_what_may_go_wrong_is_a_warning(
    tmp_path: Path,
) -> None:
    older = "built with NVIDIA driver 590, here is the older 570"
    cases: tuple[tuple[str, dict[str, Any], Machine, str], ...] = (
        ("error", {"built": False}, HERE, "has not been built: build it with `triptych engine"),
        ("error", {"plan": None}, HERE, "minilm_core/1/model.plan is missing"),
        ("error", {"plan": b""}, HERE, "minilm_core/1/model.plan is empty"),
        ("error", {"plan": b"another"}, HERE, "is not the file that the build manifest describes"),
        ("error", {"onnx_sha256": "old"}, HERE, "built from another graph"),
        ("error", {}, machine(), "needs a GPU, here is none: start the container with `--gpus"),
        ("error", {"gpus": (0, 1)}, HERE, "runs on GPU 1, here are 1"),
        ("error", {"gpus": (0, 1)}, machine(H200, L4), "and NVIDIA L4 (8.9)"),
        ("error", {"gpus": "all"}, machine(H200, L4), "and NVIDIA L4 (8.9)"),
        ("warning", {}, machine(H200, tensorrt=None), "no TensorRT was found here"),
        ("warning", {}, machine(H200, driver="570.1"), older),
    )
    for number, (severity, pipeline, here, wrong) in enumerate(cases):
        said = check(write_pipeline(tmp_path / str(number), **pipeline), here)
        assert wrong in said, said
        assert said.startswith(f"{severity}: minilm: "), said
        assert "\n" not in said
    # Each pipeline has its own line; those on ONNX Runtime need no GPU.
    several = tmp_path / "several"
    for name, pipeline in (("one", {"built": False}), ("two", {"plan": None}), ("well", {})):
        write_pipeline(several, name, **pipeline)
    assert [verdict.pipeline for verdict in check_repository(several, HERE)] == ["one", "two"]
    bare = machine(tensorrt=None, driver=None)
    assert check(write_pipeline(tmp_path / "onnx", **ONNX), bare) == ""


MODEL = "minilm_core/1/model.onnx"
OTHER = "is not the file that the build manifest describes"


def damage(repository: Path) -> int:
    path = repository / MODEL
    return path.write_bytes(path.read_bytes()[:-1] + bytes(1))


def put_a_folder(repository: Path) -> None:
    path = repository / MODEL
    path.unlink()
    path.mkdir()


DAMAGES: list[tuple[str, Callable[[Path], object]]] = [
    (f"{MODEL} {OTHER}", damage),
    (
        f"minilm/config.pbtxt {OTHER}",
        lambda folder: (folder / "minilm/config.pbtxt").write_text('platform: "ensemble"'),
    ),
    ("minilm/config.pbtxt is missing", lambda folder: (folder / "minilm/config.pbtxt").unlink()),
    (f"{MODEL} is missing", put_a_folder),
    (f"{MODEL} is empty", lambda folder: (folder / MODEL).write_bytes(b"")),
    (
        "minilm_core/2/model.onnx is not in the build manifest",
        lambda folder: shutil.copytree(folder / "minilm_core/1", folder / "minilm_core/2"),
    ),
    (
        f"{MODEL} {OTHER} (and 1 more)",
        lambda folder: (damage(folder), (folder / "minilm_core/1/hooks.py").write_text("")),
    ),
]
"""What is said, and the change of a built repository that it is said of."""


def test_what_is_not_as_it_was_built_is_refused(tmp_path: Path) -> None:
    remedy = "build it again with `triptych build minilm`, or copy it again"
    for number, (wrong, change) in enumerate(DAMAGES):
        folder = tmp_path / str(number)
        write_pipeline(folder, **ONNX)
        change(folder)
        for here in (HERE, None):
            assert check(folder, here) == f"error: minilm: {wrong}: {remedy}"
    # Without hashes files must only be there, and what no server loads is no difference.
    folder = write_pipeline(tmp_path / "unhashed", **ONNX)
    (folder / "minilm_core/1/.DS_Store").touch()
    (folder / "minilm_core/notes.txt").touch()
    assert check(folder) == ""
    damage(folder)
    assert check(folder, hashes=False) == ""
    (folder / MODEL).unlink()
    assert "is missing" in check(folder, hashes=False)
    assert check(write_pipeline(tmp_path / "plan", plan=b"another"), hashes=False) == ""


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


def test_missing_instruction_sets_are_told_with_what_they_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pipeline(tmp_path, backend="openvino", built=False, plan=None)
    trials = [("fp32", "passed", 100.0), ("bf16", "chosen", 290.0)]
    content = lock_data(tmp_path, "minilm") | {
        "instruction_sets": ["avx512_bf16", "amx_bf16"],
        "gate": {
            "precision": "bf16",
            "candidates": [
                {"precision": precision, "status": status, "throughput_per_s": rate}
                for precision, status, rate in trials
            ],
        },
    }
    write_lock(tmp_path, "minilm", content)
    here = machine()._replace(instruction_sets=("avx512f", "avx512_bf16"))
    assert check(tmp_path, here) == (
        "warning: minilm: its precision was measured with avx512_bf16, amx_bf16, and this "
        "processor lacks amx_bf16: it is slower here, up to 2.9 times, what it gained over fp32"
    )
    assert check(tmp_path, here._replace(instruction_sets=("avx512_bf16", "amx_bf16"))) == ""
    monkeypatch.setattr(lock_check, "find_instruction_sets", lambda: ("avx2",))
    assert check_and_make_flags(tmp_path, production=False) == []
    assert "this processor lacks avx512_bf16, amx_bf16: it is" in capsys.readouterr().err
    assert core_variables(tmp_path) == {}
    write_lock(tmp_path, "minilm", content | {"gate": {"precision": "fp32"}})
    assert core_variables(tmp_path) == FP32_LIMIT


def test_locks_that_are_shared_missing_or_unreadable(tmp_path: Path) -> None:
    write_pipeline(tmp_path / "shared", "guest", built=False, plan=None)
    content = lock_data(tmp_path / "shared", "guest")
    content["spec"]["core"]["shared_from"] = "minilm"  # is checked with its owner only
    write_lock(tmp_path / "shared", "guest", content)
    assert check(tmp_path / "shared") == ""
    lock = write_pipeline(tmp_path / "lock") / "minilm/triptych.lock.json"
    lock.unlink()
    nothing = "warning: minilm: has no build manifest: nothing could be checked"
    assert check(tmp_path / "lock") == nothing
    tensorrt, onnxruntime = (
        f'{{"spec": {{"core": {{"backend": "{name}"}}}}' for name in ("tensorrt", "onnxruntime")
    )
    for text in (
        *("{", "[]", '{"spec": {}}', "\xff", "[" * 100_000),
        f"{tensorrt}}}",
        f'{onnxruntime}, "files": {{}}}}',
    ):
        lock.write_bytes(text.encode("latin-1"))
        said = check(tmp_path / "lock")
        assert said.startswith("error: minilm: its build manifest cannot be used ("), text[:50]
        assert "\n" not in said, text[:50]


def test_the_operator_decides_what_a_refusal_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = str(write_pipeline(tmp_path, built=False))
    for mode, exit_code, is_told in (("off", 0, False), ("warn", 0, True), ("enforce", 1, True)):
        monkeypatch.setenv("TRIPTYCH_LOCK_CHECK", mode)
        assert main([repository]) == exit_code
        assert ("error: minilm" in capsys.readouterr().err) == is_told
    assert main([str(tmp_path / "none")]) == 2
    assert "TRIPTYCH_REPOSITORY" in capsys.readouterr().err


FAKE_DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal + 40; return 0; }
int cuDeviceGetName(char *name, int length, int device) {
  strncpy(name, device == 40 ? "NVIDIA H200" : "NVIDIA L4", length); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? (device == 40 ? 9 : 8) : (device == 40 ? 0 : 9); return 0; }
"""


def test_gpus_come_from_the_drivers_library(tmp_path: Path) -> None:
    assert find_gpus(str(tmp_path / "none")) == ()
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    source, library = tmp_path / "fake.c", tmp_path / "libfake.so"
    source.write_text(FAKE_DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    assert find_gpus(str(library)) == (H200, L4)


def test_the_machine_is_known_by_its_files(tmp_path: Path) -> None:
    for folder, names in {
        "path": ("libnvinfer.so.11", "libnvinfer_plugin.so.11.2.1"),
        "image": ("libnvinfer.so.9.9.9", "libnvinfer.so.10.16.1", "libnvinfer.so.10"),
    }.items():
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).touch()
    folders = (str(tmp_path / "image"),)
    variables = {"LD_LIBRARY_PATH": str(tmp_path / "path")}
    assert find_tensorrt(variables, folders) == "10.16.1"
    (tmp_path / "path/libnvinfer.so.11.2.1").touch()
    assert find_tensorrt(variables, folders) == "11.2.1"
    file, none = tmp_path / "file", tmp_path / "none"
    for text, version in (
        ("590.48.01\n", "590.48.01"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module  615.61  Release Build", "615.61"),
        ("nothing", None),
    ):
        file.write_text(text)
        assert find_driver((str(none), str(file))) == version
    file.write_text("model name\t: A B\nflags\t\t: fpu amx_bf16 avx2 avx512f\n\nflags\t: other\n")
    assert find_instruction_sets(file) == ("avx2", "avx512f", "amx_bf16")
    assert find_processor(file) == "A B"
    assert find_instruction_sets(none) == ()
    assert sets_for("bf16", find_instruction_sets(file)) == ("amx_bf16",)
    assert sets_for("fp32", find_instruction_sets(file)) == ()
    assert node_label("avx512_vnni") == "feature.node.kubernetes.io/cpu-cpuid.AVX512VNNI"
