"""From a pipeline to answers of its engine, in one go, on a machine with a fake GPU."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.support import served_engines
from tests.support.container_cases import H200, L4
from tests.support.container_cases import machine as facts_of
from tests.support.engine_cases import contents, machine
from tests.support.project import build_into, link_cache, lock_data, traffic_texts, write_pipeline
from tests.support.scaffolding import keep_rows
from triptych.client import Client
from triptych.container.lock_check import check_repository
from triptych.repository.lint import run_checks
from triptych.serving.server import Server

ENGINE = "core.backend=tensorrt"


@pytest.fixture(scope="module", params=["packed", pytest.param("bucketed", marks=pytest.mark.long)])
def pipeline(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("pipelines") / "tiny"
    core = {"precision": "fp16", "max_batch_size": 8, "layout": request.param}
    write_pipeline(folder, model={"source": str(tiny_model)}, core=core)
    return keep_rows(folder, 50)


@pytest.fixture(scope="module")
def built(pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pipeline with its engine, built where TensorRT 10.16 and one H200 are faked.

    A second build there keeps the engine; afterwards the machine has no GPU any more.
    """
    base = tmp_path_factory.mktemp("gpu")
    build_into(pipeline, base / "exported", ENGINE)
    with pytest.MonkeyPatch.context() as patch:
        link_cache(base / "cache", "engine", "timing")
        machine(patch, base, "10")
        assert "tiny_core" in build_into(pipeline, base / "repository", ENGINE).changed
        before = contents(base / "repository")
        assert build_into(pipeline, base / "repository", ENGINE).changed == ()
        assert contents(base / "repository") == before
    return base / "repository"


@pytest.fixture
def repository(built: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    return Path(shutil.copytree(built, tmp_path / "repository", symlinks=True))


@pytest.mark.server
@pytest.mark.replacement
def test_an_engine_is_checked_and_answers_as_the_model(
    pipeline: Path, repository: Path, tmp_path: Path, tiny_model: Path
) -> None:
    from sentence_transformers import SentenceTransformer

    assert (repository / "tiny_core/1/model.plan").is_file()
    found = {f.id for f in run_checks(repository, triton="26.05") if f.severity != "info"}
    assert found <= {"known-defect"}  # of that release
    assert check_repository(repository, facts_of(H200)) == []
    (verdict,) = check_repository(repository, facts_of(L4, tensorrt="11.2.1"))
    assert "TensorRT 10.16.1.11 on NVIDIA H200 (9.0), here are TensorRT 11.2.1" in str(verdict)

    served_engines.without_gpu(repository)
    backends = served_engines.write_fakes(tmp_path / "backends")
    texts = traffic_texts()[:40]
    with (
        Server(repository, backend_directory=backends) as server,
        Client("tiny", server.grpc_url) as client,
    ):
        wanted = SentenceTransformer(str(tiny_model), device="cpu").encode(texts)
        assert np.abs(client.embed(texts) - wanted).max() < 5e-3


def test_an_engine_outlives_a_build_where_there_is_no_gpu_unless_it_does_not_fit(
    pipeline: Path, repository: Path, tmp_path: Path
) -> None:
    plan, before = repository / "tiny_core/1/model.plan", contents(repository)
    assert build_into(pipeline, repository, ENGINE).changed == ()
    assert contents(repository) == before
    build_into(pipeline, repository, ENGINE, "serving.queue.max_delay_us=100")
    assert plan.read_bytes() == before["tiny_core/1/model.plan"]
    assert lock_data(repository, "tiny")["engine"]["gpu"] == "NVIDIA H200"
    for settings in ([], ["core.max_batch_size=4"]):
        copy = Path(shutil.copytree(repository, tmp_path / f"copy{len(settings)}", symlinks=True))
        plan = copy / "tiny_core/1/model.plan"
        if not settings:
            plan.write_bytes(plan.read_bytes()[:-1] + b"?")
        build_into(pipeline, copy, ENGINE, *settings)
        assert not plan.exists()
        assert lock_data(copy, "tiny")["engine"] is None
        assert {f.id for f in run_checks(copy) if f.severity == "error"} == {"engine-built"}
        (verdict,) = check_repository(copy, facts_of(H200))
        assert "the engine has not been built" in str(verdict)
