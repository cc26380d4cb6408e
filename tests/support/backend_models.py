"""Small models and their configs, for the contract tests of the emulated backends.

A model of `SHARED` is written for both backends; its name then ends in the name of the backend.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import onnx.parser

from tests.support.served_engines import write_model as write_engine
from tests.support.tensorrt_cases import Ranges

BACKENDS = ("onnxruntime", "tensorrt")
"""Backends that join rows."""
ALL_BACKENDS = (*BACKENDS, "openvino")
MAX_TOKENS = 60
"""Of all rows of a batch, in the profiles of packed engines."""

WAITS = "max_queue_delay_microseconds: 60000000"
"""A batch waits until it has the preferred number of rows."""
ON_CPU = "instance_group { kind: KIND_CPU count: 1 }\n"
ANY_DEVICE = "instance_group { kind: KIND_MODEL }\n"
BATCHES_OF_4 = f"dynamic_batching {{ preferred_batch_size: [4] {WAITS} }}\n"
TOKENS = 'input { name: "tokens" data_type: TYPE_INT32 dims: [-1] allow_ragged_batch: true }\n'
LENGTH = 'input { name: "length" data_type: TYPE_INT32 dims: [1] }\n'
STRIDE = """
batch_input { kind: BATCH_ITEM_SHAPE_FLATTEN target_name: "stride" data_type: TYPE_INT32
  source_input: "tokens" }
"""

# A small packed core: the mean of a table's vectors over the first `length` tokens of each row.
# No token may be 10 or more.
PACKED = """
packed (int32[T] tokens, int32[B,1] length, int32[B] stride)
=> (float[B,4] mean, float[T,4] each, float[T,4] negative)
<float[10,4] table = {0.9,0.1,0.2,0.3, 1.4,1.1,1.2,1.3, 2.4,2.1,2.2,2.3, 3.4,3.1,3.2,3.3,
  4.4,4.1,4.2,4.3, 5.4,5.1,5.2,5.3, 6.4,6.1,6.2,6.3, 7.4,7.1,7.2,7.3, 8.4,8.1,8.2,8.3,
  9.4,9.1,9.2,9.3}, int64 zero = {0}, int64 one = {1}, int64[1] last = {1},
  int64[1] front = {0}> {
  vectors = Gather(table, tokens)
  stride64 = Cast<to: int = 7>(stride)
  length64 = Cast<to: int = 7>(length)
  ends = CumSum(stride64, zero)
  starts = Sub(ends, stride64)
  starts_column = Unsqueeze(starts, last)
  stops_column = Add(starts_column, length64)
  shape = Shape(tokens)
  count = Squeeze(shape)
  places = Range(zero, count, one)
  places_row = Unsqueeze(places, front)
  after = GreaterOrEqual(places_row, starts_column)
  before = Less(places_row, stops_column)
  inside = And(after, before)
  weights = Cast<to: int = 1>(inside)
  sums = MatMul(weights, vectors)
  lengths = Cast<to: int = 1>(length)
  mean = Div(sums, lengths)
  each = Sin(vectors)
  negative = Neg(each)
}
"""
PACKED_CONFIG = f"""
max_batch_size: 4
{TOKENS}{LENGTH}{STRIDE}
output {{ name: "mean" data_type: TYPE_FP32 dims: [4] }}
output {{ name: "each" data_type: TYPE_FP32 dims: [-1, 4] }}
output {{ name: "negative" data_type: TYPE_FP32 dims: [-1, 4] }}
batch_output {{ kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: ["each", "negative"]
  source_input: "tokens" }}
{BATCHES_OF_4}
model_warmup {{ name: "ones" batch_size: 3
  inputs {{ key: "tokens" value {{ data_type: TYPE_INT32 dims: [5] zero_data: true }} }}
  inputs {{ key: "length" value {{ data_type: TYPE_INT32 dims: [1] zero_data: true }} }} }}
"""
PACKED_RANGES: Ranges = {
    "tokens": [[0], [8], [MAX_TOKENS]],
    "length": [[1, 1], [4, 1], [4, 1]],
    "stride": [[1], [4], [4]],
}

# No batch dimension.
UNBATCHED = "unbatched (float[N] x) => (float[N] y) { y = Add(x, x) }"
UNBATCHED_CONFIG = """
input { name: "x" data_type: TYPE_FP32 dims: [-1] }
output { name: "y" data_type: TYPE_FP32 dims: [-1] }
"""
UNBATCHED_RANGES: Ranges = {"x": [[1], [4], [8]]}

NUMBERS = tuple(f"{sign}INT{bits}" for sign in ("U", "") for bits in (8, 16, 32, 64))
ONNX_NAMES = {"FP16": "float16", "FP32": "float", "FP64": "double"}
TYPES = {
    "onnxruntime": ("BOOL", *NUMBERS, "FP16", "FP32", "FP64", "STRING"),
    "tensorrt": ("BOOL", "UINT8", "INT8", "INT32", "INT64", "FP16", "FP32"),
    "openvino": ("BOOL", *NUMBERS, "FP16", "FP32"),
}
"""Triton's types of tensors that a backend takes."""


class Model(NamedTuple):
    """A config and a graph in ONNX's text form; `ranges` is the profile of its engine."""

    config: str
    graph: str
    ranges: Ranges


def typed(types: Sequence[str], *, batches: bool = True) -> Model:
    """A model that returns a tensor of each type as it is."""
    inputs, outputs = (
        ", ".join(f"{ONNX_NAMES.get(name, name.lower())}[B,2] {name}_{role}" for name in types)
        for role in ("in", "out")
    )
    dims = "2" if batches else "-1, 2"
    copies = " ".join(f"{name}_out = Identity({name}_in)" for name in types)
    tensors = "".join(
        f'{role}put {{ name: "{name}_{role}" data_type: TYPE_{name} dims: [{dims}] }}\n'
        for role in ("in", "out")
        for name in types
    )
    return Model(
        f"max_batch_size: {4 * batches}\n{tensors}",
        f"typed ({inputs}) => ({outputs}) {{ {copies} }}",
        {f"{name}_in": [[1, 2], [4, 2], [4, 2]] for name in types},
    )


SHARED: Mapping[str, Model] = {
    "packed": Model(PACKED_CONFIG, PACKED, PACKED_RANGES),
    "unbatched": Model(UNBATCHED_CONFIG, UNBATCHED, UNBATCHED_RANGES),
}

# Rows padded to one length: no ragged input, but a variable dimension.
PADDED = """
padded (int32[B,L] tokens, float[B,1] scale) => (float[B,L] scaled, float[B,1] total)
<int64[1] last = {1}> {
  values = Cast<to: int = 1>(tokens)
  scaled = Mul(values, scale)
  total = ReduceSum(scaled, last)
}
"""
PADDED_CONFIG = """
max_batch_size: 8
input { name: "tokens" data_type: TYPE_INT32 dims: [-1] }
input { name: "scale" data_type: TYPE_FP32 dims: [1] }
output { name: "scaled" data_type: TYPE_FP32 dims: [-1] }
output { name: "total" data_type: TYPE_FP32 dims: [1] }
dynamic_batching { max_queue_delay_microseconds: 20000 }
instance_group { kind: KIND_CPU count: 2 }
parameters { key: "intra_op_thread_count" value { string_value: "1" } }
parameters { key: "execution_mode" value { string_value: "1" } }
parameters { key: "inter_op_thread_count" value { string_value: "1" } }
parameters { key: "enable_mem_pattern" value { string_value: "off" } }
parameters { key: "memory.enable_memory_arena_shrinkage" value { string_value: "cpu:0" } }
optimization { graph { level: 1 } }
"""

# No batch dimension; a scalar input, a scalar output, and an input with a default value.
SCALARS = """
scalars (float[N] x, float[] factor, float[1] bias = {0.5}) => (float[N] y, float[] top) {
  scaled = Mul(x, factor)
  y = Add(scaled, bias)
  top = ReduceMax<keepdims: int = 0>(y)
}
"""
SCALARS_CONFIG = """
max_batch_size: 0
input { name: "x" data_type: TYPE_FP32 dims: [-1] }
input { name: "factor" data_type: TYPE_FP32 dims: [1] }
input { name: "bias" data_type: TYPE_FP32 dims: [1] optional: true }
output { name: "y" data_type: TYPE_FP32 dims: [-1] }
output { name: "top" data_type: TYPE_FP32 dims: [1] }
"""

# One number per row, without a dimension of its own: needs `reshape`.
PLAIN = "plain (float[B] x, float[B,3] v) => (float[B] y, float[B,3] w) {{ {} }}"
DOUBLE = PLAIN.format("y = Add(x, x) w = Identity(v)")
SQUARE = PLAIN.format("y = Mul(x, x) w = Identity(v)")
RESHAPED_CONFIG = """
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [1] reshape { shape: [] } }
input { name: "v" data_type: TYPE_FP32 dims: [3, 1] reshape { shape: [3] } }
output { name: "y" data_type: TYPE_FP32 dims: [1] reshape { shape: [] } }
output { name: "w" data_type: TYPE_FP32 dims: [1, 3] reshape { shape: [3] } }
version_policy { all {} }
default_model_filename: "other.onnx"
"""

# An output that has a row for each row whose length is not 0.
FAULTY = """
faulty (int32[T] tokens, int32[B,1] length) => (int32[K,1] kept) <int64 zero = {0}> {
  places = NonZero(length)
  rows = Gather(places, zero)
  kept = Gather(length, rows)
}
"""
FAULTY_CONFIG = f"""
max_batch_size: 4
{TOKENS}{LENGTH}
output {{ name: "kept" data_type: TYPE_INT32 dims: [1] }}
{BATCHES_OF_4}{ON_CPU}
"""
TEXTS = "texts (string[B,1] x) => (string[B,1] y) { y = Identity(x) }"
TEXTS_CONFIG = f"""
max_batch_size: 2
input {{ name: "x" data_type: TYPE_STRING dims: [1] }}
output {{ name: "y" data_type: TYPE_STRING dims: [1] }}
{BATCHES_OF_4.replace("4", "2")}{ON_CPU}
"""
ONNX_MODELS: Mapping[str, tuple[str, dict[str, str]]] = {
    "padded": (PADDED_CONFIG, {"1/model.onnx": PADDED}),
    "scalars": (SCALARS_CONFIG + ON_CPU, {"1/model.onnx": SCALARS}),
    # The native backend accepts a folder in place of the file, too.
    "reshaped": (
        RESHAPED_CONFIG + ON_CPU,
        {"1/other.onnx": DOUBLE, "2/other.onnx/model.onnx": SQUARE},
    ),
    "completed": ("", {"1/model.onnx": DOUBLE}),
    "faulty": (FAULTY_CONFIG, {"1/model.onnx": FAULTY}),
    "texts": (TEXTS_CONFIG, {"1/model.onnx": TEXTS}),
}
"""Config and graphs by path of the models for ONNX Runtime alone."""

FULL_BATCHES = f"""
max_batch_size: 2
input {{ name: "x" data_type: TYPE_FP32 dims: [1] reshape {{ shape: [] }} }}
input {{ name: "v" data_type: TYPE_FP32 dims: [3] }}
output {{ name: "y" data_type: TYPE_FP32 dims: [1] reshape {{ shape: [] }} }}
output {{ name: "w" data_type: TYPE_FP32 dims: [3] }}
{BATCHES_OF_4.replace("4", "2")}{ON_CPU}
default_model_filename: "model.onnx"
"""
"""Config of a model for OpenVINO with batches of 2 rows."""

OF_ONNX = ON_CPU + 'default_model_filename: "model.onnx"\n'
REFUSED: Mapping[str, tuple[str, str, str, str]] = {
    "no_file": (
        "onnxruntime",
        PADDED_CONFIG + 'default_model_filename: "none"',
        PADDED,
        "unable to find",
    ),
    "no_batching": (
        "onnxruntime",
        "max_batch_size: 2",
        SCALARS,
        "model does not support batching while non-zero max_batch_size is specified",
    ),
    "no_ir": ("openvino", UNBATCHED_CONFIG + ON_CPU, UNBATCHED, "unable to find"),
    "joined": ("openvino", PACKED_CONFIG + OF_ONNX, PACKED, "does not join rows: tokens, stride"),
    "hinted": (
        "openvino",
        UNBATCHED_CONFIG + OF_ONNX + 'parameters { key: "HINT_BF16" value { string_value: "x" } }',
        UNBATCHED,
        "expected the parameter 'HINT_BF16' to be YES, got x",
    ),
    "on_any": (
        "openvino",
        UNBATCHED_CONFIG + ANY_DEVICE + 'default_model_filename: "model.onnx"',
        UNBATCHED,
        "supports only Kind CPU and AUTO",
    ),
    "double": (
        "openvino",
        typed(["FP64"], batches=False).config + OF_ONNX,
        typed(["FP64"]).graph,
        "unsupported datatype TYPE_FP64",
    ),
    "rows": (
        "tensorrt",
        PACKED_CONFIG.replace("max_batch_size: 4", "max_batch_size: 5") + ANY_DEVICE,
        PACKED,
        "configuration specified max-batch 5 but TensorRT engine only supports max-batch 4",
    ),
}
"""Backend, config and graph of models that must not load, with part of the error text."""


def write_models(repository: Path) -> list[str]:
    """Write all models; returns the names of those that load."""
    for backend in BACKENDS:
        for name, model in (*SHARED.items(), ("typed", typed(TYPES[backend]))):
            folder = repository / f"{name}_{backend}"
            if backend == "onnxruntime":
                write_graphs(folder, model.config + ON_CPU, {"1/model.onnx": model.graph})
            else:
                write_engine(folder, model.config + ANY_DEVICE, model.graph, [model.ranges])
    of_openvino = {
        "unbatched": Model(UNBATCHED_CONFIG, UNBATCHED, {}),
        "typed": typed(TYPES["openvino"], batches=False),
        "full": Model(FULL_BATCHES, DOUBLE, {}),
    }
    for name, model in of_openvino.items():
        config = model.config if name == "full" else model.config + OF_ONNX
        files = {"1/model.onnx": model.graph}
        write_graphs(repository / f"{name}_openvino", config, files, backend="openvino")
    loading = [folder.name for folder in repository.iterdir()]
    for name, (config, graphs) in ONNX_MODELS.items():
        write_graphs(repository / name, config, graphs)
    for name, (backend, config, graph, _) in REFUSED.items():
        if backend == "tensorrt":
            write_engine(repository / name, config, graph, [PACKED_RANGES])
        else:
            write_graphs(repository / name, config, {"1/model.onnx": graph}, backend=backend)
    return [*loading, *ONNX_MODELS]


def write_graphs(
    folder: Path, config: str, graphs: Mapping[str, str], *, backend: str = "onnxruntime"
) -> None:
    """Write a model of ONNX files; `graphs` maps a path (``1/model.onnx``) to a graph's text."""
    folder.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(f'backend: "{backend}"\n{config}', encoding="utf-8")
    for path, text in graphs.items():
        model: Any = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 17]>{text}')
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(model.SerializeToString())
