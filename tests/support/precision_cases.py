"""Graphs for the converters: exported ones of several architectures, and small ones by hand."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from triptych.base.onnx_graph import open_session, read_model, write_model
from triptych.core.precision import float16, quantize
from triptych.core.precision.linear import Recipe
from triptych.core.requests import core_feed
from triptych.repository.records import Conversion
from triptych.spec.backends import Precision


def convert_int8(
    source: Path, target: Path, recipe: Recipe, feeds: Sequence[Mapping[str, NDArray[Any]]]
) -> Conversion:
    """Write ``target/model.onnx`` in int8, except `Recipe.kept`."""
    graph, conversion = quantize.Quantizer(read_model(source), recipe, feeds).converted(recipe.kept)
    write_model(graph, target)
    return conversion


CONVERT: dict[Precision, Callable[..., Conversion]] = {
    "int8": convert_int8,
    "int8_dynamic": convert_int8,
    "fp8": quantize.convert_fp8,
    "fp16": float16.convert,
    "bf16": float16.convert,
}
"""The conversion of a core to each precision."""
QUANTIZED: tuple[Precision, ...] = ("int8", "int8_dynamic", "fp8")
HALVES: tuple[Precision, ...] = ("fp16", "bf16")
CLOSE = {"fp16": 2e-3, "bf16": 2e-2, "int8": 0.05, "int8_dynamic": 0.05, "fp8": 0.1}
"""Largest `relative_error` of the results."""
Feed = dict[str, NDArray[Any]]
WIDTH = 32


@dataclass(frozen=True)
class Exported:
    """A random model's core, in a folder that is shared: not to be written to."""

    path: Path
    layout: str
    pad: int

    def feed(self, rows: Sequence[Sequence[int]]) -> Feed:
        from tests.support import architectures as models  # needs torch

        samples = [models.token_row(row) for row in rows]
        return core_feed(samples, models.LAYOUT_INPUTS[self.layout], pad_token_id=self.pad)

    def feeds(self, *, seed: int = 7) -> list[Feed]:
        """One row each, as for calibration."""
        from tests.support import architectures as models

        return [self.feed([row]) for row in models.random_rows(seed=seed)]


def export(name: str, head: str, layout: str) -> Exported:
    """The core of an architecture."""
    from tests.support import architectures as models

    folder, facts = models.exported(name, head, layout)
    return Exported(folder / "onnx/model.onnx", layout, facts.pad_token_id)


def run(path: Path, feed: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
    """The outputs of a graph of any precision, on the CPU."""
    results: list[NDArray[Any]] = open_session(path).run(None, dict(feed))
    return results


def run_plainly(path: Path, feed: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
    """The same as ONNX Runtime runs the file itself."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    results: list[NDArray[Any]] = session.run(None, dict(feed))
    return results


def relative_error(found: NDArray[Any], wanted: NDArray[Any]) -> float:
    """Length of the difference in lengths of what was wanted; NaN where one is not finite."""
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def declared(path: Path) -> str:
    """Inputs and outputs as the file declares them: names, types, shapes."""
    graph = onnx.load(path).graph
    return str([*graph.input, *graph.output])


def stored(path: Path) -> dict[str, int]:
    """Type of each constant of a graph, by name."""
    return {tensor.name: tensor.data_type for tensor in onnx.load(path).graph.initializer}


def write_graph(
    folder: Path,
    nodes: Sequence[Any],
    constants: Mapping[str, NDArray[Any]],
    *,
    width: int = WIDTH,
    outputs: int = WIDTH,
) -> Path:
    """A graph from ``x`` FP32 ``[rows, width]`` to ``y`` FP32 ``[rows, outputs]``."""
    graph = helper.make_graph(
        list(nodes),
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", width])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", outputs])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def node(operator: str, inputs: str, output: str, **settings: Any) -> Any:
    """A node named after its output; `inputs` are separated by spaces."""
    return helper.make_node(operator, inputs.split(), [output], name=f"make_{output}", **settings)


def matrix(seed: int, rows: int = WIDTH, columns: int = WIDTH) -> NDArray[np.float32]:
    """Random weights that keep the size of a vector."""
    random = np.random.default_rng(seed)
    weights: NDArray[np.float32] = random.normal(size=(rows, columns)).astype(np.float32)
    return weights / np.float32(np.sqrt(rows))


def vectors(rows: int = 6, width: int = WIDTH, *, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32)


def two_layers(folder: Path, *middle: Any, **constants: Any) -> Path:
    """``x @ first``, then `middle` from ``a`` to ``b``, then ``b @ last``."""
    nodes = [
        node("MatMul", "x first", "a"),
        *(middle or [node("Relu", "a", "b")]),
        node("MatMul", "b last", "y"),
    ]
    return write_graph(folder, nodes, {"first": matrix(1), "last": matrix(2), **constants})
