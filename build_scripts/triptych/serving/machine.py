"""The facts about this machine that `doctor` checks, read once."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from triptych.container.machine import find_driver, find_tensorrt
from triptych.serving.embedded import Platform, package_version, read_platform, server_path
from triptych.serving.ports import port_is_busy

_PROGRAM_TIMEOUT_S = 20.0
_GPU_QUERY = "name,memory.total,compute_cap,driver_version"


class StubPython(NamedTuple):
    """The Python whose packages the steps of a served pipeline see: the first on a server's PATH.

    `version` is as ``3.11``, `prefix` the environment that it belongs to.
    """

    program: Path
    version: str
    prefix: str


class GpuSummary(NamedTuple):
    """One GPU as nvidia-smi describes it; `compute_capability` is as ``(9, 0)``."""

    name: str
    memory_mib: int
    compute_capability: tuple[int, int]


@dataclass(frozen=True)
class MachineFacts:
    """What is there; whether that will do is for `doctor` to say.

    Attributes:
        tritonserver: the server program on PATH; None outside an NGC container.
        prefix: the environment that this Python belongs to.
        stub_python: None where no ``python3`` would be found, or it does not run.
        temporary_folder_runs_programs: whether a program in it may be run (no ``noexec`` mount).
        ports: the port by its name (``grpc``); 0 asks for any free one.
        busy_ports: the names of those where something listens already.
        shm_free_bytes: None where there is no such mount.
        extras: by extra, by package of that extra: its version, None where it is missing. Empty
            where triptych itself is not installed.
        torch_pin: the version of torch that the `build` extra asks for.
    """

    platform: Platform
    tritonserver: Path | None
    prefix: str
    stub_python: StubPython | None
    temporary_folder: Path
    temporary_folder_runs_programs: bool
    ports: Mapping[str, int]
    busy_ports: tuple[str, ...]
    shm_path: Path
    shm_free_bytes: int | None
    extras: Mapping[str, Mapping[str, str | None]]
    torch_pin: str | None
    gpus: tuple[GpuSummary, ...]
    driver: str | None
    tensorrt: str | None
    perf_analyzer: Path | None


def read_machine(ports: Mapping[str, int], shm_path: Path) -> MachineFacts:
    """Looks at this machine; changes nothing on it. Ports are by name; 0 is not looked at.

    Raises:
        UserError: a port is out of range.
    """
    requirements = _extra_requirements()
    temporary_folder = Path(tempfile.gettempdir())
    gpus, driver = _read_gpus()
    return MachineFacts(
        platform=read_platform(),
        tritonserver=_on_path("tritonserver"),
        prefix=sys.prefix,
        stub_python=_read_stub_python(),
        temporary_folder=temporary_folder,
        temporary_folder_runs_programs=not os.statvfs(temporary_folder).f_flag & os.ST_NOEXEC,
        ports=dict(ports),
        busy_ports=tuple(name for name, port in ports.items() if port and port_is_busy(port)),
        shm_path=shm_path,
        shm_free_bytes=shutil.disk_usage(shm_path).free if shm_path.is_dir() else None,
        extras={
            extra: {name: package_version(name) for name in packages}
            for extra, packages in requirements.items()
        },
        torch_pin=requirements.get("build", {}).get("torch"),
        gpus=gpus,
        driver=driver,
        tensorrt=find_tensorrt(os.environ),
        perf_analyzer=_on_path("perf_analyzer"),
    )


def _extra_requirements() -> dict[str, dict[str, str]]:
    """Triptych's own metadata: by extra, the pinned version by package, empty where not pinned."""
    try:
        lines = metadata.requires("triptych") or []
    except metadata.PackageNotFoundError:
        return {}
    extras: dict[str, dict[str, str]] = {}
    for line in lines:
        package = re.match(r"[\w.-]+", line)
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        if package and extra:
            pin = re.search(r"==\s*([\w.]+)", line.partition(";")[0])
            extras.setdefault(extra[1], {})[package[0]] = pin[1] if pin else ""
    return extras


def _read_stub_python() -> StubPython | None:
    program = shutil.which("python3", path=server_path())
    said = _output(
        [program or "", "-I", "-c", "import sys; print(*sys.version_info[:2], sys.prefix)"]
    )
    found = re.fullmatch(r"(\d+) (\d+) (.+)\n", said)
    if program is None or found is None:
        return None
    return StubPython(Path(program), f"{found[1]}.{found[2]}", found[3])


def _read_gpus() -> tuple[tuple[GpuSummary, ...], str | None]:
    said = _output(["nvidia-smi", f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader,nounits"])
    gpus = []
    driver: str | None = None
    for line in said.splitlines():
        found = re.fullmatch(r"(.+), (\d+), (\d+)\.(\d+), ([\d.]+)", line.strip())
        if found:
            gpus.append(GpuSummary(found[1], int(found[2]), (int(found[3]), int(found[4]))))
            driver = found[5]
    return tuple(gpus), driver or find_driver()


def _on_path(program: str) -> Path | None:
    found = shutil.which(program)
    return Path(found) if found else None


def _output(command: list[str]) -> str:
    """What a program prints; empty where it is missing, fails or does not end."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROGRAM_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""
