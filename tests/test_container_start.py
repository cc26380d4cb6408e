"""The image's whole start-up with a real server: check, flags, readiness, answers, SIGTERM."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from container_cases import copy_of_the_images_files
from test_server import eventually, write_model
from triptych.client import AccessDenied, Client
from triptych.container.entrypoint import flags_for
from triptych.container.flags import Options
from triptych.container.machine import read_machine
from triptych.releases import Release
from triptych.server.embedded import find_installation
from triptych.server.leftovers import MARK_VARIABLE, new_mark, remove_leftovers
from triptych.server.ports import claim_ports

pytestmark = pytest.mark.server

KEY = "a-key-of-the-operators"
TEXT = "my delivery is late"
WRAPPER = """#!/bin/sh
export LD_LIBRARY_PATH='{libraries}' PATH='{path}'
exec '{program}' "$@" --backend-directory='{backends}' {prefixes}
"""


class Image(NamedTuple):
    """What stands for the image: its files, its environment."""

    files: Path
    variables: dict[str, str]

    def run(self, module: str, *arguments: str) -> subprocess.Popen[str]:
        # Without site: nothing of this environment is there but the files of the image.
        return subprocess.Popen(
            [sys.executable, "-S", "-m", f"triptych.container.{module}", *arguments],
            env=self.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def health(self) -> tuple[int, str]:
        with self.run("health") as process:
            said = process.communicate(timeout=30)[0]
        return process.returncode, said.strip()

    def url(self, service: str) -> str:
        return f"127.0.0.1:{self.variables[f'TRIPTYCH_{service}_PORT']}"


@contextmanager
def image_of(folder: Path, repository: Path) -> Iterator[Image]:
    """An image around the embedded server; nothing of its server is left behind."""
    folder.mkdir(parents=True)
    mark = new_mark()
    server = find_installation(folder / "server")
    prefixes = [
        f"--backend-config={backend},shm-region-prefix-name={mark}"
        for backend in server.python_backends
    ]
    wrapper = folder / "tritonserver"
    wrapper.write_text(
        WRAPPER.format(
            libraries=server.environment["LD_LIBRARY_PATH"],
            path=server.environment["PATH"],
            program=server.executable,
            backends=server.backend_directory,
            prefixes=" ".join(prefixes),
        )
    )
    wrapper.chmod(0o755)
    (folder / "key").write_text(KEY)
    services = {f"TRIPTYCH_{name}_PORT": 0 for name in ("HTTP", "GRPC", "METRICS")}
    ports = {name: str(port) for name, port in claim_ports("127.0.0.1", services).items()}
    variables = {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(copy_of_the_images_files(folder / "opt")),
        "TRIPTYCH_TRITON": "24.10",
        "TRIPTYCH_HOST": "127.0.0.1",
        "TRIPTYCH_REPOSITORY": str(repository),
        "TRIPTYCH_RESTRICTED_KEY_FILE": str(folder / "key"),
        MARK_VARIABLE: mark,
        **ports,
    }
    try:
        yield Image(folder / "opt", variables)
    finally:
        remove_leftovers(mark)


@pytest.fixture(scope="module")
def repository(minilm_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MiniLM, and a model that takes as long as it is told to."""
    folder = tmp_path_factory.mktemp("repository") / "models"
    shutil.copytree(minilm_repository, folder)
    return write_model(folder, "echo")


@pytest.fixture(scope="module")
def started(
    repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Image, subprocess.Popen[str]]]:
    with (
        image_of(tmp_path_factory.mktemp("image") / "i", repository) as image,
        image.run("entrypoint", "--log-verbose=0") as process,
    ):
        try:
            assert eventually(lambda: image.health()[0] == 0, 120), image.health()
            yield image, process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def image(started: tuple[Image, subprocess.Popen[str]]) -> Image:
    return started[0]


def status(url: str, path: str, headers: dict[str, str] | None = None) -> int:
    try:
        request = urllib.request.Request(f"http://{url}{path}", headers=headers or {})
        with urllib.request.urlopen(request, timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def test_the_health_check_names_the_ensembles(image: Image) -> None:
    assert image.health() == (0, "healthy: minilm_bucketed, minilm_packed")


def test_the_ensembles_answer(image: Image) -> None:
    with Client("minilm_packed", image.url("GRPC")) as client:
        vectors = client.embed([TEXT, TEXT])
    assert vectors.shape == (2, 384)
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-5)


@pytest.mark.parametrize(
    "path", ["models/minilm_packed/stats", "systemsharedmemory/status", "trace/setting", "logging"]
)
def test_the_restricted_services_want_the_key_over_http(image: Image, path: str) -> None:
    path = f"/v2/{path}"
    assert status(image.url("HTTP"), path) == 403
    assert status(image.url("HTTP"), path, {"triptych-key": "another-key-of-16"}) == 403
    assert status(image.url("HTTP"), path, {"triptych-key": KEY}) == 200


def test_the_restricted_services_want_the_key_over_grpc(image: Image) -> None:
    header = {"triton-grpc-protocol-triptych-key": KEY}
    with Client("minilm_packed", image.url("GRPC"), headers=header) as client:
        assert client.step_statistics()
    with Client("minilm_packed", image.url("GRPC")) as client, pytest.raises(AccessDenied):
        client.step_statistics()


def test_the_metrics_have_summaries(image: Image) -> None:
    with urllib.request.urlopen(f"http://{image.url('METRICS')}/metrics", timeout=10) as page:
        text = page.read().decode()
    assert 'nv_inference_request_summary_us{model="minilm_packed"' in text


def test_models_cannot_be_loaded_even_with_the_key(image: Image) -> None:
    connection = http.client.HTTPConnection(image.url("HTTP"), timeout=10)
    connection.request("POST", "/v2/repository/models/echo/unload", headers={"triptych-key": KEY})
    response = connection.getresponse()
    assert "explicit model load / unload is not allowed" in response.read().decode()
    connection.close()


def test_the_server_is_the_process_that_was_started(
    started: tuple[Image, subprocess.Popen[str]],
) -> None:
    program = Path(f"/proc/{started[1].pid}/exe").readlink()
    assert program.name == "tritonserver"


def ask_slowly(image: Image) -> str:
    tensor = {"name": "text", "shape": [1, 1], "datatype": "BYTES", "data": ["sleep:2"]}
    connection = http.client.HTTPConnection(image.url("HTTP"), timeout=30)
    connection.request("POST", "/v2/models/echo/infer", json.dumps({"inputs": [tensor]}))
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return str(answer["outputs"][0]["data"][0])


def test_sigterm_lets_requests_in_flight_finish(repository: Path, tmp_path: Path) -> None:
    alone = write_model(tmp_path / "models", "echo")
    shutil.copytree(repository / "minilm_packed", alone / "minilm_packed")
    for step in ("core", "preprocess", "postprocess"):
        shutil.copytree(repository / f"minilm_packed_{step}", alone / f"minilm_packed_{step}")
    with image_of(tmp_path / "image", alone) as image, image.run("entrypoint") as process:
        try:
            assert eventually(lambda: image.health()[0] == 0, 120), image.health()
            with ThreadPoolExecutor(2) as pool:
                answers = [pool.submit(ask_slowly, image) for _ in range(2)]
                assert eventually(lambda: waiting(image) == 1)  # so the other one is computed
                process.send_signal(signal.SIGTERM)
                assert [answer.result(timeout=30) for answer in answers] == ["sleep:2"] * 2
            said = process.communicate(timeout=30)[0]
        finally:
            process.kill()
    assert process.returncode == 0, said
    assert image.health()[0] == 1


def waiting(image: Image) -> float:
    """Requests that wait for the slow model's only instance."""
    with urllib.request.urlopen(f"http://{image.url('METRICS')}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith('nv_inference_pending_request_count{model="echo"')
    )


def test_a_repository_that_cannot_be_served_is_refused_before_the_server(
    repository: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "models"
    shutil.copytree(repository, broken)
    (broken / "minilm_packed/triptych.lock.json").write_text("{")
    with image_of(tmp_path / "image", broken) as image, image.run("entrypoint") as process:
        said = process.communicate(timeout=30)[0]
    assert process.returncode == 1
    assert said.startswith("error: minilm_packed: its lock cannot be used")
    assert len(said.splitlines()) == 1


def test_requests_are_traced_where_the_operator_asks(tmp_path: Path) -> None:
    repository = write_model(tmp_path / "models", "echo")
    traces = tmp_path / "traces"
    with image_of(tmp_path / "image", repository) as image:
        image.variables.update(TRIPTYCH_TRACE=str(traces), TRIPTYCH_TRACE_RATE="1")
        with image.run("entrypoint") as process:
            try:
                assert eventually(lambda: answers(image), 60)
                ask_slowly(image)
                process.send_signal(signal.SIGTERM)
                said = process.communicate(timeout=30)[0]
            finally:
                process.kill()
    written = "".join(path.read_text() for path in tmp_path.glob("traces*"))
    assert '"model_name":"echo"' in written, said


def answers(image: Image) -> bool:
    try:
        return status(image.url("HTTP"), "/v2/health/ready") == 200
    except OSError:
        return False


def test_health_says_that_there_is_no_ensemble(tmp_path: Path) -> None:
    with image_of(tmp_path / "image", write_model(tmp_path / "models", "echo")) as image:
        assert image.health() == (1, "unhealthy: the repository holds no ensemble")


def test_health_names_the_model_that_is_not_ready(repository: Path, image: Image) -> None:
    absent = Image(image.files, dict(image.variables))
    other = repository.parent / "other"
    shutil.copytree(repository / "minilm_packed", other / "minilm_packed")
    config = other / "minilm_packed/config.pbtxt"
    config.write_text(config.read_text().replace("minilm_packed_core", "gone_core"))
    absent.variables["TRIPTYCH_REPOSITORY"] = str(other)
    exit_code, said = absent.health()
    assert exit_code == 1
    assert said.startswith("unhealthy: gone_core is not ready (HTTP 4")


def serve_in_production(repository: Path) -> subprocess.Popen[str]:
    ports = [f"--{kind}-port=0" for kind in ("grpc", "http", "metrics")]
    words = ["serve", str(repository), "--profile", "production", "--json", *ports]
    return subprocess.Popen(
        [str(Path(sys.executable).with_name("triptych")), *words],
        env={**os.environ, "TRIPTYCH_RESTRICTED_KEY": KEY},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_serve_in_production_takes_the_same_flags(repository: Path) -> None:
    with serve_in_production(repository) as process:
        try:
            assert process.stdout is not None
            endpoints = json.loads(process.stdout.readline())
            words = Path(f"/proc/{endpoints['pid']}/cmdline").read_bytes().decode().split("\0")
            expected = flags_for(
                repository, Options(restricted_key=KEY), read_machine(), Release(24, 10)
            )
            assert words[-len(expected) - 1 : -1] == expected
            path = "/v2/models/minilm_packed/stats"
            assert status(endpoints["http"], path) == 403
            assert status(endpoints["http"], path, {"triptych-key": KEY}) == 200
            with Client("minilm_packed", endpoints["grpc"]) as client:
                assert client.embed([TEXT]).shape == (1, 384)
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0, errors


def test_serve_in_production_refuses_what_cannot_be_served(
    repository: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "models"
    shutil.copytree(repository / "minilm_packed", broken / "minilm_packed")
    (broken / "minilm_packed/triptych.lock.json").write_text("{")
    with serve_in_production(broken) as process:
        errors = process.communicate(timeout=60)[1]
    assert process.returncode == 2
    assert "error: minilm_packed: its lock cannot be used" in errors
    assert "Traceback" not in errors
