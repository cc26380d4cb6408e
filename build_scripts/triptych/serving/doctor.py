"""Check this machine: read facts about it, and return findings with remedies."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from triptych.base.errors import Finding, Severity
from triptych.base.extras import BASE, find_untested, install_command, requirements_by_extra
from triptych.base.formatting import amount
from triptych.base.release_changes import defects_of
from triptych.container.machine import find_driver, find_tensorrt
from triptych.container.processor import find_instruction_sets, find_processor, sets_for
from triptych.container.supervisor import LIMITS, server_limits
from triptych.serving.embedded import (
    EMBEDDED_RELEASE,
    REQUIREMENTS,
    TEMPORARY_REMEDY,
    TEMPORARY_RULE,
    Platform,
    find_temporary_fault,
    package_version,
    read_platform,
    server_path,
)
from triptych.serving.ports import port_is_busy

_PROGRAM_TIMEOUT_S = 20.0
_GPU_QUERY = "name,memory.total,compute_cap,driver_version"


class StubPython(NamedTuple):
    """Python whose packages the steps of a served pipeline use: the first on a server's PATH.

    `version` is text such as ``3.11``, and `prefix` is the path of its environment.
    """

    program: Path
    version: str
    prefix: str


class GpuSummary(NamedTuple):
    """A GPU according to nvidia-smi; `compute_capability` is a tuple such as ``(9, 0)``."""

    name: str
    memory_mib: int
    compute_capability: tuple[int, int]


@dataclass(frozen=True)
class MachineInfo:
    """Facts about a machine, which `check_machine` judges."""

    platform: Platform
    tritonserver: Path | None  # Server program on PATH; None outside an NGC container
    prefix: str  # Environment of this Python
    stub_python: StubPython | None  # None if ``python3`` is missing or does not run
    temporary_fault: str  # Fault of the folder for temporary files; empty if there is none
    ports: Mapping[str, int]  # Port by name (``grpc``); 0 requests any free port
    busy_ports: tuple[str, ...]  # Names of the ports that are in use
    shm_path: Path
    shm_free_bytes: int | None  # Free shared memory in bytes; None without such a mount
    # Version of each package, by extra (or `BASE`) and package; None if the package is missing.
    # Empty if triptych itself is not installed.
    extras: Mapping[str, Mapping[str, str | None]]
    untested: Mapping[str, tuple[str, str]]  # Installed and tested version, where they differ
    gpus: tuple[GpuSummary, ...]
    driver: str | None
    tensorrt: str | None
    perf_analyzer: Path | None
    limits: Mapping[str, int]  # Soft limits of a server's process, by their names
    processor: str = ""
    instruction_sets: tuple[str, ...] = ()


def read_machine(ports: Mapping[str, int], shm_path: Path) -> MachineInfo:
    """Read facts about this machine without changing it; ports with the number 0 are skipped.

    Raises:
        UserError: A port is out of range.
    """
    gpus, driver = _read_gpus()
    return MachineInfo(
        platform=read_platform(),
        tritonserver=_on_path("tritonserver"),
        prefix=sys.prefix,
        stub_python=_read_stub_python(),
        temporary_fault=find_temporary_fault(),
        ports=dict(ports),
        busy_ports=tuple(name for name, port in ports.items() if port and port_is_busy(port)),
        shm_path=shm_path,
        shm_free_bytes=shutil.disk_usage(shm_path).free if shm_path.is_dir() else None,
        extras={
            extra: {name: package_version(name) for name in packages}
            for extra, packages in requirements_by_extra().items()
        },
        untested=find_untested(),
        gpus=gpus,
        driver=driver,
        tensorrt=find_tensorrt(os.environ),
        perf_analyzer=_on_path("perf_analyzer"),
        limits={limit.name: soft for limit, (soft, _) in server_limits().items()},
        processor=find_processor(),
        instruction_sets=find_instruction_sets(),
    )


def _read_stub_python() -> StubPython | None:
    program = shutil.which("python3", path=server_path())
    output = _output(
        [program or "", "-I", "-c", "import sys; print(*sys.version_info[:2], sys.prefix)"]
    )
    found = re.fullmatch(r"(\d+) (\d+) (.+)\n", output)
    if program is None or found is None:
        return None
    return StubPython(Path(program), f"{found[1]}.{found[2]}", found[3])


def _read_gpus() -> tuple[tuple[GpuSummary, ...], str | None]:
    output = _output(["nvidia-smi", f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader,nounits"])
    gpus = []
    driver: str | None = None
    for line in output.splitlines():
        found = re.fullmatch(r"(.+), (\d+), (\d+)\.(\d+), ([\d.]+)", line.strip())
        if found:
            gpus.append(GpuSummary(found[1], int(found[2]), (int(found[3]), int(found[4]))))
            driver = found[5]
    return tuple(gpus), driver or find_driver()


def _on_path(program: str) -> Path | None:
    found = shutil.which(program)
    return Path(found) if found else None


def _output(command: list[str]) -> str:
    """Return the output of a program; empty if it is missing, fails or times out."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROGRAM_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


_MIB = 2**20
_PYTHON_MIN, _PYTHON_END = (3, 10), (3, 13)
# A pipeline on a machine without GPU has three: preprocess, the emulated core, postprocess.
_PYTHON_STEPS = 3
_SHM_WARNING_BYTES = 64 * _MIB * _PYTHON_STEPS
_SHM_ERROR_BYTES = 16 * _MIB * _PYTHON_STEPS
# TensorRT 11 and its NGC containers require this driver.
_DRIVER_MIN = 590
_COMPUTE_CAPABILITY_MIN = (7, 5)


def examine(
    *,
    grpc_port: int = 8001,
    http_port: int = 8000,
    metrics_port: int = 8002,
    shm_path: Path = Path("/dev/shm"),
) -> list[Finding]:
    """Read facts about this machine and check them; port 0 is always free.

    Returns:
        The findings of all checks, in order; a passing check is an ``info`` without a remedy.

    Raises:
        UserError: A port is out of range.
    """
    ports = {"grpc": grpc_port, "http": http_port, "metrics": metrics_port}
    return check_machine(read_machine(ports, shm_path))


def check_machine(machine: MachineInfo) -> list[Finding]:
    """Return the findings of all checks of `machine`."""
    return [
        *_installation(machine),
        *_embedded(machine),
        *_resources(machine),
        *_packages(machine),
        _processor(machine),
        *_gpus(machine),
        _finding(
            "perf-analyzer",
            machine.perf_analyzer,
            "`triptych bench` generates load with perf_analyzer",
            machine.perf_analyzer or "not on PATH",
            "info",
            "Nothing: `triptych bench` fetches one when it is first run",
        ),
    ]


def _finding(
    name: str, holds: object, rule: str, given: object, severity: Severity, remedy: str
) -> Finding:
    """Return a finding; an ``info`` without a remedy if the rule holds."""
    kind: Severity = "info" if holds else severity
    return Finding(name, kind, "", rule, str(given), "" if holds else remedy)


def _installation(machine: MachineInfo) -> Iterable[Finding]:
    version = tuple(int(part) for part in machine.platform.python_version.split("."))
    yield _finding(
        "python-version",
        _PYTHON_MIN <= version < _PYTHON_END,
        "Python must be 3.10, 3.11 or 3.12",
        f"Python {machine.platform.python_version}",
        "error",
        "Create the virtual environment again: `python3.11 -m venv .venv`",
    )
    rule = "a tritonserver on PATH is used, otherwise the embedded one"
    defects = amount(len(defects_of(EMBEDDED_RELEASE, {"any server"})), "known defect")
    listed = f"`triptych lint --triton {EMBEDDED_RELEASE}` lists them"
    embedded = f"embedded {EMBEDDED_RELEASE}: for development, {defects} ({listed})"
    given = machine.tritonserver or embedded
    yield _finding("tritonserver", True, rule, given, "info", "")


def _embedded(machine: MachineInfo) -> Iterable[Finding]:
    """Check the embedded server; with another server on PATH, its faults are only an ``info``."""
    severity: Severity = "info" if machine.tritonserver else "error"
    for name, rule, holds, given, remedy in REQUIREMENTS:
        rule = f"the embedded tritonserver {rule}"
        yield _finding(
            name, holds(machine.platform), rule, given(machine.platform), severity, remedy
        )
    python = machine.stub_python
    expected = (machine.platform.python_version, machine.prefix)
    yield _finding(
        "stub-python",
        python is not None and (python.version, python.prefix) == expected,
        f"the first python3 beside this Python must belong to {machine.prefix}: a served step "
        "finds its packages through it",
        f"{python.program}: Python {python.version} of {python.prefix}" if python else "none runs",
        severity,
        "Run triptych from a virtual environment: `python3.11 -m venv .venv`",
    )
    yield _finding(
        "temporary-folder",
        not machine.temporary_fault,
        f"the temporary folder {TEMPORARY_RULE}",
        machine.temporary_fault or tempfile.gettempdir(),
        severity,
        TEMPORARY_REMEDY,
    )


def _resources(machine: MachineInfo) -> Iterable[Finding]:
    for name, port in machine.ports.items():
        yield _finding(
            f"port-{name}",
            name not in machine.busy_ports,
            f"the {name} port must be free for `triptych serve`",
            port or "any free one",
            "warning",
            f"Stop what listens there, or pass another with --{name}-port (0 picks a free one)",
        )
    free_bytes = machine.shm_free_bytes
    yield _finding(
        "shared-memory",
        free_bytes is not None and free_bytes >= _SHM_WARNING_BYTES,
        f"{machine.shm_path} should have {_SHM_WARNING_BYTES // _MIB} MiB free "
        f"(64 for each of {_PYTHON_STEPS} Python steps)",
        "no such folder" if free_bytes is None else f"{free_bytes // _MIB} MiB",
        "error" if free_bytes is None or free_bytes < _SHM_ERROR_BYTES else "warning",
        "In a container: `docker run --shm-size=1g`, or in Kubernetes an emptyDir with medium "
        f"Memory on {machine.shm_path}. Elsewhere: `mount -o remount,size=1g {machine.shm_path}`",
    )
    for limit in LIMITS:
        value = machine.limits[limit.name]
        yield _finding(
            f"limit-{limit.name}",
            value >= limit.enough,
            limit.rule,
            f"{value:,} {limit.unit}",
            "warning",
            limit.remedy,
        )


def _packages(machine: MachineInfo) -> Iterable[Finding]:
    missing = [name for name, version in machine.extras.get(BASE, {}).items() if version is None]
    yield _finding(
        "package",
        machine.extras and not missing,
        "triptych must be installed, with the packages that it requires",
        (f"missing: {', '.join(missing)}" if missing else "installed")
        if machine.extras
        else "not installed",
        "warning" if machine.extras else "error",
        f"Run `{install_command(BASE, missing)}`"
        if machine.extras
        else "Run `pip install` with the wheels `triptych-client` and `triptych`",
    )
    openvino = machine.extras.get("openvino", {}).get("openvino")
    yield _finding(
        "extra-openvino",
        openvino,
        "`core.backend: openvino` needs the package of the extra `openvino`",
        f"openvino {openvino}" if openvino else "missing: openvino",
        "info",
        f"Run `{install_command('openvino')}`",
    )
    differing = machine.untested.items()
    yield _finding(
        "tested-versions",
        not differing,
        "these versions of packages were tested together",
        ", ".join(f"{name} {given} (tested: {tested})" for name, (given, tested) in differing)
        or "all installed packages have the tested version",
        "info",
        "Nothing, unless a build or a server fails: then run `pip install "
        + " ".join(f"{name}=={tested}" for name, (_, tested) in differing)
        + "`",
    )


def _processor(machine: MachineInfo) -> Finding:
    """Return what this processor computes fast besides fp32; slow precisions are no fault."""
    fast = [name for name in ("bf16", "int8") if sets_for(name, machine.instruction_sets)]
    sets = ", ".join(machine.instruction_sets) or "none of these instruction sets"
    return _finding(
        "processor",
        True,
        "`core.backend: openvino` is fast in bf16 with amx_bf16 or avx512_bf16, and int8 is fast "
        "with amx_int8, avx512_vnni or avx_vnni",
        f"{machine.processor or 'unknown processor'}: {sets}; fast: {', '.join(['fp32', *fast])}",
        "info",
        "",
    )


def _gpus(machine: MachineInfo) -> Iterable[Finding]:
    listed = ", ".join(f"{gpu.name} ({gpu.memory_mib} MiB)" for gpu in machine.gpus)
    yield _finding(
        "gpu",
        machine.gpus,
        "a GPU is needed to build and run TensorRT engines, and for `core.device: gpu`",
        listed or "none",
        "warning" if machine.driver else "info",
        "In a container pass it on: `docker run --gpus all`"
        if machine.driver
        else "Nothing, if pipelines set `core.device: cpu`",
    )
    old = [gpu for gpu in machine.gpus if gpu.compute_capability < _COMPUTE_CAPABILITY_MIN]
    if machine.gpus:
        yield _finding(
            "gpu-compute-capability",
            not old,
            "TensorRT needs compute capability 7.5 or later",
            ", ".join(f"{g.compute_capability[0]}.{g.compute_capability[1]}" for g in machine.gpus),
            "warning",
            "Serve with `core.backend: onnxruntime` on these",
        )
    if machine.driver is not None:
        major = machine.driver.partition(".")[0]
        yield _finding(
            "nvidia-driver",
            major.isdigit() and int(major) >= _DRIVER_MIN,
            f"containers with TensorRT 11 need NVIDIA driver {_DRIVER_MIN} or later",
            machine.driver,
            "warning",
            "Update the driver on the host, or pin a container with TensorRT 10",
        )
    if not machine.gpus:
        return
    packages = {"TensorRT": machine.tensorrt, **machine.extras.get("gpu", {})}
    there = [f"{name} {version}" for name, version in packages.items() if version]
    missing = [name for name, version in packages.items() if version is None]
    yield _finding(
        "tensorrt",
        not missing,
        "`triptych engine`, and serving engines without a container, need TensorRT and CUDA's "
        "Python packages",
        ", ".join([*there, *(f"no {name}" for name in missing)]),
        "info",
        "Nothing, if containers do both; else install `tensorrt` and run "
        f"`{install_command('gpu')}`",
    )
