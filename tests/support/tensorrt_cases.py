"""Fake plans for the tests that run engines, and the graphs in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import onnx

from fake_tensorrt.runtime import pack_plan

Ranges = Mapping[str, Sequence[Sequence[int]]]
"""By input: its smallest, usual and largest shape."""

# TensorRT's names of ONNX's element types.
TENSORRT_TYPES = {
    onnx.TensorProto.FLOAT: "FLOAT",
    onnx.TensorProto.FLOAT16: "HALF",
    onnx.TensorProto.BFLOAT16: "BF16",
    onnx.TensorProto.INT8: "INT8",
    onnx.TensorProto.INT32: "INT32",
    onnx.TensorProto.INT64: "INT64",
    onnx.TensorProto.UINT8: "UINT8",
    onnx.TensorProto.BOOL: "BOOL",
}

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
    {
        "input_ids": [[1, edge], [4, edge], [4, edge]],
        "row_length": [[1, 1], [4, 1], [4, 1]],
    }
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
                TENSORRT_TYPES[value.type.tensor_type.elem_type],
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


class Refused(NamedTuple):
    """A model that must not load: its config, its graph and profiles, and what Triton says."""

    config: str
    engine: tuple[str, Sequence[Ranges]]
    message: str


ANY_DEVICE = "instance_group { kind: KIND_MODEL }\n"
MAX_TOKENS = 40
# A packed core in small: the engine fails on token 9 and above.
PACKED = """
packed (int32[tokens] input_ids, int32[rows,1] row_length, int32[rows] row_stride)
=> (float[rows,1] stride, float[tokens,2] each)
<float[9,2] table = {0,0, 1,1, 2,2, 3,3, 4,4, 5,5, 6,6, 7,7, 8,8}, int64[1] last = {1}> {
  each = Gather(table, input_ids)
  column = Unsqueeze(row_stride, last)
  stride = Cast<to: int = 1>(column)
}
"""
PACKED_PROFILES: list[Ranges] = [
    {
        "input_ids": [[1], [8], [MAX_TOKENS]],
        "row_length": [[1, 1], [4, 1], [4, 1]],
        "row_stride": [[1], [4], [4]],
    }
]
PACKED_CONFIG = """
max_batch_size: 4
input { name: "input_ids" data_type: TYPE_INT32 dims: [-1] allow_ragged_batch: true }
input { name: "row_length" data_type: TYPE_INT32 dims: [1] }
batch_input { kind: BATCH_ITEM_SHAPE_FLATTEN target_name: "row_stride" data_type: TYPE_INT32
  source_input: "input_ids" }
output { name: "stride" data_type: TYPE_FP32 dims: [1] }
output { name: "each" data_type: TYPE_FP32 dims: [-1, 2] }
batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "each" source_input: "input_ids" }
dynamic_batching { preferred_batch_size: [4] max_queue_delay_microseconds: 5000000 }
"""
PADDED_CONFIG = """
max_batch_size: 4
input { name: "input_ids" data_type: TYPE_INT32 dims: [-1] }
input { name: "row_length" data_type: TYPE_INT32 dims: [1] }
output { name: "total" data_type: TYPE_FP32 dims: [1] }
output { name: "each" data_type: TYPE_FP32 dims: [-1] }
"""
TWO_TARGETS = """
two_targets (int32[tokens] input_ids) => (int32[tokens] each, int32[tokens] negative) {
  each = Identity(input_ids)
  negative = Neg(input_ids)
}
"""
TWO_TARGETS_CONFIG = """
max_batch_size: 1
input { name: "input_ids" data_type: TYPE_INT32 dims: [-1] allow_ragged_batch: true }
output { name: "each" data_type: TYPE_INT32 dims: [-1] }
output { name: "negative" data_type: TYPE_INT32 dims: [-1] }
batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: ["each", "negative"]
  source_input: "input_ids" }
"""
UNBATCHED = "unbatched (float[n] x) => (float[n] y) { y = Add(x, x) }"
UNBATCHED_CONFIG = """
input { name: "x" data_type: TYPE_FP32 dims: [-1] }
output { name: "y" data_type: TYPE_FP32 dims: [-1] }
"""
TYPES = {"half": ("float16", "FP16"), "byte": ("uint8", "UINT8"), "long": ("int64", "INT64")}
TYPES |= {"flag": ("bool", "BOOL")}
TYPED = (
    "typed ("
    + ", ".join(f"{kind}[rows,1] {name}" for name, (kind, _) in TYPES.items())
    + ") => ("
    + ", ".join(f"{kind}[rows,1] {name}_out" for name, (kind, _) in TYPES.items())
    + ") { "
    + " ".join(f"{name}_out = Identity({name})" for name in TYPES)
    + " }"
)
TYPED_CONFIG = "max_batch_size: 2\n" + "".join(
    f'{role} {{ name: "{name}{end}" data_type: TYPE_{kind} dims: [1] }}\n'
    for name, (_, kind) in TYPES.items()
    for role, end in (("input", ""), ("output", "_out"))
)
MODELS: dict[str, tuple[str, str, Sequence[Ranges]]] = {
    "packed": (PACKED_CONFIG + ANY_DEVICE, PACKED, PACKED_PROFILES),
    "two_targets": (
        TWO_TARGETS_CONFIG + ANY_DEVICE,
        TWO_TARGETS,
        [{"input_ids": [[1], [8], [MAX_TOKENS]]}],
    ),
    "unbatched": (UNBATCHED_CONFIG + ANY_DEVICE, UNBATCHED, [{"x": [[1], [4], [8]]}]),
    "typed": (
        TYPED_CONFIG + ANY_DEVICE,
        TYPED,
        [{name: [[1, 1], [2, 1], [2, 1]] for name in TYPES}],
    ),
}
_PACKED = (PACKED, PACKED_PROFILES)
_PADDED = (PADDED, BUCKETS)
_ROWS = PACKED_CONFIG.replace("max_batch_size: 4", "max_batch_size: 5").replace("[4]", "[5]")
_GRAPHS = """
optimization { cuda { graphs: true graph_spec { batch_size: %d
  input { key: "input_ids" value { dim: [3] } } input { key: "row_length" value { dim: [1] } }
  graph_lower_bound { batch_size: 1 input { key: "input_ids" value { dim: [%d] } }
    input { key: "row_length" value { dim: [1] } } } } } }
"""
REFUSED = {
    "no_plan": Refused(PADDED_CONFIG + ANY_DEVICE, _PADDED, "unable to find"),
    "on_cpu": Refused(
        PADDED_CONFIG + "instance_group { kind: KIND_CPU }",
        _PADDED,
        "unable to load model 'on_cpu', TensorRT backend supports only GPU device",
    ),
    "rows": Refused(
        _ROWS + ANY_DEVICE,
        _PACKED,
        "configuration specified max-batch 5 but TensorRT engine only supports max-batch 4",
    ),
    "profile": Refused(
        PADDED_CONFIG + 'instance_group { kind: KIND_MODEL profile: ["0", "2"] }',
        _PADDED,
        "configuration specified invalid profile 2. Number of profiles supported by TensorRT "
        "engine: 2",
    ),
    "profile_name": Refused(
        PADDED_CONFIG + 'instance_group { kind: KIND_MODEL profile: ["long"] }',
        _PADDED,
        "unable to parse 'long'",
    ),
    "type": Refused(
        PADDED_CONFIG.replace("TYPE_INT32", "TYPE_INT64") + ANY_DEVICE,
        _PADDED,
        "'input_ids' is TYPE_INT64 [-1,-1] in the config and TYPE_INT32 [-1,-1] in the model",
    ),
    "text": Refused(
        PADDED_CONFIG.replace("TYPE_INT32", "TYPE_STRING") + ANY_DEVICE,
        _PADDED,
        "'input_ids' is TYPE_STRING",
    ),
    "dims": Refused(
        PADDED_CONFIG.replace("[-1]", "[-1, 2]") + ANY_DEVICE,
        _PADDED,
        "'input_ids' is TYPE_INT32 [-1,-1,2] in the config and TYPE_INT32 [-1,-1] in the model",
    ),
    "not_ragged": Refused(
        PADDED_CONFIG.replace("dims: [-1] }\ninput", "dims: [-1] allow_ragged_batch: true }\ninput")
        + ANY_DEVICE,
        _PADDED,
        "'input_ids' is TYPE_INT32 [-1] in the config and TYPE_INT32 [-1,-1] in the model",
    ),
    "optional": Refused(
        UNBATCHED_CONFIG.replace("[-1] }\noutput", "[-1] optional: true }\noutput") + ANY_DEVICE,
        (UNBATCHED, [{"x": [[1], [4], [8]]}]),
        "describes the inputs none, the model has x",
    ),
    "unknown": Refused(
        PADDED_CONFIG.replace('"total"', '"sum"') + ANY_DEVICE,
        _PADDED,
        "describes the outputs each, sum, the model has each, total",
    ),
    "missing": Refused(
        PADDED_CONFIG.replace('input { name: "row_length" data_type: TYPE_INT32 dims: [1] }', "")
        + ANY_DEVICE,
        _PADDED,
        "describes the inputs input_ids, the model has input_ids, row_length",
    ),
    "graph_size": Refused(
        PADDED_CONFIG + ANY_DEVICE + _GRAPHS % (5, 3), _PADDED, "batch size from 1 to"
    ),
    "graph_bound": Refused(
        PADDED_CONFIG + ANY_DEVICE + _GRAPHS % (4, 2),
        _PADDED,
        "graph_lower_bound gives other dims than its graph",
    ),
}
