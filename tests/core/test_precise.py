"""Lower precision in a build: which layers stay, what is remembered, what is refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from conftest import build_into, lock_data, quiet, write_pipeline
from triptych.base.errors import UserError
from triptych.building import build as building
from triptych.core.inputs import PipelineInputs, read_inputs
from triptych.core.precision import layer_exclusion
from triptych.core.precision.layer_exclusion import ConvertedCore, convert_with_exclusions
from triptych.repository.records import GateResult
from triptych.spec.backends import Precision
from triptych.spec.spec import load_spec


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "tiny"
    return write_pipeline(folder, model={"source": str(tiny_model)})


@pytest.fixture(scope="module")
def fp32(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[PipelineInputs, Path, str]:
    """The tiny pipeline, its fp32 core and that core's key."""
    repository = tmp_path_factory.mktemp("fp32")
    build_into(tiny, repository)
    lock = lock_data(repository, "tiny")
    return (
        read_inputs(load_spec(tiny), quiet),
        repository / "tiny_core/1/model.onnx",
        lock["core_key"],
    )


class Gate:
    """A gate that passes as soon as enough layers are kept: how many, the file tells by its size.

    It stands in for the real one, whose verdict on a random model is an accident.
    """

    precision: Precision = "int8"
    judged_by = ""

    def __init__(self, *, passes_at: int) -> None:
        self.passes_at = passes_at
        self.judged: list[Mapping[str, str]] = []

    def run(self, artifact: Path, files: Mapping[str, str]) -> GateResult:
        import onnx

        self.judged.append(files)
        kinds = [node.op_type for node in onnx.load(artifact).graph.node]
        kept = LAYERS - kinds.count("QuantizeLinear")
        failures = () if kept >= self.passes_at else (f"only {kept} layers kept",)
        return GateResult("int8", 1, 0, True, (), failures)


LAYERS = 8  # two transformer layers: q/k/v, attention output, two of the feed-forward


def lowered_by(fp32: tuple[PipelineInputs, Path, str], gate: Gate, *, mark: str) -> ConvertedCore:
    inputs, file, key = fp32
    gate.judged_by = mark
    return convert_with_exclusions(inputs, file, key, gate, quiet)


def test_the_layers_that_hurt_most_are_kept(fp32: Any, tmp_path: Path) -> None:
    gate = Gate(passes_at=0)
    lowered = lowered_by(fp32, gate, mark=f"{tmp_path} passes")
    assert lowered.conversion.excluded_layers == ()
    assert len(lowered.conversion.layers) == LAYERS
    assert len(gate.judged) == 1
    assert not lowered.conversion.layer_errors
    gate = Gate(passes_at=3)
    lowered = lowered_by(fp32, gate, mark=str(tmp_path))
    layer_errors = lowered.conversion.layer_errors
    assert set(lowered.conversion.excluded_layers) == set(
        sorted(layer_errors, key=lambda n: -layer_errors[n])[:3]
    )
    assert lowered.gate.passed
    assert len(gate.judged) == 4  # 0, 1, 2 and 3 layers
    times = lowered.conversion.batch_ms
    assert set(times) == {"fp32", "nothing kept", "as kept"}
    assert all(time > 0 for time in times.values())
    # What was found is not looked for again, only judged before it ships.
    again = Gate(passes_at=3)
    assert lowered_by(fp32, again, mark=str(tmp_path)) == lowered
    assert len(again.judged) == 1


def test_neighbors_among_many_layers_are_ranked_and_kept_together(
    fp32: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_exclusion, "MAX_RANKED", 3)
    gate = Gate(passes_at=2)
    found = lowered_by(fp32, gate, mark=str(tmp_path)).conversion
    groups = [found.layers[:3], found.layers[3:6], found.layers[6:]]
    assert [len({found.layer_errors[name] for name in group}) for group in groups] == [1, 1, 1]
    assert found.excluded_layers == max(groups, key=lambda group: found.layer_errors[group[0]])
    assert len(gate.judged) == 2


def test_where_nothing_passes_the_last_try_is_told_and_forgotten(fp32: Any, tmp_path: Path) -> None:
    gate = Gate(passes_at=LAYERS)
    lowered = lowered_by(fp32, gate, mark=str(tmp_path))
    assert lowered.gate.failures == ("only 4 layers kept",)  # at most half of them
    assert set(lowered.conversion.layer_errors) == set(lowered.conversion.layers)
    again = Gate(passes_at=LAYERS)
    lowered_by(fp32, again, mark=str(tmp_path))
    assert len(again.judged) == len(gate.judged) > 1


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_minilm_passes_in_lower_precision(tmp_path: Path, precision: str) -> None:
    folder = write_pipeline(tmp_path / "minilm", core={"precision": precision})
    built = build_into(folder, tmp_path / "repository")
    lock = lock_data(tmp_path / "repository", "minilm")
    gate = built.gate.without_texts().as_dict()
    assert lock["gate"] == json.loads(json.dumps(gate))
    assert gate["precision"] == precision
    assert gate["failures"] == []
    assert len(gate["conversion"]["layers"]) == 24
    layer_errors = gate["conversion"].get("layer_errors", {})
    assert (precision == "int8") >= bool(layer_errors)  # fp16 needs no search
    assert (
        len([name for name in gate["conversion"]["excluded_layers"] if name in layer_errors]) <= 12
    )
    found = {verdict["metric"]: verdict["value"] for verdict in gate["verdicts"]}
    assert found["mean_cosine"] >= 0.998
    assert found["nearest_neighbor_agreement"] >= 0.97
    assert lock["core_key"] != lock["source_key"]
    assert build_into(folder, tmp_path / "repository").changed == ()


def test_what_would_not_run_is_refused_before_any_work(tiny: Path, tmp_path: Path) -> None:
    told: list[str] = []
    for precision in ("bf16", "fp8"):
        inputs = read_inputs(load_spec(tiny, [f"core.precision={precision}"]), quiet)
        with pytest.raises(UserError, match="is not supported by onnxruntime"):
            building.build(inputs, tmp_path / "repository", lambda stage, line: told.append(stage))
    assert told == []
    assert not (tmp_path / "repository").exists()


def test_a_shared_core_brings_its_precision(tmp_path: Path, tiny_model: Path) -> None:
    """fp16 of a random model passes: its limits are those of rounding alone."""
    source, repository = {"source": str(tiny_model)}, tmp_path / "repository"
    first = write_pipeline(tmp_path / "owner", model=source)
    second = write_pipeline(tmp_path / "sharer", model=source, core={"shared_from": "owner"})
    lines = (second / "traffic.jsonl").read_text(encoding="utf-8").splitlines()
    (second / "traffic.jsonl").write_text("\n".join(lines[:60]), encoding="utf-8")
    build_into(first, repository, "core.precision=fp16")
    built = build_into(second, repository)
    assert built.gate.precision == "fp16"
    owner, sharer = (lock_data(repository, name) for name in ("owner", "sharer"))
    assert owner["core_key"] == sharer["core_key"]
    assert built.gate.rows < owner["gate"]["rows"]  # judged on its own traffic
    with pytest.raises(UserError, match="differs from that of the shared core, fp16"):
        build_into(second, repository, "core.precision=int8")
