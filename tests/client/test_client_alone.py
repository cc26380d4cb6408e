"""The client in environments that have neither torch, ONNX nor a server, with NumPy 2."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.client_toy import Toy, expected_all
from tests.support.wheels import build_wheels, new_environment

pytestmark = [pytest.mark.server, pytest.mark.long]

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
print(json.dumps({
    "numpy": numpy.__version__,
    "version": triptych.__version__,
    "names": dir(triptych),
    "outputs": names,
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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheels(tmp_path_factory.mktemp("wheels"))[1]


@pytest.mark.parametrize("program", interpreters())
def test_the_client_works_alone_with_numpy_2(
    program: str, wheel: Path, toy: Toy, tmp_path: Path
) -> None:
    programs = new_environment(tmp_path / "venv", wheel, "numpy>=2", python=program)
    texts = ["a", "", "a longer text"]
    done = subprocess.run(
        [programs / "python", "-I", "-W", "error", "-c", SCRIPT, toy.url, json.dumps(texts)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["numpy"].startswith("2.")
    assert {"Client", "build", "new", "serve", "__version__"} <= set(told["names"])
    np.testing.assert_array_equal(np.float32(told["vectors"]), expected_all(texts))
    assert not (programs / "triptych").exists()
