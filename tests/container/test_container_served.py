"""A container from its start-up to its end, with a real server: check, flags, answers, SIGTERM."""

import fcntl
import http.client
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import Request

import numpy as np
import onnx
import psutil
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException
from typer.testing import CliRunner

from tests.support.certificates import write_certificate
from tests.support.container_cases import copy_packed
from tests.support.container_image import KEY, Image, image_of, server_of
from tests.support.deploy_cases import document, options, write_built
from tests.support.echo_server import write_model
from tests.support.failing_models import initializing_with
from tests.support.http_pages import fetch
from tests.support.processes import CORE_IS_A_PROCESS, eventually, mark_of, regions, running
from tests.support.project import set_setting
from tests.support.served_command import endpoints_of, serving
from triptych.base.explained import yaml_of
from triptych.client import (
    AccessDeniedError,
    Client,
    InvalidRequestError,
    PipelineNotReadyError,
    ServerUnreachableError,
)
from triptych.container import shared_memory, supervisor
from triptych.container.entrypoint import flags_for
from triptych.container.flags import ServerFlags
from triptych.container.health import HealthCheck
from triptych.container.machine import read_machine
from triptych.container.manifests import find_pipelines, largest_request_mib
from triptych.container.shared_memory import SharedRegions, new_prefix
from triptych.container.supervisor import EXIT_DEAD, STARVED, step_processes
from triptych.deploy.targets import make_manifests
from triptych.interface.cli import app
from triptych.runtime.in_flight import InFlight
from triptych.serving.bench.resources import fetch_metrics
from triptych.serving.embedded import find_release
from triptych.serving.endpoint import wait_answers
from triptych.serving.orphan_cleanup import PROCESS_TAG_VARIABLE, SHM, tagged_processes
from triptych.serving.readiness import ServerError
from triptych.serving.server import Server

pytestmark = pytest.mark.server

TEXT = "my delivery is late"


@pytest.fixture(scope="module")
def repository(minilm_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One pipeline of MiniLM, and a model that says what it is told."""
    folder = copy_packed(minilm_repository, tmp_path_factory.mktemp("repository") / "models")
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
    # Python of the image finds the package without PYTHONPATH.
    words = [word for word in probe if word != "-I"]
    return subprocess.run(words, env=image.variables, timeout=60).returncode == 0


def test_what_deploy_writes_runs_here(image: Image, repository: Path, tmp_path: Path) -> None:
    """Probes and preStop as the YAML has them; the metrics that its queries select are there."""
    chosen = options(
        name="minilm-packed",
        triton="24.10",
        rps_per_replica=9.0,
        cpu_cores=1.0,
        memory_mib=2048,
        gateway="public",  # the rate is the servers' own then
    )
    built = write_built(tmp_path, "minilm_packed")
    made = make_manifests(built, "minilm_packed", chosen, tmp_path)
    deployment = document(made, "deployment.yaml")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
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
        "".join(map(yaml_of, made.files.values())),
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


def test_more_idle_connections_than_files_of_the_usual_limit_leave_a_server_healthy(
    image: Image,
) -> None:
    address = ("127.0.0.1", int(image.variables["TRIPTYCH_HTTP_PORT"]))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    try:
        with ExitStack() as opened:
            for _ in range(1100):
                opened.enter_context(socket.create_connection(address, timeout=60))
            assert eventually(lambda: image.health() == (0, "healthy: minilm_packed"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


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


def cut_vocabulary(repository: Path) -> None:
    """Leave two tokens in the core, so that it loads and every inference fails."""
    file = repository / "minilm_packed_core/1/model.onnx"
    model = onnx.load(file)
    (table,) = (each for each in model.graph.initializer if each.dims == [30522, 384])
    table.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(table)[:2], table.name))
    del model.graph.value_info[:]
    onnx.save(model, file)


def remove_warm_ups(repository: Path) -> None:
    """Of the config, and of those for other machines."""
    for config in (repository / "minilm_packed_core").rglob("*.pbtxt"):
        text = re.sub(r"(?ms)^model_warmup \{.*?^\}\n", "", config.read_text())
        config.write_text(text)


def test_a_core_that_fails_is_never_ready(
    minilm_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton 24.10 may die as a warm-up fails: in 11 of 16 tries."""
    repository, failure = copy_packed(minilm_repository, tmp_path / "models"), "data bounds"
    monkeypatch.setenv("TRIPTYCH_LOCK_CHECK", "warn")
    cut_vocabulary(repository)
    ports = [f"--{name}-port=0" for name in ("grpc", "http", "metrics")]
    done = CliRunner().invoke(app, ["serve", str(repository), *ports])
    assert isinstance(done.exception, ServerError)
    assert done.exception.step in ("", "minilm_packed_core")
    # A server that dies of it need not have written the core's error to its log.
    wanted = rf"failed to run warmup sample '1x\d+'.*{failure}"
    wanted = wanted if done.exception.step else "signal SIGSEGV"
    assert re.match(wanted, done.exception.reason), done.exception
    done.exception.log_file.unlink()
    with image_of(tmp_path / "image", repository) as image:
        image.variables["TRIPTYCH_LOCK_CHECK"] = "warn"
        with image.run("entrypoint") as process:
            said = process.communicate(timeout=120)[0]
    assert process.returncode in (1, EXIT_DEAD, 128 + signal.SIGSEGV), said
    assert failure in said or "SIGSEGV" in said, said
    # Without warm-ups the first request shows it.
    remove_warm_ups(repository)
    answer = rf"minilm_packed does not answer \(HTTP 500: .*{failure}"
    with image_of(tmp_path / "other", repository) as image:
        image.variables["TRIPTYCH_LOCK_CHECK"] = "warn"
        with image.run("entrypoint") as process:
            assert eventually(lambda: bool(re.search(answer, image.health()[1])))
            assert image.health()[0] == 1
            process.kill()
    with running(Server(repository)) as server:
        health = HealthCheck(find_pipelines(repository), server.metrics_url)
        assert health.ask(f"http://{server.http_url}") == ["minilm_packed"]
        find_fault, now = partial(health.find_fault, f"http://{server.http_url}"), time.monotonic()
        with pytest.raises(
            ServerError, match=rf"failed the health-check request.*{failure}"
        ) as told:
            wait_answers(server, find_fault, now)
    told.value.log_file.unlink()


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


def test_serve_in_production_takes_the_same_flags(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIPTYCH_RESTRICTED_KEY", KEY)
    with serving(repository, "--profile", "production") as process:
        endpoints = endpoints_of(process)
        words = Path(f"/proc/{endpoints['pid']}/cmdline").read_bytes().decode().split("\0")
        hidden = ServerFlags(restricted_key="*" * len(KEY))  # as the process list shows it
        expected = flags_for(repository, hidden, read_machine(), find_release())
        assert " ".join(expected) in " ".join(words)
        assert not [text for text in seen_of(mark_of(endpoints["pid"])) if KEY in text]
        for key, status in (("", 403), (KEY, 200)):
            assert ask(endpoints["http"], "/v2/models/minilm_packed/stats", key)[0] == status


REQUESTS = 40
REFUSALS = (PipelineNotReadyError, ServerUnreachableError)
STEP_NAMES = ("core", "postprocess", "preprocess")
HELD = """
import os
import time

_execute = TritonPythonModel.execute


def execute(self, requests):
    while os.path.exists({file!r}):
        time.sleep(0.01)
    return _execute(self, requests)


TritonPythonModel.execute = execute
"""
"""Code of a step that waits while a file exists."""


@pytest.fixture
def alone(minilm_repository: Path, tmp_path: Path) -> Path:
    """A repository with one pipeline."""
    return copy_packed(minilm_repository, tmp_path / "models")


def test_sigterm_loses_nothing(alone: Path, tmp_path: Path) -> None:
    """Requests in flight are answered, new ones refused, and no idle connection delays the end."""
    hold = tmp_path / "hold"
    with (alone / "minilm_packed_postprocess/1/model.py").open("a") as step:
        step.write(HELD.format(file=str(hold)))
    set_setting(alone, "minilm_packed_preprocess", "max_wait_ms", 600_000)
    with image_of(tmp_path / "image", alone) as image:
        image.variables["TRIPTYCH_LOCK_CHECK"] = "off"
        # An idle connection would hold it for so long.
        image.variables["TRIPTYCH_EXIT_TIMEOUT_S"] = "600"
        image.set_seconds("EXIT_S", 1.0)
        image.set_seconds("_CHECK_S", 600.0)  # it would find the step that waits
        with image.serving() as process:
            tag = image.variables[PROCESS_TAG_VARIABLE]
            (counts,) = InFlight.of_server(server_of(process), tag)
            hold.touch()
            with (
                closing(http.client.HTTPConnection(image.url("HTTP"), timeout=60)) as idle,
                Client("minilm_packed", image.url("GRPC"), timeout_s=120) as client,
                ThreadPoolExecutor(2 * REQUESTS) as pool,
            ):
                idle.request("GET", "/v2/health/live")
                idle.getresponse().read()
                sent = [pool.submit(client.embed, [TEXT]) for _ in range(REQUESTS)]
                assert eventually(lambda: counts.requests() >= REQUESTS)
                process.send_signal(signal.SIGTERM)
                assert eventually(lambda: counts.closed_at > 0)
                late = list[Future[Any]]()

                def is_one_refused() -> bool:
                    """Some are let in: as if sent before, or to see whether others have left."""
                    late.append(pool.submit(client.embed, [TEXT]))
                    return any(one.done() and isinstance(one.exception(), REFUSALS) for one in late)

                assert eventually(is_one_refused)
                hold.unlink()
                assert {one.result(timeout=120).shape for one in sent} == {(1, 384)}
                said = process.communicate(timeout=120)[0]
    assert process.returncode == 0, said
    assert f"warning: in Triton {find_release()}, " in said
    assert image.health()[0] == 1


def test_a_step_that_dies_as_the_server_gets_ready_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Between two looks of the supervisor; process 5 only read the config of a model."""
    looks = iter([{5: "a"}, {6: "a", 7: "b"}, {6: "a"}])
    ready = iter([False, False, True])
    monkeypatch.setattr(supervisor, "conceal_keys", lambda _server: True)  # it is no server
    monkeypatch.setattr(supervisor, "step_processes", lambda _server: next(looks))
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as server:
        assert (
            supervisor._watch(server, [], lambda: next(ready), lambda: None, lambda: False)
            == EXIT_DEAD
        )
    assert "error: a step has died: b (process 7). The server" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("groups", "counts"),
    [
        ("0::/\n", "memory.events"),
        ("0::/pod/container\n", "pod/container/memory.events"),
        ("5:cpu,cpuacct:/\n4:memory:/docker/1\n0::/\n", "memory/memory.oom_control"),
        ("9:hugetlb,memory:/docker/1\n", "memory/docker/1/memory.oom_control"),
    ],
)
def test_a_step_that_the_kernel_killed_for_memory_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    groups: str,
    counts: str,
) -> None:
    """Of both versions of cgroups; the state of a container shows no death of a step."""
    (tmp_path / "groups").write_text(groups)
    monkeypatch.setattr(supervisor, "_OWN_CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(supervisor, "_CGROUPS", tmp_path)
    file = tmp_path / counts
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("oom 4\noom_kill 2\n")

    def kill(_server: int, steps: dict[int, str]) -> dict[int, str]:
        file.write_text("oom 4\noom_kill 3\noom_group_kill 0\n")
        return steps

    monkeypatch.setattr(supervisor, "conceal_keys", lambda _server: True)  # it is no server
    monkeypatch.setattr(supervisor, "step_processes", lambda _server: {5: "a"})
    monkeypatch.setattr(supervisor, "dead_steps", kill)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as server:
        assert supervisor._watch(server, [], lambda: True, lambda: None, lambda: False) == EXIT_DEAD
    said = capfd.readouterr().err
    assert (
        "a step has died: a (process 5); killed here by the kernel for lack of memory: 1." in said
    )
    assert supervisor.describe_memory_kills(3) == ""


@pytest.mark.parametrize(
    ("attack", "told"),
    [
        ("the server is killed", "error: tritonserver ended by itself: signal SIGKILL"),
        ("a step is killed", "error: a step has died: minilm_packed_preprocess (process "),
        ("a step gets no CPU", "error: "),
    ],
)
def test_a_server_or_step_that_dies_ends_the_container_and_leaves_no_memory(
    alone: Path, tmp_path: Path, attack: str, told: str
) -> None:
    """As after a kill by the kernel for want of memory, and as on a machine that is too busy."""
    with image_of(tmp_path / "image", alone) as image:
        tag = image.variables[PROCESS_TAG_VARIABLE]
        with image.serving() as process:
            server = server_of(process)
            steps = step_processes(server)
            names = STEP_NAMES if CORE_IS_A_PROCESS else STEP_NAMES[1:]
            assert sorted(steps.values()) == [f"minilm_packed_{step}" for step in names]
            first = next(pid for pid, model in steps.items() if model.endswith("_preprocess"))
            assert regions(tag)
            if attack == "a step gets no CPU":
                os.kill(first, signal.SIGSTOP)
                # Triton takes it for dead after a second; then it ends as soon as it runs again.
                assert eventually(lambda: is_taken_for_dead(image))
                os.kill(first, signal.SIGCONT)
            else:
                os.kill(server if attack == "the server is killed" else first, signal.SIGKILL)
            said = process.communicate(timeout=120)[0]
        assert process.returncode == EXIT_DEAD
        assert told in said
        assert re.search("ended by itself: signal SIG|a step has died|fails its health check", said)
        assert eventually(lambda: not any(psutil.pid_exists(pid) for pid in steps))
        assert eventually(lambda: regions(tag) == [])


def is_taken_for_dead(image: Image) -> bool:
    """Whether the server says that a step is dead, before the time of the health check is over."""
    exit_code, said = image.health()
    return exit_code == 1 and said.startswith("unhealthy: minilm_packed") and "(HTTP " in said


HOLDER = """
import sys, time
from triptych.container.shared_memory import SHM, SharedRegions
regions = SharedRegions(sys.argv[1])
(SHM / f"{sys.argv[1]}region").touch()
print(flush=True)
time.sleep(600)
"""


def test_memory_is_removed_after_its_server_and_not_before() -> None:
    prefix = new_prefix()
    with subprocess.Popen([sys.executable, "-c", HOLDER, prefix], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        SharedRegions(new_prefix()).remove()
        assert sorted(regions(prefix)) == [f"{prefix}lock", f"{prefix}region"]
        holder.kill()
    SharedRegions(new_prefix()).remove()
    # A server of another test may remove them at the same moment.
    assert eventually(lambda: regions(prefix) == [])


def test_memory_is_kept_if_another_server_starts_before_its_lock_is_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flock, of_another_server = fcntl.flock, shared_memory._remove_abandoned

    def held_late(file: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        of_another_server()
        flock(file, operation)

    prefix = new_prefix()
    monkeypatch.setattr(shared_memory, "_remove_abandoned", lambda: None)
    monkeypatch.setattr(fcntl, "flock", held_late)
    first = SharedRegions(prefix)
    assert regions(prefix) == [f"{prefix}lock"]
    first.remove()
    assert regions(prefix) == []


def test_a_server_that_would_load_for_ever_ends_the_container(tmp_path: Path) -> None:
    """As on a machine so busy that a step gets no CPU for a second while it loads."""
    stopped = initializing_with(f"os.kill(os.getpid(), {signal.SIGSTOP:d})")
    repository = write_model(tmp_path / "models", "step", stopped)
    with image_of(tmp_path / "image", repository) as image:
        image.set_seconds("_MAX_END_S", 2.0)
        with image.run("entrypoint") as process:
            try:
                said = process.communicate(timeout=120)[0]
            finally:
                process.kill()
    assert process.returncode == EXIT_DEAD
    assert f"error: step never finishes loading ({STARVED})" in said
