"""An engine against its graph: every task's outputs, in the shapes that the engine takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import lock_data, quiet, traffic_texts
from engine_cases import copied, machine
from task_conversions import traffic_of
from task_models import MODELS
from triptych.building.build import build
from triptych.core.engine.stage import EngineFailure, build_engine
from triptych.core.inputs import read_inputs
from triptych.repository.records import plain_record
from triptych.spec.spec import load_spec

CASES = (
    ("topics", "bucketed", "fp16"),
    ("tags", "packed", "fp16"),
    ("answers", "bucketed", "fp32"),
    ("masks", "packed", "fp16"),
    ("images", "packed", "fp16"),
)
"""Pipeline of `MODELS`, layout, precision: all that a core can return, and images."""
Outputs = dict[str, Any]


def wrong_class(outputs: Outputs) -> Outputs:
    """Integers one off; floats swapped from row to row where there are no integers."""
    whole = [name for name, value in outputs.items() if value.dtype.kind == "i"]
    if whole:
        return {n: v + 1 if n in whole else v for n, v in outputs.items()}
    return {n: np.roll(v, 1, axis=-1) for n, v in outputs.items()}


def wrong_score(outputs: Outputs) -> Outputs:
    return {n: v if v.dtype.kind == "i" else v * 0.5 - 1.0 for n, v in outputs.items()}


def wild_class(outputs: Outputs) -> Outputs:
    """A class that cannot be, as uninitialized memory holds; no number where none are chosen."""
    return {
        n: v * 0 + 2_000_000_000 if v.dtype.kind == "i" else v * np.nan for n, v in outputs.items()
    }


@pytest.fixture(scope="module")
def repositories(
    tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path
) -> Callable[[str, str, str], Path]:
    """Builds a case's repository, once."""
    base = tmp_path_factory.mktemp("parity")
    built: dict[str, Path] = {}

    def make(name: str, layout: str, precision: str) -> Path:
        if name not in built:
            task, model = MODELS[name]
            folder = base / name
            folder.mkdir()
            core = {"backend": "tensorrt", "layout": layout, "precision": precision}
            if task == "image-classification":
                del core["layout"]
            spec: Mapping[str, Any] = {
                "task": task,
                "model": {
                    "source": str(
                        model(base / f"{name}_model", minilm_folder, traffic_texts()[:40])
                    )
                },
                "core": {**core, "max_batch_size": 4},
            }
            (folder / "pipeline.yaml").write_text(json.dumps(spec))
            rows = traffic_of(task, folder)
            (folder / "traffic.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
            build(read_inputs(load_spec(folder), quiet), base / "repository", quiet)
            built[name] = base / "repository"
        return built[name]

    return make


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_the_right_engine_of_every_task_passes_and_wrong_ones_fail(
    repositories: Callable[[str, str, str], Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    case: tuple[str, str, str],
) -> None:
    name = case[0]
    source = repositories(*case)
    trt = machine(monkeypatch, tmp_path, "10")
    repository = copied(source, tmp_path / "repository", name)
    for fault in (wrong_class, wrong_score, wild_class):
        trt._play.miscompute = fault
        with pytest.raises(EngineFailure):
            build_engine(repository, name, quiet)
        assert not (repository / f"{name}_core/1/model.plan").exists()
    trt._play.miscompute = None
    record = build_engine(repository, name, quiet).record
    assert all(verdict.passed for verdict in record.check.verdicts)
    lock = lock_data(repository, name)
    assert lock["engine"] == plain_record(record)
