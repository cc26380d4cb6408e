"""Three real servers behind a real Envoy, under load: who goes costs nobody an answer."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from certificates import write_certificate
from conftest import build_into
from hot_reload_cases import Asker, hooks, write_tickets
from processes import CORE_IS_A_PROCESS, eventually
from served_command import endpoints_of, serving
from triptych.base.api_keys import KeyEntry, KeyFile, make_key, print_keys
from triptych.client import AccessDeniedError, Client, Tls
from triptych.serving.fleet.fleet import Fleet, Replica
from triptych.serving.fleet.serve import new_fleet
from triptych.serving.readiness import responds_ok

pytestmark = [pytest.mark.server, pytest.mark.long]

CLIENTS = 12
ANSWERS = 500
"""Answers before something happens to a replica, and afterwards."""
LATEST_S = 240


class Watched:
    """A fleet that a thread looks after, and what it told."""

    def __init__(self, fleet: Fleet, problems: list[str]) -> None:
        self.fleet = fleet
        self.problems = problems
        self._ends = threading.Event()
        self._failure: list[BaseException] = []
        self._looker = threading.Thread(target=self._look)

    def __enter__(self) -> Watched:
        try:
            self.fleet.start()
        except BaseException:
            self.fleet.stop()
            raise
        self._looker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._looker.join()
        self.fleet.stop()

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LATEST_S
        while not holds():
            assert not self._failure, self._failure
            assert time.monotonic() < deadline, self.problems
            time.sleep(0.05)

    def take(self, text: str) -> None:
        """Wait for a problem with this text, and forget all; a busy machine may cause others."""
        self.until(lambda: any(text in problem for problem in self.problems))
        others = [problem for problem in self.problems if text not in problem]
        assert [problem for problem in others if "health check" not in problem] == []
        self.problems.clear()

    def _look(self) -> None:
        try:
            while not self._ends.wait(0.1):
                self.fleet.reconcile()
        except BaseException as error:
            self._failure.append(error)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path) -> Path:
    folder = write_tickets(tmp_path_factory.mktemp("fleet"), minilm_folder)
    build(folder, "FIRST")
    shutil.copytree(repository_of(folder), folder.parents[1] / "first")
    return folder


@pytest.fixture(scope="module")
def watched(pipeline: Path) -> Iterator[Watched]:
    problems: list[str] = []

    def note(problem: str) -> None:
        # Triton 24.10 may abort where a step loads and gets no CPU for a second (docker/README.md),
        # and is started again: no fault of the fleet.
        if "lock_exception" not in problem:
            problems.append(problem)

    with (
        new_fleet(repository_of(pipeline), replicas=3, on_change=print, on_problem=note) as fleet,
        Watched(fleet, problems) as watched,
    ):
        yield watched


def repository_of(pipeline: Path) -> Path:
    return pipeline.parents[1] / "repository"


def build(pipeline: Path, label: str, *, at_load: bool = False) -> None:
    (pipeline / "hooks.py").write_text(hooks(label, at_load=at_load))
    build_into(pipeline, repository_of(pipeline))


def build_candidate(pipeline: Path, folder: Path) -> Path:
    """A repository with another build, which samples all and labels it as OTHER."""
    made = Path(shutil.copytree(pipeline, folder / "pipelines/tickets"))
    spec = json.loads((made / "pipeline.yaml").read_text())
    spec["serving"] = {"sample": {"rate": 1.0, "window_s": 0.2}}
    (made / "pipeline.yaml").write_text(json.dumps(spec))
    (made / "hooks.py").write_text(hooks("OTHER"))
    build_into(made, folder / "candidate")
    return folder / "candidate"


@contextmanager
def load(watched: Watched, clients: int = CLIENTS) -> Iterator[Asker]:
    """Many clients at once, none of which may fail."""
    with Asker(watched.fleet.endpoints["grpc"], clients, pause_s=0.0) as asker:
        yield asker
    assert asker.failures == []


def pid_of(replica: Replica) -> int | None:
    """Process id of its server, or None while it is being replaced."""
    with suppress(RuntimeError):
        return replica.server.pid
    return None


def answered(replica: Replica) -> int:
    counter = r'nv_inference_request_success\{model="tickets",.*\} (\d+)'
    return int(re.findall(counter, page_of(replica.server.metrics_url))[0])


def has(url: str, line: re.Pattern[str]) -> bool:
    return line.search(page_of(url)) is not None


def page_of(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as page:
        return str(page.read().decode())


def guard(folder: Path) -> list[str]:
    """Return the options of `serve` for a key, certificates of both sides and a gateway."""
    write_certificate(folder, "first")
    key, digest = make_key()
    (folder / "key").write_text(key)
    (folder / "keys.yaml").write_text(print_keys(KeyFile(keys={"a": KeyEntry(sha256=digest)})))
    files = {"tls-certificate": "server.pem", "tls-key": "server.key", "client-ca": "ca.pem"}
    words = {"keys": "keys.yaml", **files}
    return ["--http-api", "0", *(w for n, f in words.items() for w in (f"--{n}", str(folder / f)))]


def credentials(folder: Path) -> dict[str, Any]:
    tls = Tls(folder / "ca.pem", folder / "server.pem", folder / "server.key")
    return {"tls": tls, "headers": {"Authorization": f"Bearer {(folder / 'key').read_text()}"}}


def check_access(folder: Path, said: dict[str, Any]) -> None:
    """Envoy and the gateway take the key and the certificate, until the key is revoked."""
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    body = json.dumps({"rows": [{"text": "where is it"}]}).encode()
    headers = {**credentials(folder)["headers"], "content-type": "application/json"}
    request = urllib.request.Request(f"{said['api']}/v1/pipelines/tickets", body, headers)
    with urllib.request.urlopen(request, context=context, timeout=60) as answer:
        assert answer.status == 200
    (folder / "keys.yaml").write_text("keys: {}")

    def is_revoked() -> bool:
        try:
            with Client("tickets", said["grpc"], **credentials(folder)) as client:
                client.classify(["where is it"])
        except AccessDeniedError:
            return True
        return False

    def is_revoked_at_the_gateway() -> bool:  # which reads the file by itself
        try:
            urllib.request.urlopen(request, context=context, timeout=60).close()
        except urllib.error.HTTPError as error:
            return error.code == 401
        return False

    assert eventually(is_revoked)
    assert eventually(is_revoked_at_the_gateway)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_serve_leaves_nothing_behind(
    pipeline: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """One `serve` has a candidate that gets copies of requests, and one has keys and a gateway."""
    repository = Path(shutil.copytree(pipeline.parents[1] / "first", tmp_path / "repository"))
    has_candidate = number == signal.SIGTERM
    samples = tmp_path / "samples"
    if has_candidate:
        options, access = ["--mirror", f"{build_candidate(pipeline, tmp_path)}:1"], {}
    else:
        options, access = guard(tmp_path), credentials(tmp_path)
    options += ["--replicas", "2", "--samples", str(samples)]
    with serving(repository, *options) as serve:
        said = endpoints_of(serve)
        with Client("tickets", said["grpc"], **access) as client:
            # What the candidate answers is sampled, and no client gets it.
            kept: list[str] = []

            def is_sampled() -> bool:
                assert client.classify(["where is it"])[0][0].label == "FIRST"
                for file in samples.glob(".candidate/tickets/*.jsonl"):
                    rows = file.read_text().splitlines(keepends=True)[1:]
                    kept.extend(row for row in rows if row.endswith("\n"))
                return bool(kept) or not has_candidate

            assert eventually(is_sampled)
        if has_candidate:
            answer = json.loads(kept[0])["answer"]
            assert answer["label"]["texts"] == ["OTHER"]
        else:
            check_access(tmp_path, said)
        family = psutil.Process(serve.pid).children(recursive=True)
        assert {replica["pid"] for replica in said["replicas"]} < {p.pid for p in family}
        serve.send_signal(number)
        serve.communicate(timeout=60)
    assert serve.returncode == (0 if number == signal.SIGTERM else -number)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    assert eventually(lambda: not list(tmp_path.glob(".serve-*")))


def test_requests_of_one_connection_go_to_all_replicas(watched: Watched) -> None:
    replicas = watched.fleet.replicas
    wanted = [answered(replica) + 100 for replica in replicas]
    with load(watched, clients=1):
        watched.until(lambda: all(answered(r) >= n for r, n in zip(replicas, wanted, strict=True)))


def test_a_replica_that_ends_politely_and_one_that_is_killed_fail_nobody(watched: Watched) -> None:
    first, second, _ = watched.fleet.replicas
    with load(watched) as asker:
        watched.until(lambda: len(asker.labels) >= ANSWERS)
        watched.fleet.drain_replica(first)
        assert watched.fleet.proxy.wait_drained(first.server, 60)
        first.drain()
        watched.until(lambda: len(asker.labels) >= 3 * ANSWERS)
        first.again_at = time.monotonic()  # as after a pause

        os.kill(second.server.pid, signal.SIGKILL)
        watched.until(lambda: not second.is_ready)
        watched.until(lambda: watched.fleet.is_settled)
    watched.take("signal SIGKILL")
    assert len(set(asker.labels)) == 1


class HttpAsker(Asker):
    """Asks over HTTP/1 all the time, each client with a connection of its own."""

    def _ask(self, number: int) -> None:
        tensor = {"name": "text", "datatype": "BYTES", "shape": [1, 1], "data": ["where is it"]}
        body = json.dumps({"inputs": [tensor]})
        connection = http.client.HTTPConnection(self._url, timeout=60)
        while not self._stop.is_set():
            try:
                connection.request("POST", "/v2/models/tickets/infer", body)
                answer = connection.getresponse()
                said = answer.read().decode()
                if answer.status == http.client.OK:
                    self.answers[number] += 1
                else:
                    self.failures.append(f"{answer.status}: {said}")
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(repr(error))
                connection.close()
        connection.close()


FROZEN = ("server", "core" if CORE_IS_A_PROCESS else "preprocess")
WITHOUT_CPU = ("preprocess", "postprocess")


def step_of(replica: Replica, part: str) -> int:
    """Process id of a step."""
    steps = {model: pid for pid, model in replica.server.living_steps().items()}
    return steps[f"tickets_{part}"]


@pytest.mark.parametrize("part", FROZEN)
def test_a_frozen_part_of_a_replica_is_replaced(watched: Watched, part: str) -> None:
    """Then also the requests at it are answered, by another one."""
    fleet, replica = watched.fleet, watched.fleet.replicas[FROZEN.index(part)]
    pid = replica.server.pid
    frozen = pid if part == "server" else step_of(replica, part)
    endpoints = fleet.endpoints
    with load(watched) as asker, HttpAsker(endpoints["http"], CLIENTS) as http_asker:
        watched.until(lambda: min(asker.answers + http_asker.answers) > 0)
        os.kill(frozen, signal.SIGSTOP)
        before = asker.answers + http_asker.answers

        def all_got() -> bool:
            """Each client has the answer to the request in flight, and others."""
            now = asker.answers + http_asker.answers
            return all(new >= old + 5 for new, old in zip(now, before, strict=True))

        watched.until(all_got)
        watched.until(lambda: fleet.is_settled and pid_of(replica) not in (pid, None))
    assert http_asker.failures == []
    assert len(set(asker.labels)) == 1
    moved = f"{replica.name} fails its health check"
    assert any(problem.startswith(moved) for problem in watched.problems), watched.problems
    watched.take("is replaced, because it fails its health check")


@pytest.mark.parametrize("part", WITHOUT_CPU)
def test_a_step_without_cpu_costs_clients_that_retry_nothing(watched: Watched, part: str) -> None:
    """It is stopped for 1.5 s, after which Triton ends it, or aborts."""
    fleet, replica = watched.fleet, watched.fleet.replicas[WITHOUT_CPU.index(part)]
    pid, step = pid_of(replica), step_of(replica, part)

    def has_ended() -> bool:  # not if the server got no CPU, either
        with suppress(ProcessLookupError):
            os.kill(step, signal.SIGSTOP)
            time.sleep(1.5)
            os.kill(step, signal.SIGCONT)
        return eventually(lambda: not replica.is_ready or pid_of(replica) != pid, 5)

    with Asker(fleet.endpoints["grpc"], CLIENTS, 0.0, retries=True) as asker:
        watched.until(lambda: min(asker.answers) > 1)
        watched.until(has_ended)
        watched.until(lambda: fleet.is_settled)
        after = sum(asker.answers) + ANSWERS
        watched.until(lambda: sum(asker.answers) > after)
    assert asker.failures == []
    watched.problems.clear()


def test_a_frozen_envoy_is_replaced(watched: Watched) -> None:
    """Requests at it fail, and clients that ask again are answered."""
    fleet = watched.fleet
    pid = fleet.proxy.pid
    with Asker(fleet.endpoints["grpc"], CLIENTS, pause_s=0.05) as asker:
        watched.until(lambda: min(asker.answers) > 0)
        os.kill(pid, signal.SIGSTOP)
        watched.take("envoy` does not answer")
        before = list(asker.answers)
        watched.until(
            lambda: all(new > old for new, old in zip(asker.answers, before, strict=True))
        )
    assert fleet.proxy.pid != pid


def test_what_is_built_is_put_in_one_at_a_time_and_what_does_not_load_never(
    watched: Watched, pipeline: Path
) -> None:
    fleet = watched.fleet
    old = fleet.replicas[0].build
    with load(watched, clients=2) as asker:
        watched.until(lambda: len(asker.labels) > 0)
        build(pipeline, "SECOND")
        watched.until(lambda: fleet.is_settled and all(r.build != old for r in fleet.replicas))
        since = len(asker.labels) + CLIENTS  # each may have had an answer of before on its way
        assert not old.folder.exists()
        build(pipeline, "THIRD", at_load=True)
        rejected = re.compile("KeyError: 'not on a server'.*The new build was not deployed", re.S)
        watched.until(lambda: any(map(rejected.search, watched.problems)) and fleet.is_settled)
        watched.until(lambda: len(asker.labels) > since + CLIENTS)
    watched.take("The new build was not deployed")
    assert set(asker.labels) == {"FIRST", "SECOND"}
    assert set(asker.labels[since:]) == {"SECOND"}


def test_metrics_pass_envoy_and_its_own_page_does_not(watched: Watched) -> None:
    endpoints = watched.fleet.endpoints
    assert eventually(lambda: responds_ok(endpoints["http"], "/v2/models/tickets/ready"))
    assert not responds_ok(endpoints["http"], "/quitquitquit")
    host = endpoints["metrics"].removeprefix("http://").removesuffix("/metrics")
    assert eventually(lambda: responds_ok(host, "/ready"))
    assert not responds_ok(host, "/config_dump")
    with Client("tickets", endpoints["grpc"]) as client:
        client.classify(["where is it"])
    for metric in ("grpc_ModelInfer_upstream_rq_time", "upstream_rq_time"):
        bucket = re.compile(rf'envoy_cluster_{metric}_bucket{{.*_name="triton_grpc",le="50"}} \d')
        watched.until(partial(has, endpoints["metrics"], bucket))


def test_a_replica_that_dies_at_each_start_is_given_up_and_a_new_build_tries_it_again(
    watched: Watched, pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Replica, "max_failed_starts", 2)
    fleet = watched.fleet
    first = fleet.replicas[0]
    with load(watched, clients=2) as asker:
        # What it serves is gone from the disk, so that it cannot start again.
        shutil.rmtree(first.build.folder / "tickets_preprocess/1")
        os.kill(first.server.pid, signal.SIGKILL)
        given_up = "failed 2 times in a row and is not restarted"
        watched.until(lambda: any(given_up in problem for problem in watched.problems))
        assert first.has_failed_for_good
        build(pipeline, "FIRST")
        watched.until(lambda: first.is_ready)
    watched.problems.clear()
    assert set(asker.labels) <= {"FIRST", "SECOND"}
