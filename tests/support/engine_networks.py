"""Small ONNX graphs in text form, and profiles and options of engine plans for them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest

from triptych.core.engine.api import USUAL_CAPABILITY, RtxApi
from triptych.core.engine.inspection import check_products
from triptych.core.engine.make import Request, make_engine
from triptych.spec.engine_plan import ShapeRange

OPTIONS: dict[str, Any] = {
    **dict.fromkeys(("workspace_mib", "optimization_level")),
    **dict.fromkeys(("version_compatible", "refit", "weight_streaming", "tf32"), False),
    "hardware": "none",
}
"""Options of an engine plan without any setting."""
FINE = {"x": ShapeRange((1, 4), (2, 4), (8, 4))}
"""The profile of a graph of `write`."""
_EYE = "1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1"


def write(folder: Path, nodes: str, *, kind: str = "float") -> Path:
    """Write a graph from ``x`` ``[rows, 4]`` to ``y`` with fp32 weights ``w`` ``[4, 4]``."""
    constants = f"float[4,4] w = {{{_EYE}}}, float scale = {{0.1}}, int8 zero = {{0}},"
    constants += f" int8[4,4] w8 = {{{_EYE}}}"
    ends = f"({kind}[rows,4] x) => ({kind}[rows,4] y)"
    return save_text(folder / "model.onnx", f"g {ends} <{constants}> {{ {nodes} }}")


def save_text(path: Path, graph: str) -> Path:
    """Write a graph in ONNX's text form; returns its path."""
    onnx.save(onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 19]> {graph}'), path)
    return path


class _ParsedError(Exception):
    """Ends a build after its graph is parsed."""


def count_products(request: Request, fp32_products: Sequence[str] = ()) -> dict[str, int]:
    """Parse a graph with NVIDIA's parser; returns the counts of `check_products`."""
    counts: dict[str, int] = {}

    def look(network: Any) -> None:
        counts.update(check_products(network, request, fp32_products))
        raise _ParsedError

    api = RtxApi(USUAL_CAPABILITY)
    with pytest.raises(_ParsedError):
        make_engine(api, request, timing_file=None, tell=lambda _: None, look=look)
    return counts
