"""TensorRT, GPUs and driver of this machine, on which an engine depends, without loading TensorRT.

The TensorRT library alone takes seconds to load, so its version comes from the name of its file.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from triptych.container.processor import find_instruction_sets, find_processor

CUDA = "libcuda.so.1"
"""Library of the GPU's driver."""
# Of cuda.h: CUdevice_attribute.
_COMPUTE_CAPABILITY_MAJOR = 75
_COMPUTE_CAPABILITY_MINOR = 76
_LIBRARY_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/local/tensorrt/lib",
    "/opt/tensorrt/lib",
)
_WHEELS = ("tensorrt", "tensorrt-cu13", "tensorrt-cu12", "tensorrt-cu13-libs", "tensorrt-cu12-libs")
_DRIVER_FILES = ("/sys/module/nvidia/version", "/proc/driver/nvidia/version")


class VisibleGpu(NamedTuple):
    """GPU that this process may use; `compute_capability` is a pair such as ``(9, 0)``."""

    name: str
    compute_capability: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.name} ({self.compute_capability[0]}.{self.compute_capability[1]})"


class Machine(NamedTuple):
    """Machine that build manifests are compared with; None for anything that was not found.

    `tensorrt` is as long as it is known (``10.16.1`` or ``10.16.1.11``); the GPUs are in the order
    of their ids, and `instruction_sets` as in `find_instruction_sets`. The name of the `processor`
    is empty if it is unknown.
    """

    tensorrt: str | None
    gpus: tuple[VisibleGpu, ...]
    driver: str | None
    instruction_sets: tuple[str, ...] = ()
    processor: str = ""


def read_machine(variables: Mapping[str, str] = os.environ) -> Machine:
    """Return this machine as a server with these variables sees it."""
    return Machine(
        find_tensorrt(variables),
        find_gpus(),
        find_driver(),
        find_instruction_sets(),
        find_processor(),
    )


def find_tensorrt(
    variables: Mapping[str, str], folders: tuple[str, ...] = _LIBRARY_FOLDERS
) -> str | None:
    """Return the version of the library that would be loaded, else of an installed wheel.

    ``LD_LIBRARY_PATH`` of the variables is searched first, as the loader does, then the folders.
    """
    searched = [*variables.get("LD_LIBRARY_PATH", "").split(os.pathsep), *folders]
    versions = _library_versions([Path(folder) for folder in searched if folder])
    return next(versions, None) or next(_wheel_versions(), None)


def _library_versions(folders: list[Path]) -> Iterator[str]:
    for folder in folders:
        found = [
            re.fullmatch(r"libnvinfer\.so\.(\d+(?:\.\d+){2,3})", path.name)
            for path in folder.glob("libnvinfer.so.*")
        ]
        versions = [match[1] for match in found if match]
        yield from sorted(versions, key=version_numbers, reverse=True)


def _wheel_versions() -> Iterator[str]:
    for name in _WHEELS:
        try:
            yield re.sub(r"\.post\d+$", "", metadata.version(name))
        except metadata.PackageNotFoundError:
            continue


def version_numbers(version: str) -> tuple[int, ...]:
    """Return a version such as ``10.16.1`` as numbers; empty if it is not a version."""
    return tuple(map(int, version.split("."))) if re.fullmatch(r"\d+(\.\d+)*", version) else ()


def load_cuda(library: str) -> ctypes.CDLL | None:
    """Return the library of the GPU's driver, ready for calls; None without a GPU."""
    try:
        cuda = ctypes.CDLL(library)
    except OSError:
        return None
    return None if cuda.cuInit(0) else cuda


def find_gpus(library: str = CUDA) -> tuple[VisibleGpu, ...]:
    """Return the GPUs that the driver shows to this process, in the order of their ids."""
    cuda, count = load_cuda(library), ctypes.c_int()
    if cuda is None or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    return tuple(_describe(cuda, ordinal) for ordinal in range(count.value))


def _describe(cuda: ctypes.CDLL, ordinal: int) -> VisibleGpu:
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(256)
    cuda.cuDeviceGet(ctypes.byref(device), ordinal)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), _COMPUTE_CAPABILITY_MAJOR, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), _COMPUTE_CAPABILITY_MINOR, device)
    return VisibleGpu(name.value.decode(errors="replace"), (major.value, minor.value))


def find_driver(files: tuple[str, ...] = _DRIVER_FILES) -> str | None:
    """Return the version of the NVIDIA driver from the kernel's files."""
    for file in files:
        try:
            text = Path(file).read_text(encoding="utf-8")
        except OSError:
            continue
        version = re.search(r"\d+\.\d+(?:\.\d+)?", text)
        if version:
            return version[0]
    return None
