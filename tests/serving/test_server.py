"""Real servers: started, asked, stopped, killed, and nothing of them left behind."""

import http.client
import marshal
import os
import py_compile
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import SourceFileLoader
from importlib.util import cache_from_source
from pathlib import Path

import psutil
import pytest

from echo_server import ECHO, ENSEMBLE, ask, write_model
from http_pages import page
from processes import eventually, mark_of, regions, running
from triptych.base.errors import UserError
from triptych.serving import hot_reload, orphan_cleanup
from triptych.serving.orphan_cleanup import tagged_processes
from triptych.serving.server import Server, check_and_make_flags

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


@pytest.fixture(scope="module")
def progress() -> list[str]:
    return []


@pytest.fixture(scope="module")
def server(repository: Path, progress: list[str]) -> Iterator[Server]:
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
        server.wait_ready(on_progress=progress.append)
        yield server
    finally:
        server.stop(grace_s=0.0)


def test_every_model_answers_from_its_source_in_its_environment(
    server: Server, repository: Path, progress: list[str]
) -> None:
    assert ask(server, "grüezi") == "grüezi"
    assert ask(server, "through the ensemble", "chain") == "through the ensemble"
    # A server that a step without CPU ended as it loaded is started again, which is told, too.
    ready = sorted(line for line in progress if line.endswith(" is ready"))
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


def test_own_backends_are_laid_over_the_assembled_ones(tmp_path: Path) -> None:
    backends = tmp_path / "backends"
    (backends / "shouting").mkdir(parents=True)
    (backends / "shouting" / "model.py").write_text(
        ECHO.replace('"echo", text)', '"echo", np.char.upper(text.astype("U")).astype(object))')
    )
    repository = write_model(tmp_path / "repository", "loud", None, backend="shouting")
    with running(Server(repository, backend_directory=backends)) as server:
        assert ask(server, "hey", "loud") == "HEY"


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
    server = Server(repository, production_flags=flags)
    try:
        server.start()
        server.wait_ready()
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
    finally:
        server.stop()
    assert_nothing_left(mark)
    assert log_file is not None
    assert log_file.is_file()  # what it said before it died
    log_file.unlink()


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


def start_child(*paths: Path, temporary_folder: Path) -> subprocess.Popen[str]:
    temporary_folder.mkdir()
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, *map(str, paths)],
        env={**os.environ, "TMPDIR": str(temporary_folder)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end_child(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.communicate()


def line_of(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


@pytest.mark.parametrize("moment", ["started", "ready"])
def test_nothing_outlives_a_killed_parent(tmp_path: Path, repository: Path, moment: str) -> None:
    """Killed as soon as the server is started, or when its models serve."""
    is_ready = moment == "ready"
    served = repository if is_ready else write_model(tmp_path / "slow", "slow", SLOW_TO_LOAD)
    temporary_folder = tmp_path / "temporary"
    child = start_child(served, temporary_folder=temporary_folder)
    try:
        pids = [int(line_of(child)) for _ in range(1 + is_ready)]
        pid = pids[-1]
        assert eventually(lambda: "tritonserver" in str(Path(f"/proc/{pid}/exe").readlink()))
        mark = mark_of(pid)
        assert not is_ready or regions(mark)
        assert list(temporary_folder.iterdir())
    finally:
        end_child(child)
    assert eventually(lambda: tagged_processes(mark) == [])
    assert eventually(lambda: regions(mark) == [])
    assert eventually(lambda: list(temporary_folder.iterdir()) == [])


def test_ctrl_c_at_the_terminal_reaches_the_server_once(tmp_path: Path, repository: Path) -> None:
    log_file = tmp_path / "server.log"
    child = start_child(repository, log_file, temporary_folder=tmp_path / "temporary")
    try:
        line_of(child)
        mark = mark_of(int(line_of(child)))
        os.killpg(child.pid, signal.SIGINT)  # as the terminal does: the whole foreground group
        assert [line_of(child), line_of(child)] == ["interrupted", "stopped"]
        assert child.wait(timeout=60) == 0
    finally:
        end_child(child)
    log = log_file.read_text()
    assert log.count(f"Signal ({int(signal.SIGTERM)})") == 1
    assert f"Signal ({int(signal.SIGINT)})" not in log
    assert list((tmp_path / "temporary").iterdir()) == []
    assert_nothing_left(mark)
