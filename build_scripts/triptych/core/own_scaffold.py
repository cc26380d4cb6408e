"""Read the interface of the user's own model for a new pipeline."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from triptych.base.errors import UserError
from triptych.base.onnx_edges import to_served
from triptych.base.onnx_graph import MODEL_FILE, interface_of, read_model
from triptych.core.export.own_ranges import find_ranges
from triptych.spec.scaffold_graph import Described


def describe_model(file: Path, factory: str) -> Described:
    """Return the interface of an ONNX file, or of a module that a Python file makes.

    Args:
        file: The file.
        factory: Function or class in a Python file; empty for an ONNX file.

    Raises:
        UserError: The file cannot be read, or the inputs of the module are not found.
    """
    if not factory:
        return _describe_graph(file)
    from triptych.core.export.own_probe import AXIS, probe_module

    with TemporaryDirectory() as folder:
        of, scalars = probe_module(file, factory, Path(folder))
        found = _describe_graph(Path(folder) / MODEL_FILE)
    inputs = [
        tensor._replace(
            axes=tuple(
                AXIS if of.get(tensor.name) == axis else size
                for axis, size in enumerate(tensor.axes or ())
            )
        )
        for tensor in found.graph.inputs
    ]
    return found._replace(graph=found.graph._replace(inputs=tuple(inputs)), of=of, scalars=scalars)


def _describe_graph(file: Path) -> Described:
    try:
        model = read_model(file, weights=False)
        to_served(model)
        graph = interface_of(model)
    except Exception as error:  # protobuf's error, or that of the file
        given = f"{file}: {' '.join(str(error).split())[:200]}"
        remedy = "Correct the path, or export the model again"
        raise UserError(
            "--model", "must be a readable ONNX file", given=given, remedy=remedy
        ) from error
    bounds = find_ranges(model, negative=False).bounds
    ranges = {
        name: (float(np.max(low)), float(np.min(high))) for name, (low, high) in bounds.items()
    }
    return Described(graph, ranges)
