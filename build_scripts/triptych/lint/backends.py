"""What is known of Triton's backends: their names, platforms and the file each one loads."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Backend:
    """A backend of Triton.

    Attributes:
        platforms: values of `platform` that go with it; any when empty.
        model_file: what it loads from a version folder by default; empty when that varies.
        batches_itself: it batches requests within the backend, so the server need not.
    """

    platforms: tuple[str, ...] = ()
    model_file: str = ""
    batches_itself: bool = False


ENSEMBLE = "ensemble"

BACKENDS: dict[str, Backend] = {
    "python": Backend(model_file="model.py"),
    "onnxruntime": Backend(("onnxruntime_onnx",), "model.onnx"),
    "tensorrt": Backend(("tensorrt_plan",), "model.plan"),
    "pytorch": Backend(("pytorch_libtorch", "pytorch", "torch_aoti")),
    "openvino": Backend(),
    "tensorflow": Backend(("tensorflow_graphdef", "tensorflow_savedmodel")),
    "vllm": Backend(model_file="model.json", batches_itself=True),
    "tensorrtllm": Backend(batches_itself=True),
    "dali": Backend(),
    "fil": Backend(),
    "identity": Backend(),
    "repeat": Backend(),
    "square": Backend(),
}


def backend_of(config: Any, version_files: Collection[str]) -> str:
    """The backend that serves `config`, as the server infers it; empty when it cannot.

    Args:
        config: a ModelConfig.
        version_files: names of the files in the served version folders.
    """
    if config.platform == ENSEMBLE or config.HasField("ensemble_scheduling"):
        return ENSEMBLE
    if config.backend:
        return str(config.backend)
    if config.platform:
        matching = (n for n, b in BACKENDS.items() if config.platform in b.platforms)
        return next(matching, "")
    present = [config.default_model_filename] if config.default_model_filename else version_files
    return inferred_backend(present)


def inferred_backend(version_files: Collection[str]) -> str:
    """The backend whose default file is among `version_files`; empty when there is none."""
    matching = (n for n, b in BACKENDS.items() if b.model_file and b.model_file in version_files)
    return next(matching, "")
