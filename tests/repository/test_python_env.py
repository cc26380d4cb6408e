"""The archive of packages for images that lack them, and a built pipeline with one."""

import io
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.support.echo_server import CONFIG, ask, write_model
from tests.support.processes import CORE_IS_A_PROCESS
from tests.support.project import build_into, lock_data, write_pipeline
from triptych.base.errors import UserError
from triptych.building.pipeline_checks import check_pipeline
from triptych.client import Client, InferenceError
from triptych.repository.config import parse_config
from triptych.repository.python_env import (
    ENV_FILE,
    ENV_PARAMETER,
    ENV_PATH,
    PYTHON_VERSIONS,
    modules_of,
    pack_env,
    with_required,
)
from triptych.serving.readiness import ServerError
from triptych.serving.server import Server
from triptych.spec.spec import load_spec


def wheel(folder: Path, files: dict[str, str]) -> Path:
    path = folder / "only_here-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def names_in(content: bytes) -> set[str]:
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        return set(archive.getnames())


def test_equal_wheels_give_equal_archives_without_tests_and_headers(tmp_path: Path) -> None:
    made = wheel(
        tmp_path, {"only_here/__init__.py": "", "only_here/tests/a.py": "", "x/include/a.h": ""}
    )
    content = pack_env({"3.12": [made]})
    assert content == pack_env({"3.12": [made]})
    assert names_in(content) == {
        *("bin/activate", "bin/python3", "pyvenv.cfg"),
        "lib/python3.12/site-packages/only_here/__init__.py",
        "lib/python3.12/site-packages/triptych.pth",
    }


def test_a_list_names_installed_packages_with_what_they_require() -> None:
    found = with_required(["Jinja2", "pytest"])
    assert {"jinja2", "markupsafe", "pytest", "pluggy"} <= set(found)
    assert "babel" not in found  # of an extra
    assert {"jinja2", "markupsafe", "pluggy"} <= modules_of(["jinja2", "pytest"])
    with pytest.raises(UserError, match=r"installed here.*Given: no-such-package"):
        with_required(["no_such_package"])


CODE = """
import sys

import numpy as np
import triton_python_backend_utils as pb_utils
import only_here

class TritonPythonModel:
    def execute(self, requests):
        said = f"{only_here.WORD}, writes byte code: {not sys.dont_write_bytecode}"
        said = np.array([[said.encode()]], dtype=np.object_)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("echo", said)]) for _ in requests]
"""


@pytest.mark.server
def test_a_step_finds_packages_in_its_environment_and_nothing_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With this machine's Python in place of the image's, on the real Python backend."""
    packages = Path(np.__file__).parents[1]  # of the tests: the real archive has numpy of its own
    made = wheel(
        tmp_path,
        {"only_here/__init__.py": "WORD = 'from the archive'", "packages.pth": f"{packages}\n"},
    )
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    home = str(Path(getattr(sys, "_base_executable", sys.executable)).resolve().parent)
    repository, here = tmp_path / "repository", tmp_path / "here"
    archive = pack_env({version: [made]}, home=home)
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        members.extractall(tmp_path / "folder", filter="data")
    for name, path in (("archive", ENV_PATH), ("folder", tmp_path / "folder"), ("none", "/none")):
        value = f'parameters {{ key: "{ENV_PARAMETER}" value {{ string_value: "{path}" }} }}'
        config = CONFIG.format(backend="python") + value
        write_model(repository, name, CODE, config)
    (repository / "archive" / ENV_FILE).write_bytes(archive)
    here.mkdir()
    for module in ("json", "numpy", "only_here"):
        (here / f"{module}.py").write_text("raise ImportError")
    monkeypatch.chdir(here)
    with pytest.raises(ServerError, match="canonical path for /none") as caught, Server(repository):
        raise AssertionError("it started")
    caught.value.log_file.unlink()
    shutil.rmtree(repository / "none")
    with Server(repository) as server:
        for name in ("archive", "folder"):
            assert ask(server, "a", name) == "from the archive, writes byte code: False", name


@pytest.mark.server
def test_a_built_pipeline_has_its_settings_and_its_archive_and_serves(
    tmp_path: Path, tiny_model: Path
) -> None:
    # No request of level 2 is served in a microsecond.
    levels = """dynamic_batching { priority_queue_policy {
        key: 2 value { timeout_action: REJECT default_timeout_microseconds: 1 } } }"""
    folder = write_pipeline(
        tmp_path / "mine",
        model={"source": str(tiny_model)},
        core={"session": {"inter_threads": 2, "memory_arena": "none", "memory_pattern": True}},
        serving={
            "python_env": ["idna"],
            "priority": {"levels": 2},
            "instances": {"core": 2},
            "config": {"core": levels, "ensemble": "version_policy { latest { num_versions: 1 } }"},
        },
    )
    (folder / "hooks.py").write_text("import idna\n\ndef before(rows):\n    return rows\n")
    checks = {check.name: check for check in check_pipeline(load_spec(folder))}
    assert checks["hooks-imports"].severity == "ok"
    repository = tmp_path / "repository"
    build_into(folder, repository)
    for step in ("preprocess", "postprocess"):
        place = repository / f"mine_{step}"
        names = names_in((place / ENV_FILE).read_bytes())
        for python in PYTHON_VERSIONS:
            for module in ("numpy", "tokenizers", "idna"):
                assert f"lib/python{python}/site-packages/{module}/__init__.py" in names
            compiled = f"cpython-{python.replace('.', '')}-x86_64-linux-gnu.so"
            assert any(compiled in name for name in names)
        texts = [place / "config.pbtxt", place / "configs/24.10.pbtxt"]
        configs = [parse_config(text.read_text(encoding="utf-8")) for text in texts]
        assert [ENV_PARAMETER in config.parameters for config in configs] == [True, False]
        assert f"mine_{step}/{ENV_FILE}" in lock_data(repository, "mine")["files"]
    core = (repository / "mine_core/config.pbtxt").read_text(encoding="utf-8")
    batching = parse_config(core).dynamic_batching
    assert (batching.priority_levels, batching.default_priority_level) == (2, 2)
    assert list(batching.priority_queue_policy) == [2]
    assert lock_data(repository, "mine")["spec"]["serving"]["config"]["core"] == levels
    # A server on PATH with another Python than the archive's takes the config without it.
    version = "{}.{}".format(*sys.version_info)
    needed = not CORE_IS_A_PROCESS and version not in PYTHON_VERSIONS
    flags = ["--model-config-name=24.10"] if needed else []
    with (
        Server(repository, extra_args=flags) as server,
        Client("mine", server.grpc_url, retry=None) as client,
    ):
        # Triton passes the priority of an ensemble's request on to its steps.
        first = client.infer({"text": ["a text"]}, parameters={"priority": 1})
        assert first["embedding"].shape == (1, 32)
        for parameters in ({"priority": 2}, {}):
            with pytest.raises(InferenceError, match="timeout"):
                client.infer({"text": ["a text"]}, parameters=parameters)
