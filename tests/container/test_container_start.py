"""The image's whole start-up with a real server: check, flags, readiness, answers, SIGTERM."""

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.request import Request

import numpy as np
import pytest
import tritonclient.grpc as triton
import yaml
from tritonclient.utils import InferenceServerException
from typer.testing import CliRunner

from certificates import write_certificate
from conftest import lock_data, write_lock
from container_image import KEY, Image, image_of, server_of
from echo_server import write_model
from http_pages import fetch
from processes import CORE_IS_A_PROCESS, eventually, mark_of
from served_command import endpoints_of, serving
from triptych.client import AccessDeniedError, Client, InvalidRequestError
from triptych.container.entrypoint import flags_for
from triptych.container.flags import ServerFlags as ServerOptions
from triptych.container.machine import read_machine
from triptych.container.manifests import largest_request_mib
from triptych.deploy.folder import write_manifests
from triptych.deploy.options import DeployOptions
from triptych.deploy.targets import make_manifests
from triptych.interface.cli import app
from triptych.serving.bench.resources import fetch_metrics
from triptych.serving.embedded import find_release
from triptych.serving.orphan_cleanup import PROCESS_TAG_VARIABLE, SHM, tagged_processes

pytestmark = pytest.mark.server

TEXT = "my delivery is late"


@pytest.fixture(scope="module")
def repository(minilm_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One pipeline of MiniLM, and a model that says what it is told."""
    folder = tmp_path_factory.mktemp("repository") / "models"
    for part in minilm_repository.glob("minilm_packed*"):
        shutil.copytree(part, folder / part.name)
    return write_model(folder, "echo")


@pytest.fixture(scope="module")
def started(
    repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Image, subprocess.Popen[str]]]:
    with (
        image_of(tmp_path_factory.mktemp("image") / "i", repository) as image,
        image.serving("--log-verbose=0") as process,
    ):
        yield image, process


@pytest.fixture(scope="module")
def image(started: tuple[Image, subprocess.Popen[str]]) -> Image:
    return started[0]


def ask(url: str, path: str, key: str = "", method: str = "GET") -> tuple[int, str]:
    """Status and text of an answer over HTTP."""
    headers = {"triptych-key": key} if key else {}
    return fetch(Request(f"http://{url}{path}", headers=headers, method=method))


def is_passed(probe: list[str], image: Image) -> bool:
    return subprocess.run(probe, env=image.variables, timeout=60).returncode == 0


def test_what_deploy_writes_runs_here(
    image: Image, minilm_repository: Path, tmp_path: Path
) -> None:
    """Probes and preStop as the YAML has them; the metrics that its queries select are there."""
    repository = tmp_path / "repository"
    for folder in minilm_repository.glob("minilm_packed*"):
        shutil.copytree(folder, repository / folder.name, copy_function=os.link)
    lock = lock_data(repository, "minilm_packed")
    lock["spec"]["serving"]["slo"]["p99_ms"] = 80.0
    (repository / "minilm_packed/triptych.lock.json").unlink()  # a link
    write_lock(repository, "minilm_packed", lock)
    options = DeployOptions(
        image="triptych-serve:24.10",
        name="minilm-packed",
        triton="24.10",
        rps_per_replica=9.0,
        cpu_cores=1.0,
        memory_mib=2048,
        gateway="public",  # the rate is the servers' own then
    )
    made = make_manifests(repository, "minilm_packed", options, tmp_path)
    write_manifests(tmp_path / "out", made.files)
    text = (tmp_path / "out/base/deployment.yaml").read_text()
    (container,) = yaml.safe_load(text)["spec"]["template"]["spec"]["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        command = container[probe]["exec"]["command"]
        # A busy machine may answer a probe too late.
        assert eventually(partial(is_passed, command, image)), probe
    program, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert int(seconds) > 0
    subprocess.run([program, "0"], check=True)
    page = f"http://{image.url('METRICS')}/metrics"
    before = fetch_metrics(page)
    with Client("minilm_packed", image.url("GRPC")) as client:
        vectors = client.embed([TEXT, TEXT])
        with pytest.raises(InvalidRequestError):
            client.embed(["x" * 200_000])
    assert vectors.shape == (2, 384)
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-5)

    def rise(name: str, model: str) -> float:
        now, then = (
            sum(v for found, labels, v in one if (found, labels.get("model")) == (name, model))
            for one in (fetch_metrics(page), before)
        )
        return now - then

    def came_in() -> float:
        step = "minilm_packed_preprocess"
        return sum(rise(f"nv_inference_request_{how}", step) for how in ("success", "failure"))

    def failed() -> float:
        return came_in() - rise("nv_inference_request_success", "minilm_packed")

    # What the rate and the failures are taken of: one was answered, one was not. Triton's Python
    # backend answers first, and counts then, also the requests of the probes.
    assert eventually(lambda: came_in() >= 2 and failed() == 1)
    # The latency that is held against the promise is of a request's whole way.
    latency = "nv_inference_request_summary_us_sum"
    assert eventually(
        lambda: rise(latency, "minilm_packed") >= rise(latency, "minilm_packed_core") > 0
    )
    selected = re.findall(
        r'(nv_\w+)\{namespace="default",model=~?"([^"]+)"(?:,quantile="([^"]+)")?\}',
        "".join(file.read_text() for file in (tmp_path / "out/base").glob("*.yaml")),
    )
    assert {name for name, _, _ in selected} >= {
        "nv_inference_request_success",
        "nv_inference_compute_infer_duration_us",
        "nv_inference_request_summary_us",
    }
    samples = [
        (name, labels["model"], quantile)
        for name, labels, _ in fetch_metrics(page)
        if "model" in labels
        for quantile in ("", labels.get("quantile"))
    ]
    for name, models, quantile in set(selected):
        for model in models.split("|"):
            assert (name, model, quantile) in samples
    assert largest_request_mib(repository) == 7  # eight texts of 128 KiB, each byte escaped


def test_the_health_check_names_the_ensemble_or_what_is_wrong(
    repository: Path, image: Image, tmp_path: Path
) -> None:
    assert eventually(lambda: image.health() == (0, "healthy: minilm_packed"))
    shutil.copytree(repository / "minilm_packed", tmp_path / "other/minilm_packed")
    config = tmp_path / "other/minilm_packed/config.pbtxt"
    config.write_text(config.read_text().replace("minilm_packed_core", "gone_core"))
    write_model(tmp_path / "none", "echo")
    for folder, fault in (
        ("other", "gone_core is not ready (HTTP 4"),
        ("none", "the repository holds no ensemble"),
    ):
        variables = {**image.variables, "TRIPTYCH_REPOSITORY": str(tmp_path / folder)}
        asked = partial(has_fault, Image(image.files, variables), fault)
        assert eventually(asked), folder


def has_fault(image: Image, fault: str) -> bool:
    exit_code, said = image.health()
    return exit_code == 1 and said.startswith(f"unhealthy: {fault}")


def test_the_services_of_operators_want_the_key(image: Image) -> None:
    stats = "models/minilm_packed/stats"
    for path in (stats, "systemsharedmemory/status", "trace/setting", "logging"):
        for key, status in (("", 403), ("another-key-of-16", 403), (KEY, 200)):
            assert ask(image.url("HTTP"), f"/v2/{path}", key)[0] == status, (path, key)
    header = {"triton-grpc-protocol-triptych-key": KEY}
    with Client("minilm_packed", image.url("GRPC"), headers=header) as client:
        assert client.step_statistics()
    with Client("minilm_packed", image.url("GRPC")) as client, pytest.raises(AccessDeniedError):
        client.step_statistics()
    # Nobody loads models, even with the key.
    unload = ask(image.url("HTTP"), "/v2/repository/models/echo/unload", KEY, "POST")
    assert "explicit model load / unload is not allowed" in unload[1]


def seen_of(mark: str, parent: int = 0) -> list[str]:
    """Command lines of a server and its steps, and what their environments hold."""
    processes = [process for process in tagged_processes(mark) if process.pid != parent]
    assert len(processes) > 1
    return [text for p in processes for text in (*p.cmdline(), *p.environ().values())]


def test_the_key_and_what_users_send_are_private(
    started: tuple[Image, subprocess.Popen[str]],
) -> None:
    image, process = started
    mark = image.variables[PROCESS_TAG_VARIABLE]
    assert eventually(lambda: not [text for text in seen_of(mark, process.pid) if KEY in text])
    assert "*" * len(KEY) in Path(f"/proc/{server_of(process)}/cmdline").read_text()
    shared = list(SHM.glob(f"{mark}*"))
    private = [path for path in shared if not path.stat().st_mode & 0o077]
    # Of the Python steps, what they count, and the lock.
    assert len(private) == (5 if CORE_IS_A_PROCESS else 4)
    assert len(shared) == len(private) + 1  # and that of `echo`, which is not ours


def test_a_repository_that_cannot_be_served_is_refused_before_the_server(
    minilm_repository: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "models"
    shutil.copytree(minilm_repository, broken)
    (broken / "minilm_packed/triptych.lock.json").write_text("{")
    path = "minilm_bucketed_preprocess/1/tokenizer.json"
    text = (broken / path).read_text(encoding="utf-8")
    one, other = '"late":', '"many":'  # the file keeps its length
    assert one in text
    assert other in text
    text = text.replace(one, "?").replace(other, one).replace("?", other)
    (broken / path).write_text(text, encoding="utf-8")
    of_files = (
        f"error: minilm_bucketed: {path} is not the file that the build manifest describes: "
        "build it again with `triptych build minilm_bucketed`, or copy it again"
    )
    with image_of(tmp_path / "image", broken) as image, image.run("entrypoint") as process:
        said = process.communicate(timeout=60)[0]
    assert process.returncode == 1
    found, of_lock = said.splitlines()
    assert found == of_files
    assert of_lock.startswith("error: minilm_packed: its build manifest cannot be used")
    for profile in ("development", "production"):
        done = CliRunner().invoke(app, ["serve", str(broken), "--profile", profile])
        assert "contains pipelines that failed the startup check" in str(done.exception)
        assert of_files in done.stderr
        assert of_lock in done.stderr


HEADERS_MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        texts = [np.array([[r.parameters()]], object).astype(bytes) for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("echo", text)]) for text in texts]
"""


def answers(image: Image) -> bool:
    try:
        return ask(image.url("HTTP"), "/v2/health/ready")[0] == 200
    except OSError:
        return False


def test_the_server_has_what_the_operator_sets(tmp_path: Path) -> None:
    """TLS, forwarded headers, shared memory of steps, threads and traces, on the server itself."""
    repository = write_model(tmp_path / "models", "echo", HEADERS_MODEL)
    write_certificate(tmp_path, "server")
    with image_of(tmp_path / "image", repository) as image:
        image.variables.update(
            TRIPTYCH_GRPC_TLS_CERTIFICATE_FILE=str(tmp_path / "server.pem"),
            TRIPTYCH_GRPC_TLS_KEY_FILE=str(tmp_path / "server.key"),
            TRIPTYCH_FORWARD_HEADERS="tenant|x-.*",
            TRIPTYCH_LOAD_THREADS="1",
            TRIPTYCH_STEP_SHM_MIB="9",
            TRIPTYCH_CORE_THREADS="1",
            TRIPTYCH_TRACE=str(tmp_path / "traces"),
            TRIPTYCH_TRACE_RATE="1",
        )
        with image.serving(is_up=lambda: answers(image)):
            tag = image.variables[PROCESS_TAG_VARIABLE]
            sizes = [path.stat().st_size for path in SHM.glob(f"{tag}*")]
            assert max(sizes) >= 9 * 2**20, sizes
            text = triton.InferInput("text", [1, 1], "BYTES")
            text.set_data_from_numpy(np.array([[b"a"]], object))
            headers = {"tenant": "t1", "x-user": "u1", "secret": "s1"}
            with triton.InferenceServerClient(
                image.url("GRPC"), ssl=True, root_certificates=str(tmp_path / "ca.pem")
            ) as client:
                (heard,) = client.infer("echo", [text], headers=headers).as_numpy("echo").ravel()
            assert [part in heard.decode() for part in ("t1", "u1", "s1")] == [True, True, False]
            with (
                triton.InferenceServerClient(image.url("GRPC")) as plain,
                pytest.raises(InferenceServerException),
            ):
                plain.is_server_live(client_timeout=60)
            tracing = json.loads(ask(image.url("HTTP"), "/v2/trace/setting", KEY)[1])
            assert (tracing["trace_file"], tracing["trace_rate"]) == (str(tmp_path / "traces"), "1")


def test_replicas_behind_envoy_have_no_tls(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.pem"
    file.write_text("-----BEGIN CERTIFICATE-----")
    for part in ("CERTIFICATE", "KEY"):
        monkeypatch.setenv(f"TRIPTYCH_GRPC_TLS_{part}_FILE", str(file))
    words = ["serve", str(repository), "--profile", "production", "--replicas", "2"]
    done = CliRunner().invoke(app, words)
    assert "is only supported with one server. Given: 2 servers" in str(done.exception)


def test_serve_in_production_takes_the_same_flags(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIPTYCH_RESTRICTED_KEY", KEY)
    with serving(repository, "--profile", "production") as process:
        endpoints = endpoints_of(process)
        words = Path(f"/proc/{endpoints['pid']}/cmdline").read_bytes().decode().split("\0")
        hidden = "*" * len(KEY)  # all that the process list shows of it
        options = ServerOptions(restricted_key=hidden)
        expected = flags_for(repository, options, read_machine(), find_release())
        starts = [i for i in range(len(words)) if words[i : i + len(expected)] == expected]
        assert len(starts) == 1, words
        assert not [text for text in seen_of(mark_of(endpoints["pid"])) if KEY in text]
        for key, status in (("", 403), (KEY, 200)):
            assert ask(endpoints["http"], "/v2/models/minilm_packed/stats", key)[0] == status
        with Client("minilm_packed", endpoints["grpc"]) as client:
            assert client.embed([TEXT]).shape == (1, 384)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
