"""Tasks to measure the path of, built for a GPU with one layer: their core is replaced."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.model import CACHE
from benchmarks.zoo import EXHIBITS, Exhibit, requests_of, write_model
from triptych.building.build import build
from triptych.core.inputs import read_inputs
from triptych.spec.spec import load_spec

_FOLDER = CACHE / "path-tasks"
TASKS = {
    exhibit.task: replace(exhibit, config={**exhibit.config, "num_hidden_layers": 1})
    for exhibit in EXHIBITS
    if exhibit.architecture == "Bert"
}
"""By name, those whose inputs are texts."""


def build_task(task: str, texts: list[str]) -> tuple[Path, str, list[dict[str, Any]]]:
    """Build the task's pipeline, packed.

    Returns:
        The repository, the pipeline's name, requests of one row each.
    """
    exhibit = TASKS[task]
    requests = requests_of(exhibit, texts, [])
    repository = _FOLDER / "repositories" / exhibit.name
    spec = load_spec(_write_pipeline(exhibit, requests))
    build(read_inputs(spec, _say), repository, _say)
    return repository, exhibit.name, requests


def _write_pipeline(exhibit: Exhibit, requests: Sequence[dict[str, Any]]) -> Path:
    model = write_model(exhibit, _FOLDER / "models" / exhibit.name)
    folder = _FOLDER / "pipelines" / exhibit.name
    folder.mkdir(parents=True, exist_ok=True)
    spec = {
        "task": exhibit.task,
        "model": {"source": str(model)},
        "core": {"layout": "packed", "device": "gpu"},
        "parameters": dict(exhibit.parameters),
    }
    (folder / "pipeline.yaml").write_text(json.dumps(spec), encoding="utf-8")
    lines = "\n".join(json.dumps(row) for row in requests)
    (folder / "traffic.jsonl").write_text(lines, encoding="utf-8")
    return folder


def _say(stage: str, line: str) -> None:
    print(f"  {stage:8} {line}", file=sys.stderr, flush=True)
