"""Read the interface of the user's own model for a new pipeline."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from triptych.base.onnx_graph import MODEL_FILE
from triptych.core.export.own_graph import read_served
from triptych.core.export.own_ranges import find_ranges
from triptych.spec.scaffold_graph import Described


def describe_model(file: Path, factory: str) -> Described:
    """Return the interface of an ONNX file, or of a module that a Python file makes.

    Args:
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
    model, graph = read_served(file, "--model")
    bounds = find_ranges(model, negative=False).bounds
    ranges = {
        name: (float(np.max(low)), float(np.min(high))) for name, (low, high) in bounds.items()
    }
    return Described(graph, ranges)
