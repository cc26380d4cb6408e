"""How a container ends: told to stop it loses nothing; with a dead step it ends by itself."""

import fcntl
import http.client
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from conftest import set_setting
from container_image import Image, image_of, server_of
from echo_server import write_model
from failing_models import initializing_with
from processes import CORE_IS_A_PROCESS, eventually, regions
from triptych.client import Client, PipelineNotReadyError, ServerUnreachableError
from triptych.container import shared_memory
from triptych.container.shared_memory import SharedRegions, new_prefix
from triptych.container.supervisor import EXIT_DEAD, STARVED, step_processes
from triptych.runtime.flow_control import InFlight
from triptych.serving.embedded import find_release
from triptych.serving.orphan_cleanup import PROCESS_TAG_VARIABLE

pytestmark = pytest.mark.server

TEXT = "my delivery is late"
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
    for name in ("minilm_packed", *(f"minilm_packed_{step}" for step in STEP_NAMES)):
        shutil.copytree(minilm_repository / name, tmp_path / "models" / name)
    return tmp_path / "models"


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
                assert eventually(lambda: counts.load().requests >= REQUESTS)
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
        assert "tritonserver ended by itself: signal SIG" in said or "a step has died" in said
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
