"""Deliberately broken cores: the gate catches each."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import ROOT, quiet
from gate_benches import (
    Bench,
    let_rows_see_each_other,
    overflow_in_half_precision,
    scale_a_layer,
    shift_positions,
    write_task,
)
from triptych.core.gate.cached import decoding_of
from triptych.core.gate.check import GateLabels
from triptych.core.gate.reference import reference_outputs
from triptych.core.gate.runs import RowOutputs, decode, reference_row_outputs
from triptych.core.inputs import read_inputs
from triptych.core.precision.stage import full_precision
from triptych.core.requests import GateRequest, by_request, rows_of
from triptych.repository.records import GateResult
from triptych.runtime.row_metadata import pack_metadata, unpack_metadata
from triptych.spec.spec import load_spec
from triptych.spec.tasks.accuracy import METRICS, thresholds
from triptych.spec.tasks.compare import read_entities
from triptych.spec.tasks.labeled import LabeledRow

pytestmark = pytest.mark.build


@pytest.fixture(scope="module")
def minilm(minilm_repository: Path) -> Bench:
    file = minilm_repository / "minilm_packed_core/1/model.onnx"
    return Bench.of(ROOT / "pipelines/minilm", file, step=16)


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path) -> dict[str, Bench]:
    """Small models of three tasks."""
    base = tmp_path_factory.mktemp("broken")
    made = {}
    for name in ("topics", "tags", "answers"):
        folder = write_task(base, name, minilm_folder)
        core = full_precision(read_inputs(load_spec(folder), quiet), quiet, "")
        made[name] = Bench.of(folder, core.file)
    return made


def missed(bench: Bench, result: GateResult) -> list[str]:
    """Metrics that miss even the limits of int8."""
    limits = thresholds(bench.inputs.plan.task, "int8", {})
    values = {verdict.metric: verdict.value for verdict in result.verdicts}
    return [name for name, limit in limits.items() if not METRICS[name].meets(values[name], limit)]


def test_a_broken_graph_is_caught(minilm: Bench, tmp_path: Path) -> None:
    right = minilm.check(minilm.open())
    assert right.passed, right.failures
    for breaks, grave in (
        (scale_a_layer, False),
        (let_rows_see_each_other, True),
        (shift_positions, True),
        (overflow_in_half_precision, True),
    ):
        result = minilm.check(minilm.broken(tmp_path / "model.onnx", breaks))
        assert not result.passed, breaks
        assert not grave or len(missed(minilm, result)) > 1, breaks


def test_wrong_pooling_is_caught(minilm: Bench, tmp_path: Path) -> None:
    plan = minilm.inputs.plan
    folder = tmp_path / "model"
    shutil.copytree(minilm.inputs.model_folder, folder, copy_function=os.symlink)
    pooling = folder / "1_Pooling/config.json"
    config = json.loads(pooling.read_text(encoding="utf-8"))
    pooling.unlink()
    swapped = {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}
    pooling.write_text(json.dumps({**config, **swapped}), encoding="utf-8")
    rows = rows_of(minilm.inputs.requests)
    wrong = reference_outputs(folder, plan.info, plan.core, rows)
    name = plan.core.outputs[0].name
    known = dict(zip(rows, wrong, strict=True))
    result = minilm.check(lambda batch: [{name: known[row][0]} for row in batch])
    assert not result.passed
    assert missed(minilm, result)


def change_class(row: RowOutputs) -> RowOutputs:
    return {**row, "class_id": (row["class_id"] + 1) % 5}


def move_tokens(row: RowOutputs) -> RowOutputs:
    return {name: np.roll(values, 1, axis=0) for name, values in row.items()}


@pytest.mark.parametrize(
    ("name", "change"),
    [("topics", change_class), ("tags", move_tokens), ("answers", move_tokens)],
)
def test_outputs_in_the_wrong_place_are_caught(
    benches: dict[str, Bench], name: str, change: Any
) -> None:
    bench = benches[name]
    right = bench.open()
    passing = bench.check(right)
    assert passing.passed, passing.failures
    result = bench.check(lambda batch: [change(row) for row in right(batch)])
    assert not result.passed
    assert missed(bench, result)
    assert result.worst[0].expected != result.worst[0].actual


@pytest.mark.parametrize(("name", "metric"), [("tags", "entity_f1"), ("answers", "exact_match")])
def test_offsets_off_by_one_change_the_answers(
    benches: dict[str, Bench], name: str, metric: str
) -> None:
    """The gate decodes both sides with the same metadata: only labeled rows can tell."""
    bench = benches[name]
    decoding = decoding_of(bench.inputs)
    assert decoding is not None
    every = by_request(bench.inputs.requests, bench.expected)
    kept = [i for i, request in enumerate(bench.inputs.requests) if not request.edge]
    requests = [bench.inputs.requests[i] for i in kept]
    expected = [row for i in kept for row in every[i]]
    outputs = reference_row_outputs(bench.inputs.plan.core, expected)
    wrong = [shifted(request) for request in requests]
    answers, others = (decode(decoding, some, outputs) for some in (requests, wrong))
    compared = bench.inputs.plan.task.compare(others, answers, [""] * len(others))
    assert compared.values[metric] < 0.5
    if name != "tags":
        return
    labels = tuple(
        LabeledRow(i, (dict(request.inputs),), {}, read_entities(answer).spans)
        for i, (request, answer) in enumerate(zip(requests, answers, strict=True))
    )
    right = bench.check(bench.open(), labeled=GateLabels(labels, tuple(requests), expected, 0.0))
    assert right.passed, right.failures
    assert right.labeled is not None
    assert right.labeled.candidate == 1
    result = bench.check(bench.open(), labeled=GateLabels(labels, tuple(wrong), expected, 0.0))
    assert "Check that the labels match" in result.failures[0]


def shifted(request: GateRequest) -> GateRequest:
    """Metadata whose offsets are one character too far."""
    metadata = [unpack_metadata(row_metadata) for row_metadata in request.metadata]
    moved = [
        pack_metadata(row_metadata._replace(offsets=row_metadata.offsets + 1))
        for row_metadata in metadata
    ]
    return replace(request, metadata=tuple(moved))
