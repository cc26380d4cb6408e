"""The images, as far as they can be judged without docker: lint, pins, sources, versions."""

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import ROOT
from triptych.base.release_changes import defects_of
from triptych.base.releases import TRITON_VERSIONS, parse_release

DOCKER = ROOT / "docker"
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))
REQUIREMENTS = sorted(DOCKER.glob("requirements-*.txt"))
CONSTRAINTS = ROOT / "build_scripts/constraints.txt"


def name_of(path: Path) -> str:
    return path.name


def read_versions() -> dict[str, str]:
    lines = (DOCKER / "versions.env").read_text().splitlines()
    return dict(line.split("=") for line in lines if not line.startswith("#"))


def instructions(path: Path) -> list[list[str]]:
    """The words of each instruction; continued lines are one."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE)
    joined = re.sub(r"\\\n", " ", text)
    return [line.split() for line in joined.splitlines() if line.strip()]


def arguments_of(path: Path, instruction: str) -> list[list[str]]:
    return [words[1:] for words in instructions(path) if words[0] == instruction]


def pins_of(path: Path) -> dict[str, str]:
    lines = [line.partition(" ")[0] for line in path.read_text().splitlines()]
    pinned = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pin) == 2 for pin in pinned), f"{path.name} has a line without an exact version"
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pinned}


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    return loaded


def test_there_is_an_image_to_build_and_one_to_serve() -> None:
    assert [path.name for path in DOCKERFILES] == ["build.Dockerfile", "serve.Dockerfile"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=name_of)
def test_hadolint_finds_nothing(path: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hadolint ignore" not in path.read_text()


@pytest.mark.parametrize("path", DOCKERFILES, ids=name_of)
def test_every_source_that_is_copied_exists_and_gets_into_the_context(path: Path) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    let_in = [line[1:] for line in ignored if line.startswith("!")]
    for *sources, _target in arguments_of(path, "COPY"):
        for source in sources:
            assert (ROOT / source).exists(), source
            assert any(source == there or source.startswith(there + "/") for there in let_in)


@pytest.mark.parametrize("path", DOCKERFILES, ids=name_of)
def test_an_image_ends_as_a_user_without_rights_and_fetches_no_scripts(path: Path) -> None:
    assert arguments_of(path, "USER")[-1] == ["1000"]
    assert not re.search(r"\b(curl|wget|apt-get|sudo|chmod 777)\b", path.read_text())
    assert not arguments_of(path, "ADD")


@pytest.mark.parametrize("path", DOCKERFILES, ids=name_of)
def test_the_base_image_is_named_by_the_build_only(path: Path) -> None:
    assert arguments_of(path, "FROM") == [["${TRITON_IMAGE}"]]
    assert ["TRITON_IMAGE"] in arguments_of(path, "ARG")  # without a default


@pytest.mark.parametrize("path", DOCKERFILES, ids=name_of)
def test_pip_installs_the_pinned_wheels_and_nothing_that_they_ask_for(path: Path) -> None:
    (run,) = [words for words in arguments_of(path, "RUN") if "pip" in words]
    kind = path.name.partition(".")[0]
    assert {"--no-deps", "--only-binary=:all:", "--no-cache-dir", "--requirement"} <= set(run)
    assert ("--require-hashes" in run) == (kind == "serve")
    assert any(f"docker/requirements-{kind}.txt" in words for words in arguments_of(path, "COPY"))


@pytest.mark.parametrize("path", REQUIREMENTS, ids=name_of)
def test_the_images_hold_the_versions_that_were_tested_here(path: Path) -> None:
    tested = pins_of(CONSTRAINTS)
    in_images_only = {"cuda-pathfinder"}
    pins = pins_of(path)
    assert {name: tested.get(name) for name in pins if name not in in_images_only} == {
        name: version for name, version in pins.items() if name not in in_images_only
    }


def test_the_serving_image_gets_three_packages_with_hashes() -> None:
    path = DOCKER / "requirements-serve.txt"
    assert set(pins_of(path)) == {"numpy", "pillow", "tokenizers"}
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert all(re.search(r" --hash=sha256:[0-9a-f]{64}$", line) for line in lines)


def test_the_bindings_are_of_the_tensorrt_in_the_image(tmp_path: Path) -> None:
    """The image's Python finds the library before any package is installed."""
    (tmp_path / "libnvinfer.so.11.3.0").touch()
    code = f"""
import sys
sys.path.insert(0, {str(ROOT / "build_scripts")!r})
from triptych.container.machine import find_tensorrt
print(find_tensorrt({{"LD_LIBRARY_PATH": {str(tmp_path)!r}}}))
"""
    command = [sys.executable, "-I", "-S", "-c", code]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"11.3.0\n"
    assert not any("bindings" in name for name in pins_of(DOCKER / "requirements-build.txt"))


def test_versions_env_agrees_with_the_table_of_releases() -> None:
    versions = read_versions()
    release = parse_release(versions["TRITON_TAG"])
    assert versions["TRITON_VERSION"] == TRITON_VERSIONS[release]
    assert not defects_of(release, {"any server", "python step", "dynamic batching"})


def test_the_health_check_and_entry_point_are_modules_that_exist() -> None:
    path = DOCKER / "serve.Dockerfile"
    for instruction in ("HEALTHCHECK", "ENTRYPOINT"):
        (words,) = arguments_of(path, instruction)
        (module,) = re.findall(r"triptych\.container\.(\w+)", " ".join(words))
        assert (ROOT / f"build_scripts/triptych/container/{module}.py").is_file()
    assert "/opt/nvidia/nvidia_entrypoint.sh" in path.read_text()


def test_compose_builds_the_dockerfiles_that_are_there() -> None:
    services = compose()["services"]
    assert set(services) == {"engine", "serve"}
    for service in services.values():
        context = (DOCKER / service["build"]["context"]).resolve()
        assert context == ROOT
        dockerfile = context / service["build"]["dockerfile"]
        assert dockerfile in DOCKERFILES
        declared = {words[0].partition("=")[0] for words in arguments_of(dockerfile, "ARG")}
        assert declared <= set(service["build"]["args"])


def test_compose_takes_its_versions_from_versions_env() -> None:
    text = (DOCKER / "compose.yaml").read_text()
    plain = set(re.findall(r"\$\{([A-Z_]+)\}", text))
    required = set(re.findall(r"\$\{([A-Z_]+):\?", text))
    assert plain <= required
    assert required <= {*read_versions(), "TRITON_IMAGE"}
    documented = "".join(path.read_text() for path in DOCKER.glob("*.md"))
    optional = set(re.findall(r"\$\{(TRIPTYCH_[A-Z_]+):-", text))
    for name in optional:
        assert name in documented


ONLY_WHAT_IS_PINNED = """
import importlib, importlib.metadata, json, re, sys
pinned = set(json.loads(sys.argv[1]))
missing = {
    top for top, names in importlib.metadata.packages_distributions().items()
    if not {re.sub(r"[-_.]+", "-", name).lower() for name in names} & {*pinned, "triptych"}
}
class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in missing:
            raise ModuleNotFoundError(f"the image does not hold {top}", name=top)
sys.meta_path.insert(0, Refuse())
for module in sys.argv[2:]:
    importlib.import_module(module)
app = importlib.import_module("triptych.interface.cli").app
"""
ENGINE_HELP = """
from typer.testing import CliRunner
result = CliRunner().invoke(app, ["engine", "--help"])
sys.exit(result.exit_code)
"""
GATEWAY = """
app(["gateway", "minilm", "--url", "127.0.0.1:1", "--port", "0", "--json"])
"""


def test_the_engine_verb_needs_nothing_that_its_image_lacks() -> None:
    pins = list(pins_of(DOCKER / "requirements-build.txt"))
    modules = [
        "triptych.core.engine.stage",
        "triptych.core.requests",
    ]
    done = subprocess.run(
        [sys.executable, "-c", ONLY_WHAT_IS_PINNED + ENGINE_HELP, json.dumps(pins), *modules],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_gateway_needs_nothing_that_the_engine_image_lacks() -> None:
    """It starts, and answers without a server; the modules are those that count tokens."""
    pins = list(pins_of(DOCKER / "requirements-build.txt"))
    rows = sorted((ROOT / "build_scripts/triptych/runtime").glob("rows_*.py"))
    modules = [f"triptych.runtime.{path.stem}" for path in rows]
    code = ONLY_WHAT_IS_PINNED + GATEWAY
    with subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(pins), *modules],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as gateway:
        assert gateway.stdout is not None
        assert gateway.stderr is not None
        line = gateway.stdout.readline()
        if not line:
            pytest.fail(gateway.stderr.read())
        try:
            with pytest.raises(urllib.error.HTTPError, match="503"):
                urllib.request.urlopen(json.loads(line)["http"] + "/health", timeout=60)
        finally:
            gateway.terminate()
        gateway.communicate(timeout=60)


@pytest.mark.parametrize("name", ["engine", "serve"])
def test_a_container_gets_a_gpu_and_as_few_rights_as_it_can_do_with(name: str) -> None:
    service = compose()["services"][name]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["tmpfs"] == ["/tmp"]
    assert service["security_opt"] == ["no-new-privileges:true"]


def test_the_server_is_published_on_loopback_and_may_finish_its_requests() -> None:
    service = compose()["services"]["serve"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert service["volumes"][0].endswith(":/models:ro")
    assert int(service["stop_grace_period"].removesuffix("s")) > 30
    assert service["healthcheck"]["test"][-1] == "triptych.container.health"


@pytest.mark.parametrize(
    "path",
    [*DOCKERFILES, *REQUIREMENTS, DOCKER / "compose.yaml", DOCKER / "README.md", ROOT / "Makefile"],
    ids=name_of,
)
def test_no_file_names_a_registry_or_a_moving_tag(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"\b[\w-]+\.(io|com|dev|cloud)/", text)
    assert ":latest" not in text


FAKE_DOCKER = '#!/bin/sh\necho "docker $* image=$TRITON_IMAGE user=$TRIPTYCH_USER"\n'


def make(target: str, *words: str, programs: Path, image: str = "") -> tuple[int, str]:
    """`make` with docker from a folder of its own."""
    done = subprocess.run(
        ["make", "--silent", target, *words],
        cwd=ROOT,
        env={"PATH": f"{programs}{os.pathsep}/usr/bin{os.pathsep}/bin", "TRITON_IMAGE": image},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def fake_docker(tmp_path: Path) -> Path:
    """A fake docker that prints what it was asked for."""
    (tmp_path / "docker").write_text(FAKE_DOCKER)
    (tmp_path / "docker").chmod(0o755)
    return tmp_path


def test_make_says_that_docker_is_missing(tmp_path: Path) -> None:
    (tmp_path / "docker").write_text("#!/bin/sh\nexit 127\n")  # hides one that may be there
    (tmp_path / "docker").chmod(0o755)
    exit_code, said = make("image", programs=tmp_path, image="somewhere/tritonserver:26.08-py3")
    assert exit_code == 2
    assert "docker with its compose plugin is needed" in said


def test_make_asks_for_the_base_image(fake_docker: Path) -> None:
    exit_code, said = make("image", programs=fake_docker)
    assert exit_code == 2
    assert f"tritonserver:{read_versions()['TRITON_TAG']}-py3" in said


def test_make_image_builds_both(fake_docker: Path) -> None:
    exit_code, said = make("image", programs=fake_docker, image="somewhere/tritonserver:tag")
    assert exit_code == 0, said
    assert "--env-file docker/versions.env --file docker/compose.yaml --profile engine" in said
    assert "image=somewhere/tritonserver:tag" in said


def test_make_engine_runs_the_verb_as_the_owner_of_the_repository(fake_docker: Path) -> None:
    image = "somewhere/tritonserver:tag"
    exit_code, said = make("engine-in-container", "NAME=minilm", programs=fake_docker, image=image)
    assert exit_code == 0, said
    assert "run --rm --build engine engine minilm" in said
    assert f"user={os.getuid()}:{os.getgid()}" in said


def test_make_engine_asks_for_the_pipeline(fake_docker: Path) -> None:
    exit_code, said = make("engine-in-container", programs=fake_docker, image="somewhere/image")
    assert exit_code == 2
    assert "NAME=minilm" in said


def test_make_runs_the_tests_in_the_image(fake_docker: Path) -> None:
    image = "somewhere/tritonserver:tag"
    words = ("test-in-container", "ARGS=-k hostile")
    exit_code, said = make(*words, programs=fake_docker, image=image)
    assert exit_code == 0, said
    assert f"--volume {ROOT}:/triptych" in said
    assert f"--user {os.getuid()}:{os.getgid()}" in said
    script = f"{image} bash tests/in_container.sh -k hostile"
    assert script in said
    assert (ROOT / "tests/in_container.sh").is_file()


def test_a_release_is_that_of_a_server_on_path(tmp_path: Path) -> None:
    exit_code, said = make("server-on-path", "TRITON_RELEASE=26.06", programs=tmp_path)
    assert exit_code == 2
    assert "PATH has none" in said
    (tmp_path / "tritonserver").write_text("#!/bin/sh\n")
    (tmp_path / "tritonserver").chmod(0o755)
    assert make("server-on-path", "TRITON_RELEASE=26.06", programs=tmp_path) == (0, "")
