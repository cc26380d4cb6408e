"""Reading and writing ONNX graphs, whatever their size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MODEL_FILE = "model.onnx"
LARGEST_PROTOBUF = 1_900_000_000


def read_model(path: Path) -> Any:
    """The graph as an `onnx.ModelProto`, its weights with it."""
    import onnx

    return onnx.load(path)


def write_model(model: Any, target: Path) -> Path:
    """Write ``target/model.onnx``, checked; weights beyond what a protobuf holds go beside it."""
    target.mkdir(parents=True, exist_ok=True)
    save_onnx(model, target / MODEL_FILE)
    return target / MODEL_FILE


def save_onnx(model: Any, path: Path) -> None:
    """Save without traces of the machine that exported it."""
    import onnx

    # Shapes of inner values name the old axes, and metadata holds source paths.
    del model.graph.value_info[:]
    _strip(model)
    onnx.checker.check_model(model)
    large = model.ByteSize() > LARGEST_PROTOBUF
    onnx.save(
        model, path, save_as_external_data=large, location=f"{path.name}.data" if large else None
    )


def _strip(model: Any) -> None:
    model.producer_version = ""
    model.doc_string = ""
    del model.metadata_props[:]
    graphs = [model.graph, *model.functions]
    for graph in graphs:
        graph.doc_string = ""
        del graph.metadata_props[:]
        for node in graph.node:
            node.doc_string = ""
            del node.metadata_props[:]
    for value in (*model.graph.input, *model.graph.output, *model.graph.initializer):
        value.doc_string = ""
        del value.metadata_props[:]
