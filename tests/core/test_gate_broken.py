"""Deliberately broken cores: the gate catches each."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import ROOT, build_into
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
from triptych.core.requests import GateRequest, by_request, rows_of
from triptych.repository.records import GateResult
from triptych.runtime.row_metadata import pack_metadata, unpack_metadata
from triptych.spec.tasks import TASKS
from triptych.spec.tasks.accuracy import METRICS, metrics_of, thresholds
from triptych.spec.tasks.compare import read_entities
from triptych.spec.tasks.labeled import LabeledRow

pytestmark = pytest.mark.build

GRAVE = "caught at the limits of int8, too"
KINDS = (
    "text-embedding",
    "text-classification",
    "token-classification",
    "question-answering",
)


@pytest.fixture(scope="module")
def minilm(minilm_repository: Path) -> Bench:
    file = minilm_repository / "minilm_packed_core/1/model.onnx"
    return Bench.of(ROOT / "pipelines/minilm", file, step=8)


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path) -> dict[str, Bench]:
    """Small models of three tasks."""
    base = tmp_path_factory.mktemp("broken")
    made = {}
    for name in ("topics", "tags", "answers"):
        folder = write_task(base, name, minilm_folder)
        build_into(folder, base / "repository")
        made[name] = Bench.of(folder, base / f"repository/{name}_core/1/model.onnx")
    return made


def missed(result: GateResult, precision: str) -> list[str]:
    """Metrics that miss the limits of a precision."""
    names = {verdict.metric for verdict in result.verdicts}
    task = next(TASKS[kind] for kind in KINDS if names <= set(metrics_of(TASKS[kind])))
    limits = thresholds(task, precision, {})
    values = {verdict.metric: verdict.value for verdict in result.verdicts}
    return [name for name, limit in limits.items() if not METRICS[name].meets(values[name], limit)]


@pytest.mark.parametrize(
    ("breaks", "grave"),
    [
        (scale_a_layer, False),
        (let_rows_see_each_other, True),
        (shift_positions, True),
        (overflow_in_half_precision, True),
    ],
)
def test_a_broken_graph_is_caught(minilm: Bench, tmp_path: Path, breaks: Any, grave: bool) -> None:
    result = minilm.check(minilm.broken(tmp_path / "model.onnx", breaks))
    assert not result.passed
    assert not grave or len(missed(result, "int8")) > 1, GRAVE


def test_the_right_graph_passes(minilm: Bench, benches: dict[str, Bench]) -> None:
    for bench in (minilm, *benches.values()):
        result = bench.check(bench.open())
        assert result.passed, result.failures


def test_wrong_pooling_is_caught(minilm: Bench, tmp_path: Path) -> None:
    plan = minilm.inputs.plan
    folder = tmp_path / "model"
    shutil.copytree(minilm.inputs.model_folder, folder, copy_function=os.symlink)
    pooling = folder / "1_Pooling/config.json"
    text = pooling.read_text(encoding="utf-8")
    pooling.unlink()
    swapped = {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}
    pooling.write_text(json.dumps({**json.loads(text), **swapped}), encoding="utf-8")
    wrong = reference_outputs(folder, plan.info, plan.core, rows_of(minilm.inputs.requests))
    result = minilm.check(minilm.recall(wrong))
    assert not result.passed
    assert missed(result, "int8"), GRAVE


def swap_labels(row: RowOutputs) -> RowOutputs:
    return {**row, "class_id": (row["class_id"] + 1) % 5}


def next_tokens(row: RowOutputs) -> RowOutputs:
    return {name: np.roll(values, 1, axis=0) for name, values in row.items()}


@pytest.mark.parametrize(
    ("name", "change"),
    [("topics", swap_labels), ("tags", next_tokens), ("answers", next_tokens)],
)
def test_outputs_in_the_wrong_place_are_caught(
    benches: dict[str, Bench], name: str, change: Any
) -> None:
    bench = benches[name]
    result = bench.check(bench.changed(change))
    assert not result.passed
    assert missed(result, "int8"), GRAVE
    assert result.worst[0].expected != result.worst[0].actual


def shifted(request: GateRequest) -> GateRequest:
    """Metadata whose offsets are one character too far."""
    metadata = [unpack_metadata(row_metadata) for row_metadata in request.metadata]
    moved = [
        pack_metadata(row_metadata._replace(offsets=row_metadata.offsets + 1))
        for row_metadata in metadata
    ]
    return replace(request, metadata=tuple(moved))


@pytest.mark.parametrize(("name", "metric"), [("tags", "entity_f1"), ("answers", "exact_match")])
def test_offsets_off_by_one_change_the_answers(
    benches: dict[str, Bench], name: str, metric: str
) -> None:
    inputs = benches[name].inputs
    decoding = decoding_of(inputs)
    assert decoding is not None
    requests = [request for request in inputs.requests if not request.edge]
    rows = by_request(
        inputs.requests, reference_row_outputs(inputs.plan.core, benches[name].expected)
    )
    outputs = [
        row for r, own in zip(inputs.requests, rows, strict=True) if not r.edge for row in own
    ]
    wanted = decode(decoding, requests, outputs)
    got = decode(decoding, [shifted(request) for request in requests], outputs)
    value = inputs.plan.task.compare(got, wanted, [""] * len(got)).values[metric]
    assert value < 0.5


def test_labeled_rows_show_offsets_that_both_sides_have_wrong(
    benches: dict[str, Bench],
) -> None:
    """The gate decodes both sides with the same metadata: only the truth can tell."""
    bench = benches["tags"]
    decoding = decoding_of(bench.inputs)
    assert decoding is not None
    every = by_request(bench.inputs.requests, bench.expected)
    kept = [i for i, request in enumerate(bench.inputs.requests) if not request.edge]
    requests = [bench.inputs.requests[i] for i in kept]
    expected = [row for i in kept for row in every[i]]
    answers = decode(decoding, requests, reference_row_outputs(bench.inputs.plan.core, expected))
    labels = tuple(
        LabeledRow(i, (dict(request.inputs),), {}, read_entities(answer).spans)
        for i, (request, answer) in enumerate(zip(requests, answers, strict=True))
    )
    right = bench.check(bench.open(), labeled=GateLabels(labels, tuple(requests), expected, 0.0))
    assert right.passed, right.failures
    assert right.labeled is not None
    assert right.labeled.candidate == 1
    wrong = tuple(shifted(request) for request in requests)
    result = bench.check(bench.open(), labeled=GateLabels(labels, wrong, expected, 0.0))
    assert "Check that the labels match" in result.failures[0]
