"""The start-up check: engines that fit this machine pass, others are refused in one line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from container_cases import H100, H200, L4, T4, machine, write_pipeline
from triptych.base.errors import UserError
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


def test_a_plan_runs_on_later_releases_only_where_it_was_built_to(tmp_path: Path) -> None:
    for number, (compatible, built, here, fits) in enumerate(
        (
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
    ):
        folder = tmp_path / str(number)
        write_pipeline(folder, tensorrt=built, version_compatible=compatible)
        said = check(folder, machine(H200, tensorrt=here))
        assert (said == "") == fits, (built, here, said)
        assert has_version_compatible_plans(folder) == compatible, built


def test_a_plan_runs_on_other_gpus_only_where_it_was_built_to(tmp_path: Path) -> None:
    for hardware, gpu, fits in (
        ("none", H200, True),
        ("none", H100, False),
        ("none", L4, False),
        ("same_compute_capability", H100, True),
        ("same_compute_capability", L4, False),
        ("ampere_plus", L4, True),
        ("ampere_plus", T4, False),
    ):
        folder = tmp_path / f"{hardware}-{gpu.name}"
        said = check(write_pipeline(folder, hardware=hardware), machine(gpu))
        assert (said == "") == fits, (hardware, said)
        assert fits or f"and {gpu}: rebuild" in said, said


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


def test_the_hash_of_a_huge_plan_may_be_skipped(tmp_path: Path) -> None:
    assert check(write_pipeline(tmp_path, plan=b"another"), hashes=False) == ""


def damage(repository: Path) -> int:
    path = repository / MODEL
    return path.write_bytes(path.read_bytes()[:-1] + bytes(1))


def put_a_folder(repository: Path) -> None:
    path = repository / MODEL
    path.unlink()
    path.mkdir()


ONNX: dict[str, Any] = {"backend": "onnxruntime", "built": False, "plan": None}
MODEL = "minilm_core/1/model.onnx"
OTHER = "is not the file that the build manifest describes"
DAMAGES: list[tuple[str, Callable[[Path], object]]] = [
    (f"{MODEL} {OTHER}", damage),
    (
        f"minilm/config.pbtxt {OTHER}",
        lambda folder: (folder / "minilm/config.pbtxt").write_text('platform: "ensemble"'),
    ),
    ("minilm/config.pbtxt is missing", lambda folder: (folder / "minilm/config.pbtxt").unlink()),
    (f"{MODEL} is missing", lambda folder: (folder / MODEL).unlink()),
    (f"{MODEL} is missing", put_a_folder),
    (f"{MODEL} is empty", lambda folder: (folder / MODEL).write_bytes(b"")),
    (
        "minilm_core/1/hooks.py is not in the build manifest",
        lambda folder: (folder / "minilm_core/1/hooks.py").touch(),
    ),
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


def test_missing_instruction_sets_are_told_with_what_they_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pipeline(tmp_path, backend="openvino", built=False, plan=None)
    lock = tmp_path / "minilm/triptych.lock.json"
    content = json.loads(lock.read_text())
    trials = [("fp32", "passed", 100.0), ("bf16", "chosen", 290.0)]
    content |= {
        "instruction_sets": ["avx512_bf16", "amx_bf16"],
        "gate": {
            "precision": "bf16",
            "candidates": [
                {"precision": precision, "status": status, "throughput_per_s": rate}
                for precision, status, rate in trials
            ],
        },
    }
    lock.write_text(json.dumps(content))
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
    content["gate"] = {"precision": "fp32"}
    lock.write_text(json.dumps(content))
    assert core_variables(tmp_path) == FP32_LIMIT


def test_instruction_sets_are_those_of_the_kernel(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("model name\t: A B\nflags\t\t: fpu amx_bf16 avx2 avx512f\n\nflags\t: other\n")
    assert find_instruction_sets(file) == ("avx2", "avx512f", "amx_bf16")
    assert find_processor(file) == "A B"
    assert find_instruction_sets(tmp_path / "none") == ()
    assert sets_for("bf16", find_instruction_sets(file)) == ("amx_bf16",)
    assert sets_for("fp32", find_instruction_sets(file)) == ()
    assert node_label("avx512_vnni") == "feature.node.kubernetes.io/cpu-cpuid.AVX512VNNI"


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


def test_a_lock_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    write_pipeline(tmp_path)
    tensorrt, onnxruntime = (
        f'{{"spec": {{"core": {{"backend": "{name}"}}}}' for name in ("tensorrt", "onnxruntime")
    )
    for content in (
        *("{", "[]", '{"spec": {}}', "\xff", "[" * 100_000),
        f"{tensorrt}}}",
        f'{onnxruntime}, "files": {{}}}}',
    ):
        (tmp_path / "minilm/triptych.lock.json").write_bytes(content.encode("latin-1"))
        said = check(tmp_path)
        assert said.startswith("error: minilm: its build manifest cannot be used ("), content[:50]
        assert "\n" not in said, content[:50]


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


def test_the_driver_is_known_by_the_kernels_files(tmp_path: Path) -> None:
    for text, version in (
        ("590.48.01\n", "590.48.01"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module  615.61  Release Build", "615.61"),
        ("nothing", None),
    ):
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
