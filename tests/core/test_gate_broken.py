"""Builds that the gate decides: broken cores, PyTorch's own rounding, narrow traffic."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from conftest import ROOT, build_into, lock_data, quiet, write_lock, write_pipeline
from triptych.base.onnx_graph import MODEL_FILE
from triptych.core.export.to_onnx import export_model
from triptych.core.gate.cached import Gate
from triptych.core.gate.check import OUTSIDE, check
from triptych.core.gate.reference import reference_of
from triptych.core.gate.runs import open_core
from triptych.core.inputs import read_inputs
from triptych.core.precision.layer_exclusion import CoreConverter
from triptych.core.requests import rows_of
from triptych.repository.manifest import EncoderManifest, read_manifest
from triptych.spec.spec import load_spec
from triptych.spec.tasks.accuracy import METRICS, metrics_of, thresholds

pytestmark = pytest.mark.build


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


def test_a_broken_graph_is_caught(minilm_repository: Path, tmp_path: Path) -> None:
    inputs = read_inputs(load_spec(ROOT / "pipelines/minilm"), quiet)
    edges = [r for r in inputs.requests if r.edge and all(len(row[0]) < 64 for row in r.rows)]
    requests = (*edges, *[r for r in inputs.requests if not r.edge][::16])
    inputs = replace(inputs, requests=requests)
    plan, expected = inputs.plan, reference_of(inputs, rows_of(requests), quiet)
    settings: Any = {"metrics": metrics_of(plan.task), "precision": "fp32", "batch_size": 16}
    fp32, int8 = (thresholds(plan.task, precision, {}) for precision in ("fp32", "int8"))
    file = minilm_repository / "minilm_packed_core/1/model.onnx"
    right = check(open_core(file, plan), requests, expected, plan.core, fp32, **settings)
    assert right.passed, right.failures
    for breaks, grave in (
        (scale_a_layer, False),
        (let_rows_see_each_other, True),
        (shift_positions, True),
    ):
        model = onnx.load(file)
        breaks(model.graph)
        onnx.save(model, tmp_path / "model.onnx")
        run = open_core(tmp_path / "model.onnx", plan)
        result = check(run, requests, expected, plan.core, fp32, **settings)
        assert not result.passed, breaks
        values = {verdict.metric: verdict.value for verdict in result.verdicts}
        missed = [name for name in int8 if not METRICS[name].meets(values[name], int8[name])]
        assert not grave or len(missed) > 1, breaks


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
