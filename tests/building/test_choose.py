"""`core.precision: auto`: real builds, real servers, real load; the fastest that passes ships."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.builds import build
from tests.support.checkpoint_files import change
from tests.support.mistakes import check_refused
from tests.support.project import link_cache, lock_data, quiet, write_pipeline
from tests.support.scaffolding import keep_rows
from triptych.building import auto, compiled
from triptych.building.auto import Throughput
from triptych.building.build import BuildOutcome
from triptych.container.processor import find_instruction_sets, sets_for
from triptych.core.engine.stage import EngineFailure
from triptych.core.gate.cached import GateFailure
from triptych.core.inputs import PipelineInputs, read_inputs
from triptych.repository.manifest import CompiledManifest, read_manifest
from triptych.repository.records import GateResult
from triptych.serving.bench import perf_analyzer
from triptych.serving.bench.perf_analyzer import LoadError, LoadResult
from triptych.spec.backends import BACKENDS
from triptych.spec.spec import load_spec

pytestmark = pytest.mark.long
CANDIDATES = ("fp32", "int8", "int8_dynamic", "fp16")
Pretend = Callable[..., list[str]]


@pytest.fixture(scope="module", autouse=True)
def short_windows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Little time for load, and a cache in which nothing was measured before."""
    cache = tmp_path_factory.mktemp("own") / "cache"
    link_cache(cache, "throughput")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIPTYCH_CACHE", str(cache))
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
    folder = write_pipeline(
        tmp_path_factory.mktemp("pipelines") / "tiny",
        model={"source": str(tiny_model)},
        core={"backend": "onnxruntime", "precision": "auto"},
        accuracy=limits,
    )
    return keep_rows(folder, 40)


def read(folder: Path, *overrides: str) -> PipelineInputs:
    return read_inputs(load_spec(folder, overrides), quiet)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Replaces the measurement by one in which the last candidate is the fastest, or `best`."""

    def begin(best: str = "") -> list[str]:
        measured: list[str] = []

        def measure(repositories: Mapping[str, Path], *_: Any, **__: Any) -> dict[str, Throughput]:
            measured.extend(repositories)
            rates = {name: 1.0 + place for place, name in enumerate(measured)} | {best: 99.0}
            return {name: Throughput(rates[name], 1.0) for name in repositories}

        monkeypatch.setattr(auto, "measure_throughputs", measure)
        return measured

    return begin


def by_precision(built: BuildOutcome) -> Mapping[str, Mapping[str, Any]]:
    return {one["precision"]: one for one in built.gate.as_dict()["candidates"]}


def statuses(built: BuildOutcome) -> dict[str, str]:
    return {name: one["status"] for name, one in by_precision(built).items()}


def test_the_fastest_that_passes_is_built_and_measured_once(
    pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository, stages = tmp_path / "auto/repository", []
    built = build(read(pipeline), repository, lambda stage, _: stages.append(stage))
    candidates = by_precision(built)
    assert tuple(candidates) == CANDIDATES
    measured = {name: one for name, one in candidates.items() if one["throughput_per_s"]}
    (best,) = [name for name, one in candidates.items() if one["status"] == "chosen"]
    assert best == max(measured, key=lambda name: measured[name]["throughput_per_s"])
    assert built.gate.precision == best
    assert "fp32" in measured
    assert stages.count("throughput") >= len(measured)
    for name, one in candidates.items():
        if one["status"] in ("passed", "chosen"):
            assert one["size_bytes"] > 0
            assert one["p99_ms"] > 0
            assert one["verdicts"]["mean_cosine"] > 0.9, name
        else:
            assert one["failures"] or one["note"], name
    lock = lock_data(repository, "tiny")
    assert lock["spec"]["core"]["precision"] == "auto"
    assert lock["gate"]["precision"] == best
    assert [one["precision"] for one in lock["gate"]["candidates"]] == list(CANDIDATES)
    left = {path.name for path in repository.parent.iterdir()}
    assert left == {"repository", ".repository.lock"}

    monkeypatch.setattr(auto, "measure_throughputs", lambda *_, **__: pytest.fail("measured again"))
    again = build(read(pipeline), repository, quiet)
    assert again.changed == ()
    assert again.gate == built.gate


@pytest.mark.long
def test_a_candidate_that_fails_is_not_measured(
    pipeline: Path, tmp_path: Path, pretend: Pretend
) -> None:
    measured = pretend()
    # No conversion meets this: fp32 does.
    inputs = read(pipeline, "accuracy.max_difference=1e-5", "serving.queue.max_in_flight=77")
    built = build(inputs, tmp_path / "repository", quiet)
    assert measured == ["fp32"]
    assert statuses(built) == {**dict.fromkeys(CANDIDATES, "failed"), "fp32": "chosen"}
    assert all("max_difference" in one["verdicts"] for one in by_precision(built).values())
    with pytest.raises(GateFailure, match="differs from the reference"):
        build(read(pipeline, "accuracy.max_difference=1e-12"), tmp_path / "none", quiet)
    assert not (tmp_path / "none").exists()


def test_without_a_backend_in_the_spec_backends_are_compared(
    pipeline: Path, tmp_path: Path, pretend: Pretend
) -> None:
    pretend("openvino bf16")
    folder = Path(shutil.copytree(pipeline, tmp_path / "tiny"))
    change(folder / "pipeline.yaml", core={"precision": "auto"})
    inputs = read(folder, "accuracy={min_cosine: 0.9, max_difference: 0.2}")
    repository = tmp_path / "repository"
    trials = {trial.label: trial for trial in build(inputs, repository, quiet).gate.candidates}
    assert tuple(trials) == (*CANDIDATES, "openvino fp32", "openvino bf16", "openvino int8")
    assert trials["openvino bf16"].status == "chosen"
    manifest = read_manifest(repository, "tiny", CompiledManifest)
    core = manifest.spec.core
    assert (core.backend, core.precision, manifest.plan.layout) == ("openvino", "bf16", "bucketed")
    assert manifest.spec.serving.instances.core == len(os.sched_getaffinity(0))
    assert manifest.instruction_sets == sets_for("bf16", find_instruction_sets())
    text = (repository / "tiny_core/config.pbtxt").read_text(encoding="utf-8")
    assert 'key: "HINT_BF16"' in text
    assert inputs.with_built_layout(repository).plan.spec.core.backend == "openvino"


def test_a_window_without_an_answer_is_measured_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    windows: list[float] = []

    def run(*arguments: Any) -> LoadResult:
        windows.append(arguments[-1].window_s)
        if len(windows) == 1:
            raise LoadError("must be answered", "no answer", "", "", is_empty=True)
        return LoadResult((0, 10**9), (1,), (5.0,))

    monkeypatch.setattr(auto, "Server", lambda *_, **__: nullcontext(SimpleNamespace(grpc_url="")))
    monkeypatch.setattr(perf_analyzer, "run", run)
    auto.measure_throughputs(
        {"fp32": Path()}, "tiny", ["a"], baseline="fp32", clients=1, progress=quiet
    )
    assert windows == [0.4, 0.8, 0.4]


def test_what_cannot_be_measured_here_must_be_named(
    pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "missing_for_engines", lambda: "no GPU is here")
    for override, lacking in (("core.device=gpu", ""), ("core.backend=tensorrt", "no GPU is here")):
        words = ["if this machine cannot measure them", lacking]
        check_refused(words, build, read(pipeline, override), tmp_path / "repository", quiet)


def test_an_engine_that_differs_from_its_graph_does_not_race(
    pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pretend: Pretend
) -> None:
    """Engines are pretended: whether one is right is the engine stage's own matter."""

    def engine(repository: Path, name: str, _progress: Any) -> tuple[str, ...]:
        if repository.name == "fp16":
            failed = GateResult("fp16", 1, 0, True, (), ("it is wrong",))
            raise EngineFailure(name, failed)
        return ()

    pretend()
    monkeypatch.setattr(auto, "missing_for_engines", lambda: "")
    tried = replace(BACKENDS["tensorrt"], tried={"gpu": ("fp32", "fp16", "bf16")})
    monkeypatch.setattr(auto, "BACKENDS", {**BACKENDS, "tensorrt": tried})
    monkeypatch.setattr(compiled, "build_engine_here", engine)
    built = build(read(pipeline, "core.backend=tensorrt"), tmp_path / "repository", quiet)
    assert statuses(built) == {"fp32": "passed", "fp16": "failed", "bf16": "chosen"}
    assert list(by_precision(built)["fp16"]["failures"]) == ["it is wrong"]
