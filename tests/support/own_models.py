"""Pipelines around own models: tables, a PyTorch module, sounds, and several models in a row."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from safetensors.numpy import save_file

from tests.support.client_toy import wait_until
from tests.support.project import quiet
from tests.support.scaffolding import run
from triptych.core.own_inputs import read_own_inputs
from triptych.spec.model_fields import load_model_spec

if TYPE_CHECKING:
    from triptych.building.build import BuildOutcome
    from triptych.core.inputs import PipelineInputs

SIZE = 64
"""Height and width of the images of `save_convolution`."""
SAMPLING = {"rate": 1.0, "window_s": 0.2}
"""Settings with which a server writes each row within a second."""

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


def save_convolution(path: Path) -> None:
    """Write a network of one convolution with random weights, of images to scores."""
    weight = np.random.default_rng(0).normal(size=(9, 3, 8, 8)).astype(np.float32) / 8
    nodes = [
        NODE("Conv", ["images", "weight", "bias"], ["maps"], strides=[2, 2]),
        NODE("Flatten", ["maps"], ["logits"], axis=1),
        NODE("Sigmoid", ["logits"], ["scores"]),
    ]
    save_graph(
        path,
        nodes,
        [MAKE("images", FLOAT, ["n", 3, SIZE, SIZE])],
        [MAKE("scores", FLOAT, ["n", 9 * ((SIZE - 8) // 2 + 1) ** 2])],
        {"weight": weight, "bias": np.zeros(len(weight), np.float32)},
    )


def read_own(base: Path, name: str, *overrides: str) -> PipelineInputs:
    """Read the pipeline in a folder ``base/pipelines/NAME``."""
    return read_own_inputs(load_model_spec(base / "pipelines" / name, overrides), quiet)


def build_own(base: Path, name: str, *overrides: str) -> BuildOutcome:
    """Build the pipeline into ``base/repository``."""
    from tests.support.builds import build

    return build(read_own(base, name, *overrides), base / "repository", quiet)


def folders_of(base: Path, *names: str) -> list[str]:
    """Options of a command: ``--NAME`` for each folder ``base/NAME``."""
    return [word for name in names for word in (f"--{name}", str(base / name))]


def monitor_samples(base: Path, name: str, rows: int) -> dict[str, Any]:
    """Wait until so many rows are stored in ``base/samples``; return what `monitor` finds."""

    def stored() -> int:
        texts = [file.read_text() for file in (base / "samples" / name).glob("*.jsonl")]
        return sum(text.count('"inputs"') for text in texts)

    wait_until(lambda: stored() >= rows, "samples")
    folders = folders_of(base, "pipelines", "repository", "samples", "reports")
    done = run("monitor", name, *folders, "--json")
    assert done.exit_code == 0, (done.output, done.exception)
    found = dict(json.loads(done.stdout))
    assert not found["alarms"]
    return found


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
