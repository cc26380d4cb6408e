"""Fake plans for the tests that run engines, and the graphs in them."""

from collections.abc import Mapping, Sequence
from typing import Any

import onnx

from tests.support.fake_tensorrt.builder import TYPES
from tests.support.fake_tensorrt.runtime import pack_plan

Ranges = Mapping[str, Sequence[Sequence[int]]]
"""By input: its smallest, usual and largest shape."""

# A bucketed core in small: what a row gives shows every token and whether rows mix.
PADDED = """
padded (int32[rows,tokens] input_ids, int32[rows,1] row_length)
=> (float[rows,1] total, float[rows,tokens] each)
<int64[1] last = {1}> {
  values = Cast<to: int = 1>(input_ids)
  lengths = Cast<to: int = 1>(row_length)
  total = ReduceSum(values, last)
  each = Mul(values, lengths)
}
"""
# Two buckets of tokens; 1 to 4 rows in each.
BUCKETS: list[Ranges] = [
    {"input_ids": [[1, edge], [4, edge], [4, edge]], "row_length": [[1, 1], [4, 1], [4, 1]]}
    for edge in (3, 6)
]


def padded_feed(rows: int, tokens: int, *, seed: int = 0) -> dict[str, Any]:
    """A batch for `PADDED`."""
    import numpy as np

    ids = np.random.default_rng(seed).integers(1, 9, (rows, tokens)).astype(np.int32)
    return {"input_ids": ids, "row_length": np.full((rows, 1), tokens, np.int32)}


def padded_answer(feed: Mapping[str, Any]) -> dict[str, Any]:
    """What `PADDED` makes of a batch."""
    ids = feed["input_ids"].astype("float32")
    return {"total": ids.sum(1, keepdims=True), "each": ids * feed["row_length"]}


def header_of(graph: bytes) -> dict[str, Any]:
    """The inputs and outputs of a graph, as a fake plan's header names them."""
    model = onnx.load_from_string(graph).graph

    def tensors(values: Any) -> dict[str, Any]:
        return {
            value.name: [
                TYPES[value.type.tensor_type.elem_type],
                [d.dim_value or -1 for d in value.type.tensor_type.shape.dim],
            ]
            for value in values
        }

    return {"inputs": tensors(model.input), "outputs": tensors(model.output)}


def plan_of(
    graph: str | bytes, profiles: Sequence[Ranges], *, version: str, **header: Any
) -> bytes:
    """A fake plan that computes `graph` (ONNX, or its text form)."""
    if isinstance(graph, str):
        text = f'<ir_version: 8, opset_import: ["": 17]> {graph}'
        graph = bytes(onnx.parser.parse_model(text).SerializeToString())
    whole = {"tensorrt": version, "profiles": list(profiles), **header_of(graph), **header}
    return pack_plan(whole, graph)
