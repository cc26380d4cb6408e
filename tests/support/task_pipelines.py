"""Pipelines of each task on small models, with traffic of the task."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.project import traffic_texts
from tests.support.task_models import MODELS

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
