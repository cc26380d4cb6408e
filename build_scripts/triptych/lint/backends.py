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
    "tensorflow": Backend(("tensorflow_graphdef", "tensorflow_savedmodel")),
    "vllm": Backend(model_file="model.json", batches_itself=True),
    "tensorrtllm": Backend(batches_itself=True),
    **dict.fromkeys(("openvino", "dali", "fil", "identity", "repeat", "square"), Backend()),
}


def backend_of(config: Any, version_files: Collection[str]) -> str:
    """The backend that serves a model, as the server infers it; empty when it cannot.

    Args:
        config: a ModelConfig; None where there is none to go by but the files.
        version_files: names of the files in the served version folders.
    """
    if config is not None:
        if config.platform == ENSEMBLE or config.HasField("ensemble_scheduling"):
            return ENSEMBLE
        if config.backend:
            return str(config.backend)
        if config.platform:
            return next((n for n, b in BACKENDS.items() if config.platform in b.platforms), "")
        if config.default_model_filename:
            version_files = [config.default_model_filename]
    return next(
        (n for n, b in BACKENDS.items() if b.model_file and b.model_file in version_files), ""
    )
