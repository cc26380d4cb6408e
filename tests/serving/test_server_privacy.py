"""What a server keeps from other users of its machine, from its clients and from a shell."""

import http.client
import json
import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from echo_server import ask, write_model
from envoy_front import send_http
from processes import CORE_IS_A_PROCESS, mark_of, regions
from triptych.base.errors import UserError
from triptych.base.releases import flags_newer_than
from triptych.client import Client
from triptych.container.flags import ALLOW_CLIENT_SHM
from triptych.serving.bench.perf_analyzer import find_perf_analyzer
from triptych.serving.embedded import find_release
from triptych.serving.orphan_cleanup import SHM, tagged_processes
from triptych.serving.server import Server

pytestmark = pytest.mark.server

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
    with Server(repository, log_file=log_file, client_shm=True) as server:
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
