"""What is said when a model or the server dies: which one, why, and where in its code."""

import re
import shutil
import socket
import urllib.request
from collections.abc import Collection
from pathlib import Path

import pytest

from failing_models import (
    CONFIG,
    MODEL,
    STOP_ONCE,
    STOPPED_IN_INITIALIZE,
    STOPPING,
    initializing_with,
    write_model,
)
from processes import eventually
from triptych.base.releases import CONFIG_FIELDS, SERVER_FLAGS
from triptych.container.supervisor import STARVED
from triptych.serving.embedded import find_release
from triptych.serving.readiness import ServerError, find_exit_reason, read_load_state
from triptych.serving.server import Server

ENSEMBLE = """platform: "ensemble"
max_batch_size: 4
input [{ name: "text" data_type: TYPE_STRING dims: [1] }]
output [{ name: "out" data_type: TYPE_STRING dims: [1] }]
ensemble_scheduling { step [{
  model_name: "STEP" model_version: -1
  input_map { key: "text" value: "text" }
  output_map { key: "OUTPUT" value: "out" }
}] }
"""


def failure_of(
    repository: Path, timeout_s: float = 120.0, *, loaded: Collection[str] = ()
) -> ServerError:
    """The error of a server that cannot become ready, `loaded` apart; it leaves nothing."""
    server = Server(repository)
    try:
        server.start()
        assert eventually(lambda: set(loaded) <= set(server._load_state().loaded))
        with pytest.raises(ServerError) as caught:
            server.wait_ready(timeout_s=timeout_s)
    finally:
        server.stop(grace_s=0.0)
    error = caught.value
    assert error.log_file.is_file()  # kept after the stop, and named in the message
    assert str(error.log_file) in error.message
    assert "CUDA" not in error.message
    error.log_file.unlink()
    return error


# Name -> model.py, config.pbtxt, what the reason must match; `NAME` in it is the name.
DEATHS: dict[str, tuple[str | None, str, str]] = {
    "raises": (
        initializing_with('raise ValueError("the scales do not add up")'),
        CONFIG,
        r"ValueError: the scales do not add up \(NAME/1/model\.py:7\)",
    ),
    "raises-in-a-library": (
        initializing_with('import json; json.loads("{")'),
        CONFIG,
        r"JSONDecodeError: .* \(/.*/json/decoder\.py:\d+, called from NAME/1/model\.py:7\)",
    ),
    "syntax-error": ("def (:\n", CONFIG, r"SyntaxError: invalid syntax \(model\.py, line 1\)"),
    "missing-module": (
        "import a_module_nobody_has\n" + MODEL,
        CONFIG,
        r"ModuleNotFoundError: No module named 'a_module_nobody_has' \(NAME/1/model\.py:1\)",
    ),
    "exits": (initializing_with("raise SystemExit(3)"), CONFIG, r"SystemExit: 3 .*"),
    "crash-in-native-code": (
        initializing_with("import ctypes; ctypes.string_at(0)"),
        CONFIG,
        r"Stub process .*: its Python process died without a traceback, .*",
    ),
    "unknown-field": (MODEL, 'backnd: "python"', r'config\.pbtxt 1:7: .* no field named "backnd"'),
    "input-without-dims": (
        MODEL,
        CONFIG.replace("dims: [1]", ""),
        r"model input 'text' must specify 'dims' for NAME",
    ),
    "missing-gpu": (
        MODEL,
        CONFIG + "instance_group [{ kind: KIND_GPU gpus: [99] }]",
        r"it needs GPU 99, which this machine lacks: .*",
    ),
    "unknown-backend": (
        MODEL,
        CONFIG.replace("python", "abacus"),
        r"unable to find backend library for backend 'abacus', .*",
    ),
    "chain-of-nobody": (
        None,
        ENSEMBLE.replace("STEP", "nobody").replace("OUTPUT", "echo"),
        ".*contains models that are not available or ambiguous: nobody.*",
    ),
    "chain-without-output": (
        None,
        ENSEMBLE.replace("STEP", "well").replace("OUTPUT", "ecco"),
        ".*mapped from non-existing output ecco in model well.*",
    ),
}


@pytest.mark.server
def test_each_model_that_does_not_load_is_named_with_its_reason(tmp_path: Path) -> None:
    write_model(tmp_path, "well", MODEL)
    for name, (code, config, _) in DEATHS.items():
        write_model(tmp_path, name, code, config)
    server = Server(tmp_path)
    try:
        server.start()
        assert eventually(lambda: len(server._load_state().failures) == len(DEATHS))
        failures = dict(server._load_state().failures)
        with pytest.raises(ServerError) as caught:
            server.wait_ready()
    finally:
        server.stop(grace_s=0.0)
    caught.value.log_file.unlink()
    for name, (_, _, reason) in DEATHS.items():
        assert re.fullmatch(reason.replace("NAME", name), failures[name]), failures[name]
    (first, *others) = failures
    assert caught.value.step == caught.value.field == first
    assert caught.value.reason == f"{failures[first]}; also failed: {', '.join(others)}"


@pytest.mark.server
def test_a_model_without_a_file_is_named(tmp_path: Path) -> None:
    """The server would wait for it for ever, and for all models that come after it."""
    error = failure_of(write_model(tmp_path, "empty", None))
    assert error.step == error.field == "empty"
    assert re.fullmatch(r"Python model file not found in '.*/empty/1/model\.py'", error.reason)


@pytest.mark.server
def test_the_step_that_died_is_named_and_not_its_ensemble(tmp_path: Path) -> None:
    write_model(tmp_path, "a_chain", None, ENSEMBLE.replace("STEP", "step"))
    write_model(tmp_path, "step", initializing_with("raise KeyError('vocabulary')"))
    error = failure_of(tmp_path)
    assert error.step == "step"
    assert error.reason.startswith("KeyError: 'vocabulary' (step/1/model.py:7)")


@pytest.mark.server
def test_a_model_that_loads_for_too_long_is_named(tmp_path: Path) -> None:
    write_model(tmp_path, "quick", MODEL)
    write_model(tmp_path, "slow", initializing_with("import time; time.sleep(600)"))
    error = failure_of(tmp_path, timeout_s=1.0, loaded=["quick"])
    assert error.step == "slow"
    assert error.message.startswith("`slow` was not ready within 1 s. Given: still loading: slow.")


@pytest.mark.server
def test_a_server_that_refuses_a_flag_says_which(tmp_path: Path) -> None:
    write_model(tmp_path, "step", MODEL)
    with pytest.raises(ServerError) as caught, Server(tmp_path, extra_args=["--frobnicate"]):
        raise RuntimeError("it started")
    assert caught.value.step == ""
    assert "exit status 1" in caught.value.reason
    assert "unrecognized option '--frobnicate'" in caught.value.reason
    caught.value.log_file.unlink()


@pytest.mark.server
def test_a_port_taken_while_models_load_is_named(tmp_path: Path) -> None:
    free = tmp_path / "free"
    waits = f"import os, time\n        while os.path.exists({str(free)!r}): time.sleep(0.1)"
    free.touch()
    server = Server(write_model(tmp_path / "models", "step", initializing_with(waits)))
    server.start()
    host, port = server.http_url.split(":")
    try:
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as any server does
            taken.bind((host, int(port)))
            taken.listen()
            free.unlink()
            with pytest.raises(ServerError, match=f"{host}:{port}' already in use") as caught:
                server.wait_ready()
    finally:
        server.stop()
    assert caught.value.step == ""
    caught.value.log_file.unlink()


STOPPED_AT_IMPORT = f"{STOP_ONCE}\n{STOPPING}\n{MODEL}"


@pytest.mark.server
@pytest.mark.parametrize(
    ("code", "said"),
    [
        pytest.param(STOPPED_AT_IMPORT, "boost::interprocess::lock_exception", id="aborts"),
        pytest.param(
            STOPPED_IN_INITIALIZE,
            "step never finishes loading",
            id="waits for ever",
            marks=pytest.mark.long,  # test_container_stop has the same state of a container
        ),
    ],
)
def test_a_server_is_started_again_where_a_step_gets_no_cpu(
    tmp_path: Path, code: str, said: str
) -> None:
    """Its process is stopped while it loads: what Triton 24.10 then does depends on where."""
    told: list[str] = []
    repository = write_model(tmp_path, "step", code)
    # As with pipelines that were built, no process asks the step for its config first.
    server = Server(repository, extra_args=["--disable-auto-complete-config"])
    server.start()
    try:
        server.wait_ready(timeout_s=120, on_progress=told.append)
        assert server.living_steps()
    finally:
        server.stop()
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


def test_an_empty_log_says_nothing() -> None:
    state = read_load_state("", Path("/models"))
    assert (state.loading, state.loaded, state.failures) == ((), (), ())
    assert find_exit_reason("") == "nothing"


def test_a_step_that_got_no_cpu_while_it_loaded_is_told_as_that() -> None:
    log = """terminate called after throwing an instance of 'boost::interprocess::lock_exception'
  what():  boost::interprocess::lock_exception
I0812 09:00:01.000006 2 pb_stub.cc:2145]  Non-graceful termination detected. """
    assert STARVED in find_exit_reason(log)


BUCKETS = """model_metrics { metric_control {
  metric_identifier { family: "nv_inference_first_response_histogram_ms" }
  histogram_options { buckets: [50, 100] }
} }
"""


def test_what_the_servers_release_lacks_is_as_the_table_of_releases_says(tmp_path: Path) -> None:
    """24.10 refuses `model_metrics`, takes the config beside it, and counts no latencies."""
    release = find_release()
    known = {since.name for since in (*CONFIG_FIELDS, *SERVER_FLAGS) if since.release <= release}
    write_model(tmp_path, "plain", MODEL)
    write_model(tmp_path, "new", MODEL, CONFIG + BUCKETS)
    if "model_metrics" not in known:
        assert 'no field named "model_metrics"' in failure_of(tmp_path).reason
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
    assert ("histogram" in metrics) == ("metrics-config.histogram_latencies" in known)
