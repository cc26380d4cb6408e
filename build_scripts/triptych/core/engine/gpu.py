"""The GPU that engines are built for: name, compute capability, driver, CUDA.

Read as the start-up check of the serving image reads it: the two are compared.
"""

from __future__ import annotations

import importlib
from typing import NamedTuple

from triptych.container.machine import find_driver, find_gpus
from triptych.core.engine.messages import no_gpu


class BuildGpu(NamedTuple):
    """One GPU and its software.

    Attributes:
        compute_capability: such as ``9.0``.
        driver: version of NVIDIA's driver; empty where the kernel does not tell.
        cuda: version of the CUDA runtime, major and minor; empty where its bindings are missing.
    """

    name: str
    compute_capability: str
    driver: str
    cuda: str


def read_gpu() -> BuildGpu:
    """The first GPU that CUDA shows to this process; a UserError where there is none."""
    gpus = find_gpus()
    if not gpus:
        raise no_gpu("NVIDIA's driver shows none to this process")
    major, minor = gpus[0].compute_capability
    return BuildGpu(gpus[0].name, f"{major}.{minor}", find_driver() or "", _cuda_version())


def _cuda_version() -> str:
    try:
        runtime = importlib.import_module("cuda.bindings.runtime")
    except ImportError:
        return ""
    error, version = runtime.cudaRuntimeGetVersion()
    return "" if int(error) else f"{version // 1000}.{version % 1000 // 10}"
