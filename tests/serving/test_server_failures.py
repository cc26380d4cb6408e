"""What is said when a model or the server dies, and of mistakes before a server starts."""

import os
import re
import shutil
import signal
import socket
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.echo_server import CONFIG as ECHO_CONFIG
from tests.support.echo_server import ECHO, ENSEMBLE, ask, write_model
from tests.support.failing_models import STOP_ONCE, STOPPING, initializing_with
from tests.support.processes import eventually, running
from triptych.base.errors import UserError
from triptych.base.releases import CONFIG_FIELDS, SERVER_FLAGS
from triptych.container.supervisor import STARVED, _awaited_children
from triptych.interface.cli import app
from triptych.serving.embedded import find_release
from triptych.serving.endpoint import RestartBackoff
from triptych.serving.ports import port_is_busy, reserve_ports
from triptych.serving.readiness import ServerError, find_exit_reason, read_load_state
from triptych.serving.server import Server, ServerAddress

CONFIG = ECHO_CONFIG.format(backend="python")
BUCKETS = """model_metrics { metric_control {
  metric_identifier { family: "nv_inference_first_response_histogram_ms" }
  histogram_options { buckets: [50, 100] }
} }
"""
KNOWN = {s.name for s in (*CONFIG_FIELDS, *SERVER_FLAGS) if s.release <= find_release()}
"""Fields of a config and flags that the server's release has."""


@contextmanager
def started(server: Server) -> Iterator[Server]:
    """Run a server that need not become ready."""
    try:
        server.start()
        yield server
    finally:
        server.stop(grace_s=0.0)


def stop_and_check(server: Server, error: ServerError) -> None:
    """Stop a server that failed; its log is kept, and named in the message."""
    server.stop(grace_s=0.0)
    assert error.log_file.is_file()
    assert str(error.log_file) in error.message
    assert "CUDA" not in error.message
    error.log_file.unlink()


# Name -> model.py, config.pbtxt, what the reason must match; `NAME` in it is the name.
DEATHS: dict[str, tuple[str | None, str, str]] = {
    "raises": (
        initializing_with('raise ValueError("the scales do not add up")'),
        CONFIG,
        r"ValueError: the scales do not add up \(NAME/1/model\.py:10\)",
    ),
    "raises-in-a-library": (
        initializing_with('import json; json.loads("{")'),
        CONFIG,
        r"JSONDecodeError: .* \(/.*/json/decoder\.py:\d+, called from NAME/1/model\.py:10\)",
    ),
    "syntax-error": ("def (:\n", CONFIG, r"SyntaxError: invalid syntax \(model\.py, line 1\)"),
    "missing-module": (
        "import a_module_nobody_has\n" + ECHO,
        CONFIG,
        r"ModuleNotFoundError: No module named 'a_module_nobody_has' \(NAME/1/model\.py:1\)",
    ),
    "exits": (initializing_with("raise SystemExit(3)"), CONFIG, r"SystemExit: 3 .*"),
    "crash-in-native-code": (
        initializing_with("import ctypes; ctypes.string_at(0)"),
        CONFIG,
        r"Stub process .*: its Python process died without a traceback, .*",
    ),
    "unknown-field": (ECHO, 'backnd: "python"', r'config\.pbtxt 1:7: .* no field named "backnd"'),
    "input-without-dims": (
        ECHO,
        CONFIG.replace("dims: [1]", ""),
        r"model input 'text' must specify 'dims' for NAME",
    ),
    "missing-gpu": (
        ECHO,
        CONFIG + "instance_group [{ kind: KIND_GPU gpus: [99] }]",
        r"it needs (GPU 99, which this machine|a GPU, which this server does not) .*",
    ),
    "unknown-backend": (
        ECHO,
        CONFIG.replace("python", "abacus"),
        r"unable to find backend library for backend 'abacus', .*",
    ),
    "chain-of-raises": (
        None,
        ENSEMBLE.format(step="raises", output="echo"),
        ".*depends on 'raises' which has no loaded version.*",
    ),
    "chain-of-nobody": (
        None,
        ENSEMBLE.format(step="nobody", output="echo"),
        ".*contains models that are not available or ambiguous: nobody.*",
    ),
    "chain-without-output": (
        None,
        ENSEMBLE.format(step="well", output="ecco"),
        ".*mapped from non-existing output ecco in model well.*",
    ),
}


if "model_metrics" not in KNOWN:
    DEATHS["new-field"] = (ECHO, CONFIG + BUCKETS, '.*no field named "model_metrics"')


@pytest.mark.server
def test_each_model_that_does_not_load_is_named_with_its_reason(tmp_path: Path) -> None:
    write_model(tmp_path, "well")
    for name, (code, config, _) in DEATHS.items():
        write_model(tmp_path, name, code, config)
    with started(Server(tmp_path)) as server:

        def have_failed() -> bool:
            with pytest.raises(ServerError):  # after each one that fails
                server.wait_ready()
            return len(server._load_state().failures) == len(DEATHS)

        assert eventually(have_failed, 300)
        failures = dict(server._load_state().failures)
        with pytest.raises(ServerError) as caught:
            server.wait_ready()
        stop_and_check(server, caught.value)
    for name, (_, _, reason) in DEATHS.items():
        assert re.fullmatch(reason.replace("NAME", name), failures[name]), failures[name]
    (first, *others) = failures
    assert caught.value.step == caught.value.field == first
    assert caught.value.reason == f"{failures[first]}; also failed: {', '.join(others)}"
    # The step that died is named, and not its ensemble.
    assert list(failures).index("raises") < list(failures).index("chain-of-raises")


@pytest.mark.server
def test_a_model_without_a_file_is_named(tmp_path: Path) -> None:
    """The server would wait for it for ever, and for all models that come after it."""
    with started(Server(write_model(tmp_path, "empty", None))) as server:
        with pytest.raises(ServerError) as caught:
            server.wait_ready(timeout_s=120)
        stop_and_check(server, caught.value)
    assert caught.value.step == caught.value.field == "empty"
    missing = r"Python model file not found in '.*/empty/1/model\.py'"
    assert re.fullmatch(missing, caught.value.reason)


@pytest.mark.server
@pytest.mark.replacement
def test_serve_loads_the_libraries_of_its_backend_directory(tmp_path: Path) -> None:
    write_model(tmp_path / "repository", "echo", config=ECHO_CONFIG, backend="onnxruntime")
    library = tmp_path / "backends/onnxruntime/libtriton_onnxruntime.so"
    library.parent.mkdir(parents=True)
    library.write_text("this is no library")
    words = ["serve", "repository", "--backend-directory", "backends", "--grpc-port", "0"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        done = CliRunner().invoke(app, [*words, "--http-port", "0", "--metrics-port", "0"])
    assert "load     backends of backends: onnxruntime\n" in done.stderr
    assert isinstance(done.exception, ServerError)
    assert "libtriton_onnxruntime.so: file too short" in done.exception.message


@pytest.mark.server
def test_a_server_that_refuses_a_flag_says_which(tmp_path: Path) -> None:
    write_model(tmp_path, "step")
    with pytest.raises(ServerError) as caught, Server(tmp_path, extra_args=["--frobnicate"]):
        raise RuntimeError("it started")
    assert caught.value.step == ""
    assert "exit status 1" in caught.value.reason
    assert "unrecognized option '--frobnicate'" in caught.value.reason
    caught.value.log_file.unlink()


@pytest.mark.server
def test_a_model_that_loads_for_too_long_and_a_port_taken_meanwhile_are_named(
    tmp_path: Path,
) -> None:
    free = tmp_path / "free"
    waits = f"import os, time\n        while os.path.exists({str(free)!r}): time.sleep(0.1)"
    free.touch()
    models = write_model(tmp_path / "models", "slow", initializing_with(waits))
    with started(Server(write_model(models, "quick"))) as server:
        host, port = server.http_url.split(":")
        said = "`slow` was not ready within 0.1 s. Given: still loading: slow."

        def is_named() -> bool:  # once the other model is ready
            with pytest.raises(ServerError) as caught:
                server.wait_ready(timeout_s=0.1)
            return caught.value.message.startswith(said)

        assert eventually(is_named)
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as any server does
            taken.bind((host, int(port)))
            taken.listen()
            free.unlink()
            with pytest.raises(ServerError, match=f"{host}:{port}' already in use") as caught:
                server.wait_ready()
        assert caught.value.step == ""
        stop_and_check(server, caught.value)


def awaited_steps(server: Server) -> set[int]:
    """Steps for whose end the server waits."""
    return _awaited_children(server.pid).intersection(server.living_steps())


@pytest.mark.server
@pytest.mark.parametrize(
    "goes_on",
    [True, pytest.param(False, marks=pytest.mark.long)],  # test_container_served has it, too
)
def test_a_server_is_started_again_where_a_step_gets_no_cpu(tmp_path: Path, goes_on: bool) -> None:
    """Its process is stopped while it loads: Triton 24.10 waits for its end, or aborts later."""
    told: list[str] = []
    repository = write_model(tmp_path, "step", f"{STOP_ONCE}\n{STOPPING}\n{ECHO}")
    # As with pipelines that were built, no process asks the step for its config first.
    with started(Server(repository, extra_args=["--disable-auto-complete-config"])) as server:
        if goes_on:
            assert eventually(lambda: bool(awaited_steps(server)))
            os.kill(awaited_steps(server).pop(), signal.SIGCONT)
        server.wait_ready(timeout_s=240, on_progress=told.append)
        assert server.living_steps()
    said = "boost::interprocess::lock_exception" if goes_on else "step never finishes loading"
    assert said in told[0]
    assert STARVED in told[0]
    assert told[-1] == "step is ready"


LOG = r"""
I0812 09:00:01.000001 1 model_lifecycle.cc:461] "loading: tokenizer:1"
I0812 09:00:01.000002 1 model_lifecycle.cc:461] "loading: core:2"
I0812 09:00:01.000003 1 model_lifecycle.cc:461] "loading: waiting:1"
E0812 09:00:01.000004 1 model_lifecycle.cc:642] "failed to load 'tokenizer' version 1: Internal: \
OSError: no such file\n\nAt:\n  <frozen importlib._bootstrap>(241): _call_with_frames_removed\n\
  /models/tokenizer/1/model.py(12): initialize\n"
I0812 09:00:01.000005 1 model_lifecycle.cc:839] "successfully loaded 'core'"
failed to load 'core' version 7: Internal: so says a step that prints, and nobody else
successfully loaded 'waiting', says the same step
E0812 09:00:01.000006 1 model_repository_manager.cc:703] "Invalid argument: ensemble 'whole' \
depends on 'tokenizer' which has no loaded version. Model 'tokenizer' loading failed with error: x"
E0812 09:00:01.000007 1 model_lifecycle.cc:642] "failed to load 'half' version 1: Internal: \
not written to its e""".replace("\\\n", "")


def test_a_log_is_read_but_not_what_steps_print() -> None:
    state = read_load_state(LOG, Path("/models"))
    assert state.loaded == ("core",)
    assert state.loading == ("waiting",)
    assert [failure.step for failure in state.failures] == ["tokenizer", "whole"]
    assert state.failures[0].reason == "OSError: no such file (tokenizer/1/model.py:12)"
    assert find_exit_reason("") == "nothing"
    log = """terminate called after throwing an instance of 'boost::interprocess::lock_exception'
  what():  boost::interprocess::lock_exception
I0812 09:00:01.000006 2 pb_stub.cc:2145]  Non-graceful termination detected. """
    assert STARVED in find_exit_reason(log)


@pytest.mark.server
def test_a_config_for_the_servers_release_is_taken_and_has_its_metrics(tmp_path: Path) -> None:
    """24.10 refuses `model_metrics`, takes the config beside it, and counts no latencies."""
    release = find_release()
    write_model(tmp_path, "new", ECHO, CONFIG + BUCKETS)
    if "model_metrics" not in KNOWN:
        (tmp_path / "new/configs").mkdir()
        (tmp_path / f"new/configs/{release}.pbtxt").write_text(CONFIG)
    flags = ["--metrics-config=histogram_latencies=true"]
    if shutil.which("tritonserver"):  # `Server` chooses the config of the embedded server alone
        flags.append(f"--model-config-name={release}")
    with (
        Server(tmp_path, extra_args=flags) as server,
        urllib.request.urlopen(server.metrics_url) as page,
    ):
        metrics = page.read().decode()
    assert "nv_inference_request_summary_us" in metrics
    assert ("histogram" in metrics) == ("metrics-config.histogram_latencies" in KNOWN)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository that no server gets to read."""
    folder = tmp_path / "repository"
    (folder / "echo" / "1").mkdir(parents=True)
    (folder / "echo" / "config.pbtxt").write_text('backend: "python"')
    return folder


def test_a_picked_port_differs_from_the_wanted_ones() -> None:
    wanted = {"grpc_port": 0, "http_port": 0, "metrics_port": 0}
    with reserve_ports("127.0.0.1", wanted) as ports:
        assert set(ports) == set(wanted)
        assert len(set(ports.values())) == 3
        assert not any(port_is_busy(port) for port in ports.values())


def test_a_picked_port_is_kept_for_its_server_until_it_is_released() -> None:
    with reserve_ports("127.0.0.1", {"grpc_port": 0}) as ports:
        at = ("127.0.0.1", ports["grpc_port"])
        with socket.socket() as another, pytest.raises(OSError, match="already in use"):
            another.bind(at)  # as another pick does
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(at)
            server.listen()
    with socket.socket() as another:
        another.bind(at)


def test_a_mistake_is_told_before_anything_starts(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    port = 20000  # any, since no server starts
    arguments: dict[str, Any]
    for folder, arguments, field in (
        (repository, {"address": ServerAddress(grpc_port=port, http_port=port)}, "http_port"),
        (repository, {"address": ServerAddress(metrics_port=70000)}, "metrics_port"),
        (repository, {"address": ServerAddress(host="192.0.2.1")}, "host"),
        (repository, {"models": ["ecco"]}, "models"),
        (repository, {"backend_directory": Path("nowhere")}, "backend_directory"),
        (tmp_path / "empty", {}, "repository"),
        (tmp_path / "nowhere", {}, "repository"),
    ):
        server = Server(folder, **arguments)
        with pytest.raises(UserError) as caught:
            server.start()
        assert caught.value.field == field, arguments
        with pytest.raises(RuntimeError, match="not started"):
            print(server.pid)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match="free port") as caught:
            Server(repository, address=ServerAddress(grpc_port=port)).start()
    assert caught.value.field == "grpc_port"
    assert str(port) in caught.value.given
    assert "Stop that process" in caught.value.remedy


def test_a_server_on_path_is_taken_with_its_own_backends_and_this_python(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "tritonserver"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/sh\nprintf "%s\\n" "$PATH" "$@"\necho "error: no luck today" >&2\nexit 7\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    log_file = tmp_path / "logs" / "server.log"
    server = Server(repository, extra_args=["--log-verbose=1"], log_file=log_file)
    reason = "exit status 7; log: error: no luck today"
    with started(server), pytest.raises(ServerError, match=reason):
        server.wait_ready()
    # Its steps import the packages of this environment, activated or not.
    path, *arguments = log_file.read_text().splitlines()
    assert path.split(":")[:2] == [str(Path(sys.executable).parent), str(program.parent)]
    assert f"--model-repository={repository}" in arguments
    assert f"--grpc-port={server.grpc_url.rpartition(':')[2]}" in arguments
    assert arguments[-2] == "--log-verbose=1"
    assert not [line for line in arguments if line.startswith("--backend-directory")]


SHARED = """
instance_group [{{ kind: KIND_CPU rate_limiter {{
  resources [{{ name: "turn" global: true count: {count} }}]
}} }}]
"""


@pytest.mark.server
def test_models_that_share_a_resource_take_turns_and_one_that_cannot_get_it_is_named(
    tmp_path: Path,
) -> None:
    repository, without = tmp_path / "repository", ECHO_CONFIG.partition("instance_group")[0]
    for name in ("one", "other"):
        config = (without + SHARED).format(backend="python", count=1)
        write_model(repository, name, ECHO, config)
    with running(Server(repository)) as server, ThreadPoolExecutor() as pool:
        first, second = tmp_path / "first", tmp_path / "second"
        slow = pool.submit(ask, server, f"sleep:3:{first}", "one")
        assert eventually(first.exists)
        ask(server, f"sleep:0:{second}", "other")
        slow.result()
        assert second.stat().st_mtime - first.stat().st_mtime > 2.9
    config = (without + SHARED).format(backend="python", count=2)
    (repository / "other/config.pbtxt").write_text(config)
    server = Server(repository, extra_args=["--rate-limit-resource=turn:1"])
    with started(server), pytest.raises(ServerError) as caught:
        server.wait_ready()
    assert caught.value.step == "other"
    assert re.match('Resource count for "turn" is limited to 1 which', caught.value.reason)
    caught.value.log_file.unlink()


def test_the_pause_before_a_restart_grows_while_crashes_follow_each_other() -> None:
    pauses = RestartBackoff()
    assert [pauses.take_s(0.0) for _ in range(9)] == [0, 0.5, 1, 2, 4, 8, 16, 30, 30]
    assert [pauses.take_s(lived_s) for lived_s in (61.0, 0.0)] == [0, 0.5]
