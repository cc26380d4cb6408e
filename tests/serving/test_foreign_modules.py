"""A server, its steps, the gateway and commands in a folder with modules of common names."""

import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request

import psutil
import pytest

from tests.support.container_image import image_of, server_of
from tests.support.http_pages import fetch
from tests.support.project import write_pipeline
from tests.support.served_command import TRIPTYCH, endpoints_of, serving
from triptych.client import Client

pytestmark = pytest.mark.server
NAME = "minilm_packed"
MODULES = ("contextlib", "json", "numpy", "starlette", "tokenizers/__init__", "typer")
MODULE = "with open({marks!r}, 'a') as marks: marks.write({name!r} + ' ')\nraise ImportError\n"


@pytest.fixture
def repository(minilm_repository: Path, tmp_path: Path) -> Path:
    for part in minilm_repository.glob(f"{NAME}*"):
        shutil.copytree(part, tmp_path / "models" / part.name)
    return tmp_path / "models"


@contextmanager
def foreign_modules(folder: Path, names: Sequence[str] = MODULES) -> Iterator[None]:
    """Modules in a folder of which none is imported while the block runs."""
    marks = folder.with_name("imported")
    for name in names:
        file = folder / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(MODULE.format(marks=str(marks), name=f"{folder.name}/{name}"))
    try:
        yield
    finally:
        assert not marks.exists(), marks.read_text()


def test_commands_and_their_server_import_nothing_of_the_caller(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither from the working directory nor from PYTHONPATH; paths in options stay relative."""
    here, path = tmp_path / "here", tmp_path / "path"
    write_pipeline(tmp_path / NAME)
    given = {"PYTHONPATH": str(path), "PYTHONSTARTUP": "a.py", "LD_LIBRARY_PATH": "/nowhere"}
    options = ("--profile=production", "--http-api=0", "--log-file=server.log")
    # Python itself has PYTHONPATH until the command drops it: `typing` imports contextlib.
    with foreign_modules(here), foreign_modules(path, MODULES[1:]):
        monkeypatch.chdir(here)
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        with serving(Path("../models"), *options) as command:
            found = endpoints_of(command)
            processes = psutil.Process(command.pid).children(recursive=True)
            assert len(processes) > 4  # the server, its guard, its steps, and the gateway
            for process in processes:
                assert not {"PYTHONPATH", "PYTHONSTARTUP"} & process.environ().keys()
            assert list(Path(psutil.Process(found["pid"]).cwd()).iterdir()) == []
            words = [TRIPTYCH, "infer", NAME, "--url", found["grpc"], "--text", "a"]
            done = subprocess.run(words, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stderr
            assert f"nothing is imported from PYTHONPATH ({path})" in done.stderr
            body = json.dumps({"model": NAME, "input": "a"}).encode()
            request = Request(
                f"{found['api']}/v1/embeddings", body, {"content-type": "application/json"}
            )
            assert fetch(request)[0] == 200
            words = [TRIPTYCH, "ui", NAME, "--url", found["grpc"], "--pipelines=..", "--port=0"]
            with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as ui:
                assert ui.stdout is not None
                assert "http://" in ui.stdout.readline()
                ui.terminate()
            command.terminate()
            assert command.wait(timeout=60) == 0
        log = Path("server.log").read_text(encoding="utf-8")
        assert log.startswith("note: the server and its steps load libraries of LD_LIBRARY_PATH=")


def test_a_container_imports_nothing_from_its_working_directory(
    repository: Path, tmp_path: Path
) -> None:
    here = tmp_path / "here"
    with foreign_modules(here), image_of(tmp_path / "image" / "i", repository) as made:
        variables = {**made.variables, "TRIPTYCH_REPOSITORY": "../models"}
        image = made._replace(folder=here, variables=variables)
        with image.serving("--log-file=triton.log") as process:
            server = server_of(process)
            assert psutil.Process(server).cwd() == "/"
            with Client(NAME, image.url("GRPC")) as client:
                assert client.embed(["a"]).shape == (1, 384)
            process.terminate()
            assert process.wait(timeout=60) == 0
        assert (here / "triton.log").is_file()
