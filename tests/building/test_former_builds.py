"""Repositories of commit 181c3a46, one of each kind with a replaced build, under today's code.

The archive also has the pipelines and their models of random weights. The pipeline that generates
text has the fake engine of that commit.
"""

import tarfile
from pathlib import Path

import pytest

from tests.support.generation_cases import fake_backend
from tests.support.project import ROOT
from tests.support.scaffolding import run
from triptych.container.lock_check import enforce
from triptych.container.settings import read_settings
from triptych.repository.manifest import build_id
from triptych.serving.server import Server

NAMES = ("encoder", "generation", "own", "text2text")


@pytest.fixture
def former(tmp_path: Path) -> Path:
    """The folder of the repository, its history, its pipelines and their models."""
    with tarfile.open(ROOT / "tests/data/former_builds.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    fake_backend()
    return tmp_path


def test_a_container_refuses_builds_that_it_could_not_drain(
    former: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not enforce(read_settings(repository=str(former / "repository")), None)
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition(": ")[2] for line in lines] == [
        f"run `triptych build {name}`" for name in NAMES
    ]


@pytest.mark.server
@pytest.mark.long
def test_former_builds_are_served_verified_rolled_back_and_renewed(former: Path) -> None:
    repository = former / "repository"
    folders = ("-r", repository, "--pipelines", former / "pipelines")
    former_ids = {name: build_id(repository, name) for name in NAMES}
    for name in NAMES:
        assert run("rollback", name, "-r", repository).exit_code == 0
    with Server(repository) as server:
        for name in NAMES:
            done = run("verify", name, *folders, "--url", server.grpc_url)
            assert done.exit_code == 0, done.output
    done = run("build", *NAMES, *folders, "--reports", former / "reports")
    assert done.exit_code == 0, done.output
    assert enforce(read_settings(repository=str(repository)), None)
    for name, former_id in former_ids.items():
        assert run("rollback", name, former_id, "-r", repository).exit_code == 0
        assert build_id(repository, name) == former_id
