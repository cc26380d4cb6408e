"""A machine that misbehaves: a clock that jumps, little memory, a slow disk, two commands at once.

The server is the one that `triptych serve` starts. `docker/faults.md` says what happens.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from urllib.request import Request

import psutil
import pytest

from tests.support.hot_reload_cases import Asker, hooks, write_tickets
from tests.support.http_pages import fetch
from tests.support.processes import eventually, mark_of, regions
from tests.support.project import build_into
from tests.support.served_command import TRIPTYCH, endpoints_of, serving
from tests.support.shims import MovedClock, slow_access
from triptych.client import Client, InferenceError
from triptych.container.lock_check import check_repository
from triptych.container.supervisor import step_processes
from triptych.serving.orphan_cleanup import SHM
from triptych.serving.ports import reserve_ports

pytestmark = [pytest.mark.server, pytest.mark.long]

HOUR_S = 3600


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path) -> Path:
    """A folder with pipelines `tickets` and `others`, and a repository with both."""
    base = tmp_path_factory.mktemp("faults")
    folder = write_tickets(base, minilm_folder)
    shutil.copytree(folder, base / "pipelines/others")
    for name in ("tickets", "others"):
        build_into(base / "pipelines" / name, base / "repository")
    return base


@pytest.fixture
def repository(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built / "repository", tmp_path / "repository", symlinks=True))


def ask(url: str, pipeline: str = "tickets") -> InferenceError | None:
    """Ask once, and return the error."""
    with Client(pipeline, url, timeout_s=60, retry=None) as client:
        try:
            client.classify(["where is it"])
        except InferenceError as error:
            return error
    return None


def predict(address: str) -> int:
    """Ask the gateway once; the status."""
    body = json.dumps({"inputs": "where is it"}).encode()
    headers = {"content-type": "application/json"}
    return fetch(Request(f"{address}/tei/tickets/predict", body, headers))[0]


def stop(serve: subprocess.Popen[str]) -> str:
    """End `triptych serve` in order; what it said."""
    serve.send_signal(signal.SIGTERM)
    log = serve.communicate(timeout=120)[1]
    assert serve.returncode == 0, log
    return log


def test_a_clock_that_is_set_back_changes_nothing(repository: Path, tmp_path: Path) -> None:
    clock = MovedClock(tmp_path)
    with serving(repository, "--http-api=0", wrapper=clock.wrapper) as serve:
        found = endpoints_of(serve)
        with Asker(found["grpc"], clients=4, pause_s=0.0) as asker:
            for _ in range(10):
                asker.wait_for("FIRST", more=20)
                clock.move(-HOUR_S)
                assert predict(found["api"]) == 200
            asker.wait_for("FIRST", more=20)
        assert asker.failures == []
        assert "crashed" not in stop(serve)


def test_a_server_that_a_clock_set_forward_ends_is_started_again(
    repository: Path, tmp_path: Path
) -> None:
    """Triton's Python backend waits by the time of day, and takes a busy step for dead."""
    clock = MovedClock(tmp_path)
    with serving(repository, wrapper=clock.wrapper) as serve:
        found = endpoints_of(serve)
        with Asker(found["grpc"], clients=4, pause_s=0.0) as asker:

            def has_ended() -> bool:
                clock.move(HOUR_S)
                return not psutil.pid_exists(found["pid"])

            assert eventually(has_ended, 120)
            assert endpoints_of(serve)["grpc"] == found["grpc"]
            asker.wait_for("FIRST", more=20)
        assert "crashed. Given: " in stop(serve)


def test_what_is_killed_for_memory_stops_the_others_until_the_restart(repository: Path) -> None:
    """SIGKILL, as the kernel sends it: all pipelines of a server share its process."""
    with serving(repository) as serve:
        found = endpoints_of(serve)
        pids = {model: pid for pid, model in step_processes(found["pid"]).items()}
        with Asker(found["grpc"], pipeline="others") as asker:
            asker.wait_for("FIRST", more=5)
            os.kill(pids["tickets_preprocess"], signal.SIGKILL)
            again = endpoints_of(serve)
            assert again["pid"] != found["pid"]
            assert again["grpc"] == found["grpc"]
            asker.wait_for("FIRST", more=5)
        assert ask(found["grpc"]) is None
        assert " crashed. Given: " in stop(serve)


def test_two_servers_that_start_at_the_same_moment_share_a_repository(repository: Path) -> None:
    with serving(repository) as first, serving(repository) as second:
        urls = [endpoints_of(each)["grpc"] for each in (first, second)]
        assert [ask(url) for url in urls] == [None, None]
        stop(first)
        assert ask(urls[1]) is None
        stop(second)


def test_of_two_servers_for_one_port_one_serves_and_the_other_names_the_port(
    repository: Path,
) -> None:
    with reserve_ports("127.0.0.1", {"grpc": 0}) as ports:
        pass  # a free port, which the two servers ask for below
    option = f"--grpc-port={ports['grpc']}"
    with serving(repository, option) as first, serving(repository, option) as second:
        both = first, second
        assert eventually(lambda: any(each.poll() is not None for each in both), 120)
        loser, winner = both if first.poll() is not None else both[::-1]
        said = "".join(loser.communicate(timeout=60))
        assert loser.returncode == 2, said
        assert str(ports["grpc"]) in said, said
        assert ask(endpoints_of(winner)["grpc"]) is None
        stop(winner)


def test_two_builds_at_the_same_moment_both_write(built: Path, tmp_path: Path) -> None:
    """What they write beside the repository is slow, so that they meet; then both are whole."""
    slow = slow_access(tmp_path, tmp_path / ".repository", 40)
    options = ("--repository", str(tmp_path / "repository"), "--reports", str(tmp_path / "reports"))
    words = [*slow, TRIPTYCH, "build", "--pipelines", str(built / "pipelines"), *options]
    builds = [
        subprocess.Popen([*words, name], stderr=subprocess.PIPE, text=True)
        for name in ("tickets", "others", "tickets")
    ]
    said = [build.communicate(timeout=300)[1] for build in builds]
    assert [build.returncode for build in builds] == [0, 0, 0], said
    assert check_repository(tmp_path / "repository", None) == []
    names = {path.name for path in (tmp_path / "repository").iterdir()}
    assert {"tickets", "others"} <= names
    assert not (tmp_path / ".repository.staging").exists()


def test_many_requests_leave_no_files_threads_or_shared_memory_behind(repository: Path) -> None:
    """What each request or connection left would be more than the limits (`make soak` has more)."""
    with serving(repository, "--http-api=0") as serve:
        found = endpoints_of(serve)

        def send(requests: int) -> None:
            for _ in range(requests // 20):
                with Client("tickets", found["grpc"], timeout_s=60) as client:
                    for _ in range(20):
                        client.classify(["where is it"])
                assert predict(found["api"]) == 200

        family = psutil.Process(serve.pid).children(recursive=True)
        mark = mark_of(found["pid"])

        def count() -> dict[int, tuple[int, int]]:
            return {each.pid: (each.num_fds(), each.num_threads()) for each in family}

        def shared() -> int:
            return sum((SHM / name).stat().st_blocks for name in regions(mark))

        send(200)
        first, memory = count(), shared()
        send(2000)

        def is_flat() -> bool:
            return all(
                now <= before + 20
                for pid, counts in count().items()
                for now, before in zip(counts, first[pid], strict=True)
            )

        assert eventually(is_flat), (first, count())
        assert shared() <= memory + 2048  # blocks of 512 bytes
        stop(serve)


def test_proxies_locales_conda_and_links_are_not_in_the_way(
    repository: Path, tmp_path: Path
) -> None:
    """What a host sets for other programs; the repository is a link to a link."""
    nowhere = "http://127.0.0.1:9"
    proxies = {f"{name}_proxy": nowhere for name in ("http", "https", "grpc", "all")}
    given = {
        **proxies,
        **{name.upper(): value for name, value in proxies.items()},
        **{"LC_ALL": "tr_TR.UTF-8", "LANG": "xx_XX", "LANGUAGE": "tr", "TZ": "Nowhere/Else"},
        **{"CONDA_PREFIX": "/nowhere", "CONDA_DEFAULT_ENV": "base", "VIRTUAL_ENV": "/nowhere"},
    }
    wrapper = ["env", *(f"{name}={value}" for name, value in given.items())]
    (tmp_path / "one").symlink_to(repository)
    (tmp_path / "two").symlink_to(tmp_path / "one")
    with serving(tmp_path / "two", "--http-api=0", wrapper=wrapper) as serve:
        found = endpoints_of(serve)
        words = [*wrapper, TRIPTYCH, "infer", "tickets", "--url", found["grpc"], "--text", "a"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert predict(found["api"]) == 200
        stop(serve)


def test_a_slow_file_system_delays_the_start_and_no_answer(
    built: Path, repository: Path, tmp_path: Path
) -> None:
    """Each access to the repository takes as long as on a disk across a busy network."""
    slow = slow_access(tmp_path, repository, 10)
    with serving(repository, "--http-api=0", wrapper=slow) as serve:
        found = endpoints_of(serve)
        with Asker(found["grpc"]) as asker:
            asker.wait_for("FIRST", more=10)
            assert predict(found["api"]) == 200
            changed = Path(shutil.copytree(built / "pipelines", tmp_path / "pipelines"))
            (changed / "tickets/hooks.py").write_text(hooks("SECOND"))
            build_into(changed / "tickets", repository)
            asker.wait_for("SECOND", more=10)
            assert predict(found["api"]) == 200
        assert asker.failures == []
        assert "crashed" not in stop(serve)
