"""Small ONNX models and their configs, for the tests of the local ONNX Runtime backend."""

from __future__ import annotations

from pathlib import Path

# One output for each kind of batch_input, broadcast over the batch dimension of `tag`.
DESCRIBED = """
described (int32[T] tokens, float[B,1] tag, int32[R] counts, float[R] sums, int32[Q] bounds,
           int32[M] longest, int32[B,K] shapes, int32[S] strides)
=> (int32[B,N] seen, int32[B,N] counts_out, float[B,N] sums_out, int32[B,N] bounds_out,
    int32[B,1] longest_out, int32[B,K] shapes_out, int32[B,N] strides_out)
<int64[1] front = {0}> {
  spread_f = Sub(tag, tag)
  spread = Cast<to: int = 6>(spread_f)
  tokens_row = Unsqueeze(tokens, front)
  seen = Add(spread, tokens_row)
  counts_row = Unsqueeze(counts, front)
  counts_out = Add(spread, counts_row)
  sums_row = Unsqueeze(sums, front)
  sums_out = Add(spread_f, sums_row)
  bounds_row = Unsqueeze(bounds, front)
  bounds_out = Add(spread, bounds_row)
  longest_shape = Shape(longest)
  longest_size = Cast<to: int = 6>(longest_shape)
  longest_out = Add(spread, longest_size)
  shapes_out = Identity(shapes)
  strides_row = Unsqueeze(strides, front)
  strides_out = Add(spread, strides_row)
}
"""
DESCRIBED_CONFIG = """
max_batch_size: 4
input { name: "tokens" data_type: TYPE_INT32 dims: [-1] allow_ragged_batch: true }
input { name: "tag" data_type: TYPE_FP32 dims: [1] }
batch_input { kind: BATCH_ELEMENT_COUNT target_name: "counts" data_type: TYPE_INT32
  source_input: "tokens" }
batch_input { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "sums" data_type: TYPE_FP32
  source_input: "tokens" }
batch_input { kind: BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO target_name: "bounds"
  data_type: TYPE_INT32 source_input: "tokens" }
batch_input { kind: BATCH_MAX_ELEMENT_COUNT_AS_SHAPE target_name: "longest" data_type: TYPE_INT32
  source_input: "tokens" }
batch_input { kind: BATCH_ITEM_SHAPE target_name: "shapes" data_type: TYPE_INT32
  source_input: "tokens" }
batch_input { kind: BATCH_ITEM_SHAPE_FLATTEN target_name: "strides" data_type: TYPE_INT32
  source_input: "tokens" }
output { name: "seen" data_type: TYPE_INT32 dims: [-1] }
output { name: "counts_out" data_type: TYPE_INT32 dims: [-1] }
output { name: "sums_out" data_type: TYPE_FP32 dims: [-1] }
output { name: "bounds_out" data_type: TYPE_INT32 dims: [-1] }
output { name: "longest_out" data_type: TYPE_INT32 dims: [1] }
output { name: "shapes_out" data_type: TYPE_INT32 dims: [-1] }
output { name: "strides_out" data_type: TYPE_INT32 dims: [-1] }
dynamic_batching { preferred_batch_size: [4] max_queue_delay_microseconds: 10000000 }
instance_group { kind: KIND_CPU count: 1 }
"""

# A small packed core: the mean of a table's vectors over the first `length` tokens of each row.
PACKED = """
packed (int32[T] tokens, int32[B,1] length, int32[B] stride)
=> (float[B,4] mean, float[V] each)
<float[10,4] table = {0.9,0.1,0.2,0.3, 1.4,1.1,1.2,1.3, 2.4,2.1,2.2,2.3, 3.4,3.1,3.2,3.3,
  4.4,4.1,4.2,4.3, 5.4,5.1,5.2,5.3, 6.4,6.1,6.2,6.3, 7.4,7.1,7.2,7.3, 8.4,8.1,8.2,8.3,
  9.4,9.1,9.2,9.3}, int64 zero = {0}, int64 one = {1}, int64[1] last = {1}, int64[1] front = {0},
  int64[1] flat = {-1}> {
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
  waves = Sin(vectors)
  each = Reshape(waves, flat)
}
"""
PACKED_CONFIG = """
max_batch_size: 32
input { name: "tokens" data_type: TYPE_INT32 dims: [-1] allow_ragged_batch: true }
input { name: "length" data_type: TYPE_INT32 dims: [1] }
batch_input { kind: BATCH_ITEM_SHAPE_FLATTEN target_name: "stride" data_type: TYPE_INT32
  source_input: "tokens" }
output { name: "mean" data_type: TYPE_FP32 dims: [4] }
output { name: "each" data_type: TYPE_FP32 dims: [-1, 4] }
batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "each" source_input: "tokens" }
"""
PACKED_BATCHING = "dynamic_batching { max_queue_delay_microseconds: 20000 }\n"
ONE_INSTANCE = "instance_group { kind: KIND_CPU count: 1 }\n"
WARM_UP = """
model_warmup { name: "zeros" batch_size: 3
  inputs { key: "tokens" value { data_type: TYPE_INT32 dims: [5] zero_data: true } }
  inputs { key: "length" value { data_type: TYPE_INT32 dims: [1] zero_data: true } } }
"""

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

ONNX_TYPES = {
    "BOOL": "bool",
    "UINT8": "uint8",
    "UINT16": "uint16",
    "UINT32": "uint32",
    "UINT64": "uint64",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "FP16": "float16",
    "FP32": "float",
    "FP64": "double",
    "STRING": "string",
}
NUMPY_TYPES = {
    name: {"FP16": "float16", "FP32": "float32", "FP64": "float64"}.get(name, name.lower())
    for name in ONNX_TYPES
}
TYPED = "typed ({}) => ({}) {{ {} }}".format(
    ", ".join(f"{onnx}[B,2] {name}_in" for name, onnx in ONNX_TYPES.items()),
    ", ".join(f"{onnx}[B,2] {name}_out" for name, onnx in ONNX_TYPES.items()),
    " ".join(f"{name}_out = Identity({name}_in)" for name in ONNX_TYPES),
)
TYPED_CONFIG = "max_batch_size: 4\n" + "".join(
    f'{role}put {{ name: "{name}_{role}" data_type: TYPE_{name} dims: [2] }}\n'
    for role in ("in", "out")
    for name in ONNX_TYPES
)

# No batch dimension; a scalar input, a scalar output, and an input with a default value.
UNBATCHED = """
unbatched (float[N] x, float[] factor, float[1] bias = {0.5}) => (float[N] y, float[] top) {
  scaled = Mul(x, factor)
  y = Add(scaled, bias)
  top = ReduceMax<keepdims: int = 0>(y)
}
"""
UNBATCHED_CONFIG = """
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

# An output that has a row for each row whose length is not 0. The number of tokens must be even.
FAULTY = """
faulty (int32[T] tokens, int32[B,1] length, int32[B] stride) => (int32[B,1] kept)
<int64[2] pairs = {2, -1}, int64 zero = {0}> {
  halves = Reshape(tokens, pairs)
  total = ReduceSum<keepdims: int = 0>(halves)
  nothing = Sub(total, total)
  places = NonZero(length)
  rows = Gather(places, zero)
  lengths = Gather(length, rows)
  kept = Add(lengths, nothing)
}
"""
FAULTY_CONFIG = """
max_batch_size: 3
input { name: "tokens" data_type: TYPE_INT32 dims: [-1] allow_ragged_batch: true }
input { name: "length" data_type: TYPE_INT32 dims: [1] }
batch_input { kind: BATCH_ITEM_SHAPE_FLATTEN target_name: "stride" data_type: TYPE_INT32
  source_input: "tokens" }
output { name: "kept" data_type: TYPE_INT32 dims: [1] }
dynamic_batching { preferred_batch_size: [3] max_queue_delay_microseconds: 10000000 }
instance_group { kind: KIND_CPU count: 1 }
"""

# A scattered output without its last element.
SHORT = """
short (int32[T] tokens) => (int32[V] each)
<int64[1] front = {0}, int64[1] back = {-1}> { each = Slice(tokens, front, back) }
"""
TWO_TARGETS = "two_targets (int32[T] tokens) => (int32[V] each, int32[V] negative) {"
TWO_TARGETS += " each = Identity(tokens) negative = Neg(tokens) }"
SCATTERED_CONFIG = """
max_batch_size: 2
input {{ name: "tokens" data_type: TYPE_INT32 dims: [-1] allow_ragged_batch: true }}
{outputs}
batch_output {{ kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: [{targets}]
  source_input: "tokens" }}
dynamic_batching {{ preferred_batch_size: [2] max_queue_delay_microseconds: 10000000 }}
instance_group {{ kind: KIND_CPU count: 1 }}
"""


def scattered_config(*targets: str) -> str:
    """Return the config of a model whose outputs are the targets of one `batch_output`."""
    outputs = (f'output {{ name: "{name}" data_type: TYPE_INT32 dims: [-1] }}' for name in targets)
    names = ", ".join(f'"{name}"' for name in targets)
    return SCATTERED_CONFIG.format(outputs="\n".join(outputs), targets=names)


TEXTS = "texts (string[B,1] x) => (string[B,1] y) { y = Identity(x) }"
TEXTS_CONFIG = """
max_batch_size: 2
input { name: "x" data_type: TYPE_STRING dims: [1] }
output { name: "y" data_type: TYPE_STRING dims: [1] }
dynamic_batching { preferred_batch_size: [2] max_queue_delay_microseconds: 10000000 }
instance_group { kind: KIND_CPU count: 1 }
"""

# Config and graphs of each model, as arguments of `write_model`.
MODELS: dict[str, tuple[str, dict[str, str]]] = {
    "described": (DESCRIBED_CONFIG, {"1/model.onnx": DESCRIBED}),
    "packed": (
        PACKED_CONFIG + PACKED_BATCHING + ONE_INSTANCE,
        {"1/model.onnx": PACKED},
    ),
    "warmed": (
        PACKED_CONFIG + ONE_INSTANCE + WARM_UP,
        {"1/model.onnx": PACKED},
    ),
    "packed_twice": (
        PACKED_CONFIG + PACKED_BATCHING + "instance_group { kind: KIND_CPU count: 2 }",
        {"1/model.onnx": PACKED},
    ),
    "padded": (PADDED_CONFIG, {"1/model.onnx": PADDED}),
    "typed": (TYPED_CONFIG, {"1/model.onnx": TYPED}),
    "unbatched": (UNBATCHED_CONFIG, {"1/model.onnx": UNBATCHED}),
    "reshaped": (
        RESHAPED_CONFIG,
        # The native backend accepts a folder in place of the file, too.
        {"1/other.onnx": DOUBLE, "2/other.onnx/model.onnx": SQUARE},
    ),
    "completed": ("", {"1/model.onnx": DOUBLE}),
    "completed_unbatched": ("", {"1/model.onnx": UNBATCHED}),
    "faulty": (FAULTY_CONFIG, {"1/model.onnx": FAULTY}),
    "short": (scattered_config("each"), {"1/model.onnx": SHORT}),
    "two_targets": (scattered_config("each", "negative"), {"1/model.onnx": TWO_TARGETS}),
    "texts": (TEXTS_CONFIG, {"1/model.onnx": TEXTS}),
}

# Config and graphs of models that must not load, with part of the error text.
REFUSED: dict[str, tuple[str, dict[str, str], str]] = {
    "no_file": (PACKED_CONFIG, {"1/elsewhere.onnx": PACKED}, "unable to find"),
    "not_ragged": (
        PACKED_CONFIG.replace("allow_ragged_batch: true", ""),
        {"1/model.onnx": PACKED},
        "'tokens' is TYPE_INT32 [-1,-1] in the config and TYPE_INT32 [-1] in the model",
    ),
    "no_batching": (
        "max_batch_size: 2",
        {"1/model.onnx": UNBATCHED},
        "model does not support batching while non-zero max_batch_size is specified",
    ),
    "parameter": (
        PADDED_CONFIG + 'parameters { key: "execution_mode" value { string_value: "2" } }',
        {"1/model.onnx": PADDED},
        "Expected values for  execution_mode are 0 or 1 but got 2",
    ),
    "sequence": (
        PADDED_CONFIG.replace("dynamic_batching", "sequence_batching").replace(
            "max_queue_delay_microseconds: 20000", ""
        ),
        {"1/model.onnx": PADDED},
        "sequence_batching is not supported by the local emulation",
    ),
}


def write_model(folder: Path, config: str, graphs: dict[str, str]) -> None:
    """Write a model: its config, and by path (``1/model.onnx``) graphs in ONNX's text form."""
    import onnx.parser

    folder.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(f'backend: "onnxruntime"\n{config}', encoding="utf-8")
    for path, text in graphs.items():
        header = '<ir_version: 9, opset_import: ["": 17]>'
        model = onnx.parser.parse_model(header + text)
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(model.SerializeToString())
