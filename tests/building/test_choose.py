"""`core.precision: auto`: real builds, real servers, real load; the fastest that passes ships."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conftest import lock_data, quiet, write_pipeline
from triptych.base.errors import UserError
from triptych.building import auto, encoder
from triptych.building import auto as choose
from triptych.building import build as building
from triptych.building.auto import Throughput
from triptych.building.build import BuildOutcome
from triptych.container.processor import find_instruction_sets, sets_for
from triptych.core.engine.stage import EngineFailure
from triptych.core.gate.cached import GateFailure
from triptych.core.inputs import read_inputs
from triptych.repository.manifest import EncoderManifest, read_manifest
from triptych.repository.records import GateResult
from triptych.spec.backends import BACKENDS
from triptych.spec.spec import load_spec

pytestmark = pytest.mark.long
CANDIDATES = ("fp32", "int8", "int8_dynamic", "fp16")
Told = list[tuple[str, str]]


@pytest.fixture(scope="module", autouse=True)
def short_windows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Little time for load, and a cache in which nothing was measured before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIPTYCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(auto, "WINDOW_S", 0.4)
        patch.setattr(auto, "ROUNDS", 2)
        yield


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A random model's: wide limits, so that what passes is no accident of its weights."""
    limits = {
        "mean_cosine": 0.9,
        "min_cosine": 0.5,
        "nearest_neighbor_agreement": 0.3,
        "mean_neighbor_loss": 0.3,
        "max_neighbor_loss": 1.0,
        "similarity_rank_correlation": 0.5,
        "batch_sensitivity": 0.1,
    }
    folder = tmp_path_factory.mktemp("pipelines") / "tiny"
    return write_pipeline(
        folder,
        model={"source": str(tiny_model)},
        core={"backend": "onnxruntime", "precision": "auto"},
        accuracy=limits,
    )


@pytest.fixture(scope="module")
def chosen(
    pipeline: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[BuildOutcome, Path, Told]:
    """A build of it: what it did, where, and what it told."""
    told: Told = []
    repository = tmp_path_factory.mktemp("auto") / "repository"
    inputs = read_inputs(load_spec(pipeline), quiet)
    built = building.build(inputs, repository, lambda stage, line: told.append((stage, line)))
    return built, repository, told


def by_precision(built: BuildOutcome) -> Mapping[str, Mapping[str, Any]]:
    return {one["precision"]: one for one in built.gate.as_dict()["candidates"]}


def test_the_fastest_that_passes_is_built(chosen: tuple[BuildOutcome, Path, Told]) -> None:
    built, repository, told = chosen
    candidates = by_precision(built)
    assert tuple(candidates) == CANDIDATES
    measured = {name: one for name, one in candidates.items() if one["throughput_per_s"]}
    (best,) = [name for name, one in candidates.items() if one["status"] == "chosen"]
    assert best == max(measured, key=lambda name: measured[name]["throughput_per_s"])
    assert built.gate.precision == best
    assert "fp32" in measured
    lock = lock_data(repository, "tiny")
    assert lock["spec"]["core"]["precision"] == "auto"
    assert lock["gate"]["precision"] == best
    assert [one["precision"] for one in lock["gate"]["candidates"]] == list(CANDIDATES)
    assert len([line for stage, line in told if stage == "throughput"]) >= len(measured)


def test_every_candidate_has_its_figures(chosen: tuple[BuildOutcome, Path, Told]) -> None:
    for name, one in by_precision(chosen[0]).items():
        if one["status"] in ("passed", "chosen"):
            assert one["size_bytes"] > 0
            assert one["p99_ms"] > 0
            assert one["verdicts"]["mean_cosine"] > 0.9, name
        else:
            assert one["failures"] or one["note"], name


def test_only_the_repository_is_left(chosen: tuple[BuildOutcome, Path, Told]) -> None:
    _, repository, _ = chosen
    assert {path.name for path in repository.parent.iterdir()} == {
        "repository",
        ".repository.lock",
    }


def test_nothing_is_measured_twice(
    chosen: tuple[BuildOutcome, Path, Told], pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, repository, _ = chosen

    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr(choose, "measure_throughputs", refuse)
    again = building.build(read_inputs(load_spec(pipeline), quiet), repository, quiet)
    assert again.changed == ()
    assert again.gate == built.gate


def test_a_candidate_that_fails_is_not_measured(
    pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []

    def pretend(
        repositories: Mapping[str, Path], *args: Any, **options: Any
    ) -> dict[str, Throughput]:
        measured.extend(repositories)
        return {
            name: Throughput(1.0 + place, 1.0, 1.0, 1.0, 1) for place, name in enumerate(measured)
        }

    monkeypatch.setattr(choose, "measure_throughputs", pretend)
    # No conversion meets this: fp32 does.
    overrides = ["accuracy.max_difference=1e-5", "serving.queue.max_in_flight=77"]
    inputs = read_inputs(load_spec(pipeline, overrides), quiet)
    built = building.build(inputs, tmp_path / "repository", quiet)
    assert measured == ["fp32"]
    candidates = by_precision(built)
    assert {name: one["status"] for name, one in candidates.items()} == {
        "fp32": "chosen",
        "int8": "failed",
        "int8_dynamic": "failed",
        "fp16": "failed",
    }
    assert all("max_difference" in one["verdicts"] for one in candidates.values())
    assert built.gate.precision == "fp32"


def test_without_a_backend_in_the_spec_backends_are_compared(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measurement is pretended: OpenVINO in bf16 is the fastest."""
    repository = tmp_path / "repository"

    def pretend(
        repositories: Mapping[str, Path], *args: Any, **options: Any
    ) -> dict[str, Throughput]:
        rates = {"openvino bf16": 9.0, "fp32": 4.0}
        return {name: Throughput(rates.get(name, 1.0), 1.0, 1.0, 1.0, 1) for name in repositories}

    monkeypatch.setattr(choose, "measure_throughputs", pretend)
    folder = write_pipeline(
        tmp_path / "open",
        model={"source": str(tiny_model)},
        core={"precision": "auto"},
        accuracy={"min_cosine": 0.9, "max_difference": 0.2},
    )
    built = building.build(read_inputs(load_spec(folder), quiet), repository, quiet)
    trials = {trial.label: trial for trial in built.gate.candidates}
    assert tuple(trials) == (*CANDIDATES, "openvino fp32", "openvino bf16", "openvino int8")
    assert trials["openvino bf16"].status == "chosen"
    manifest = read_manifest(repository, "open", EncoderManifest)
    core = manifest.spec.core
    assert (core.backend, core.precision, manifest.plan.layout) == ("openvino", "bf16", "bucketed")
    assert manifest.spec.serving.instances.core == len(os.sched_getaffinity(0))
    assert manifest.instruction_sets == sets_for("bf16", find_instruction_sets())
    text = (repository / "open_core/config.pbtxt").read_text(encoding="utf-8")
    assert 'key: "HINT_BF16"' in text
    again = read_inputs(load_spec(folder), quiet).with_built_layout(repository)
    assert again.plan.spec.core.backend == "openvino"


def test_where_fp32_is_wrong_nothing_is_chosen(pipeline: Path, tmp_path: Path) -> None:
    inputs = read_inputs(load_spec(pipeline, ["accuracy.max_difference=1e-12"]), quiet)
    with pytest.raises(GateFailure, match="differs from the reference"):
        building.build(inputs, tmp_path / "repository", quiet)
    assert not (tmp_path / "repository").exists()


@pytest.mark.parametrize(
    ("override", "lacking"), [("core.device=gpu", ""), ("core.backend=tensorrt", "no GPU is here")]
)
def test_what_cannot_be_measured_here_must_be_named(
    pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, lacking: str
) -> None:
    monkeypatch.setattr(choose, "missing_for_engines", lambda: "no GPU is here")
    inputs = read_inputs(load_spec(pipeline, [override]), quiet)
    with pytest.raises(UserError, match="if this machine cannot measure them") as raised:
        building.build(inputs, tmp_path / "repository", quiet)
    assert lacking in raised.value.given


def test_an_engine_that_differs_from_its_graph_does_not_race(
    pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines are pretended: whether one is right is the engine stage's own matter."""

    def engine(repository: Path, name: str, _progress: Any) -> tuple[str, ...]:
        if repository.name == "fp16":
            failed = GateResult("fp16", 1, 0, True, (), ("it is wrong",))
            raise EngineFailure(name, failed)
        return ()

    def pretend(
        repositories: Mapping[str, Path], *args: Any, **options: Any
    ) -> dict[str, Throughput]:
        return {
            name: Throughput(1.0 + place, 1.0, 1.0, 1.0, 1)
            for place, name in enumerate(repositories)
        }

    monkeypatch.setattr(choose, "missing_for_engines", lambda: "")
    tried = replace(BACKENDS["tensorrt"], tried={"gpu": ("fp32", "fp16", "bf16")})
    monkeypatch.setattr(choose, "BACKENDS", {**BACKENDS, "tensorrt": tried})
    monkeypatch.setattr(encoder, "build_engine_here", engine)
    monkeypatch.setattr(choose, "measure_throughputs", pretend)
    inputs = read_inputs(load_spec(pipeline, ["core.backend=tensorrt"]), quiet)
    candidates = by_precision(building.build(inputs, tmp_path / "repository", quiet))
    assert {name: one["status"] for name, one in candidates.items()} == {
        "fp32": "passed",
        "fp16": "failed",
        "bf16": "chosen",
    }
    assert list(candidates["fp16"]["failures"]) == ["it is wrong"]
