"""Builds that the general probe, PyTorch's own rounding and narrow traffic decide."""

import json
import shutil
from pathlib import Path

import pytest

from conftest import build_into, lock_data, quiet, write_lock, write_pipeline
from triptych.base.onnx_graph import MODEL_FILE
from triptych.building.build import BuildOutcome
from triptych.core.export.to_onnx import export_model
from triptych.core.gate.cached import Gate
from triptych.core.gate.check import OUTSIDE
from triptych.core.inputs import read_inputs
from triptych.core.precision.layer_exclusion import CoreConverter
from triptych.repository.manifest import EncoderManifest, read_manifest
from triptych.spec.spec import load_spec


@pytest.fixture(scope="module")
def noisy(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, minilm_folder: Path
) -> tuple[BuildOutcome, Path]:
    """A model whose weights are so large that fp32 itself is off by more than the gate's limit."""
    import torch
    from transformers import BertConfig, BertModel

    base = tmp_path_factory.mktemp("noisy")
    shutil.copytree(tiny_model, base / "model")
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        initializer_range=2.0,
    )
    BertModel(config).save_pretrained(base / "model")
    folder = write_pipeline(
        base / "noisy", model={"source": str(base / "model")}, core={"layout": "bucketed"}
    )
    texts = [json.dumps({"text": f"order {number}"}) for number in range(70)]
    lines = (folder / "traffic.jsonl").read_text(encoding="utf-8").splitlines()
    (folder / "traffic.jsonl").write_text("\n".join([*lines[:60], *texts]), encoding="utf-8")
    return build_into(folder, base / "repository"), base / "repository"


def test_a_limit_below_pytorchs_own_rounding_stops_no_build(
    noisy: tuple[BuildOutcome, Path],
) -> None:
    gate = noisy[0].gate
    assert gate.passed
    assert gate.rounding is not None
    assert 1e-5 / 3 < gate.rounding < 1e-4
    limits = {verdict.metric: verdict.limit for verdict in gate.verdicts}
    assert limits["max_difference"] == 3 * gate.rounding > 1e-5
    assert limits["edge_error"] == 1e-4
    raised = f"PyTorch's own rounding is {gate.rounding:.2e}: the limit is raised to"
    assert any(raised in note for note in gate.notes)
    assert gate.probe is None  # fp32 is the original's own numbers


def test_narrow_traffic_is_a_warning_with_figures(noisy: tuple[BuildOutcome, Path]) -> None:
    (finding,) = [f for f in noisy[0].findings if f.id == "traffic"]
    assert finding.severity == "warning"
    assert "near duplicates of others" in finding.given
    assert "Add real requests" in finding.remedy


def test_a_lock_of_before_is_still_read(noisy: tuple[BuildOutcome, Path], tmp_path: Path) -> None:
    shutil.copytree(noisy[1], tmp_path / "repository")
    lock = lock_data(tmp_path / "repository", "noisy")
    del lock["gate"]["rounding"]
    for name in ("words", "vocabulary_share", "near_duplicates"):
        del lock["traffic"][name]
    write_lock(tmp_path / "repository", "noisy", lock)
    old = read_manifest(tmp_path / "repository", "noisy", EncoderManifest)
    assert (old.gate.rounding, old.gate.probe) == (None, None)
    assert old.gate.verdicts == noisy[0].gate.verdicts


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
