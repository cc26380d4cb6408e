"""An engine against its graph: every kind of outputs, in the shapes that the engine takes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import build_into, lock_data, quiet
from engine_cases import machine
from gate_benches import write_task
from triptych.core.engine.stage import EngineFailure, build_engine
from triptych.repository.records import plain_record

pytestmark = pytest.mark.build

CASES = (
    ("topics", "bucketed", "fp16"),
    ("tags", "packed", "fp16"),
    ("answers", "bucketed", "fp32"),
    ("images", "fixed", "fp16"),
)
"""Pipeline of `MODELS`, layout, precision: classes of rows and of tokens, spans, and images."""
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


@pytest.mark.parametrize(("name", "layout", "precision"), CASES)
def test_the_right_engine_of_every_task_passes_and_wrong_ones_fail(
    name: str,
    layout: str,
    precision: str,
    minilm_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    core: dict[str, Any] = {"backend": "tensorrt", "precision": precision, "max_batch_size": 4}
    if layout != "fixed":
        core["layout"] = layout
    repository = tmp_path / "repository"
    build_into(write_task(tmp_path, name, minilm_folder, core=core), repository)
    trt = machine(monkeypatch, tmp_path, "10")
    for fault in (wrong_class, wrong_score, wild_class):
        trt._play.miscompute = fault
        with pytest.raises(EngineFailure):
            build_engine(repository, name, quiet)
        assert not (repository / f"{name}_core/1/model.plan").exists()
    trt._play.miscompute = None
    record = build_engine(repository, name, quiet).record
    assert all(verdict.passed for verdict in record.check.verdicts)
    assert lock_data(repository, name)["engine"] == plain_record(record)
