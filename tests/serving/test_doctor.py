"""What `doctor` says about this machine, and about broken ones."""

import os
import socket
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.support.mistakes import refusal
from tests.support.project import ROOT
from tests.support.rights import without_rights
from triptych.base.errors import Finding, UserError
from triptych.base.extras import BASE
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
from triptych.serving.server import new_shell_safe_dir

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
EXTRAS = {
    BASE: {"torch": "2.13.0+cpu", "transformers": "5.23.0", "nvidia-pytriton": "0.7.0"},
    "openvino": {"openvino": "2026.3.0"},
}
MACHINE = MachineInfo(
    platform=PLATFORM,
    tritonserver=None,
    prefix="/project/.venv",
    stub_python=StubPython(Path("/project/.venv/bin/python3"), "3.11", "/project/.venv"),
    temporary_fault="",
    ports={"grpc": 8001, "http": 8000, "metrics": 8002},
    busy_ports=(),
    shm_path=Path("/dev/shm"),
    shm_free_bytes=1024 * MIB,
    extras=EXTRAS,
    untested={},
    gpus=(GpuSummary("NVIDIA L4", 23034, (8, 9)),),
    driver="595.10",
    tensorrt="11.2.1",
    perf_analyzer=Path("/usr/bin/perf_analyzer"),
    limits={"stack": 1 << 30, "nofile": 1 << 16},
)


def unwell(machine: MachineInfo) -> list[Finding]:
    """The findings that ask for something."""
    return [finding for finding in check_machine(machine) if finding.remedy]


def test_a_healthy_machine_needs_nothing() -> None:
    findings = check_machine(MACHINE)
    assert {finding.severity for finding in findings} == {"info"}
    assert len({finding.id for finding in findings}) == len(findings)
    assert all(finding.given for finding in findings)


def test_the_processor_is_told_with_what_it_computes_fast() -> None:
    for sets, fast in (
        (("avx2", "avx512f", "avx512_bf16"), "A B: avx2, avx512f, avx512_bf16; fast: fp32, bf16"),
        (("avx2", "avx_vnni"), "A B: avx2, avx_vnni; fast: fp32, int8"),
        ((), "A B: none of these instruction sets; fast: fp32"),
    ):
        findings = check_machine(replace(MACHINE, processor="A B", instruction_sets=sets))
        (found,) = [one for one in findings if one.id == "processor"]
        assert (found.given, found.severity) == (fast, "info")


def broken_machine(case: dict[str, Any]) -> MachineInfo:
    """Return the machine of a case of tests/data/doctor.yaml."""
    facts = case.get("machine", {})
    if "stub_python" in facts:
        program, version, prefix = facts["stub_python"]
        facts["stub_python"] = StubPython(Path(program), version, prefix)
    if "gpus" in facts:
        facts["gpus"] = tuple(GpuSummary(name, mib, tuple(cc)) for name, mib, cc in facts["gpus"])
    platform: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in case.get("platform", {}).items()
    }
    facts["platform"] = replace(PLATFORM, **platform)
    facts["extras"] = {**EXTRAS, BASE: {**EXTRAS[BASE], **case.get("packages", {})}}
    return replace(MACHINE, **facts)


def test_one_broken_fact_gives_its_finding() -> None:
    for case in yaml.safe_load((ROOT / "tests/data/doctor.yaml").read_text(encoding="utf-8")):
        machine = broken_machine(case)
        [finding] = unwell(machine)
        severity = next(one for one in ("error", "warning", "info") if one in case)
        assert (finding.id, finding.severity) == (case["finding"], severity), case
        assert case[severity] in finding.given, case
        assert case.get("remedy", "") in finding.remedy, case
        if finding.id.startswith("embedded-"):  # the server says the same
            error = refusal(check_requirements, machine.platform)
            assert (error.given, error.remedy) == (finding.given, finding.remedy), case
    assert unwell(replace(MACHINE, shm_free_bytes=192 * MIB)) == []


def test_missing_packages_are_told_by_their_cause() -> None:
    found = {finding.id: finding for finding in unwell(replace(MACHINE, extras={}))}
    assert set(found) == {"package", "extra-openvino"}
    assert (found["package"].severity, found["package"].given) == ("error", "not installed")
    assert "wheels" in found["package"].remedy
    # A missing wheel is told before its missing stubs.
    platform = replace(PLATFORM, stub_versions=())
    ids = [finding.id for finding in unwell(replace(MACHINE, platform=platform))]
    assert ids == ["embedded-wheel", "embedded-stub"]
    with pytest.raises(UserError, match="pip install nvidia-pytriton=="):
        check_requirements(platform)


def test_what_the_embedded_server_lacks_is_no_error_inside_a_container() -> None:
    platform = replace(PLATFORM, numpy_version="2.1.0", libpython=None, stub_versions=())
    there = Path("/opt/tritonserver/bin/tritonserver")
    machine = replace(MACHINE, platform=platform, stub_python=None, tritonserver=there)
    findings = check_machine(machine)
    assert {finding.severity for finding in findings} == {"info"}
    assert [one.given for one in findings if one.id == "tritonserver"] == [str(there)]
    (row,) = [one for one in check_machine(MACHINE) if one.id == "tritonserver"]
    assert "known defects (`triptych lint" in row.given
    assert len(row.given) < 100  # one line of a terminal, with the columns before it


def test_this_machine_can_serve_and_what_is_taken_or_missing_is_seen(tmp_path: Path) -> None:
    findings = examine(grpc_port=0, http_port=0, metrics_port=0)
    assert [finding for finding in findings if finding.severity == "error"] == []
    by_id = {finding.id: finding for finding in findings}
    assert by_id["python-version"].given == f"Python {'.'.join(map(str, sys.version_info[:2]))}"
    assert by_id["port-grpc"].given == "any free one"
    assert by_id["package"].given == "installed"
    assert by_id["tested-versions"].remedy == ""
    for requirement in REQUIREMENTS:
        assert by_id[requirement.id].remedy == ""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port, shm = taken.getsockname()[1], tmp_path / "shm"
        findings = examine(metrics_port=port, shm_path=shm)
    by_id = {finding.id: finding for finding in findings}
    assert (by_id["port-metrics"].severity, by_id["port-metrics"].given) == ("warning", str(port))
    assert by_id["shared-memory"].severity == "error"
    assert str(shm) in by_id["shared-memory"].remedy
    with pytest.raises(UserError, match="1 to 65535"):
        examine(http_port=65536)


def test_what_nvidia_smi_says_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("triptych.serving.doctor.find_driver", lambda: None)
    both = (GpuSummary("NVIDIA L4", 23034, (8, 9)), GpuSummary("Tesla T4", 15360, (7, 5)))
    for said, gpus, driver in (
        ("NVIDIA L4, 23034, 8.9, 595.10\nTesla T4, 15360, 7.5, 595.10", both, "595.10"),
        ("NVIDIA-SMI has failed because it could not talk to the driver", (), None),
    ):
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\necho '{said}'\n")
        program.chmod(0o755)
        machine = read_machine({}, Path("/dev/shm"))
        assert (machine.gpus, machine.driver) == (gpus, driver)


def test_a_temporary_folder_that_cannot_hold_a_server_is_told_by_doctor_and_by_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mounts that are full or have `noexec` are in test_store.py."""
    real = os.statvfs(tmp_path)
    fine, closed = tmp_path / "fine", tmp_path / "closed"
    fine.mkdir()
    closed.mkdir(mode=0o500)

    def status(free: int = 9 * MIB, flags: int = 0) -> SimpleNamespace:
        return SimpleNamespace(f_frsize=1, f_blocks=0, f_bfree=0, f_bavail=free, f_flag=flags)

    def start() -> None:
        find_installation(tmp_path / "server", own_backends=tmp_path)

    def told() -> str:
        def find() -> Finding:
            (found,) = [one for one in examine() if one.id == "temporary-folder"]
            return found

        tempfile.tempdir = None
        finding: Finding = without_rights(find)
        assert finding.severity == ("error" if finding.remedy else "info")
        if finding.remedy:
            tempfile.tempdir = None
            error = refusal(without_rights, start)
            assert (error.field, error.given) == ("TMPDIR", finding.given)
        return finding.given

    try:
        for folder, found, given in (
            (fine, real, f"{fine}"),
            (f"{fine}/../fine/", real, f"{fine}"),
            (closed, real, f"{closed}, which is full or cannot be written"),
            (tmp_path / "none", real, f"{tmp_path}/none, which is full or cannot be written"),
            (fine, status(7 * MIB), f"{fine}, with 7 MiB free"),
            (fine, status(), f"{fine}"),
            (fine, status(flags=os.ST_NOEXEC), f"{fine}, whose mount has `noexec`"),
        ):
            monkeypatch.setenv("TMPDIR", str(folder))
            monkeypatch.setattr(os, "statvfs", lambda _folder, found=found: found)
            assert told() == given
        with monkeypatch.context() as patch:
            patch.setattr(tempfile, "_candidate_tempdir_list", list)
            assert "No usable temporary directory" in told()
            refused = refusal(new_shell_safe_dir)
            assert "must be a writable folder whose path" in refused.message
    finally:
        tempfile.tempdir = None
