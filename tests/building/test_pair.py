"""Pairs of pipelines for the texts and the images of one model, in one vector space."""

import shutil
from pathlib import Path

import pytest

from tests.support.image_models import save_image_model
from tests.support.mistakes import refusal
from tests.support.project import build_into
from triptych.container.lock_check import check_repository
from triptych.core.gate.cached import GateFailure
from triptych.core.inputs import read_inputs
from triptych.repository.config import space_of
from triptych.repository.history import rollback
from triptych.repository.manifest import CompiledManifest, build_id, read_manifest
from triptych.repository.store import history_folder
from triptych.serving.server import check_and_make_flags
from triptych.spec.scaffold import scaffold
from triptych.spec.spec import load_spec

pytestmark = pytest.mark.build
TEXT, IMAGE = "shop_text", "shop_image"


@pytest.fixture
def pipelines(tmp_path: Path) -> Path:
    """Folder with a new pair of a small CLIP."""
    save_image_model("clip", tmp_path / "model")
    scaffold(
        "shop",
        task="image-text-embedding",
        model=str(tmp_path / "model"),
        with_hooks=False,
        pipelines=tmp_path / "pipelines",
    )
    return tmp_path / "pipelines"


@pytest.mark.long
def test_a_pair_has_one_space_and_is_built_served_and_restored_as_one(
    pipelines: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, image = pipelines / TEXT, pipelines / IMAGE
    repository = pipelines.parent / "repository"
    first = {
        name: build_into(pipelines / name, repository).gate.pair for name in (TEXT, IMAGE, TEXT)
    }
    spaces = {name: read_manifest(repository, name, CompiledManifest).space for name in first}
    assert len({*spaces.values()}) == 1
    assert spaces[TEXT].startswith("CLIPModel ")
    for pair in first.values():
        values = {verdict.metric: verdict.value for verdict in pair.verdicts}
        assert pair.rows >= 2
        assert all(verdict.passed for verdict in pair.verdicts)
        assert values["nearest_neighbor_agreement"] == 1.0
        assert 0 < values["max_difference"] <= 1e-5
    check_and_make_flags(repository, production=False)

    old = {name: build_id(repository, name) for name in first}
    shutil.rmtree(pipelines.parent / "model")
    save_image_model("clip", pipelines.parent / "model", seed=6)
    error = refusal(build_into, text, repository)
    assert f"Run `triptych build {TEXT} {IMAGE}`" in error.message
    build_into(text, repository, built_after=[IMAGE])
    lines = {p.pipeline: p.line for p in check_repository(repository, None)}
    assert f"run `triptych build {TEXT} {IMAGE}`" in lines[TEXT]
    assert f"run `triptych build {IMAGE} {TEXT}`" in lines[IMAGE]
    refused = refusal(check_and_make_flags, repository, production=False)
    assert "failed the startup check" in refused.message
    assert "cannot be compared with those of" in capsys.readouterr().err
    build_into(image, repository)
    check_and_make_flags(repository, production=False)

    assert rollback(repository, IMAGE, None).builds == {IMAGE: old[IMAGE], TEXT: old[TEXT]}
    check_and_make_flags(repository, production=False)
    shutil.rmtree(history_folder(repository) / TEXT)
    error = refusal(rollback, repository, IMAGE, None)
    assert error.remedy.endswith(f"run `triptych build {IMAGE} {TEXT}`")


def test_a_pair_that_does_not_fit_is_refused(pipelines: Path) -> None:
    other = save_image_model("clip", pipelines.parent / "other", seed=6)
    plain = save_image_model("vit", pipelines.parent / "plain")
    repository = pipelines.parent / "repository"
    for override, rule in (
        (f"model.source={other}", "names a pipeline with another vector space"),
        ("parameters.dimensions=8", "names a pipeline with another vector space"),
        (f"model.source={plain}", "is only supported for the sides of a model"),
    ):
        error = refusal(build_into, pipelines / IMAGE, repository, override)
        assert (error.field, error.rule[: len(rule)]) == ("pair_with", rule)
    assert not repository.exists()
    inputs = read_inputs(load_spec(pipelines / TEXT), lambda _stage, _line: None)
    assert space_of(inputs.plan).endswith(", 24 numbers")


def test_the_order_of_matches_between_two_cores_decides(
    pipelines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = pipelines.parent / "repository"
    build_into(pipelines / TEXT, repository)
    graph = repository / f"{TEXT}_core/1/model.onnx"
    # Another graph in place of the core that passed its gate: its vectors are of another space.
    other = save_image_model("clip", pipelines.parent / "other", seed=6)
    beside = pipelines.parent / "beside"
    shutil.copytree(pipelines, beside)
    for name in (TEXT, IMAGE):
        spec = beside / name / "pipeline.yaml"
        spec.write_text(spec.read_text().replace(str(pipelines.parent / "model"), str(other)))
    build_into(beside / TEXT, beside / "repository")
    shutil.copy(beside / f"repository/{TEXT}_core/1/model.onnx", graph)
    with pytest.raises(GateFailure, match=f"with {TEXT}: max_difference"):
        build_into(pipelines / IMAGE, repository)
