"""Servers that share `/dev/shm` without seeing each other's processes, as containers can."""

import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from conftest import build_into
from hot_reload_cases import Asker, hooks, write_tickets
from processes import eventually, mark_of, regions
from served_command import endpoints_of, serving
from triptych.serving.orphan_cleanup import tagged_processes

pytestmark = [pytest.mark.server, pytest.mark.long]

ISOLATED = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
"""Command that runs another one in a PID namespace of its own, with its own `/proc`."""
AS_ROOT = ("--user", "--map-root-user")


def isolation() -> tuple[str, ...]:
    command = ISOLATED if os.geteuid() == 0 else (*ISOLATED, *AS_ROOT)
    done = subprocess.run([*command, "true"], capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        pytest.skip(f"no PID namespaces here: {done.stderr}")
    return command


def test_one_starts_reloads_and_ends_while_the_other_serves(
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


def inner_of(serve: "subprocess.Popen[str]") -> psutil.Process:
    """The process that `unshare` started."""
    (inner,) = psutil.Process(serve.pid).children()
    return inner


def server_of(serve: "subprocess.Popen[str]") -> int:
    family = inner_of(serve).children(recursive=True)
    return next(process.pid for process in family if process.name() == "tritonserver")


def namespace_pid(pid: int) -> str:
    """The number of a process in its own namespace."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line for line in lines if line.startswith("NSpid")).split()[-1]
