"""Reading and writing ONNX graphs, whatever their size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

MODEL_FILE = "model.onnx"
LARGEST_PROTOBUF = 1_900_000_000
"""Bytes; weights of a larger graph go into a file beside it."""


def hashes_of_graph(files: Mapping[str, str]) -> dict[str, str]:
    """Of `files` of a folder (name -> hash): the graph, and weights beside it."""
    return {name: digest for name, digest in files.items() if name.startswith(MODEL_FILE)}


def read_model(path: Path) -> Any:
    """The graph as an `onnx.ModelProto`, its weights with it."""
    import onnx

    return onnx.load(path)


def write_model(model: Any, target: Path) -> Path:
    """Write ``target/model.onnx``, checked; returns its path."""
    target.mkdir(parents=True, exist_ok=True)
    save_onnx(model, target / MODEL_FILE)
    return target / MODEL_FILE


def save_onnx(model: Any, path: Path) -> None:
    """Save without traces of the machine that exported it."""
    import onnx

    graph = model.graph
    # Shapes of inner values name the old axes, and metadata holds source paths.
    del graph.value_info[:]
    model.producer_version = ""
    nodes = (node for one in (graph, *model.functions) for node in one.node)
    values = (*graph.input, *graph.output, *graph.initializer)
    for part in (model, graph, *model.functions, *nodes, *values):
        part.doc_string = ""
        del part.metadata_props[:]
    onnx.checker.check_model(model)
    large = model.ByteSize() > LARGEST_PROTOBUF
    onnx.save(
        model, path, save_as_external_data=large, location=f"{path.name}.data" if large else None
    )
