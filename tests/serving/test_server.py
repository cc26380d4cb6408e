"""Real servers: asked, stopped, killed without a trace, and what they keep from others."""

import http.client
import json
import marshal
import os
import py_compile
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from importlib.util import cache_from_source
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from tests.support.echo_server import ECHO, ENSEMBLE, ask, write_model
from tests.support.envoy_front import send_http
from tests.support.http_pages import page
from tests.support.processes import CORE_IS_A_PROCESS, eventually, mark_of, regions, running
from triptych.base.errors import UserError
from triptych.base.releases import flags_newer_than
from triptych.client import Client
from triptych.container.flags import ALLOW_CLIENT_SHM
from triptych.serving import hot_reload, orphan_cleanup
from triptych.serving import process as processes
from triptych.serving.bench.perf_analyzer import find_perf_analyzer
from triptych.serving.embedded import find_release
from triptych.serving.orphan_cleanup import SHM, tagged_processes
from triptych.serving.server import Server, ServerProfile, check_and_make_flags

pytestmark = pytest.mark.server

SLOW_TO_LOAD = ECHO.replace("pass", "time.sleep(600)")


def port_of(url: str) -> int:
    return int(url.removesuffix("/metrics").rpartition(":")[2])


def assert_nothing_left(mark: str) -> None:
    """Check that no process and no shared memory of a server is left."""
    assert eventually(lambda: tagged_processes(mark) == [])
    assert eventually(lambda: regions(mark) == [])


def forge_byte_code(source: Path, folder: Path) -> None:
    """Put the byte code of other source where Python looks for that of `source`."""
    forged = folder / "forged.py"
    forged.write_text(ECHO.replace('"unset"', '"forged"'))
    stat = source.stat()
    os.utime(forged, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "pycache_prefix", None)
        cache = cache_from_source(str(source))
        py_compile.compile(str(forged), cache, str(source), doraise=True)
        content = bytearray(Path(cache).read_bytes())
        content[12:16] = stat.st_size.to_bytes(4, "little")
        Path(cache).write_bytes(content)
        # The attack works: Python takes the byte code for that of the source.
        code = SourceFileLoader("model", str(source)).get_code("model")
    assert code is not None
    assert b"forged" in marshal.dumps(code)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, of which `echo` has forged byte code, and an ensemble of this model."""
    folder = tmp_path_factory.mktemp("repository")
    write_model(folder, "other")
    write_model(folder, "echo")
    forge_byte_code(folder / "echo/1/model.py", tmp_path_factory.mktemp("forged"))
    return write_model(folder, "chain", None, config=ENSEMBLE.format(step="echo", output="echo"))


PROGRESS: list[str] = []
"""Lines about the start of `server`."""


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Server]:
    """A server that a thread started which has ended since."""
    server = Server(repository, environment={"TRIPTYCH_TEST": "seen"})
    with pytest.MonkeyPatch.context() as no_rights:
        no_rights.setattr(shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(UserError, match="__pycache__"):
            server.start()
    try:
        thread = threading.Thread(target=server.start)
        thread.start()
        thread.join()
        server.wait_ready(on_progress=PROGRESS.append)
        yield server
    finally:
        server.stop(grace_s=0.0)


def test_every_model_answers_from_its_source_in_its_environment(
    server: Server, repository: Path
) -> None:
    assert ask(server, "grüezi") == "grüezi"
    assert ask(server, "through the ensemble", "chain") == "through the ensemble"
    # A server that a step without CPU ended as it loaded is started again, which is told, too.
    ready = sorted(line for line in PROGRESS if line.endswith(" is ready"))
    assert ready == ["chain is ready", "echo is ready", "other is ready"]
    assert ask(server, "env:TRIPTYCH_TEST") == "seen"
    assert ask(server, "env:TOKENIZERS_PARALLELISM") == "false"
    assert ask(server, "env:NO_SUCH_VARIABLE") == "unset"  # not as in the forged byte code
    assert [path.name for path in (repository / "echo/1").iterdir()] == ["model.py"]


def test_the_three_services_listen_on_loopback_and_metrics_have_quantiles(server: Server) -> None:
    ports = {port_of(url) for url in (server.grpc_url, server.http_url, server.metrics_url)}
    listening: dict[int, str] = {}
    for table in ("tcp", "tcp6"):  # gRPC listens through the IPv6 form of 127.0.0.1
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            address, _, port = local.partition(":")
            if state == "0A" and int(port, 16) in ports:
                listening[int(port, 16)] = address[-8:]
    assert listening == dict.fromkeys(ports, "0100007F")
    status, text = page(port_of(server.metrics_url), "/metrics")
    assert status == 200
    assert re.search(r'nv_inference_request_summary_us\{model="echo".*quantile', text)


def test_a_second_server_runs_beside_the_first_and_answers_what_is_in_flight_at_its_stop(
    server: Server, repository: Path, tmp_path: Path
) -> None:
    log_file, asked = tmp_path / "second.log", f"sleep:1:{tmp_path / 'begun'}"
    with (
        ThreadPoolExecutor(1) as pool,
        Server(repository, models=["chain"], log_file=log_file) as second,
    ):
        mark = mark_of(second.pid)
        assert ask(second, "two") == "two"
        assert ask(server, "one") == "one"
        # The step of the ensemble is served, and no other model.
        for model, is_served in (("echo", True), ("other", False)):
            status, _ = page(port_of(second.http_url), f"/v2/models/{model}/ready")
            assert (status == 200) is is_served, model
        assert tagged_processes(mark)
        assert regions(mark)
        answer = pool.submit(ask, second, asked)
        assert eventually((tmp_path / "begun").exists)
        second.stop()
        assert answer.result(timeout=60.0) == asked
    assert_nothing_left(mark)
    assert ask(server, "still one") == "still one"
    assert "Waiting for in-flight requests" in log_file.read_text()


@pytest.mark.replacement
def test_a_replaced_step_answers_its_last_request_and_its_end_is_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hot_reload, "_LAST_ANSWERS_S", 0.0)
    held = ECHO.replace("time.sleep(float(seconds))", "while os.path.exists(begun): pass")
    models = write_model(tmp_path / "models", "echo", held)
    write_model(models, "chain", None, config=ENSEMBLE.format(step="echo", output="echo"))
    begun = tmp_path / "begun"
    with ThreadPoolExecutor(1) as pool, Server(models, models=["chain"]) as server:
        answer = pool.submit(ask, server, f"sleep:0:{begun}")
        assert eventually(begun.exists)
        (old,) = server.living_steps()
        (models / "echo/1/model.py").write_text(held.replace("pass", "self.changed = True"))
        hot_reload.reload(server, "chain")
        assert ask(server, "new") == "new"
        assert psutil.pid_exists(old)
        begun.unlink()
        assert answer.result(timeout=60.0).startswith("sleep")
        assert eventually(lambda: not psutil.pid_exists(old))
        assert server.find_crash(within_s=1.0) is None


def test_stop_kills_after_the_grace_and_may_be_called_again(
    tmp_path: Path, repository: Path
) -> None:
    server = Server(repository, models=["echo"])
    server.stop()  # never started
    with ThreadPoolExecutor(1) as pool:
        try:
            server.start()
            server.wait_ready()
            mark = mark_of(server.pid)
            log_file = server.log_file
            answer = pool.submit(ask, server, f"sleep:600:{tmp_path / 'begun'}")
            assert eventually((tmp_path / "begun").exists)
        finally:
            server.stop(grace_s=0.5)
        with pytest.raises((OSError, http.client.HTTPException)):
            answer.result(timeout=60.0)
    assert_nothing_left(mark)
    assert log_file is not None
    assert not log_file.exists()
    server.stop()


def test_a_ready_server_that_does_not_answer_has_its_whole_grace_to_stop(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine may leave it no CPU for an answer; one that loads gets two seconds."""
    begun = tmp_path / "begun"
    with (
        ThreadPoolExecutor(1) as pool,
        running(Server(repository, models=["echo"])) as server,
    ):
        answer = pool.submit(ask, server, f"sleep:4:{begun}")
        assert eventually(begun.exists)
        monkeypatch.setattr("triptych.serving.server.responds_ok", lambda *_: False)
        server.stop(grace_s=300)
        assert answer.result(timeout=60.0).startswith("sleep:4:")


def test_stop_cleans_up_after_a_server_that_was_killed(repository: Path) -> None:
    """A server with the flags of the production profile."""
    flags = check_and_make_flags(repository, production=True)
    with running(Server(repository, profile=ServerProfile(production_flags=flags))) as server:
        assert ask(server, "env:NO_SUCH_VARIABLE") == "unset"
        mark = mark_of(server.pid)
        log_file = server.log_file
        (step,) = (pid for pid, model in server.living_steps().items() if model == "echo")
        os.kill(step, signal.SIGKILL)
        death = server.find_crash(within_s=60)
        assert death is not None
        assert death.message.startswith(f"`echo` crashed. Given: its process {step} has ended")
        server.living_steps()  # without the one that died
        os.kill(server.pid, signal.SIGKILL)
        death = server.find_crash(within_s=60)
        assert death is not None
        assert "signal SIGKILL" in death.message
    assert_nothing_left(mark)
    assert log_file is not None
    assert log_file.is_file()  # what it said before it died
    log_file.unlink()


def test_a_thread_that_lists_processes_is_not_in_the_way_of_another(
    monkeypatch: pytest.MonkeyPatch, minilm_server: Server
) -> None:
    """The threads share the processes of psutil, and the attributes that it read last."""
    listed = psutil.process_iter

    def shared(attributes: list[str] | None = None) -> Iterator[psutil.Process]:
        for process in listed(attributes):
            process.info = {}
            yield process

    tag = psutil.Process(minilm_server.pid).environ()[orphan_cleanup.PROCESS_TAG_VARIABLE]
    monkeypatch.setattr(psutil, "process_iter", shared)
    assert minilm_server.pid in {process.pid for process in tagged_processes(tag)}
    orphan_cleanup.remove_environment_folders()


def test_servers_of_the_machine_are_found_however_their_flags_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commands = (
        "--model-repository=/models",
        "--grpc-address=0.0.0.0 --grpc-port=9001",
        "--grpc-address 10.0.0.1 --grpc-port 9001 --http-port 9000",
    )
    running = [("tritonserver", ["tritonserver", *words.split()]) for words in commands]
    running.append(("python3", ["python3", "--grpc-port=1"]))
    monkeypatch.setattr(processes, "read_processes", lambda _: ((0, each) for each in running))
    found = list(processes.find_local_servers())
    assert found == ["127.0.0.1:8001", "127.0.0.1:9001", "10.0.0.1:9001"]


def test_empty_folders_of_ended_servers_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that a server which runs may have made, and those with files, stay."""
    monkeypatch.setattr(orphan_cleanup, "ENVIRONMENTS", tmp_path)
    old, used, new = (tmp_path / f"python_env_{name}" for name in ("oldOLD", "usedUS", "newNEW"))
    for folder in (old, used, new):
        folder.mkdir()
    (used / "file").touch()
    name = f"server-{os.getpid()}"  # another run of this test may be under way
    monkeypatch.setattr(orphan_cleanup, "SERVER", name)
    program = shutil.copy("/bin/sleep", tmp_path / name)
    with subprocess.Popen([program, "600"]) as server:
        for folder in (old, used):
            os.utime(folder, (0, 0))
        os.utime(new)
        assert eventually(lambda: psutil.Process(server.pid).name() == name)
        orphan_cleanup.remove_environment_folders()
        assert [folder.exists() for folder in (old, used, new)] == [False, True, True]
        server.kill()
    orphan_cleanup.remove_environment_folders()
    assert [folder.exists() for folder in (used, new)] == [True, False]


# Prints the server's pid when it is started and when it is ready, and waits to be killed. It sleeps
# for short times, because Python misses a Ctrl-C at the moment at which a long wait begins.
CHILD = """
import sys
import time
from pathlib import Path
from triptych.serving.server import Server

server = Server(Path(sys.argv[1]), log_file=Path(sys.argv[2]) if sys.argv[2:] else None)
try:
    server.start()
    print(server.pid, flush=True)
    server.wait_ready()
    print(server.pid, flush=True)
    while True:
        time.sleep(0.1)
except KeyboardInterrupt:
    print("interrupted", flush=True)
finally:
    server.stop()
    print("stopped", flush=True)
"""


@contextmanager
def child(temporary_folder: Path, *paths: Path) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """Run `CHILD`, and yield the process and its output; it is killed in the end."""
    temporary_folder.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, *map(str, paths)],
        env={**os.environ, "TMPDIR": str(temporary_folder)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout
        finally:
            process.kill()


@pytest.mark.parametrize("moment", ["started", "ready"])
def test_nothing_outlives_a_killed_parent(tmp_path: Path, repository: Path, moment: str) -> None:
    """Killed as soon as the server is started, or when its models serve."""
    is_ready = moment == "ready"
    served = repository if is_ready else write_model(tmp_path / "slow", "slow", SLOW_TO_LOAD)
    temporary_folder = tmp_path / "temporary"
    with child(temporary_folder, served) as (_, lines):
        pid = [int(lines.readline()) for _ in range(1 + is_ready)][-1]
        assert eventually(lambda: "tritonserver" in str(Path(f"/proc/{pid}/exe").readlink()))
        mark = mark_of(pid)
        assert not is_ready or regions(mark)
        assert list(temporary_folder.iterdir())
    assert_nothing_left(mark)
    assert eventually(lambda: list(temporary_folder.iterdir()) == [])


def test_ctrl_c_at_the_terminal_reaches_the_server_once(tmp_path: Path, repository: Path) -> None:
    log_file = tmp_path / "server.log"
    with child(tmp_path / "temporary", repository, log_file) as (process, lines):
        lines.readline()
        mark = mark_of(int(lines.readline()))
        os.killpg(process.pid, signal.SIGINT)  # as the terminal does: the whole foreground group
        assert lines.read().split() == ["interrupted", "stopped"]
        assert process.wait(timeout=60) == 0
    log = log_file.read_text()
    assert log.count(f"Signal ({int(signal.SIGTERM)})") == 1
    assert f"Signal ({int(signal.SIGINT)})" not in log
    assert list((tmp_path / "temporary").iterdir()) == []
    assert_nothing_left(mark)


HOSTILE = "x$(touch${IFS}PWNED)y `touch PWNED` 'q\" ü;&"
STEPS = 6 if CORE_IS_A_PROCESS else 4
"""Python processes of the two pipelines of `minilm_server`."""


def post(url: str, path: str, body: object) -> tuple[int, str]:
    connection = http.client.HTTPConnection(url, timeout=60)
    return send_http(connection, path, json.dumps(body).encode(), {})[:2]


def test_only_the_servers_own_user_can_read_what_it_shares(minilm_server: Server) -> None:
    with Client("minilm_packed", minilm_server.grpc_url) as client:
        client.embed(["for nobody else"])
    assert minilm_server.log_file is not None
    shared = [SHM / name for name in regions(mark_of(minilm_server.pid))]
    own = [path for path in shared if not re.search("in_flight|_lock$", path.name)]
    assert len(own) == STEPS
    assert len(shared) > STEPS
    for path in (*shared, minilm_server.log_file):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_clients_cannot_read_a_steps_memory_nor_write_files(
    minilm_server: Server, tmp_path: Path
) -> None:
    region = next(n for n in regions(mark_of(minilm_server.pid)) if "in_flight" not in n)
    written = tmp_path / "written"
    asked: tuple[tuple[str, Any], ...] = (
        (
            "systemsharedmemory/region/r/register",
            {"key": f"/{region}", "offset": 0, "byte_size": 8},
        ),
        ("logging", {"log_file": str(written)}),
        ("trace/setting", {"trace_file": str(written), "trace_level": ["TIMESTAMPS"]}),
        ("models/minilm_packed/trace/setting", {"trace_file": str(written)}),
        ("repository/index", {}),
        ("repository/models/minilm_packed/load", {}),
    )
    for path, body in asked:
        status, said = post(minilm_server.http_url, f"/v2/{path}", body)
        assert (status, "restricted" in said) == (403, True), (path, status, said)
    assert not written.exists()
    with InferenceServerClient(minilm_server.grpc_url) as client:
        for call, arguments in (
            (client.register_system_shared_memory, ("r", f"/{region}", 8)),
            (client.update_log_settings, ({"log_file": str(written)},)),
            (client.update_trace_settings, ("", {"trace_file": str(written)})),
            (client.get_model_repository_index, ()),
        ):
            with pytest.raises(InferenceServerException, match="restricted"):
                call(*arguments)
        # Open: what every client and `bench` need, and everything to who started the server.
        assert client.get_inference_statistics("minilm_packed").model_stats
        assert client.get_model_config("minilm_packed").config.name == "minilm_packed"
        headers = minilm_server.operator_headers
        if flags_newer_than([ALLOW_CLIENT_SHM], find_release()):
            client.register_system_shared_memory("r", f"/{region}", 8, headers=headers)
            client.unregister_system_shared_memory("r", headers=headers)
        else:
            with pytest.raises(InferenceServerException, match="Client shared memory is disabled"):
                client.register_system_shared_memory("r", f"/{region}", 8, headers=headers)
    assert region not in minilm_server._log_text()


def test_the_key_is_neither_in_the_process_list_nor_with_the_steps(minilm_server: Server) -> None:
    (key,) = minilm_server.operator_headers.values()
    processes = tagged_processes(mark_of(minilm_server.pid))
    assert len(processes) > STEPS
    for process in processes:
        seen = [*process.cmdline(), *process.environ().values()]
        assert not [text for text in seen if key in text], process
    words = next(p.cmdline() for p in processes if p.pid == minilm_server.pid)
    assert len([word for word in words if word.endswith(f"triptych-key={'*' * len(key)}")]) == 2
    assert key not in minilm_server._log_text()


def test_no_path_is_read_by_a_shell_and_clients_use_shared_memory_only_where_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Python backend would start its steps through a shell, with these paths in the line."""
    analyzer = find_perf_analyzer()
    words = [
        *(str(analyzer.binary.resolve()), "-m", "echo", "-i", "grpc", "--shared-memory=system"),
        *("--output-shared-memory-size=4096", "--string-length=8", "--concurrency-range=1"),
        "--request-count=10",
    ]
    environment = analyzer.environment()
    monkeypatch.chdir(tmp_path)
    temporary = tmp_path / HOSTILE
    repository = write_model(temporary / HOSTILE, "echo")
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    log_file = temporary / "log's $(touch PWNED)"
    with Server(repository, log_file=log_file, profile=ServerProfile(client_shm=True)) as server:
        assert stat.S_IMODE(log_file.stat().st_mode) == 0o600
        mark = mark_of(server.pid)
        assert ask(server, "grüezi") == "grüezi"
        private = [Path(word) for p in tagged_processes(mark) for word in p.cmdline()]
        found = subprocess.run(
            [*words, "-u", server.grpc_url], env=environment, capture_output=True, text=True
        )
        assert found.returncode == 0, found.stdout + found.stderr
        status, said = post(server.http_url, "/v2/logging", {"log_file": str(tmp_path / "log")})
        assert (status, "restricted" in said) == (403, True)
    assert not list(tmp_path.rglob("PWNED"))
    assert sorted(path.name for path in temporary.iterdir()) == sorted([HOSTILE, log_file.name])
    assert repository.joinpath("echo/1/model.py").is_file()  # a link to it was removed, not it
    left = [path for path in private if path.is_absolute() and path.name == "model.py"]
    assert left
    assert not [path for path in left if path.exists()]


def test_names_that_a_shell_would_read_and_a_folder_without_rights_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("$(touch PWNED)", "with space", "ü"):
        repository = write_model(tmp_path / name.strip("$()") / "r", name)
        write_model(repository, "echo")
        with pytest.raises(UserError, match="Rename the folder") as caught:
            Server(repository).start()
        assert name in caught.value.given
    assert not Path("PWNED").exists()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="TMPDIR"):
        Server(write_model(tmp_path / "r", "echo")).start()
