"""Real cores on real rows for the gate, and ways to break a graph."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from conftest import quiet, traffic_texts
from task_models import MODELS
from triptych.core.gate.cached import decoding_of
from triptych.core.gate.check import GateLabels, check
from triptych.core.gate.reference import reference_of
from triptych.core.gate.runs import RunBatch, open_core
from triptych.core.inputs import PipelineInputs, read_inputs
from triptych.core.requests import Expected, rows_of
from triptych.repository.records import GateResult
from triptych.spec.spec import load_spec
from triptych.spec.tasks.accuracy import metrics_of, thresholds

CONTEXT = "The lamp is kept by Ines in the old harbour house. "
IMAGES = 72
"""Number of pictures in traffic: so many that calibration has some."""


def write_task(base: Path, name: str, minilm: Path, rows: int = 40, **more: Any) -> Path:
    """The folder of a pipeline on one of the small models, with traffic of its task.

    `more` is put into the spec.
    """
    task, make = MODELS[name]
    folder = base / "pipelines" / name
    folder.mkdir(parents=True)
    spec: dict[str, Any] = {"task": task, "model": {"source": str(base / "models" / name)}, **more}
    make(base / "models" / name, minilm, traffic_texts())
    if task == "zero-shot-classification":
        spec["parameters"] = {"candidate_labels": ["billing", "a delivery", "something else"]}
    lines = traffic_of(task, traffic_texts()[:rows], folder)
    (folder / "pipeline.yaml").write_text(json.dumps(spec), encoding="utf-8")
    (folder / "traffic.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return folder


def traffic_of(task: str, texts: list[str], folder: Path) -> list[dict[str, Any]]:
    """Traffic of a task; pictures of noise are written into the folder of the pipeline."""
    if task == "image-classification":
        return [{"image": _image(folder / f"{number}.png", number)} for number in range(IMAGES)]
    if task == "question-answering":
        return [{"text": "Who keeps it?", "text_pair": CONTEXT + text} for text in texts]
    if task == "reranking":
        return [{"text": texts[i % 5], "text_pair": text} for i, text in enumerate(texts)]
    return [{"text": f"[MASK] {text}" if task == "fill-mask" else text} for text in texts]


def _image(path: Path, seed: int) -> str:
    """Write a picture of noise over one color; returns its name."""
    from PIL import Image

    random = np.random.default_rng(seed)
    pixels = random.integers(0, 200, 3) + random.integers(0, 56, (40, 40, 3))
    Image.fromarray(pixels.astype(np.uint8)).save(path, "PNG")
    return path.name


@dataclass(frozen=True)
class Bench:
    """A pipeline, its core and what the reference makes of the gate's rows."""

    inputs: PipelineInputs
    file: Path
    expected: list[Expected]

    @classmethod
    def of(cls, folder: Path, file: Path, *, step: int = 1) -> Bench:
        """With every `step`th request of the traffic; above 1 also without long made-up rows."""
        inputs = read_inputs(load_spec(folder), quiet)
        edges = [
            request
            for request in inputs.requests
            if request.edge and (step == 1 or all(len(row[0]) < 64 for row in request.rows))
        ]
        traffic = [request for request in inputs.requests if not request.edge][::step]
        inputs = replace(inputs, requests=(*edges, *traffic))
        expected = reference_of(inputs, rows_of(inputs.requests), quiet)
        return cls(inputs, file, expected)

    def open(self, file: Path | None = None) -> RunBatch:
        return open_core(file or self.file, self.inputs.plan)

    def check(self, run: RunBatch, labeled: GateLabels | None = None) -> GateResult:
        """The verdict at the limits of fp32."""
        plan = self.inputs.plan
        return check(
            run,
            self.inputs.requests,
            self.expected,
            plan.core,
            thresholds(plan.task, "fp32", {}),
            metrics=metrics_of(plan.task),
            precision="fp32",
            batch_size=16,
            decoding=decoding_of(self.inputs),
            labeled=labeled,
        )

    def broken(self, target: Path, breaks: Callable[[Any], None]) -> RunBatch:
        """The core with its graph changed."""
        import onnx

        model = onnx.load(self.file)
        breaks(model.graph)
        onnx.save(model, target)
        return self.open(target)


def weights(graph: Any, part: str) -> Any:
    """The initializer whose name has `part`."""
    return next(item for item in graph.initializer if part in item.name)


def rewrite(initializer: Any, change: Callable[[Any], Any]) -> None:
    from onnx import numpy_helper

    values = change(numpy_helper.to_array(initializer))
    initializer.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(values), initializer.name))


def scale_a_layer(graph: Any) -> None:
    """A feed-forward matrix in the middle of the encoder, 5 % too large."""
    matrices = [item for item in graph.initializer if list(item.dims) == [384, 1536]]
    rewrite(matrices[len(matrices) // 2], lambda values: values * np.float32(1.05))


def let_rows_see_each_other(graph: Any) -> None:
    """Rows of a request are read as if each took the same number of tokens."""
    from onnx import helper

    for node in graph.node:
        node.input[:] = ["no_offset" if name == "row_offset" else name for name in node.input]
    graph.node.insert(0, helper.make_node("Sub", ["row_offset", "row_offset"], ["no_offset"]))


def shift_positions(graph: Any) -> None:
    """Every token has the position of the next one."""
    rewrite(weights(graph, "position_embeddings"), lambda values: np.roll(values, -1, axis=0))


def overflow_in_half_precision(graph: Any) -> None:
    """Values inside the graph go through fp16 at a scale at which large ones do not fit."""
    from onnx import TensorProto, helper, numpy_helper

    norms = [node for node in graph.node if node.op_type == "LayerNormalization"]
    norm = norms[len(norms) // 2]
    name = norm.output[0]
    norm.output[0] = f"{name}_before"
    for side, factor in (("up", 3e4), ("down", 1 / 3e4)):
        graph.initializer.append(numpy_helper.from_array(np.float32(factor), f"{name}_{side}"))
    steps = [
        ("Mul", [f"{name}_before", f"{name}_up"], f"{name}_large", {}),
        ("Cast", [f"{name}_large"], f"{name}_half", {"to": TensorProto.FLOAT16}),
        ("Cast", [f"{name}_half"], f"{name}_single", {"to": TensorProto.FLOAT}),
        ("Mul", [f"{name}_single", f"{name}_down"], name, {}),
    ]
    place = list(graph.node).index(norm) + 1
    for offset, (kind, given, made, settings) in enumerate(steps):
        graph.node.insert(place + offset, helper.make_node(kind, given, [made], **settings))
