"""Builds that the general probe, PyTorch's own rounding and narrow traffic decide."""

import json
from pathlib import Path

import pytest

from conftest import build_into, lock_data, quiet, write_lock, write_pipeline
from triptych.base.onnx_graph import MODEL_FILE
from triptych.core.export.to_onnx import export_model
from triptych.core.gate.cached import Gate
from triptych.core.gate.check import OUTSIDE
from triptych.core.inputs import read_inputs
from triptych.core.precision.layer_exclusion import CoreConverter
from triptych.repository.manifest import EncoderManifest, read_manifest
from triptych.spec.spec import load_spec


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
