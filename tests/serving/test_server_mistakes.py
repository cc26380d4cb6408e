"""What a user can get wrong before a server starts, and which server is taken."""

import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from triptych.base.errors import UserError
from triptych.serving.ports import port_is_busy, release_ports, reserve_ports
from triptych.serving.readiness import ServerError
from triptych.serving.server import Server


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository that no server gets to read."""
    folder = tmp_path / "repository"
    (folder / "echo" / "1").mkdir(parents=True)
    (folder / "echo" / "config.pbtxt").write_text('backend: "python"')
    return folder


def test_a_picked_port_differs_from_the_wanted_ones() -> None:
    wanted = {"grpc_port": 0, "http_port": 0, "metrics_port": 0}
    ports = reserve_ports("127.0.0.1", wanted)
    assert set(ports) == set(wanted)
    assert len(set(ports.values())) == 3
    assert not any(port_is_busy(port) for port in ports.values())
    release_ports(ports.values())


def test_a_picked_port_is_kept_for_its_server_until_it_is_released() -> None:
    at = ("127.0.0.1", reserve_ports("127.0.0.1", {"grpc_port": 0})["grpc_port"])
    with socket.socket() as another, pytest.raises(OSError, match="already in use"):
        another.bind(at)  # as another pick does
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(at)
        server.listen()
    release_ports([at[1]])
    with socket.socket() as another:
        another.bind(at)


def test_a_mistake_is_told_before_anything_starts(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    port = reserve_ports("127.0.0.1", {"grpc_port": 0})["grpc_port"]
    arguments: dict[str, Any]
    for folder, arguments, field in (
        (repository, {"grpc_port": port, "http_port": port}, "http_port"),
        (repository, {"metrics_port": 70000}, "metrics_port"),
        (repository, {"host": "192.0.2.1"}, "host"),
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
    release_ports([port])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match="free port") as caught:
            Server(repository, grpc_port=port).start()
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
    try:
        server.start()
        with pytest.raises(ServerError, match="exit status 7; log: error: no luck today"):
            server.wait_ready()
    finally:
        server.stop()
    # Its steps import the packages of this environment, activated or not.
    path, *arguments = log_file.read_text().splitlines()
    assert path.split(":")[:2] == [str(Path(sys.executable).parent), str(program.parent)]
    assert f"--model-repository={repository}" in arguments
    assert f"--grpc-port={server.grpc_url.rpartition(':')[2]}" in arguments
    assert arguments[-2] == "--log-verbose=1"
    assert not [line for line in arguments if line.startswith("--backend-directory")]
