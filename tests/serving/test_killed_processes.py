"""A process of a pipeline is killed: `serve` says which, restarts, and clients are answered again.

| core | process killed | client without retries | `serve` |
| --- | --- | --- | --- |
| ONNX Runtime | preprocess, core or postprocess | `PipelineNotReadyError` | restarts |
| CTranslate2 | core, which contains the engine | `PipelineNotReadyError` | restarts |
| engine with a process (fake) | core | `PipelineNotReadyError` | restarts |
| engine with a process (fake) | engine | `PipelineNotReadyError`, code `engine_died` | restarts |
| vLLM (`test_generation_vllm.py`) | EngineCore | as above | the step ends |
| any (`test_server.py`) | tritonserver, or its parent | | its steps and files are removed |

Servers can share `/dev/shm` without seeing each other's processes, as containers do.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.support.builds import build
from tests.support.generation_cases import write_pipeline as write_generation
from tests.support.generation_cases import write_tiny_model
from tests.support.hot_reload_cases import Asker, hooks, write_tickets
from tests.support.processes import CORE_IS_A_PROCESS, eventually, mark_of, regions, running
from tests.support.project import build_into, quiet
from tests.support.project import write_pipeline as write_encoder
from tests.support.served_command import endpoints_of, serving
from tests.support.text2text_cases import write_model, write_pipeline
from triptych.building.generation.inputs import read_generation
from triptych.building.generation.text2text import read_text2text
from triptych.client import Client, InferenceError, PipelineNotReadyError, ServerUnreachableError
from triptych.container.health import HealthCheck
from triptych.container.manifests import find_pipelines
from triptych.container.supervisor import step_processes
from triptych.serving import endpoint
from triptych.serving.orphan_cleanup import tagged_processes
from triptych.serving.server import Server
from triptych.spec.generation_fields import load_generation_spec, load_text2text_spec

pytestmark = [pytest.mark.server, pytest.mark.long]

ENGINE = "engine"
KILLED = (
    ("encoder", "preprocess"),
    *([("encoder", "core")] if CORE_IS_A_PROCESS else []),
    ("encoder", "postprocess"),
    ("translator", "core"),
    ("chat", "core"),
    ("chat", ENGINE),
)
"""Pipeline and its step whose process is killed; `ENGINE` is the child of the core."""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A pipeline of each kind of core."""
    base = tmp_path_factory.mktemp("killed")
    folder = write_encoder(base / "encoder", model={"source": str(tiny_model)})
    build_into(folder, base / "repository")
    chat = write_generation(base / "chat", write_tiny_model(base / "model"))
    build(read_generation(load_generation_spec(chat), quiet), base / "repository", quiet)
    translator = write_pipeline(base / "translator", write_model("t5", base / "t5"))
    inputs = read_text2text(load_text2text_spec(translator), quiet)
    build(inputs, base / "repository", quiet)
    return base / "repository"


def process_of(server: int, pipeline: str, part: str) -> psutil.Process:
    step = "core" if part == ENGINE else part
    pids = {model: pid for pid, model in step_processes(server).items()}
    found = psutil.Process(pids[f"{pipeline}_{step}"])
    if part != ENGINE:
        return found
    (engine,) = found.children()
    return engine


def ask(url: str, pipeline: str) -> InferenceError | None:
    """Ask once, and return the error."""
    with Client(pipeline, url, timeout_s=120, retry=None) as client:
        try:
            if pipeline == "encoder":
                client.embed(["a text"])
            else:
                client.generate("The dog").whole()
        except InferenceError as error:
            return error
    return None


def ask_until_gone(server: int, url: str, pipeline: str) -> list[InferenceError]:
    """Ask until the server has ended; return what failed."""
    errors: list[InferenceError] = []

    def has_ended() -> bool:
        error = ask(url, pipeline)
        if error is not None:
            errors.append(error)
        return not psutil.pid_exists(server)

    assert eventually(has_ended, 240), (pipeline, errors)
    return errors


def test_what_dies_is_restarted(repository: Path) -> None:
    with serving(repository) as serve:
        endpoints = endpoints_of(serve)
        for pipeline, part in KILLED:
            url, server = endpoints["grpc"], endpoints["pid"]
            assert ask(url, pipeline) is None
            process_of(server, pipeline, part).kill()
            errors = ask_until_gone(server, url, pipeline)
            endpoints = endpoints_of(serve)
            assert endpoints["grpc"] == url
            assert ask(url, pipeline) is None, (pipeline, part)
            # A client with retries asks again after these errors.
            kinds = {type(error) for error in errors}
            assert kinds <= {PipelineNotReadyError, ServerUnreachableError}, (part, errors)
            if part == ENGINE:  # without an error the server ended before it was asked
                said = [str(error) for error in errors if isinstance(error, PipelineNotReadyError)]
                died = "has ended (its process died). The server restarts"
                assert not said or any(died in text for text in said), said
        serve.send_signal(signal.SIGTERM)
        log = serve.communicate(timeout=60)[1]
    # Triton itself may end, too, when a step dies.
    assert log.count("crashed. Given: ") >= len(KILLED), log


def test_a_frozen_core_is_noticed(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The question of the health check, of one token, is not answered."""
    monkeypatch.setattr(endpoint, "HEALTH_INTERVAL_S", 0.1)
    with running(Server(repository)) as server:
        check = HealthCheck(find_pipelines(repository))
        assert eventually(lambda: check.find_fault(f"http://{server.http_url}") is None)
        process_of(server.pid, "chat", "core").suspend()
        error = endpoint._wait_for_crash(server, lambda: False)
        assert "chat does not answer" in error.message
        assert "2 times in a row" in error.message


ISOLATED = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
"""Command that runs another one in a PID namespace of its own, with its own `/proc`."""
AS_ROOT = ("--user", "--map-root-user")


def isolation() -> tuple[str, ...]:
    command = ISOLATED if os.geteuid() == 0 else (*ISOLATED, *AS_ROOT)
    done = subprocess.run([*command, "true"], capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        pytest.skip(f"no PID namespaces here: {done.stderr}")
    return command


def test_a_server_starts_reloads_and_ends_while_one_in_another_namespace_serves(
    tmp_path: Path, minilm_folder: Path
) -> None:
    """In namespaces of their own their processes have the same numbers."""
    command = isolation()
    folder = write_tickets(tmp_path, minilm_folder)
    build_into(folder, tmp_path / "repository")
    other = Path(shutil.copytree(tmp_path / "repository", tmp_path / "other"))
    with serving(tmp_path / "repository", wrapper=command) as first:
        url = endpoints_of(first)["grpc"]
        number, mark = namespace_pid(server_of(first)), mark_of(server_of(first))
        own = set(regions(mark))
        with Asker(url, clients=4, pause_s=0.0) as asker:
            killed = attack(folder, other, command, signal.SIGKILL, reloads=False)
            asker.wait_for("FIRST", more=10)
            assert regions(killed.mark)  # nobody was left to remove them
            ended = attack(folder, other, command, signal.SIGTERM)
            asker.wait_for("FIRST", more=10)
        assert asker.failures == []
        # A server that was started again, because a step got no CPU, has another number.
        assert number in (killed.number, ended.number)
        assert own <= set(regions(mark))
        assert regions(killed.mark) == regions(ended.mark) == []
        inner_of(first).send_signal(signal.SIGTERM)
        first.wait(timeout=60)
    assert regions(mark) == []


class Attack(NamedTuple):
    """A server beside the first one: its mark, and its process id in its own namespace."""

    mark: str
    number: str


def attack(
    folder: Path,
    repository: Path,
    command: tuple[str, ...],
    end: signal.Signals,
    *,
    reloads: bool = True,
) -> Attack:
    """Serve a repository beside, reload it under load, and end the server."""
    with serving(repository, wrapper=command) as serve:
        url = endpoints_of(serve)["grpc"]
        mark, number = mark_of(server_of(serve)), namespace_pid(server_of(serve))
        with Asker(url) as asker:
            asker.wait_for("FIRST", more=10)
            if reloads:
                (folder / "hooks.py").write_text(hooks("SECOND"))
                build_into(folder, repository)
                asker.wait_for("SECOND", more=10)
        inner_of(serve).send_signal(end)
        serve.wait(timeout=60)
    assert asker.failures == []
    assert eventually(lambda: tagged_processes(mark) == [])
    return Attack(mark, number)


def inner_of(serve: subprocess.Popen[str]) -> psutil.Process:
    """The process that `unshare` started."""
    (inner,) = psutil.Process(serve.pid).children()
    return inner


def server_of(serve: subprocess.Popen[str]) -> int:
    family = inner_of(serve).children(recursive=True)
    return next(process.pid for process in family if process.name() == "tritonserver")


def namespace_pid(pid: int) -> str:
    """The number of a process in its own namespace."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line for line in lines if line.startswith("NSpid")).split()[-1]
