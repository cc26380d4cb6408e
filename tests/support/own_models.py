"""Pipelines around own models: a detector of bright rectangles, and a network for tables."""

import io
import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from PIL import Image, ImageDraw
from safetensors.numpy import save_file

SIZE = 64
"""Height and width of the detector's input."""
STRIDE = 2
SIDES = (12, 20, 28)
"""Heights and widths of the boxes that the detector knows."""
RING = 4
"""Width of the dark frame around a bright rectangle."""

HOOKS = '''
"""Letterbox before the detector, and non-maximum suppression behind it."""

import io

import numpy as np
import onnx
from PIL import Image

SIZE = 64


def setup(context):
    global LABELS
    LABELS = (context.folder / "labels.txt").read_text().split()


def preprocess(rows, parameters):
    pixels = np.zeros((len(rows["image"]), 3, SIZE, SIZE), np.float32)
    scale = np.zeros((len(pixels), 1), np.float32)
    for row, data in enumerate(rows["image"]):
        try:
            image = Image.open(io.BytesIO(data)).convert("RGB")
        except OSError as error:
            raise ValueError(f"the image cannot be decoded: {error}", row) from error
        scale[row] = SIZE / max(image.size)
        width, height = (max(1, round(side * scale[row, 0])) for side in image.size)
        small = np.asarray(image.resize((width, height)), np.float32) / 255
        pixels[row, :, :height, :width] = small.transpose(2, 0, 1)
    return {"images": pixels, "scale": scale}


def postprocess(arrays, parameters):
    boxes, labels, scores = [], [], []
    for found, score, scale in zip(arrays["boxes"], arrays["scores"], arrays["scale"]):
        kept = _suppress(found, score, parameters["threshold"], parameters["overlap"])
        boxes.append(found[kept] / scale)
        labels.append([LABELS[0]] * len(kept))
        scores.append(score[kept])
    return {"box": boxes, "label": labels, "score": scores}


def _suppress(boxes, scores, least, overlap):
    order = np.flatnonzero(scores >= least)
    order = order[np.argsort(-scores[order], kind="stable")]
    kept = []
    while len(order):
        first, order = order[0], order[1:]
        kept.append(first)
        low = np.maximum(boxes[first, :2], boxes[order, :2])
        high = np.minimum(boxes[first, 2:], boxes[order, 2:])
        shared = np.prod(np.clip(high - low, 0, None), axis=1)
        areas = np.prod(boxes[:, 2:] - boxes[:, :2], axis=1)
        order = order[shared / (areas[first] + areas[order] - shared) < overlap]
    return kept
'''

SPEC: dict[str, Any] = {
    "task": "model",
    "model": {"onnx": "detector.onnx"},
    "files": ["labels.txt"],
    "inputs": {"image": {"type": "bytes"}},
    "parameters": {
        "threshold": {"type": "float", "default": 0.5, "min": 0, "max": 1},
        "overlap": {"type": "float", "default": 0.1, "min": 0, "max": 1},
    },
    "outputs": {
        "box": {"type": "float", "shape": ["detections", 4], "metric": "iou"},
        "label": {"type": "text", "shape": ["detections"]},
        "score": {"type": "float", "shape": ["detections"]},
    },
}


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


def picture(boxes: Sequence[tuple[int, int, int, int]], size: tuple[int, int]) -> bytes:
    """Return a PNG file with bright rectangles ``x1, y1, x2, y2`` on a dark ground."""
    image = Image.new("RGB", size, (20, 20, 24))
    for x1, y1, x2, y2 in boxes:
        ImageDraw.Draw(image).rectangle((x1, y1, x2 - 1, y2 - 1), fill=(235, 230, 240))
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


PICTURES: Sequence[tuple[tuple[int, int], list[tuple[int, int, int, int]]]] = (
    ((64, 64), [(10, 10, 30, 22)]),
    ((128, 128), [(20, 20, 44, 60), (76, 80, 116, 104)]),
    ((96, 64), []),
    ((256, 128), [(40, 40, 88, 88)]),
    ((64, 128), [(12, 12, 52, 36), (8, 72, 48, 112)]),
)
"""Size of each picture, and its rectangles."""


def write_detector(folder: Path, **fields: Any) -> Path:
    """Write a pipeline that detects bright rectangles; `fields` override its spec."""
    folder.mkdir(parents=True)
    save_detector(folder / "detector.onnx")
    (folder / "labels.txt").write_text("bright\n")
    (folder / "hooks.py").write_text(textwrap.dedent(HOOKS).lstrip())
    rows = []
    for number, (size, boxes) in enumerate(PICTURES):
        (folder / f"{number}.png").write_bytes(picture(boxes, size))
        rows.append({"image": f"{number}.png"})
    write_rows(folder, rows)
    (folder / "pipeline.yaml").write_text(json.dumps({**SPEC, **fields}))
    return folder


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


CHAIN_HOOKS = """


def crop(arrays, parameters):
    if not parameters["threshold"]:
        raise ValueError("a threshold is needed", 0)
    images, where, counts = [], [], []
    for pixels, boxes, scores in zip(arrays["pixels"], arrays["boxes"], arrays["scores"]):
        kept = _suppress(boxes, scores, parameters["threshold"], parameters["overlap"])
        counts.append(len(kept))
        for x1, y1, x2, y2 in boxes[kept].round().astype(int):
            part = pixels[:, max(y1, 0) : max(y2, y1 + 1), max(x1, 0) : max(x2, x1 + 1)]
            images.append(_fit(part) if part.size else np.zeros((3, 8, 8), np.float32))
        where.append(boxes[kept])
    where = np.concatenate(where) / np.repeat(arrays["scale"], counts, axis=0)
    return {"parts": np.array(images), "where": where}, counts


def _fit(part):
    rows, columns = (np.linspace(0, size - 1, 8).round().astype(int) for size in part.shape[1:])
    return part[:, rows][:, :, columns]


def postprocess(arrays, rows, counts):
    ends = np.cumsum(counts)[:-1]
    tall = arrays["shape"].argmax(axis=1)
    return {
        "box": np.split(arrays["where"], ends),
        "label": [[("light", "dark")[i] for i in part] for part in np.split(tall, ends)],
        "size": [len(data) for data in rows["image"]],
    }
"""


def write_chain(folder: Path, **fields: Any) -> Path:
    """Write a pipeline that detects bright rectangles and classifies each of them."""
    write_detector(folder)
    nodes = [
        NODE("Flatten", ["parts"], ["flat"], axis=1),
        NODE("MatMul", ["flat", "weight"], ["product"]),
        NODE("Add", ["product", "bias"], ["shape"]),
    ]
    weight = np.stack([np.full(192, 1 / 192), np.full(192, -1 / 192)], axis=1)
    save_graph(
        folder / "classifier.onnx",
        nodes,
        [MAKE("parts", FLOAT, ["n", 3, 8, 8])],
        [MAKE("shape", FLOAT, ["n", 2])],
        {"weight": weight.astype(np.float32), "bias": np.array([0, 1], np.float32)},
    )
    before = HOOKS[: HOOKS.index("def postprocess")] + HOOKS[HOOKS.index("def _suppress") :]
    before = before.replace("import onnx\n", "")
    before = before.replace('"scale": scale}', '"scale": scale, "pixels": pixels}')
    (folder / "hooks.py").write_text(before.lstrip() + CHAIN_HOOKS)
    spec = {key: value for key, value in SPEC.items() if key not in ("model", "outputs")} | {
        "models": {
            "detector": {"onnx": "detector.onnx"},
            "classifier": {
                "onnx": "classifier.onnx",
                "step": "crop",
                "core": {"max_batch_size": 64},
            },
        },
        "outputs": {
            "box": {"type": "float", "shape": ["detections", 4], "metric": "iou"},
            "label": {"type": "text", "shape": ["detections"]},
            "size": {"type": "int"},
        },
        **fields,
    }
    (folder / "pipeline.yaml").write_text(json.dumps(spec))
    return folder
