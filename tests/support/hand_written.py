"""A model repository with an ensemble that was written by hand."""

from pathlib import Path

import numpy as np
import onnx

from tests.support.own_models import FLOAT, MAKE, NODE, save_graph

INT64 = onnx.TensorProto.INT64
NET = """backend: "onnxruntime"
max_batch_size: 16
input { name: "IDS" data_type: TYPE_INT64 dims: [-1] }
input { name: "MASK" data_type: TYPE_INT64 dims: [-1] }
output { name: "LOGITS" data_type: TYPE_FP32 dims: [3] }
instance_group { count: 2 kind: KIND_CPU }
"""
TOKENIZE_CONFIG = """backend: "python"
max_batch_size: 16
input { name: "TEXT" data_type: TYPE_STRING dims: [1] }
output { name: "IDS" data_type: TYPE_INT64 dims: [-1] }
output { name: "MASK" data_type: TYPE_INT64 dims: [-1] }
output { name: "LENGTH" data_type: TYPE_INT32 dims: [1] }
parameters { key: "lower" value: { string_value: "yes" } }
"""
TOKENIZE = """import json
import os

import numpy as np
import triton_python_backend_utils as pb_utils
from padding import pad


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.lower = parameters["lower"]["string_value"] == "yes"
        folder = os.path.join(args["model_repository"], args["model_version"])
        with open(os.path.join(folder, "end.txt")) as file:
            self.end = int(file.read())

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        texts = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()[:, 0]
        if not all(texts):
            error = pb_utils.TritonError("a text is empty")
            return pb_utils.InferenceResponse(output_tensors=[], error=error)
        rows = [[*(t.lower() if self.lower else t), self.end] for t in texts]
        ids, mask = pad(rows)
        length = np.array([[len(row)] for row in rows], np.int32)
        tensors = {"IDS": ids, "MASK": mask, "LENGTH": length}
        return pb_utils.InferenceResponse([pb_utils.Tensor(*item) for item in tensors.items()])
"""
PADDING = """import numpy as np


def pad(rows):
    ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for row, values in zip(ids, rows):
        row[: len(values)] = values
    return ids, (np.arange(ids.shape[1]) < [[len(row)] for row in rows]).astype(np.int64)
"""
DECODE_CONFIG = """backend: "python"
max_batch_size: 16
input { name: "LOGITS" data_type: TYPE_FP32 dims: [3] }
input { name: "TEXT" data_type: TYPE_STRING dims: [1] }
input { name: "LENGTH" data_type: TYPE_INT32 dims: [1] }
output { name: "LABEL" data_type: TYPE_STRING dims: [1] }
output { name: "SCORES" data_type: TYPE_FP32 dims: [3] }
"""
DECODE = """import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = pb_utils.get_output_config_by_name(json.loads(args["model_config"]), "SCORES")
        self.dtype = pb_utils.triton_string_to_numpy(config["data_type"])

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        names = ("LOGITS", "TEXT", "LENGTH")
        logits, texts, lengths = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in names
        )
        scores = np.exp(logits / lengths)
        scores = (scores / scores.sum(axis=1, keepdims=True)).astype(self.dtype)
        labels = [b"%d " % best + text for best, (text,) in zip(scores.argmax(axis=1), texts)]
        label = pb_utils.Tensor("LABEL", np.array(labels, object)[:, None])
        return pb_utils.InferenceResponse([label, pb_utils.Tensor("SCORES", scores)])
"""
ENSEMBLE = """platform: "ensemble"
max_batch_size: 16
input { name: "TEXT" data_type: TYPE_STRING dims: [1] }
output { name: "LABEL" data_type: TYPE_STRING dims: [1] }
output { name: "SCORES" data_type: TYPE_FP32 dims: [3] }
ensemble_scheduling {
  step [
    {
      model_name: "decode" model_version: -1
      input_map { key: "LOGITS" value: "logits" }
      input_map { key: "TEXT" value: "TEXT" }
      input_map { key: "LENGTH" value: "length" }
      output_map { key: "LABEL" value: "LABEL" }
      output_map { key: "SCORES" value: "SCORES" }
    },
    {
      model_name: "tokenize" model_version: -1
      input_map { key: "TEXT" value: "TEXT" }
      output_map { key: "IDS" value: "ids" }
      output_map { key: "MASK" value: "mask" }
      output_map { key: "LENGTH" value: "length" }
    },
    {
      model_name: "net" model_version: -1
      input_map { key: "IDS" value: "ids" }
      input_map { key: "MASK" value: "mask" }
      output_map { key: "LOGITS" value: "logits" }
    }
  ]
}
"""


def write_repository(root: Path) -> Path:
    """Write an ensemble of a tokenizer, a network with random weights, and a decoder."""
    texts = {
        "net/config.pbtxt": NET,
        "tokenize/config.pbtxt": TOKENIZE_CONFIG,
        "tokenize/1/model.py": TOKENIZE,
        "tokenize/1/padding.py": PADDING,
        "tokenize/1/end.txt": "7\n",
        "decode/config.pbtxt": DECODE_CONFIG,
        "decode/1/model.py": DECODE,
        "moods/config.pbtxt": ENSEMBLE,
    }
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    (root / "moods/1").mkdir()
    (root / "net/1").mkdir()
    random = np.random.default_rng(0)
    nodes = [
        NODE("Gather", ["table", "IDS"], ["vectors"]),
        NODE("Cast", ["MASK"], ["member"], to=FLOAT),
        NODE("Unsqueeze", ["member", "two"], ["members"]),
        NODE("Mul", ["vectors", "members"], ["kept"]),
        NODE("ReduceSum", ["kept", "one"], ["sum"], keepdims=0),
        NODE("MatMul", ["sum", "weight"], ["LOGITS"]),
    ]
    weights = {
        "table": random.normal(size=(256, 8)).astype(np.float32),
        "weight": random.normal(size=(8, 3)).astype(np.float32),
        "one": np.array([1]),
        "two": np.array([2]),
    }
    inputs = [MAKE(name, INT64, ["batch", "tokens"]) for name in ("IDS", "MASK")]
    outputs = [MAKE("LOGITS", FLOAT, ["batch", 3])]
    save_graph(root / "net/1/model.onnx", nodes, inputs, outputs, weights)
    return root
