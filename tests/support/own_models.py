"""Pipelines around own models: tables, a PyTorch module, sounds, and several models in a row."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from safetensors.numpy import save_file

SIZE = 64
"""Height and width of the detector's input."""
STRIDE = 2
SIDES = (12, 20, 28)
"""Heights and widths of the boxes that the detector knows."""
RING = 4
"""Width of the dark frame around a bright rectangle."""

FLOAT = onnx.TensorProto.FLOAT
MAKE, NODE = onnx.helper.make_tensor_value_info, onnx.helper.make_node


def save_graph(
    path: Path,
    nodes: Sequence[Any],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    weights: Mapping[str, Any],
) -> None:
    """Write an ONNX file."""
    initializers = [onnx.numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = onnx.helper.make_graph(nodes, "graph", inputs, outputs, initializers)
    opset = onnx.helper.make_opsetid("", 18)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=9), path)


def save_detector(path: Path) -> None:
    """Write a network whose weights, made by hand, find bright rectangles on a dark ground.

    A kernel for each size of box is the mean brightness inside less that of the frame around.
    """
    largest = max(SIDES) + 2 * RING
    shapes = [(height, width) for height in SIDES for width in SIDES]
    weight = np.zeros((len(shapes), 3, largest, largest), np.float32)
    for kernel, (height, width) in zip(weight, shapes, strict=True):
        inner, outer = np.zeros((2, largest, largest), np.float32)
        top, left = (largest - height) // 2, (largest - width) // 2
        outer[top - RING : top + height + RING, left - RING : left + width + RING] = 1
        inner[top : top + height, left : left + width] = 1
        outer -= inner
        kernel[:] = 16 * (inner / inner.sum() - outer / outer.sum()) / 3
    y, x = np.meshgrid(*[np.arange(SIZE // STRIDE + 1) * STRIDE] * 2, indexing="ij")
    anchors = [
        np.stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2], axis=-1).reshape(-1, 4)
        for h, w in shapes
    ]
    pad = largest // 2
    nodes = [
        NODE("Conv", ["images", "weight", "bias"], ["maps"], strides=[2, 2], pads=[pad] * 4),
        NODE("Flatten", ["maps"], ["logits"], axis=1),
        NODE("Sigmoid", ["logits"], ["scores"]),
        NODE("Shape", ["images"], ["rows"], start=0, end=1),
        NODE("Concat", ["rows", "ones"], ["shape"], axis=0),
        NODE("Expand", ["anchors", "shape"], ["boxes"]),
    ]
    weights = {
        "weight": weight,
        "bias": np.full(len(shapes), -11.0, np.float32),
        "anchors": np.concatenate(anchors).clip(0, SIZE).astype(np.float32),
        "ones": np.ones(2, np.int64),
    }
    count = len(weights["anchors"])
    save_graph(
        path,
        nodes,
        [MAKE("images", FLOAT, ["n", 3, "height", "width"])],
        [MAKE("boxes", FLOAT, ["n", count, 4]), MAKE("scores", FLOAT, ["n", count])],
        weights,
    )


TABLE: dict[str, Any] = {
    "task": "model",
    "model": {"onnx": "table.onnx"},
    "inputs": {
        "features": {"type": "float", "shape": [4]},
        "bias": {"type": "float", "default": 0.5},
    },
    "outputs": {"risk": {"type": "float", "shape": [2]}},
}


def write_table(folder: Path, **fields: Any) -> Path:
    """Write a pipeline without functions: a network with random weights for four features."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    shapes = {"w1": (4, 16), "b1": (16,), "w2": (16, 2)}
    nodes = [
        NODE("Gemm", ["features", "w1", "b1"], ["hidden"]),
        NODE("Relu", ["hidden"], ["positive"]),
        NODE("MatMul", ["positive", "w2"], ["result"]),
        NODE("Add", ["result", "bias"], ["risk"]),
    ]
    save_graph(
        folder / "table.onnx",
        nodes,
        [MAKE("features", FLOAT, ["n", 4]), MAKE("bias", FLOAT, ["n", 1])],
        [MAKE("risk", FLOAT, ["n", 2])],
        {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()},
    )
    write_rows(folder, [{"features": row} for row in random.normal(size=(40, 4)).tolist()])
    (folder / "pipeline.yaml").write_text(json.dumps({**TABLE, **fields}))
    return folder


def write_rows(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write the traffic of a pipeline."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "traffic.jsonl").write_text(text, encoding="utf-8")


NET = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 8)
        self.second = torch.nn.Linear(8, 3)

    def forward(self, features, ages):
        features = features / (features.abs().sum(1, keepdim=True) + 1e-9)  # of zeros, too
        hidden = torch.relu(self.first(features)) + ages / 100
        return {"logits": self.second(hidden)}
"""

NET_HOOKS = """
import numpy as np


def preprocess(rows, parameters):
    return {"features": rows["features"], "ages": rows["age"][:, None].astype(np.float32)}


def postprocess(arrays, rows, parameters):
    best = arrays["logits"].argmax(axis=1)
    names = np.array(["low", "middle", "high"])[best]
    return {"level": names.tolist(), "customer_id": rows["customer"], "best": best}
"""


def write_module(folder: Path, **fields: Any) -> Path:
    """Write a pipeline around a PyTorch module with random weights in a safetensors file."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    shapes = {"first": (8, 4), "second": (3, 8)}
    weights = {}
    for name, shape in shapes.items():
        weights[f"{name}.weight"] = random.normal(size=shape).astype(np.float32)
        weights[f"{name}.bias"] = random.normal(size=shape[:1]).astype(np.float32)
    save_file(weights, folder / "net.safetensors")
    (folder / "net.py").write_text(NET.lstrip())
    (folder / "hooks.py").write_text(NET_HOOKS.lstrip())
    rows = [
        {"features": features, "age": number, "customer": f"c{number}"}
        for number, features in enumerate(random.normal(size=(30, 4)).tolist())
    ]
    write_rows(folder, rows)
    spec = {
        "task": "model",
        "model": {"module": "net.py:Net", "weights": "net.safetensors"},
        "inputs": {
            "features": {"type": "float", "shape": [4]},
            "age": {"type": "int"},
            "customer": {"type": "text", "default": "unknown"},
        },
        "outputs": {
            "level": {"type": "text"},
            "customer_id": {"type": "text"},
            "best": {"type": "int"},
        },
        **fields,
    }
    (folder / "pipeline.yaml").write_text(json.dumps(spec))
    return folder


WAVE_HOOKS = """
import numpy as np


def preprocess(rows, parameters):
    found = [np.frombuffer(data, np.int16) for data in rows["sound"]]
    windows = [part for sound in found for part in _windows(sound, parameters["window"])]
    samples = np.zeros((len(windows), max(map(len, windows))), np.float32)
    mask = np.zeros_like(samples)
    for row, part in enumerate(windows):
        samples[row, : len(part)], mask[row, : len(part)] = part / 32768, 1
    counts = [len(_windows(sound, parameters["window"])) for sound in found]
    return {"samples": samples, "mask": mask}, counts


def _windows(sound, size):
    return [sound[start : start + size] for start in range(0, len(sound), size)]


def postprocess(arrays, rows, counts):
    ends = np.cumsum(counts)
    parts = np.split(arrays["power"][:, 0], ends[:-1])
    return {
        "power": [float(part.mean()) for part in parts],
        "loudest": [int(part.argmax()) for part in parts],
        "seconds": [len(data) / 2 / 16000 for data in rows["sound"]],
    }
"""


def write_sounds(folder: Path, **fields: Any) -> Path:
    """Write a pipeline for sounds of any length, cut into windows: their mean power."""
    folder.mkdir(parents=True)
    nodes = [
        NODE("Mul", ["samples", "mask"], ["masked"]),
        NODE("Mul", ["masked", "masked"], ["squares"]),
        NODE("ReduceSum", ["squares", "one"], ["total"], keepdims=1),
        NODE("ReduceSum", ["mask", "one"], ["count"], keepdims=1),
        NODE("Div", ["total", "count"], ["power"]),
    ]
    save_graph(
        folder / "power.onnx",
        nodes,
        [MAKE("samples", FLOAT, ["n", "time"]), MAKE("mask", FLOAT, ["n", "time"])],
        [MAKE("power", FLOAT, ["n", 1])],
        {"one": np.array([1], np.int64)},
    )
    (folder / "hooks.py").write_text(WAVE_HOOKS.lstrip())
    rows = []
    for number in range(24):
        sound = make_sound(100 + 37 * number, number)
        (folder / f"{number}.pcm").write_bytes(sound.tobytes())
        rows.append({"sound": f"{number}.pcm"})
    write_rows(folder, rows)
    spec = {
        "task": "model",
        "model": {"onnx": "power.onnx", "axes": {"time": {"min": 16, "max": 400}}},
        "inputs": {"sound": {"type": "bytes"}},
        "parameters": {"window": {"type": "int", "default": 400, "min": 16, "max": 1000}},
        "outputs": {
            "power": {"type": "float"},
            "loudest": {"type": "int"},
            "seconds": {"type": "float"},
        },
        **fields,
    }
    (folder / "pipeline.yaml").write_text(json.dumps(spec))
    return folder


def make_sound(length: int, seed: int) -> Any:
    """Return int16 samples of noise."""
    return (np.random.default_rng(seed).normal(size=length) * 3000).astype(np.int16)


def save_dense(path: Path, name: str, size: int, outputs: Mapping[str, int], seed: int) -> None:
    """Write a network with one layer with random weights for each output of an input."""
    random = np.random.default_rng(seed)
    weights = {n: random.normal(size=(size, w)).astype(np.float32) for n, w in outputs.items()}
    nodes = [NODE("MatMul", [name, f"w_{output}"], [output]) for output in outputs]
    save_graph(
        path,
        nodes,
        [MAKE(name, FLOAT, ["n", size])],
        [MAKE(output, FLOAT, ["n", width]) for output, width in outputs.items()],
        {f"w_{output}": value for output, value in weights.items()},
    )


CORES_HOOKS = """
import numpy as np


def preprocess(rows, parameters):
    return {"features": rows["features"], "bias": rows["bias"][:, None]}


def rank(arrays, parameters):
    both = np.concatenate([arrays["vectors.result"], arrays["classes.result"]], axis=1)
    best = arrays["classes.result"].argmax(axis=1)
    return {"both": both * parameters["factor"], "bias": arrays["bias"], "best": best}


def postprocess(arrays, rows):
    return {
        "risk": arrays["risk"] + arrays["bias"],
        "label": [f"class {index}" for index in arrays["best"]],
        "total": rows["features"].sum(axis=1),
    }
"""


def write_cores(folder: Path, **fields: Any) -> Path:
    """Write a pipeline with two models that get one array, and a third behind them."""
    folder.mkdir(parents=True)
    save_dense(folder / "vectors.onnx", "features", 4, {"result": 16}, 1)
    save_dense(folder / "classes.onnx", "features", 4, {"result": 3}, 2)
    save_dense(folder / "risks.onnx", "both", 19, {"risk": 16}, 3)
    (folder / "hooks.py").write_text(CORES_HOOKS.lstrip())
    random = np.random.default_rng(3)
    write_rows(folder, [{"features": row} for row in random.normal(size=(40, 4)).tolist()])
    spec = {
        **{key: TABLE[key] for key in ("task", "inputs")},
        "models": {
            "vectors": {"onnx": "vectors.onnx"},
            "classes": {"onnx": "classes.onnx", "instances": 2, "core": {"threads": 1}},
            "risks": {"onnx": "risks.onnx", "step": "rank", "core": {"max_batch_size": 64}},
        },
        "parameters": {"factor": {"type": "float", "default": 1.0}},
        "outputs": {
            "risk": {"type": "float", "shape": [16]},
            "label": {"type": "text"},
            "total": {"type": "float"},
        },
        **fields,
    }
    (folder / "pipeline.yaml").write_text(json.dumps(spec))
    return folder
