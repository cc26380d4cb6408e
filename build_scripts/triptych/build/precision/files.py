"""Reading and writing ONNX graphs, whatever their size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from triptych.build.export import MODEL_FILE, save_onnx


def read_model(path: Path) -> Any:
    """The graph as an `onnx.ModelProto`, its weights with it."""
    import onnx

    return onnx.load(path)


def write_model(model: Any, target: Path) -> Path:
    """Write ``target/model.onnx``, checked; weights beyond what a protobuf holds go beside it."""
    target.mkdir(parents=True, exist_ok=True)
    save_onnx(model, target / MODEL_FILE)
    return target / MODEL_FILE
