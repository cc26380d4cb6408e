"""The client in environments that have neither torch, ONNX nor a server, with NumPy 2."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from client_toy import Toy, expected_all

pytestmark = [pytest.mark.server, pytest.mark.long]

ROOT = Path(__file__).parents[2]
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
SCRIPT = """
import asyncio, json, sys
import numpy, triptych
from triptych import Client
from triptych.client import AsyncClient, InvalidRequestError

url, texts = sys.argv[1], json.loads(sys.argv[2])
with Client("toy", url) as client:
    vectors = client.embed(texts)
    each = client.embed_each([texts[0], "\\ud800"])
    names = list(client.interface().outputs)

async def again():
    async with AsyncClient("toy", url) as client:
        return await client.embed(texts)

assert numpy.array_equal(asyncio.run(again()), vectors)
assert isinstance(each[1], InvalidRequestError) and numpy.array_equal(each[0], vectors[0])
heavy = {"torch", "onnx", "onnxruntime", "pydantic", "yaml", "rich", "typer"} & set(sys.modules)
print(json.dumps({
    "numpy": numpy.__version__,
    "version": triptych.__version__,
    "names": dir(triptych),
    "outputs": names,
    "heavy": sorted(heavy),
    "vectors": vectors.tolist(),
}))
"""


def interpreters() -> list[str]:
    """The programs of the oldest and the newest supported Python that this machine has."""
    found = {f"{sys.version_info.major}.{sys.version_info.minor}": sys.executable}
    pyenv = Path.home() / ".pyenv/versions"
    for version in VERSIONS:
        kept = sorted(pyenv.glob(f"{version}.*/bin/python"))
        if program := (str(kept[-1]) if kept else shutil.which(f"python{version}")):
            found.setdefault(version, program)
    programs = [found[version] for version in VERSIONS if version in found]
    return list(dict.fromkeys((programs[0], programs[-1])))


def pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", *words, "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", str(ROOT), "--no-deps", "--wheel-dir", str(folder))
    (made,) = folder.glob("*.whl")
    return made


@pytest.mark.parametrize("program", interpreters())
def test_the_client_works_alone_with_numpy_2(
    program: str, wheel: Path, toy: Toy, tmp_path: Path
) -> None:
    subprocess.run([program, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    pip("--python", str(python), "install", "--no-compile", str(wheel), "numpy>=2")
    texts = ["a", "", "a longer text"]
    done = subprocess.run(
        [python, "-I", "-W", "error", "-c", SCRIPT, toy.url, json.dumps(texts)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["numpy"].startswith("2.")
    assert told["heavy"] == []
    assert {"Client", "build", "new", "serve", "__version__"} <= set(told["names"])
    np.testing.assert_array_equal(np.float32(told["vectors"]), expected_all(texts))
    command = subprocess.run(
        [tmp_path / "venv/bin/triptych", "--help"], capture_output=True, text=True, check=False
    )
    assert command.returncode == 2
    assert re.search(r"Given: no (typer|yaml)\. Run `pip install 'jinja2", command.stderr)
