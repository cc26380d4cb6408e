"""Find the ranges of numbers with which a graph reads tables, so that preprocess can check them.

ONNX Runtime fails a whole batch for one index that is out of range. The search goes backward from
the indices of each operator that reads a table of known size to the inputs of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from triptych.base.arrays import Array
from triptych.base.onnx_graph import SMALL, all_nodes, bodies, infer_graph, reads, value_of

if TYPE_CHECKING:
    import onnx

Bounds = NDArray[np.float64]
"""Smallest and largest value of each element, ``[2, ...]``; infinite without a bound."""

_FREE = 3
"""Size of axes of variable size during the search."""
_MARGIN = 1e-6
"""Relative distance of a number from the integer above it, as which the graph may round it."""
_SAFE = frozenset(("ArgMax", "ArgMin", "NonZero", "Shape", "Size", "TopK"))
"""Operators whose results are within the size of their operand, whatever its elements are."""
_TABLES = frozenset(("Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND"))
_MOVES = frozenset(
    {
        *("Concat", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split"),
        *("Squeeze", "Tile", "Transpose", "Unsqueeze"),
    }
)
"""Operators whose results are elements of their operands, chosen by constants."""
_FLOATS = (1, 10, 11, 16)
"""FLOAT, FLOAT16, DOUBLE and BFLOAT16 of `onnx.TensorProto.DataType`."""


class GraphRanges(NamedTuple):
    """Ranges of the inputs of a graph."""

    # Bounds of the elements of a row of each input. Axes on which they do not depend have the size
    # 1.
    bounds: Mapping[str, Bounds]
    unknown: Mapping[str, str]  # Operator and reason for each input whose range cannot be derived


class _Unknown(Exception):
    """Bounds of a result say nothing about the operands."""


def find_ranges(model: onnx.ModelProto, *, negative: bool) -> GraphRanges:
    """Return the ranges of the inputs of a graph.

    Args:
        model: An `onnx.ModelProto`; the values of large weights are not read.
        negative: Whether -n to -1 are indices of a table of n rows, as in ONNX. Else only 0 to
            n - 1 are, as in the embeddings of PyTorch.
    """
    import onnx.inliner

    if len(model.functions):
        model = onnx.inliner.inline_local_functions(model)
    return _RangeSearch(model, negative).run()


class _RangeSearch:
    def __init__(self, model: onnx.ModelProto, negative: bool) -> None:
        self._graph, self._negative = model.graph, negative
        weights = {tensor.name: tensor for tensor in self._graph.initializer}
        self._inputs = [v.name for v in self._graph.input if v.name not in weights]
        inferred = infer_graph(model)
        self._free = _shapes(inferred)  # an axis of variable size is 0
        for tensor in inferred.input:
            for axis in tensor.type.tensor_type.shape.dim:
                axis.dim_value = axis.dim_value or _FREE
        sized = type(model)()
        sized.CopyFrom(model)
        del sized.graph.input[:], sized.graph.value_info[:]
        sized.graph.input.extend(v for v in inferred.input if v.name in self._inputs)
        found = infer_graph(sized, data_prop=True)
        self._kinds = {
            v.name: v.type.tensor_type.elem_type for v in (*found.value_info, *found.input)
        }
        self._shapes = _shapes(found) | {name: tuple(t.dims) for name, t in weights.items()}
        self._free |= {name: tuple(t.dims) for name, t in weights.items()}
        self._constants = {n: value_of(t) for n, t in weights.items() if t.ByteSize() <= SMALL}
        self._sources = {name: frozenset((name,)) for name in self._inputs}
        self._needs: dict[str, Bounds] = {}
        self._unknown: dict[str, str] = {}

    def run(self) -> GraphRanges:
        """Return the ranges."""
        for node in self._graph.node:
            self._read(node)
        for node in reversed(self._graph.node):
            for place, name in enumerate(node.output):
                if name in self._needs:
                    self._try(node, name, self._pass, place)
            indices = (
                node.input[0 if node.op_type == "OneHot" else 1] if len(node.input) > 1 else ""
            )
            self._try(node, node.output[0] if any(bodies(node)) else indices, self._start, indices)
        bounds = {}
        for name in self._inputs:
            found = self._needs.get(name, np.full(1, np.inf))
            for axis, size in enumerate(self._free.get(name, ()), start=1):
                first = found.take([0], axis) if found.ndim > axis else found
                if (found == first).all():
                    found = first
                elif not size:  # a part of a variable axis
                    self._unknown[name] = "bounds of a part of a variable axis"
                    found = np.full(1, np.inf)
            if found.ndim > 1 and np.isfinite(found).any():
                bounds[name] = found[:, 0]
        return GraphRanges(bounds, self._unknown)

    def _read(self, node: onnx.NodeProto) -> None:
        """Find the results of a node if they are constants, and the inputs on which they depend."""
        from onnx.reference import ReferenceEvaluator

        found = [self._sources.get(name, frozenset()) for name in reads(node)]
        sources = frozenset[str]() if node.op_type in _SAFE else frozenset[str]().union(*found)
        self._sources |= dict.fromkeys(node.output, sources)
        known = {name: self._constants.get(name) for name in node.input if name}
        if node.op_type == "Shape" and node.input[0] in self._shapes:
            known = {node.input[0]: np.zeros(self._shapes[node.input[0]], np.bool_)}
        sizes = [np.prod(self._shapes.get(name, (1,))) for name in node.output]
        if max(sizes) <= SMALL and not any(value is None for value in known.values()):
            try:
                values = ReferenceEvaluator(node).run(None, known)
            except Exception:  # an operator or type that the evaluator lacks
                return
            self._constants |= dict(zip(node.output, values, strict=True))

    def _try(
        self, node: onnx.NodeProto, name: str, call: Callable[..., None], argument: object
    ) -> None:
        """Call a function; if it knows no bounds, note the inputs on which a value depends."""
        try:
            call(node, argument)
        except _Unknown as reason:
            text = f"{node.op_type} `{node.name or name}` {reason}".rstrip()
            for source in self._sources.get(name, ()):
                self._unknown.setdefault(source, text)

    def _need(self, name: str, bounds: Bounds) -> None:
        if self._sources.get(name):
            low, high = self._needs.get(name, (-np.inf, np.inf))
            self._needs[name] = np.stack([np.maximum(low, bounds[0]), np.minimum(high, bounds[1])])

    def _constant(self, name: str) -> Array:
        if name not in self._constants:
            raise _Unknown
        return np.asarray(self._constants[name])

    def _start(self, node: onnx.NodeProto, indices: str) -> None:
        """Take up the bounds of the indices of an operator that reads a table."""
        kind, attributes = node.op_type, _attributes(node)
        if any(inner.op_type in _TABLES for body in bodies(node) for inner in all_nodes(body.node)):
            raise _Unknown("reads a table in a branch or loop")
        is_one_hot = kind == "OneHot" and not self._negative  # ONNX gives zeros for other indices
        if not (kind in _TABLES or is_one_hot) or not self._sources.get(indices):
            return
        shape, table = self._shapes.get(indices), self._free.get(node.input[0], ())
        if is_one_hot:
            sizes = self._constant(node.input[1]).reshape(1)
        elif kind in ("GatherND", "ScatterND"):
            first = attributes.get("batch_dims", 0)
            sizes = np.array(table[first : first + shape[-1]] if shape else ())
        else:
            axis = attributes.get("axis", 0)
            sizes = np.array(table[axis : axis + 1 or None])
        if shape is None or not sizes.size or not sizes.all():
            raise _Unknown("reads a table of variable size")
        low = -sizes if self._negative else sizes * 0
        self._need(indices, np.stack([np.broadcast_to(each, shape) for each in (low, sizes - 1)]))

    def _pass(self, node: onnx.NodeProto, place: int) -> None:
        """Take up the bounds of the operands of a node from those of one of its results."""
        bounds, kind, first = self._needs[node.output[place]], node.op_type, node.input[0]
        low, high = bounds
        if kind in _MOVES:
            self._move(node, place, bounds)
        elif kind in ("Add", "Sub", "Mul", "Div"):
            self._compute(node, low, high)
        elif kind in ("Clip", "Max", "Min", "Relu"):
            self._limit(node, low, high)
        elif kind in ("Cast", "Floor") and self._kinds.get(first) != 8:  # STRING
            if self._kinds.get(first) in _FLOATS and _attributes(node).get("to") not in _FLOATS:
                most = high + 1 - _MARGIN * np.maximum(1, np.abs(high))
                least = low - 1 + _MARGIN * np.maximum(1, np.abs(low))
                if kind == "Cast":  # toward zero
                    low, most = np.where(low > 0, low, least), np.where(high < 0, high, most)
                high = most
            self._need(first, np.stack([low, high]))
        elif kind == "Mod":  # of integers
            size = np.abs(self._constant(node.input[1])) - 1
            if (low > -size * _attributes(node).get("fmod", 0)).any() or (high < size).any():
                raise _Unknown
        else:
            raise _Unknown

    def _limit(self, node: onnx.NodeProto, low: Array, high: Array) -> None:
        """Take up the bounds of an operand that the node itself limits."""
        kind = node.op_type
        ends: list[object] = [np.zeros(()) if kind == "Relu" else None, None]
        for index, name in enumerate(node.input[1:]):
            ends[kind == "Min" or index] = self._constant(name) if name else None
        if ends[0] is not None:
            low = np.where(ends[0] >= low, -np.inf, low)
        if ends[1] is not None:
            high = np.where(ends[1] <= high, np.inf, high)
        self._fit(node.input[0], low, high)

    def _move(self, node: onnx.NodeProto, place: int, bounds: Bounds) -> None:
        """Follow the elements of the operands by their numbers."""
        from onnx.reference import ReferenceEvaluator

        feed, names, start = dict[str, Any](), list[str](), 0
        for index, name in enumerate(node.input):
            if index and node.op_type != "Concat":
                feed |= {name: self._constant(name)} if name else {}
                continue
            if name not in self._shapes:
                raise _Unknown
            size = int(np.prod(self._shapes[name]))
            feed[name] = np.arange(start, start + size).reshape(self._shapes[name])
            names.append(name)
            start += size
        try:
            moved = np.asarray([*ReferenceEvaluator(node).run(None, feed)][place])
        except Exception as error:  # sizes that do not fit
            raise _Unknown from error
        flat = _collect(moved, bounds, start)
        for name in names:
            numbers = feed[name]
            self._need(name, flat[:, numbers.reshape(-1)].reshape(2, *numbers.shape))

    def _fit(self, name: str, low: Array, high: Array) -> None:
        """Take up the bounds of an operand that was broadcast."""
        if name not in self._shapes:
            raise _Unknown
        shape = self._shapes[name]
        bounds = np.stack(np.broadcast_arrays(low, high))
        size = int(np.prod(shape))
        numbers = np.broadcast_to(np.arange(size).reshape(shape), bounds.shape[1:])
        self._need(name, _collect(numbers, bounds, size).reshape(2, *shape))

    def _compute(self, node: onnx.NodeProto, low: Array, high: Array) -> None:
        """Take up the bounds of the operand of arithmetic that is no constant."""
        kind, (left, right) = node.op_type, node.input
        is_left = right in self._constants
        name = left if is_left else right
        value = self._constant(right if is_left else left).astype(np.float64)
        if kind == "Add":
            low, high = low - value, high - value
        elif kind == "Sub":
            low, high = (low + value, high + value) if is_left else (value - high, value - low)
        elif (value <= 0).any() or (kind == "Div" and not is_left):
            raise _Unknown
        elif kind == "Mul":
            low, high = low / value, high / value
        elif self._kinds.get(name) in _FLOATS:
            low, high = low * value, high * value
        else:  # integers are divided toward zero
            low = np.where(low > 0, low * value, (low - 1) * value + 1)
            high = np.where(high < 0, high * value, (high + 1) * value - 1)
        self._fit(name, low, high)


def _shapes(graph: onnx.GraphProto) -> dict[str, tuple[int, ...]]:
    """Return the sizes of the axes of each value of a graph, 0 for an unknown size."""
    return {
        value.name: tuple(axis.dim_value for axis in value.type.tensor_type.shape.dim)
        for value in (*graph.value_info, *graph.input, *graph.output)
        if value.type.tensor_type.HasField("shape")
    }


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    import onnx

    return {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}


def _collect(numbers: Array, bounds: Bounds, count: int) -> Bounds:
    """Return the bounds ``[2, count]`` of elements from those of the places where they are."""
    flat: Bounds = np.stack([np.full(count, -np.inf), np.full(count, np.inf)])
    np.maximum.at(flat[0], numbers.reshape(-1), bounds[0].reshape(-1))
    np.minimum.at(flat[1], numbers.reshape(-1), bounds[1].reshape(-1))
    return flat
