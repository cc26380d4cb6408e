"""Builds that the gate decides: broken cores, PyTorch's own rounding, narrow traffic."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from conftest import ROOT, build_into, lock_data, quiet, write_lock, write_pipeline
from task_pipelines import write_task
from triptych.base.onnx_graph import MODEL_FILE
from triptych.core.export.to_onnx import export_model
from triptych.core.gate.cached import Gate, decoding_of
from triptych.core.gate.check import OUTSIDE, GateLabels, check
from triptych.core.gate.reference import reference_of, reference_outputs
from triptych.core.gate.runs import RunBatch, decode, open_core, reference_row_outputs
from triptych.core.inputs import PipelineInputs, read_inputs
from triptych.core.precision.layer_exclusion import CoreConverter
from triptych.core.precision.stage import full_precision
from triptych.core.requests import Expected, GateRequest, by_request, rows_of
from triptych.repository.manifest import EncoderManifest, read_manifest
from triptych.repository.records import GateResult
from triptych.runtime.row_metadata import pack_metadata, unpack_metadata
from triptych.spec.spec import load_spec
from triptych.spec.tasks.accuracy import METRICS, metrics_of, thresholds
from triptych.spec.tasks.compare import read_entities
from triptych.spec.tasks.labeled import LabeledRow

pytestmark = pytest.mark.build


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
        model = onnx.load(self.file)
        breaks(model.graph)
        onnx.save(model, target)
        return self.open(target)


def rewrite(initializer: Any, change: Callable[[Any], Any]) -> None:
    values = change(numpy_helper.to_array(initializer))
    initializer.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(values), initializer.name))


def scale_a_layer(graph: Any) -> None:
    """A feed-forward matrix in the middle of the encoder, 5 % too large."""
    matrices = [item for item in graph.initializer if list(item.dims) == [384, 1536]]
    rewrite(matrices[len(matrices) // 2], lambda values: values * np.float32(1.05))


def let_rows_see_each_other(graph: Any) -> None:
    """Rows of a request are read as if each took the same number of tokens."""
    for node in graph.node:
        node.input[:] = ["no_offset" if name == "row_offset" else name for name in node.input]
    graph.node.insert(0, helper.make_node("Sub", ["row_offset", "row_offset"], ["no_offset"]))


def shift_positions(graph: Any) -> None:
    """Every token has the position of the next one."""
    (places,) = (item for item in graph.initializer if "position_embeddings" in item.name)
    rewrite(places, lambda values: np.roll(values, -1, axis=0))


def overflow_in_half_precision(graph: Any) -> None:
    """Values inside the graph go through fp16 at a scale at which large ones do not fit."""
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


@pytest.fixture(scope="module")
def minilm(minilm_repository: Path) -> Bench:
    file = minilm_repository / "minilm_packed_core/1/model.onnx"
    return Bench.of(ROOT / "pipelines/minilm", file, step=16)


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path) -> dict[str, Bench]:
    """Small models of two tasks."""
    base = tmp_path_factory.mktemp("broken")
    made = {}
    for name in ("tags", "answers"):
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


def test_a_limit_below_pytorchs_own_rounding_stops_no_build(
    tmp_path: Path, minilm_folder: Path
) -> None:
    """The weights are so large that fp32 itself is off by more than the gate's limit."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(**sizes, num_hidden_layers=2, initializer_range=2.0)
    BertModel(config).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(minilm_folder).save_pretrained(tmp_path / "model")
    source, repository = {"source": str(tmp_path / "model")}, tmp_path / "repository"
    folder = write_pipeline(tmp_path / "noisy", model=source, core={"layout": "bucketed"})
    texts = [json.dumps({"text": f"order {number}"}) for number in range(70)]
    lines = (folder / "traffic.jsonl").read_text(encoding="utf-8").splitlines()
    (folder / "traffic.jsonl").write_text("\n".join([*lines[:60], *texts]), encoding="utf-8")
    built = build_into(folder, repository)
    gate = built.gate
    assert gate.passed
    assert gate.rounding is not None
    assert 1e-5 / 3 < gate.rounding < 1e-4
    limits = {verdict.metric: verdict.limit for verdict in gate.verdicts}
    assert limits["max_difference"] == 3 * gate.rounding > 1e-5
    assert limits["edge_error"] == 1e-4
    raised = f"PyTorch's own rounding is {gate.rounding:.2e}: the limit is raised to"
    assert any(raised in note for note in gate.notes)
    assert gate.probe is None  # fp32 is the original's own numbers
    # Narrow traffic is a warning with figures.
    (finding,) = [found for found in built.findings if found.id == "traffic"]
    assert finding.severity == "warning"
    assert "near duplicates of others" in finding.given
    assert "Add real requests" in finding.remedy
    # A manifest of before is still read.
    lock = lock_data(repository, "noisy")
    del lock["gate"]["rounding"]
    for name in ("words", "vocabulary_share", "near_duplicates"):
        del lock["traffic"][name]
    write_lock(repository, "noisy", lock)
    old = read_manifest(repository, "noisy", EncoderManifest)
    assert (old.gate.rounding, old.gate.probe) == (None, None)
    assert old.gate.verdicts == gate.verdicts


@pytest.mark.long
def test_a_core_fitted_to_one_phrase_is_stopped(tmp_path: Path) -> None:
    """On its own 70 rows MiniLM in int8_dynamic is right; elsewhere it lost a tenth of it all."""
    folder = write_pipeline(tmp_path / "orders", core={"precision": "int8_dynamic"})
    lines = [json.dumps({"text": f"order {number}"}) for number in range(1001, 1071)]
    (folder / "traffic.jsonl").write_text("\n".join(lines), encoding="utf-8")
    inputs = read_inputs(load_spec(folder), quiet)
    exported = export_model(inputs.plan, inputs.model_folder, quiet)
    converter = CoreConverter(inputs, exported.file, exported.key, "int8_dynamic", quiet)
    converted, _, _ = converter.converted(())
    told: list[str] = []
    gate = Gate(inputs, "int8_dynamic", lambda stage, line: told.append(line))
    result = gate.run(converted.folder / MODEL_FILE, converted.files)
    assert all(verdict.passed for verdict in result.verdicts)
    assert not result.passed
    assert all(failure.startswith(f"{OUTSIDE}: ") for failure in result.failures)
    assert result.probe is not None
    broken = {verdict.metric for verdict in result.probe.verdicts if not verdict.passed}
    assert broken >= {"mean_cosine", "mean_neighbor_loss"}
    assert any(line.startswith(OUTSIDE) and "FAILED" in line for line in told)
