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

from tests.support.project import ROOT
from tests.support.served_command import endpoints_of
from triptych.base.release_changes import defects_of
from triptych.base.releases import TRITON_VERSIONS, parse_release

DOCKER = ROOT / "docker"
DOCKERFILES = {kind: DOCKER / f"{kind}.Dockerfile" for kind in ("build", "serve")}
OTHERS = (DOCKER / "compose.yaml", DOCKER / "README.md", ROOT / "Makefile")
REQUIREMENTS = {kind: DOCKER / f"requirements-{kind}.txt" for kind in DOCKERFILES}


FEW_RIGHTS = {
    "read_only": True,
    "cap_drop": ["ALL"],
    "tmpfs": ["/tmp"],
    "security_opt": ["no-new-privileges:true"],
}


def read_versions() -> dict[str, str]:
    lines = (DOCKER / "versions.env").read_text().splitlines()
    return dict(line.split("=") for line in lines if not line.startswith("#"))


def arguments_of(path: Path, instruction: str) -> list[list[str]]:
    """The words of each instruction of this name; continued lines are one."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE)
    lines = [line.split() for line in re.sub(r"\\\n", " ", text).splitlines() if line.strip()]
    return [words[1:] for words in lines if words[0] == instruction]


def pins_of(path: Path) -> dict[str, str]:
    lines = [line.partition(" ")[0] for line in path.read_text().splitlines()]
    pinned = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pin) == 2 for pin in pinned), f"{path.name} has a line without an exact version"
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pinned}


@pytest.mark.parametrize("path", sorted(DOCKER.glob("*.Dockerfile")), ids=lambda path: path.stem)
def test_an_image_is_built_without_rights(path: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    text = path.read_text()
    assert "hadolint ignore" not in text
    assert arguments_of(path, "USER")[-1] == ["1000"]
    # Any other user of group 0 can read the files, whatever the umask of the checkout was.
    assert "RUN chmod -R a+rX /opt/triptych" in text[text.rindex("COPY") :]
    assert not re.search(r"\b(curl|wget|apt-get|sudo|chmod 777)\b", text)
    assert not arguments_of(path, "ADD")
    # The base image is named by the build only.
    assert arguments_of(path, "FROM") == [["${TRITON_IMAGE}"]]
    assert ["TRITON_IMAGE"] in arguments_of(path, "ARG")
    (run,) = [words for words in arguments_of(path, "RUN") if "pip" in words]
    assert {"--only-binary=:all:", "--no-cache-dir"} <= set(run)
    assert "/opt/nvidia/nvidia_entrypoint.sh" in text


@pytest.mark.parametrize("kind", DOCKERFILES)
def test_an_image_of_a_clone_is_built_of_pinned_parts(kind: str) -> None:
    path = DOCKERFILES[kind]
    text = path.read_text()
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    let_in = [line[1:] for line in ignored if line.startswith("!")]
    for *sources, _target in arguments_of(path, "COPY"):
        for source in sources:
            assert (ROOT / source).exists(), source
            assert any(source == there or source.startswith(there + "/") for there in let_in)
    for words in arguments_of(path, "RUN"):
        assert "--directory" not in words or {"--group=0", "--mode=0770"} <= set(words)
    (run,) = [words for words in arguments_of(path, "RUN") if "pip" in words]
    assert {"--no-deps", "--requirement"} <= set(run)
    assert ("--require-hashes" in run) == (kind == "serve")
    assert any(f"docker/requirements-{kind}.txt" in words for words in arguments_of(path, "COPY"))
    modules = re.findall(r"triptych\.container\.(\w+)", text)
    here = {path.stem for path in (ROOT / "build_scripts/triptych/container").glob("*.py")}
    assert modules
    assert here.issuperset(modules)
    if kind == "serve":  # it may be started in any folder, whose modules must not be imported
        for instruction in ("ENTRYPOINT", "HEALTHCHECK"):
            assert '"python3", "-I", "-m"' in " ".join(arguments_of(path, instruction)[-1])


def test_the_images_hold_the_versions_that_were_tested_here() -> None:
    tested = pins_of(ROOT / "build_scripts/triptych/constraints.txt")
    for path in REQUIREMENTS.values():
        for name, version in pins_of(path).items():
            assert name == "cuda-pathfinder" or tested[name] == version, name
    # The bindings of TensorRT are installed in the version of the image's library.
    assert not any("bindings" in name for name in pins_of(REQUIREMENTS["build"]))
    path = REQUIREMENTS["serve"]
    assert set(pins_of(path)) == {"numpy", "pillow", "tokenizers"}
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert all(re.search(r" --hash=sha256:[0-9a-f]{64}$", line) for line in lines)
    versions = read_versions()
    release = parse_release(versions["TRITON_TAG"])
    assert versions["TRITON_VERSION"] == TRITON_VERSIONS[release]
    assert not defects_of(release, {"any server", "python step", "dynamic batching"})
    for path in (*DOCKERFILES.values(), *REQUIREMENTS.values(), *OTHERS):
        text = path.read_text()
        assert not re.search(r"\b[\w-]+\.(io|com|dev|cloud)/", text), path  # names no registry
        assert ":latest" not in text, path


def test_compose_builds_the_images_and_runs_them_with_few_rights() -> None:
    text = (DOCKER / "compose.yaml").read_text()
    services: dict[str, Any] = yaml.safe_load(text)["services"]
    assert set(services) == {"engine", "serve"}
    for service in services.values():
        context = (DOCKER / service["build"]["context"]).resolve()
        assert context == ROOT
        dockerfile = context / service["build"]["dockerfile"]
        assert dockerfile in DOCKERFILES.values()
        declared = {words[0].partition("=")[0] for words in arguments_of(dockerfile, "ARG")}
        assert declared <= set(service["build"]["args"])
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]
        assert {name: service[name] for name in FEW_RIGHTS} == FEW_RIGHTS
    serve = services["serve"]
    assert all(port.startswith("127.0.0.1:") for port in serve["ports"])
    assert serve["volumes"][0].endswith(":/models:ro")
    assert int(serve["stop_grace_period"].removesuffix("s")) > 30
    # Its versions are those of versions.env.
    required = set(re.findall(r"\$\{([A-Z_]+):\?", text))
    assert set(re.findall(r"\$\{([A-Z_]+)\}", text)) <= required
    assert required <= {*read_versions(), "TRITON_IMAGE"}
    documented = "".join(path.read_text() for path in DOCKER.glob("*.md"))
    for name in re.findall(r"\$\{(TRIPTYCH_[A-Z_]+):-", text):
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
from typer.testing import CliRunner
from triptych.interface.cli import app
assert CliRunner().invoke(app, ["engine", "--help"]).exit_code == 0
app(["gateway", "minilm", "--url", "127.0.0.1:1", "--port", "0", "--json"])
"""


def test_the_engine_verb_and_the_gateway_need_nothing_that_their_image_lacks() -> None:
    """The gateway answers without a server; it counts tokens with the modules of rows."""
    rows = sorted((ROOT / "build_scripts/triptych/runtime").glob("rows_*.py"))
    modules = [f"triptych.runtime.{path.stem}" for path in rows]
    modules += ["triptych.core.engine.stage", "triptych.core.requests"]
    pins = json.dumps(list(pins_of(REQUIREMENTS["build"])))
    command = [sys.executable, "-c", ONLY_WHAT_IS_PINNED, pins, *modules]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, text=True, stdout=pipe, stderr=pipe) as gateway:
        try:
            with pytest.raises(urllib.error.HTTPError, match="503"):
                urllib.request.urlopen(f"{endpoints_of(gateway)['http']}/health", timeout=60)
        finally:
            gateway.terminate()
            gateway.communicate(timeout=60)


FAKE_DOCKER = '#!/bin/sh\necho "docker $* image=$TRITON_IMAGE user=$TRIPTYCH_USER"\n'
IMAGE = "somewhere/tritonserver:tag"
USER = f"{os.getuid()}:{os.getgid()}"
COMPOSE = "--env-file docker/versions.env --file docker/compose.yaml --profile engine"
WITH_DOCKER = (
    ("image", "", 2, [f"tritonserver:{read_versions()['TRITON_TAG']}-py3"]),
    ("image", IMAGE, 0, [COMPOSE, f"image={IMAGE}"]),
    ("engine-in-container", IMAGE, 2, ["NAME=minilm"]),
    (
        "engine-in-container NAME=minilm",
        IMAGE,
        0,
        ["run --rm --build engine engine minilm", f"user={USER}"],
    ),
    (
        "test-in-container",
        IMAGE,
        0,
        [f"--volume {ROOT}:/triptych", f"{IMAGE} bash tests/in_container.sh"],
    ),
)
"""Words of `make`, the base image, the exit code, and what is said or asked of docker."""


def test_make_asks_docker_for_the_images(tmp_path: Path) -> None:
    def make(*words: str, image: str = "") -> tuple[int, str]:
        path = f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin"
        done = subprocess.run(
            ["make", "--silent", *words],
            cwd=ROOT,
            env={"PATH": path, "TRITON_IMAGE": image},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    def install(program: str, text: str) -> None:
        (tmp_path / program).write_text(text)
        (tmp_path / program).chmod(0o755)

    install("docker", "#!/bin/sh\nexit 127\n")  # hides one that may be there
    exit_code, said = make("image", image=IMAGE)
    assert exit_code == 2
    assert "docker with its compose plugin is needed" in said
    install("docker", FAKE_DOCKER)
    for words, image, wanted, parts in WITH_DOCKER:
        exit_code, said = make(*words.split(), image=image)
        assert exit_code == wanted, said
        assert [part for part in parts if part not in said] == [], said
    # A release is that of a server on PATH.
    exit_code, said = make("server-on-path", "TRITON_RELEASE=26.06")
    assert exit_code == 2
    assert "PATH has none" in said
    install("tritonserver", "#!/bin/sh\n")
    assert make("server-on-path", "TRITON_RELEASE=26.06") == (0, "")
