"""Model repositories written by code for the tests of lint: good ones, and edits of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from onnx import TensorProto, helper

Files = dict[str, bytes]
"""Path relative to the repository -> content; a path that ends with a slash is an empty folder."""
Edit = Callable[[Files], None]

LOCK = "minilm/triptych.lock.json"
LAYOUTS = ("packed", "bucketed", "plan", "buckets")
"""ONNX cores of both layouts, and a packed and a bucketed TensorRT plan."""
EDGES = (16, 32, 64)

TRITON_IO = b"import json\n\nimport numpy as np\nimport triton_python_backend_utils as pb_utils\n"
MODEL_PY = b"""
import json
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

from .triton_io import np as numpy

try:
    import orjson
except ImportError:
    orjson = None


class TritonPythonModel:
    def initialize(self, args):
        self.tokenizer_file = Path(__file__).with_name("tokenizer.json")

    def execute(self, requests):
        return [None] * len(requests)
"""

PLAIN_PY = b"class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"

COMPLETING_PY = (
    PLAIN_PY + b"    @staticmethod\n    def auto_complete_config(config):\n        return config\n"
)
ENSEMBLE = """
name: "minilm"
platform: "ensemble"
max_batch_size: 32
input [{ name: "text" data_type: TYPE_STRING dims: [1] }]
output [{ name: "embedding" data_type: TYPE_FP32 dims: [384] }]
ensemble_scheduling {
  step [
    {
      model_name: "minilm_preprocess"
      model_version: -1
      input_map { key: "text" value: "text" }
      output_map { key: "input_ids" value: "input_ids" }
      output_map { key: "row_length" value: "row_length" }
    },
    {
      model_name: "minilm_core"
      model_version: -1
      input_map { key: "input_ids" value: "input_ids" }
      input_map { key: "row_length" value: "row_length" }
      output_map { key: "sentence_embedding" value: "sentence_embedding" }
    },
    {
      model_name: "minilm_postprocess"
      model_version: -1
      input_map { key: "sentence_embedding" value: "sentence_embedding" }
      output_map { key: "embedding" value: "embedding" }
    }
  ]
}
"""
PREPROCESS = """
name: "minilm_preprocess"
backend: "python"
max_batch_size: 32
input [{ name: "text" data_type: TYPE_STRING dims: [1] }]
output [
  { name: "input_ids" data_type: TYPE_INT32 dims: [-1] },
  { name: "row_length" data_type: TYPE_INT32 dims: [1] }
]
instance_group [{ count: 2 kind: KIND_CPU }]
dynamic_batching {
  default_queue_policy { default_timeout_microseconds: 5000000 max_queue_size: 1024 }
}
"""
POSTPROCESS = """
name: "minilm_postprocess"
backend: "python"
max_batch_size: 32
input [{ name: "sentence_embedding" data_type: TYPE_FP32 dims: [384] }]
output [{ name: "embedding" data_type: TYPE_FP32 dims: [384] }]
instance_group [{ count: 2 kind: KIND_CPU }]
dynamic_batching { }
"""
_CORE = """
name: "minilm_core"
backend: "%s"
max_batch_size: 32
input [
  { name: "input_ids" data_type: TYPE_INT32 dims: [-1] %s },
  { name: "row_length" data_type: TYPE_INT32 dims: [1] }
]
output [{ name: "sentence_embedding" data_type: TYPE_FP32 dims: [384] }]
%s
dynamic_batching {
  max_queue_delay_microseconds: 500
  default_queue_policy { default_timeout_microseconds: 5000000 max_queue_size: 1024 }
}
model_warmup [{
  name: "warm"
  batch_size: 2
  inputs { key: "input_ids" value { data_type: TYPE_INT32 dims: [16] zero_data: true } }
  inputs { key: "row_length" value { data_type: TYPE_INT32 dims: [1] zero_data: true } }
}]
"""
ROW_STRIDE = """
batch_input [{
  kind: BATCH_ITEM_SHAPE_FLATTEN
  target_name: "row_stride"
  data_type: TYPE_INT32
  source_input: "input_ids"
}]
"""
_CPU = "instance_group [{ count: 2 kind: KIND_CPU }]"
_GPU = "instance_group [{ count: 2 kind: KIND_GPU gpus: [0] profile: [%s] }]"


def graph_spec(edge: int, rows: int, fewest: int) -> str:
    """Return a CUDA graph for `fewest` to `rows` rows of `edge` tokens."""
    inputs = (
        f'input {{ key: "input_ids" value {{ dim: [{edge}] }} }} '
        'input { key: "row_length" value { dim: [1] } }'
    )
    lower = f"graph_lower_bound {{ batch_size: {fewest} {inputs} }}"
    return f"graph_spec {{ batch_size: {rows} {inputs} {lower} }}"


GRAPHS = tuple(
    graph_spec(edge, rows, fewest) for edge in EDGES for rows, fewest in ((1, 1), (8, 2), (32, 9))
)
_GRAPHS = f"optimization {{ cuda {{ graphs: true {' '.join(GRAPHS)} }} }}"
_RAGGED = "allow_ragged_batch: true"
_CORES = {
    "packed": ("onnxruntime", _RAGGED, ROW_STRIDE + _CPU),
    "bucketed": ("onnxruntime", "", _CPU),
    "plan": ("tensorrt", _RAGGED, ROW_STRIDE + _GPU % '"0"'),
    "buckets": ("tensorrt", "", _GPU % '"0", "1", "2"' + _GRAPHS),
}


@cache
def graph(
    layout: str,
    *,
    width: int = 384,
    rows: int | str = "rows",
    flat: bool = True,
    dtype: int = TensorProto.FLOAT,
    middle: int = TensorProto.FLOAT,
    ids: int = TensorProto.INT32,
    external: str = "",
) -> bytes:
    """A small ONNX file with the inputs and outputs of a core; `external` names a weights file."""
    packed = layout in ("packed", "plan")
    tokens = ["tokens"] if packed and flat else [rows, "tokens"]
    inputs = [
        helper.make_tensor_value_info("input_ids", ids, tokens),
        helper.make_tensor_value_info("row_length", TensorProto.INT32, [rows, 1]),
    ]
    if packed:
        inputs.append(helper.make_tensor_value_info("row_stride", TensorProto.INT32, [rows]))
    output = helper.make_tensor_value_info("sentence_embedding", dtype, [rows, width])
    weights = helper.make_tensor("w", TensorProto.FLOAT, [1, width], [0.0] * width)
    if external:
        weights.ClearField("float_data")
        weights.data_location = TensorProto.EXTERNAL
        weights.external_data.add(key="location", value=external)
    nodes = [
        helper.make_node("Cast", ["row_length"], ["length"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["length", "w"], ["product"]),
        helper.make_node("Cast", ["product"], ["middle"], "bf16", to=middle),
        helper.make_node("Cast", ["middle"], ["sentence_embedding"], to=dtype),
    ]
    body = helper.make_graph(nodes, "core", inputs, [output], initializer=[weights])
    model = helper.make_model(body, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    content: bytes = model.SerializeToString()
    return content


def step_settings(**own: object) -> bytes:
    """The settings of preprocess."""
    return json.dumps({"bucket_edges": list(EDGES), "max_length": EDGES[-1], **own}).encode()


def good_files(layout: str) -> Files:
    """Return the files of a repository without a fault, in one of `LAYOUTS`."""
    backend, ragged, extra = _CORES[layout]
    core = {"minilm_core/1/model.plan": b"a TensorRT plan"}
    if backend == "onnxruntime":
        core = {"minilm_core/1/model.onnx": graph(layout)}
    files = {
        "minilm/config.pbtxt": ENSEMBLE.encode(),
        "minilm/1/": b"",
        "minilm_preprocess/config.pbtxt": PREPROCESS.encode(),
        "minilm_preprocess/1/model.py": MODEL_PY,
        "minilm_preprocess/1/triton_io.py": TRITON_IO,
        "minilm_preprocess/1/settings.json": step_settings(),
        "minilm_preprocess/1/tokenizer.json": b"{}",
        "minilm_core/config.pbtxt": (_CORE % (backend, ragged, extra)).encode(),
        **core,
        "minilm_postprocess/config.pbtxt": POSTPROCESS.encode(),
        "minilm_postprocess/1/model.py": b"from .triton_io import np\n" + PLAIN_PY,
        "minilm_postprocess/1/settings.json": b"{}",
        "minilm_postprocess/1/triton_io.py": TRITON_IO,
    }
    files[LOCK] = b""
    return files


def profile(rows: tuple[int, int], **tokens: tuple[int, ...]) -> dict[str, Any]:
    """A profile for so many rows: packed over ``tokens=(fewest, most)``, else of ``edge=(n,)``."""
    least, most = rows
    shapes = {"row_length": ([least, 1], [most, 1])}
    if "edge" in tokens:
        shapes["input_ids"] = ([least, *tokens["edge"]], [most, *tokens["edge"]])
    else:
        low, high = tokens["tokens"]
        shapes |= {"input_ids": ([low], [high]), "row_stride": ([least], [most])}
    return {
        name: {"minimum": low, "optimum": high, "maximum": high}
        for name, (low, high) in shapes.items()
    }


PACKED = [profile((1, 32), tokens=(1, 32 * EDGES[-1]))]
BUCKETED = [profile((1, 32), edge=(edge,)) for edge in EDGES]


def engine_plan(profiles: list[dict[str, Any]]) -> dict[str, Any]:
    """Return an `EnginePlan` as it is in the lock."""
    return {"precision": "fp16", "profiles": profiles, "graph_specs": [], "options": {}}


def make_manifest(files: Files, **traffic: Any) -> bytes:
    """Return the lock of `files`."""
    core = files.get("minilm_core/config.pbtxt", b"")
    hashed = {n: c for n, c in files.items() if n != LOCK and not n.endswith("/")}
    lock = {
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in hashed.items()},
        "traffic": {"rows": 300, "truncated_share": 0.01, **traffic},
    }
    if b"tensorrt" in core:
        lock["plan"] = {"engine": engine_plan(PACKED if _RAGGED.encode() in core else BUCKETED)}
    return json.dumps(lock).encode()


def write_repository(root: Path, layout: str, *edits: Edit) -> Path:
    """Write a good repository with `edits`; the lock covers the edited files unless one sets it."""
    files = good_files(layout)
    for edit in edits:
        edit(files)
    if files.get(LOCK) == b"":
        files[LOCK] = make_manifest(files)
    for name, content in files.items():
        target = root / name
        if name.endswith("/"):
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
    return root


def replace(model: str, old: str, new: str) -> Edit:
    """Replace text in the config of `model`, wherever it occurs."""

    def edit(files: Files) -> None:
        text = files[f"{model}/config.pbtxt"].decode()
        if old not in text:
            raise ValueError(f"{old!r} is not in the config of {model}")
        files[f"{model}/config.pbtxt"] = text.replace(old, new).encode()

    return edit


def append(model: str, text: str) -> Edit:
    """Add text to the config of `model`."""

    def edit(files: Files) -> None:
        files[f"{model}/config.pbtxt"] += text.encode()

    return edit


def put(path: str, content: bytes | str) -> Edit:
    """Add or overwrite a file; with a trailing slash and no content, a folder."""

    def edit(files: Files) -> None:
        files[path] = content.encode() if isinstance(content, str) else content

    return edit


def remove(prefix: str) -> Edit:
    """Remove every file whose path starts with `prefix`."""

    def edit(files: Files) -> None:
        for name in [name for name in files if name.startswith(prefix)]:
            del files[name]

    return edit


def solo(extra: str = "", code: bytes | str = PLAIN_PY) -> Edit:
    """Add a Python model of its own, without batching, to the repository."""

    def edit(files: Files) -> None:
        tensor = "data_type: TYPE_FP32 dims: [1]"
        config = f"""
            name: "solo" backend: "python"
            input [{{ name: "a" {tensor} }}, {{ name: "b" {tensor} optional: true }}]
            output [{{ name: "c" {tensor} }}]
            instance_group [{{ count: 2 kind: KIND_CPU }}] {extra}"""
        put("solo/config.pbtxt", config)(files)
        put("solo/1/model.py", code)(files)

    return edit


def ensemble(name: str, inputs: str, outputs: str, *steps: str) -> Edit:
    """Add an ensemble without batching; a step is ``"model in=tensor ... > out=tensor ..."``."""

    def edit(files: Files) -> None:
        own = [
            f'{kind} {{ name: "{tensor}" data_type: TYPE_FP32 dims: [1] }}'
            for kind, tensors in (("input", inputs), ("output", outputs))
            for tensor in tensors.split()
        ]
        text = f'name: "{name}" platform: "ensemble" {" ".join(own)} ensemble_scheduling {{ '
        for step in steps:
            model, *maps = step.split()
            text += f'step {{ model_name: "{model}" model_version: -1 '
            kind = "input_map"
            for pair in maps:
                kind = "output_map" if pair == ">" else kind
                key, _, value = pair.partition("=")
                text += f'{kind} {{ key: "{key}" value: "{value}" }} ' if value else ""
            text += "} "
        put(f"{name}/config.pbtxt", text + "}")(files)
        put(f"{name}/1/", "")(files)

    return edit


def relock(**traffic: Any) -> Edit:
    """Write the lock now, over the files as they are."""

    def edit(files: Files) -> None:
        files[LOCK] = make_manifest(files, **traffic)

    return edit


def engine(profiles: list[dict[str, Any]] | None = None, **record: Any) -> Edit:
    """Write the lock now, with other profiles or the record of a finished engine."""

    def edit(files: Files) -> None:
        lock = json.loads(make_manifest(files))
        if profiles is not None:
            lock["plan"]["engine"] = engine_plan(profiles)
        lock["engine"] = record or None
        files[LOCK] = json.dumps(lock).encode()

    return edit
