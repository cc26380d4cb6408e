"""Replicas behind Envoy: what dies is replaced, what is built anew is put in one at a time.

What replicas serve: a repository as it was at one time, whatever is built into it later.

A build swaps whole models and changes no file in place, so that links to its files keep what
they hold.

One server of a fleet: started, stopped and started again, each in a thread of its own.

A server beside a fleet, on another build, that gets copies of some requests and samples them.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.base.errors import UserError
from triptych.base.files import told_to_user
from triptych.container.health import find_fault
from triptych.container.manifests import find_pipelines
from triptych.repository.store import link, locked
from triptych.serving.endpoint import RestartBackoff
from triptych.serving.fleet.proxy import Proxy
from triptych.serving.hot_reload import BuildPoller, find_wrong_pipelines
from triptych.serving.server import Server


@dataclass(frozen=True, order=True)
class ReplicaBuild:
    """One of them: a later one has a higher number."""

    number: int
    folder: Path


def link_build(repository: Path, home: Path, number: int) -> ReplicaBuild:
    """Keep what the repository holds now, in a folder that is made in `home`.

    Raises:
        UserError: a build writes into the repository just now, or there is no room.
    """
    folder = home / f"build-{number}"
    with told_to_user(folder), locked(repository):
        shutil.copytree(
            repository,
            folder,
            copy_function=_link,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    return ReplicaBuild(number, folder)


def _link(source: str, target: str) -> str:
    link(Path(source).resolve(), Path(target))
    return target


_ASK_POLL_S = 0.2


class Replica:
    """A server and what became of it; `Fleet` decides, the methods here take their time.

    Attributes:
        name: as it is told to the user.
        build: what it serves, or is being started on.
        is_ready: whether it may get requests.
        work: its start or exchange under way; None where there is none.
        again_at: when it is to be started again, on the monotonic clock; None where it is not.
        most_failed_starts: in a row: what fails so often will fail again.
    """

    most_failed_starts = 6

    def __init__(
        self, name: str, server: Server, models: Sequence[str], build: ReplicaBuild
    ) -> None:
        self.name = name
        self.server = server
        self.build = build
        self.is_ready = False
        self.work: Future[None] | None = None
        self.again_at: float | None = None
        self._models = frozenset(models)
        self._failed_starts = 0
        self._pauses = RestartBackoff()
        self._ready_at = time.monotonic()
        self._ending = threading.Lock()
        self._ended = False
        self._was_started = False

    @property
    def has_failed_for_good(self) -> bool:
        """Whether it answers nothing and is not started again."""
        return not self.is_ready and self.work is None and self.again_at is None

    def start(self, build: ReplicaBuild, timeout_s: float) -> None:
        """Start it on `build`, and return once each of its pipelines has answered a question.

        Raises:
            UserError: it does not load, or does not answer.
        """
        with self._ending:
            if self._ended:
                raise RuntimeError("the fleet is being stopped")
            if build != self.build:
                self.build = build
                self._failed_starts = 0
            if self._was_started:
                self.server.restart(build.folder)
            else:
                self._was_started = True
                self.server.start()
        deadline = time.monotonic() + timeout_s
        self.server.wait_ready(timeout_s)
        self._answer(deadline)

    def drain(self) -> None:
        """Answer what is under way, then end the server."""
        with self._ending:
            self.server.stop()

    def end(self) -> None:
        """`drain`, and never start again."""
        with self._ending:
            self._ended = True
            self.server.stop()

    def ready(self) -> None:
        """Count it as one that answers."""
        self.is_ready = True
        self._failed_starts = 0
        self._ready_at = time.monotonic()

    def failed(self) -> float | None:
        """Count a death or a failed start; the pause until the next start, None if that is over."""
        now = time.monotonic()
        self._failed_starts += not self.is_ready
        pause_s = self._pauses.take_s(now - self._ready_at if self.is_ready else 0.0)
        self.is_ready = False
        if self._failed_starts >= self.most_failed_starts:
            self.again_at = None
            return None
        self.again_at = now + pause_s
        return pause_s

    def _answer(self, deadline: float) -> None:
        pipelines = [
            pipeline
            for pipeline in find_pipelines(self.build.folder)
            if not self._models or pipeline.name in self._models
        ]
        url = f"http://{self.server.http_url}"
        while pipelines and (fault := find_fault(url, pipelines)):
            death = self.server.find_crash(_ASK_POLL_S)
            if death is not None:
                raise death
            if time.monotonic() > deadline:
                raise UserError(self.name, "must answer a question of its traffic", given=fault)


class CandidateServer:
    """Its server, kept up as a replica is; nothing that becomes of it changes the fleet.

    Args:
        replica: not started.
        load_s: that its models may take to load.
        on_change: told in a line what went well.
        on_problem: told in a line what did not.
    """

    def __init__(
        self,
        replica: Replica,
        *,
        load_s: float,
        on_change: Callable[[str], None],
        on_problem: Callable[[str], None],
    ) -> None:
        self.replica = replica
        self._load_s = load_s
        self._on_change = on_change
        self._on_problem = on_problem

    def start(self) -> None:
        """Start it, in a thread of its own."""
        replica = self.replica
        done: Future[None] = Future()

        def work() -> None:
            try:
                replica.start(replica.build, self._load_s)
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        replica.again_at = None
        replica.work = done
        threading.Thread(target=work, name="candidate", daemon=True).start()

    def reconcile(self) -> None:
        """Tell what became of it, and start it again where it died; as `Fleet.reconcile`."""
        replica = self.replica
        if replica.work is not None:
            if replica.work.done():
                self._end_start(replica.work.exception())
        elif replica.is_ready:
            death = replica.server.find_crash(0.0)
            if death is not None:
                self._failed(death)
        elif replica.again_at is not None and time.monotonic() >= replica.again_at:
            self.start()

    def end(self) -> None:
        """Answer what is under way, and end the server for good."""
        self.replica.end()

    def _end_start(self, error: BaseException | None) -> None:
        self.replica.work = None
        if error is None:
            self.replica.ready()
            self._on_change(f"the candidate is ready at {self.replica.server.grpc_url}")
        elif isinstance(error, UserError):
            self._failed(error)
        else:
            raise error

    def _failed(self, error: UserError) -> None:
        pause_s = self.replica.failed()
        again = "is not started again" if pause_s is None else f"is started again in {pause_s:g} s"
        self._on_problem(f"{error.message} The candidate {again}; the fleet goes on without it.")


_TAKEN_OUT_S = 10.0
_FOUND_S = 30.0
Tell = Callable[[str], None]


class Fleet:
    """Servers on what a repository holds, kept up; never outlives this process.

    All is decided in `reconcile`, by one thread; what takes long is done by others meanwhile.

    Args:
        repository: what is served, and watched for builds.
        folder: of this fleet's own, for what is served as it was; on the repository's file system.
        servers: makes a server on a build, by its number from 0, not started.
        replicas: how many of them.
        proxy: in front of them, not started.
        models: serve these only; empty serves all.
        candidate: beside them, not started; None for none.
        exchanges: whether what is built anew is put in.
        load_s: that the models of a replica may take to load.
        on_change: told in a line what went well.
        on_problem: told in a line what did not, and what follows.
    """

    def __init__(
        self,
        repository: Path,
        folder: Path,
        servers: Callable[[Path, int], Server],
        *,
        replicas: int,
        proxy: Proxy,
        models: Sequence[str] = (),
        candidate: CandidateServer | None = None,
        exchanges: bool = True,
        load_s: float = 120.0,
        on_change: Tell,
        on_problem: Tell,
    ) -> None:
        self._repository = repository
        self._folder = folder
        self.proxy = proxy
        self._candidate = candidate
        self._exchanges = exchanges
        self._load_s = load_s
        self._on_change = on_change
        self._on_problem = on_problem
        self._builds = BuildPoller(repository)
        self._built: dict[str, list[str]] = {}
        self._proven = self._wanted = link_build(repository, folder, 1)
        self.replicas = tuple(
            Replica(
                f"replica {number + 1}", servers(self._wanted.folder, number), models, self._wanted
            )
            for number in range(replicas)
        )
        self._pool = ThreadPoolExecutor(replicas, "fleet")

    @property
    def ready(self) -> list[Replica]:
        """Those that get requests."""
        return [replica for replica in self.replicas if replica.is_ready]

    @property
    def endpoints(self) -> dict[str, str]:
        """Where Envoy is asked."""
        proxy = self.proxy
        return {"grpc": proxy.grpc_url, "http": proxy.http_url, "metrics": proxy.metrics_url}

    @property
    def is_settled(self) -> bool:
        """Whether all replicas are ready, on the newest build of those that load."""
        return not self._built and all(
            replica.is_ready and replica.build == self._wanted for replica in self.replicas
        )

    def start(self) -> None:
        """Start all replicas at once, and Envoy in front of them once each has answered.

        Raises:
            UserError: one does not become ready, a port is busy, or Envoy does not start.
        """
        work = [self._begin(replica, self._wanted) for replica in self.replicas]
        for replica, started in zip(self.replicas, work, strict=True):
            started.result()
            replica.work = None
            replica.ready()
            self._on_change(f"{replica.name} is ready at {replica.server.grpc_url}")
        self._start_proxy()
        if self._candidate is not None:
            self._candidate.start()

    def described(self) -> list[dict[str, Any]]:
        """Each replica: where it can be asked itself, and its process."""
        return [
            {"grpc": r.server.grpc_url, "metrics": r.server.metrics_url, "pid": r.server.pid}
            for r in self.replicas
        ]

    def reconcile(self) -> None:
        """Replace what died, put in what was built; to be called about three times a second.

        Raises:
            UserError: no replica is left, and none is started again.
        """
        for replica in self.replicas:
            self._reconcile_replica(replica)
        if all(replica.has_failed_for_good for replica in self.replicas):
            raise UserError(
                "replicas",
                "must not all fail",
                given=f"each of {len(self.replicas)} failed too often to be started again",
                remedy="The lines above say why",
            )
        if self.proxy.has_died():
            self._on_problem(f"{self.proxy.failure('must stay up').message} It is started again.")
            self.proxy.stop()
            self._start_proxy()
        if self._candidate is not None:
            self._candidate.reconcile()
        self._check_for_builds()
        self._update_next()

    def drain_replica(self, replica: Replica) -> None:
        """Let Envoy give this replica nothing more; what is under way goes on.

        Returns at once: `Proxy.wait_drained` waits until it is so.
        """
        replica.is_ready = False
        self._route()

    def stop(self) -> None:
        """Answer what is under way, and end all servers and Envoy."""
        try:
            enders = [threading.Thread(target=replica.end) for replica in self.replicas]
            if self._candidate is not None:
                enders.append(threading.Thread(target=self._candidate.end))
            for ender in enders:
                ender.start()
            for ender in enders:
                ender.join()
        finally:
            self.proxy.stop()
            self._pool.shutdown()

    def _start_proxy(self) -> None:
        servers = [replica.server for replica in self.ready]
        self.proxy.start(servers)
        if not self.proxy.wait_healthy(servers, _FOUND_S):
            raise self.proxy.failure("must find its replicas healthy")

    def _route(self) -> None:
        self.proxy.route_to(replica.server for replica in self.ready)

    def _reconcile_replica(self, replica: Replica) -> None:
        if replica.work is not None:
            if replica.work.done():
                self._end_work(replica, replica.work.exception())
        elif replica.is_ready:
            death = replica.server.find_crash(0.0)
            if death is not None:
                self._failed(replica, death)
        elif replica.again_at is not None and time.monotonic() >= replica.again_at:
            self._begin(replica, self._proven)

    def _begin(
        self, replica: Replica, build: ReplicaBuild, *, drains: bool = False
    ) -> Future[None]:
        """Start a replica that gets no requests any more, in a thread of its own."""

        def work() -> None:
            if drains:
                self.proxy.wait_drained(replica.server, _TAKEN_OUT_S)
                replica.drain()
            replica.start(build, self._load_s)

        replica.again_at = None
        replica.work = self._pool.submit(work)
        return replica.work

    def _end_work(self, replica: Replica, error: BaseException | None) -> None:
        replica.work = None
        if error is None:
            self._proven = max(self._proven, replica.build)
            self._remove_old_builds()
            self._on_change(
                f"{replica.name} is ready, on build {replica.build.number} since the start"
            )
            replica.ready()
            self._route()
        elif not isinstance(error, UserError):
            raise error
        elif replica.build > self._proven:
            if self._wanted == replica.build:
                self._wanted = self._proven
            self._on_problem(
                f"{error.message} What was built gets no requests: the replicas go on with what "
                "they served before."
            )
            self._begin(replica, self._proven)
        else:
            self._failed(replica, error)

    def _failed(self, replica: Replica, error: UserError) -> None:
        was_ready, pause_s = replica.is_ready, replica.failed()
        if was_ready:
            self._route()
        if pause_s is None:
            again = f"failed {replica.most_failed_starts} times in a row and is not started again"
        else:
            again = f"is started again {f'in {pause_s:g} s' if pause_s else 'now'}"
        self._on_problem(f"{error.message} {replica.name.capitalize()} {again}.")

    def _check_for_builds(self) -> None:
        change = self._builds.poll()
        if change is not None:
            for pipeline in change.gone:
                self._on_problem(f"{pipeline} is not in the repository any more, but still served")
            self._built |= change.built
        if not self._built:
            return
        refusal = self._rejection_reason()
        if not refusal:
            try:
                self._wanted = link_build(self._repository, self._folder, self._wanted.number + 1)
            except UserError as error:
                if change is not None:
                    self._on_problem(f"{error.message} It is tried again.")
                return
        self._built.clear()
        if refusal:
            self._on_problem(f"{refusal} The replicas go on with what they serve.")

    def _rejection_reason(self) -> str:
        """Why what was built is not even tried; empty where it is."""
        if not self._exchanges:
            return f"{', '.join(self._built)} was built anew; this profile exchanges nothing."
        wrong = find_wrong_pipelines(self._repository)
        return " ".join(
            UserError(pipeline, "must be as it was built", given=wrong[pipeline]).message
            for pipeline in self._built
            if pipeline in wrong
        )

    def _update_next(self) -> None:
        """One replica at a time, first those that failed, and never the only one that answers."""
        if any(replica.work or replica.again_at is not None for replica in self.replicas):
            return
        old = [replica for replica in self.replicas if replica.build != self._wanted]
        for replica in sorted(old, key=lambda replica: replica.is_ready):
            if not replica.is_ready:
                self._begin(replica, self._wanted)
                return
            if len(self.ready) > 1:
                self.drain_replica(replica)
                self._begin(replica, self._wanted, drains=True)
                return

    def _remove_old_builds(self) -> None:
        used = {self._wanted, self._proven, *(replica.build for replica in self.replicas)}
        for folder in self._folder.glob("build-*"):
            if folder not in {build.folder for build in used}:
                shutil.rmtree(folder, ignore_errors=True)
