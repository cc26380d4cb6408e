"""The GPU that engines are built for: name, compute capability, driver, CUDA."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
from dataclasses import dataclass

from triptych.build.engine.messages import no_gpu

_TIMEOUT_S = 20.0
_QUERY = "name,compute_cap,driver_version"


@dataclass(frozen=True)
class Gpu:
    """One GPU and what drives it.

    Attributes:
        name: the product.
        compute_capability: such as ``9.0``.
        driver: version of NVIDIA's driver.
        cuda: version of the CUDA runtime, major and minor; empty where its bindings are missing.
    """

    name: str
    compute_capability: str
    driver: str
    cuda: str


def read_gpu() -> Gpu:
    """The GPU that TensorRT builds for: the first that CUDA shows to this process.

    Raises:
        UserError: there is none.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        raise no_gpu("no nvidia-smi on the PATH")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip()
    command = [program, f"--id={visible or 0}", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise no_gpu(f"nvidia-smi: {error}") from error
    said = done.stdout.decode(errors="replace").strip()
    found = re.fullmatch(r"(.+), (\d+\.\d+), ([\d.]+)", said)
    if done.returncode != 0 or found is None:
        raise no_gpu(f"nvidia-smi: {said or done.stderr.decode(errors='replace').strip()}")
    return Gpu(found[1], found[2], found[3], _cuda_version())


def _cuda_version() -> str:
    try:
        runtime = importlib.import_module("cuda.bindings.runtime")
    except ImportError:
        return ""
    error, version = runtime.cudaRuntimeGetVersion()
    if int(error) != 0:
        return ""
    return f"{version // 1000}.{version % 1000 // 10}"
