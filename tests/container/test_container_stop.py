"""How a container ends: told to stop it loses nothing; with a dead step it ends by itself."""

import http.client
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from container_image import image_of, server_of
from echo_server import write_model
from failing_models import STOPPED_IN_INITIALIZE
from processes import CORE_IS_A_PROCESS, eventually, regions
from triptych.client import Client, PipelineNotReadyError, ServerUnreachableError
from triptych.container.shared_memory import SharedRegions, new_prefix
from triptych.container.supervisor import EXIT_DEAD, STARVED, step_processes
from triptych.runtime.flow_control import InFlight
from triptych.serving.embedded import find_release
from triptych.serving.orphan_cleanup import PROCESS_TAG_VARIABLE

pytestmark = pytest.mark.server

TEXT = "my delivery is late"
LONG = " ".join([TEXT] * 62)
"""Of 250 tokens: many of these keep a server busy for seconds."""
REQUESTS = 40
STEP_NAMES = ("core", "postprocess", "preprocess")


@pytest.fixture(scope="module")
def alone(minilm_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with one pipeline."""
    folder = tmp_path_factory.mktemp("alone")
    for name in ("minilm_packed", *(f"minilm_packed_{step}" for step in STEP_NAMES)):
        shutil.copytree(minilm_repository / name, folder / name)
    return folder


def is_refused(client: Client) -> bool:
    try:
        client.embed([TEXT])
    except (PipelineNotReadyError, ServerUnreachableError):
        return True
    return False


def test_sigterm_loses_nothing(alone: Path, tmp_path: Path) -> None:
    """Requests in flight are answered, new ones refused, and no idle connection delays the end."""
    with image_of(tmp_path / "image", alone) as image:
        # An idle connection would hold it for so long.
        image.variables["TRIPTYCH_EXIT_TIMEOUT_S"] = "600"
        image.set_seconds("EXIT_S", 1.0)
        with image.serving() as process:
            idle = http.client.HTTPConnection(image.url("HTTP"), timeout=60)
            idle.request("GET", "/v2/health/live")
            idle.getresponse().read()
            tag = image.variables[PROCESS_TAG_VARIABLE]
            (counts,) = InFlight.of_server(server_of(process), tag)
            with (
                Client("minilm_packed", image.url("GRPC"), timeout_s=60) as client,
                ThreadPoolExecutor(REQUESTS) as pool,
            ):
                sent = [pool.submit(client.embed, [LONG]) for _ in range(REQUESTS)]
                assert eventually(
                    lambda: counts.load().requests + sum(one.done() for one in sent) >= REQUESTS
                )
                process.send_signal(signal.SIGTERM)
                assert counts.load().requests > 0
                assert eventually(lambda: counts.closed_at > 0)
                assert eventually(lambda: is_refused(client))
                assert {one.result(timeout=60).shape for one in sent} == {(1, 384)}
            said = process.communicate(timeout=120)[0]
            idle.close()
    assert process.returncode == 0, said
    assert f"warning: in Triton {find_release()}, " in said
    assert image.health()[0] == 1


@pytest.mark.parametrize(
    ("attack", "told"),
    [
        ("the server is killed", "error: tritonserver ended by itself: signal SIGKILL"),
        ("a frozen step is killed", "error: a step has died: minilm_packed_preprocess (process "),
        ("a step gets no CPU for 1.5 s", "error: "),
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
            if attack == "the server is killed":
                os.kill(server, signal.SIGKILL)
            else:
                os.kill(first, signal.SIGSTOP)
                exit_code, said = image.health()
                assert exit_code == 1
                assert said.startswith("unhealthy: minilm_packed does not answer (")
                os.kill(first, signal.SIGKILL if "killed" in attack else signal.SIGCONT)
            said = process.communicate(timeout=60)[0]
        assert process.returncode == EXIT_DEAD
        assert told in said
        assert "tritonserver ended by itself: signal SIG" in said or "a step has died" in said
        assert eventually(lambda: not any(psutil.pid_exists(pid) for pid in steps))
        assert regions(tag) == []


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
    assert regions(prefix) == []


def test_a_server_that_would_load_for_ever_ends_the_container(tmp_path: Path) -> None:
    repository = write_model(tmp_path / "models", "step", STOPPED_IN_INITIALIZE)
    with image_of(tmp_path / "image", repository) as image:
        image.set_seconds("_MAX_END_S", 2.0)
        with image.run("entrypoint") as process:
            try:
                said = process.communicate(timeout=120)[0]
            finally:
                process.kill()
    assert process.returncode == EXIT_DEAD
    assert f"error: step never finishes loading ({STARVED})" in said
