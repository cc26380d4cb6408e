"""From a pipeline to answers of its engine, in one go, on a machine with a fake GPU."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import served_engines
from conftest import build_into, link_cache, lock_data, traffic_texts, write_pipeline
from container_cases import H200, L4
from container_cases import machine as facts_of
from engine_cases import contents, machine
from triptych.client import Client
from triptych.container.lock_check import check_repository
from triptych.repository.lint import run_checks
from triptych.serving.server import Server

ENGINE = "core.backend=tensorrt"


def write_tiny(folder: Path, model: Path) -> Path:
    core = {"precision": "fp16", "max_batch_size": 8}
    return write_pipeline(folder / "tiny", model={"source": str(model)}, core=core)


@pytest.fixture
def pipeline(tiny_model: Path, tmp_path: Path) -> Path:
    return write_tiny(tmp_path, tiny_model)


@pytest.fixture
def on_gpu(pipeline: Path, tmp_path: Path) -> Callable[[pytest.MonkeyPatch], Any]:
    """Makes this a machine with TensorRT 10.16 and one H200, as far as a fake can be one.

    Its cache has everything that the packed pipeline needs except engines.
    """
    build_into(pipeline, tmp_path / "exported", ENGINE)

    def begin(patch: pytest.MonkeyPatch) -> Any:
        link_cache(tmp_path / "cache", "engine", "timing")
        return machine(patch, tmp_path, "10")

    return begin


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, on_gpu: Callable[[pytest.MonkeyPatch], Any]) -> Any:
    """The module ``tensorrt`` there."""
    return on_gpu(monkeypatch)


@pytest.fixture
def built_elsewhere(
    pipeline: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    on_gpu: Callable[[pytest.MonkeyPatch], Any],
) -> Path:
    """The pipeline with its engine, on a machine that has no GPU any more."""
    with monkeypatch.context() as here:
        on_gpu(here)
        build_into(pipeline, tmp_path / "repository", ENGINE)
    return tmp_path / "repository"


@pytest.mark.server
@pytest.mark.replacement
@pytest.mark.parametrize("layout", ["packed", pytest.param("bucketed", marks=pytest.mark.long)])
def test_build_engine_check_and_serve(
    pipeline: Path, gpu: Any, tmp_path: Path, layout: str
) -> None:
    repository = tmp_path / "repository"
    built = build_into(pipeline, repository, ENGINE, f"core.layout={layout}")
    assert "tiny_core" in built.changed
    assert (repository / "tiny_core/1/model.plan").is_file()
    found = {f.id for f in run_checks(repository, triton="26.05") if f.severity != "info"}
    assert found <= {"known-defect"}  # of that release
    assert check_repository(repository, facts_of(H200)) == []
    (verdict,) = check_repository(repository, facts_of(L4, tensorrt="11.2.1"))
    assert "TensorRT 10.16.1.11 on NVIDIA H200 (9.0), here are TensorRT 11.2.1" in str(verdict)

    plain = tmp_path / "plain"
    build_into(pipeline, plain, f"core.layout={layout}")
    shutil.copytree(repository, tmp_path / "served")
    served_engines.without_gpu(tmp_path / "served")
    backends = served_engines.write_fakes(tmp_path / "backends")
    texts = traffic_texts()[:40]
    with (
        Server(tmp_path / "served", backend_directory=backends) as engine,
        Server(plain) as reference,
        Client("tiny", engine.grpc_url) as asked,
        Client("tiny", reference.grpc_url) as wanted,
    ):
        assert np.abs(asked.embed(texts) - wanted.embed(texts)).max() < 5e-3


def test_a_build_without_changes_keeps_the_engine(pipeline: Path, gpu: Any, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    build_into(pipeline, repository, ENGINE)
    before = contents(repository)
    assert build_into(pipeline, repository, ENGINE).changed == ()
    assert contents(repository) == before


def test_an_engine_outlives_a_build_where_there_is_no_gpu(
    pipeline: Path, built_elsewhere: Path
) -> None:
    repository = built_elsewhere
    before = contents(repository)
    assert build_into(pipeline, repository, ENGINE).changed == ()
    assert contents(repository) == before
    build_into(pipeline, repository, ENGINE, "serving.queue.max_delay_us=100")
    assert (repository / "tiny_core/1/model.plan").read_bytes() == before["tiny_core/1/model.plan"]
    lock = lock_data(repository, "tiny")
    assert lock["engine"]["gpu"] == "NVIDIA H200"


def test_a_damaged_engine_does_not_stay(pipeline: Path, built_elsewhere: Path) -> None:
    plan = built_elsewhere / "tiny_core/1/model.plan"
    plan.write_bytes(plan.read_bytes()[:-1] + b"?")
    build_into(pipeline, built_elsewhere, ENGINE)
    assert not plan.exists()
    assert lock_data(built_elsewhere, "tiny")["engine"] is None


def test_an_engine_of_other_shapes_does_not_stay(pipeline: Path, built_elsewhere: Path) -> None:
    repository = built_elsewhere
    build_into(pipeline, repository, ENGINE, "core.max_batch_size=4")
    assert not (repository / "tiny_core/1/model.plan").exists()
    lock = lock_data(repository, "tiny")
    assert lock["engine"] is None
    findings = {f.id for f in run_checks(repository) if f.severity == "error"}
    assert findings == {"engine-built"}
    (verdict,) = check_repository(repository, facts_of(H200))
    assert "the engine has not been built" in str(verdict)
