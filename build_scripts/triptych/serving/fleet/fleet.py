"""Replicas behind Envoy: restart after crashes, rolling update after builds, and a candidate.

Each replica serves a copy of a build, which shares its blocks where the file system can do that.
Somebody may overwrite a file of the repository in place, and replicas must keep their build.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from triptych.base.errors import UserError
from triptych.base.files import os_errors_as_user_errors, scratch_folder
from triptych.container.health import HealthCheck
from triptych.container.manifests import ServedPipeline, find_pipelines
from triptych.container.periodic import HEALTH_INTERVAL_S, REPLACED_AFTER, PeriodicCheck
from triptych.repository.store import clone, link, locked
from triptych.serving.device import check_device
from triptych.serving.endpoint import RestartBackoff, wait_answers
from triptych.serving.fleet.proxy import Proxy
from triptych.serving.hot_reload import BuildPoller, find_wrong_pipelines
from triptych.serving.server import Server


@dataclass(frozen=True, order=True)
class ReplicaBuild:
    """A build in a folder; later builds have higher numbers."""

    number: int
    folder: Path

    @cached_property
    def pipelines(self) -> list[ServedPipeline]:
        """All pipelines of the build, whose files do not change."""
        return find_pipelines(self.folder)

    def copy(self) -> None:
        """Replace links to files of the repository by copies; without disk space they stay links.

        Raises:
            UserError: The folder cannot be written.
        """
        with (
            os_errors_as_user_errors(self.folder),
            scratch_folder(".copy-", self.folder.parent) as scratch,
        ):
            for file in self.folder.rglob("*"):
                if file.is_file() and file.stat().st_nlink > 1:
                    clone(file, scratch / file.name)
                    (scratch / file.name).replace(file)


def link_build(repository: Path, home: Path, number: int) -> ReplicaBuild:
    """Link the repository's present content into a new folder in `home`.

    No build can write meanwhile, so that this must be short: `ReplicaBuild.copy` follows.

    Raises:
        UserError: A build is writing the repository, or the disk is full.
    """
    folder = home / f"build-{number}"
    with os_errors_as_user_errors(folder), locked(repository):
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


class Replica:
    """A server of a fleet and its state. `Fleet` decides; these methods may block.

    Attributes:
        name: Name in messages.
        build: Build that it serves or starts on.
        is_ready: Whether it may get requests.
        is_healthy: Whether its last health check passed; others get the requests otherwise.
        work: Start or update in progress; None without one.
        again_at: Time of the next start on the monotonic clock; None without one.
        max_failed_starts: Maximum number of failed starts in a row.
    """

    max_failed_starts = 6

    def __init__(
        self, name: str, server: Server, models: Sequence[str], build: ReplicaBuild
    ) -> None:
        self.name = name
        self.server = server
        self.build = build
        self.is_ready = False
        self.is_healthy = True
        self.work: Future[None] | None = None
        self.again_at: float | None = None
        self._models = frozenset(models)
        self._failed_starts = 0
        self._pauses = RestartBackoff()
        self._ready_at = time.monotonic()
        self._ending = threading.Lock()
        self._ended = False
        self._was_started = False
        self._checked_build: ReplicaBuild | None = None
        self._health = HealthCheck([])

    @property
    def has_failed_for_good(self) -> bool:
        """Whether it is down and will not be restarted."""
        return not self.is_ready and self.work is None and self.again_at is None

    @property
    def pipelines(self) -> list[ServedPipeline]:
        """Pipelines of its build that it serves."""
        return [
            pipeline
            for pipeline in self.build.pipelines
            if not self._models or pipeline.name in self._models
        ]

    def start(self, build: ReplicaBuild, timeout_s: float) -> None:
        """Start it on `build`, and wait until each of its pipelines answers a request.

        Raises:
            UserError: A model does not load, or a pipeline does not answer.
        """
        with self._ending:
            if self._ended:
                raise RuntimeError("the fleet is stopping")
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
        wait_answers(self.server, self.find_fault, deadline, name=self.name)

    def find_fault(self) -> str | None:
        """Ask each of its pipelines the question of the image's health check; return the fault."""
        if self._checked_build is not self.build:
            self._health = HealthCheck(self.pipelines, self.server.metrics_url)
            self._checked_build = self.build
        return self._health.find_fault(f"http://{self.server.http_url}")

    def drain(self) -> None:
        """Answer the requests in flight, then stop the server."""
        with self._ending:
            self.server.stop()

    def end(self) -> None:
        """Drain the server and never start it again."""
        with self._ending:
            self._ended = True
            self.server.stop()

    def ready(self) -> None:
        """Mark it as ready."""
        self.is_ready = self.is_healthy = True
        self._failed_starts = 0
        self._ready_at = time.monotonic()

    def failed(self) -> float | None:
        """Count a crash or failed start; return the pause in seconds, or None if it gives up."""
        now = time.monotonic()
        self._failed_starts += not self.is_ready
        pause_s = self._pauses.take_s(now - self._ready_at if self.is_ready else 0.0)
        self.is_ready = False
        if self._failed_starts >= self.max_failed_starts:
            self.again_at = None
            return None
        self.again_at = now + pause_s
        return pause_s


class CandidateServer:
    """Server of a candidate build, restarted like a replica; its failures do not affect the fleet.

    Args:
        replica: Replica, not started.
        load_s: Timeout for loading its models, in seconds.
        on_change: Called with a line about each success.
        on_problem: Called with a line about each problem.
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
        """Start it in a separate thread."""
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
        """Report its state and restart it after a crash; call it like `Fleet.reconcile`."""
        replica = self.replica
        if replica.work is not None:
            if replica.work.done():
                self._end_start(replica.work.exception())
        elif replica.is_ready:
            crash = replica.server.find_crash(0.0)
            if crash is not None:
                self._failed(crash)
        elif replica.again_at is not None and time.monotonic() >= replica.again_at:
            self.start()

    def end(self) -> None:
        """Answer the requests in flight, and stop the server for good."""
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
        again = "is not restarted" if pause_s is None else f"restarts in {pause_s:g} s"
        self._on_problem(f"{error.message} The candidate {again}; the fleet serves without it.")


_PROXY_INTERVAL_S = 0.5
_DRAIN_TIMEOUT_S = 10.0
_HEALTHY_TIMEOUT_S = 30.0


class Fleet:
    """Replicas on a repository behind Envoy; it never outlives this process.

    `reconcile` makes all decisions in one thread. Worker threads run what blocks.

    Args:
        repository: Repository to serve and to poll for builds.
        folder: Folder of this fleet for copies of builds, on the repository's file system.
        servers: Function from a folder and a number from 0 to a server that is not started.
        replicas: Number of replicas.
        proxy: Proxy in front of the replicas, not started.
        models: Models to serve; empty serves all.
        candidate: Server of a candidate build, not started; None without one.
        exchanges: Whether rebuilt pipelines are rolled out.
        load_s: Timeout for loading the models of a replica, in seconds.
        on_change: Called with a line about each success.
        on_problem: Called with a line about each problem and its consequence.
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
        on_change: Callable[[str], None],
        on_problem: Callable[[str], None],
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
        self._copying = threading.Lock()
        self._proven = self._wanted = link_build(repository, folder, 1)
        self.replicas = tuple(
            Replica(
                f"replica {number + 1}", servers(self._wanted.folder, number), models, self._wanted
            )
            for number in range(replicas)
        )
        self._pool = ThreadPoolExecutor(replicas, "fleet")
        self._check_pool = ThreadPoolExecutor(replicas + 1, "fleet-health")
        self._checks = {
            replica.name: PeriodicCheck(self._check_pool, replica.find_fault, HEALTH_INTERVAL_S)
            for replica in self.replicas
        }
        self._proxy_check = PeriodicCheck(self._check_pool, proxy.find_fault, _PROXY_INTERVAL_S)

    @property
    def ready(self) -> list[Replica]:
        """Replicas that get requests."""
        return [replica for replica in self.replicas if replica.is_ready]

    @property
    def endpoints(self) -> dict[str, str]:
        """Addresses of Envoy: ``grpc``, ``http`` and ``metrics``."""
        proxy = self.proxy
        return {"grpc": proxy.grpc_url, "http": proxy.http_url, "metrics": proxy.metrics_url}

    @property
    def is_settled(self) -> bool:
        """Whether all replicas are ready and serve the newest build that loads."""
        return not self._built and all(
            replica.is_ready and replica.build == self._wanted for replica in self.replicas
        )

    def start(self) -> None:
        """Start all replicas concurrently, then Envoy.

        Raises:
            UserError: A replica does not become ready, a port is busy, or Envoy does not start.
        """
        work = [self._begin(replica, self._wanted) for replica in self.replicas]
        for replica, started in zip(self.replicas, work, strict=True):
            started.result()
            replica.work = None
            replica.ready()
            self._checks[replica.name].reset()
            self._on_change(f"{replica.name} is ready at {replica.server.grpc_url}")
        self._start_proxy()
        if self._candidate is not None:
            self._candidate.start()

    def described(self) -> list[dict[str, Any]]:
        """Return addresses and process id of each replica."""
        return [
            {"grpc": r.server.grpc_url, "metrics": r.server.metrics_url, "pid": r.server.pid}
            for r in self.replicas
        ]

    def reconcile(self) -> None:
        """Restart crashed and frozen servers, roll out new builds, and renew keys and certificates.

        Call it about three times per second.

        Raises:
            UserError: All replicas have failed for good.
        """
        for replica in self.replicas:
            self._reconcile_replica(replica)
        if all(replica.has_failed_for_good for replica in self.replicas):
            raise UserError(
                "replicas",
                "have all failed",
                given=f"{len(self.replicas)} replicas that failed too often to be restarted",
                remedy="See the reasons above",
            )
        if self.proxy.has_died():
            self._restart_proxy("crashed")
        elif self._proxy_check.has_result() and self._proxy_check.failures:
            self._restart_proxy("does not answer")
        if self._candidate is not None:
            self._candidate.reconcile()
        try:
            self.proxy.renew_access()
        except UserError as error:
            self._on_problem(f"keys and certificates are not changed: {error.message}")
        self._check_for_builds()
        self._update_next()

    def drain_replica(self, replica: Replica) -> None:
        """Remove this replica from Envoy's endpoints; requests in flight continue.

        It does not wait; see `Proxy.wait_drained`.
        """
        replica.is_ready = False
        self._route()

    def stop(self) -> None:
        """Answer the requests in flight, and stop all servers and Envoy."""
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
            self._check_pool.shutdown()

    def _restart_proxy(self, rule: str) -> None:
        self._on_problem(f"{self.proxy.failure(rule).message} It restarts.")
        self.proxy.stop(grace_s=0.0)
        self._start_proxy()
        self._proxy_check.reset()

    def _start_proxy(self) -> None:
        servers = [replica.server for replica in self.ready]
        self.proxy.start(servers, self._pipelines())
        if not self.proxy.wait_healthy(servers, _HEALTHY_TIMEOUT_S):
            raise self.proxy.failure("found no healthy replica")

    def _route(self) -> None:
        healthy = [replica for replica in self.ready if replica.is_healthy]
        servers = [replica.server for replica in healthy or self.ready]
        self.proxy.route_to(servers, self._pipelines())

    def _pipelines(self) -> list[str]:
        """Return the names of the pipelines that a replica serves or starts on."""
        return sorted({p.name for replica in self.replicas for p in replica.pipelines})

    def _reconcile_replica(self, replica: Replica) -> None:
        if replica.work is not None:
            if replica.work.done():
                self._end_work(replica, replica.work.exception())
        elif replica.is_ready:
            crash = replica.server.find_crash(0.0)
            if crash is not None:
                self._failed(replica, crash)
            elif self._checks[replica.name].has_result():
                self._judge(replica)
        elif replica.again_at is not None and time.monotonic() >= replica.again_at:
            self._begin(replica, self._proven)

    def _judge(self, replica: Replica) -> None:
        """Move requests away from a replica that fails its health check, and replace it later."""
        check = self._checks[replica.name]
        is_healthy = check.failures == 0
        if is_healthy != replica.is_healthy:
            replica.is_healthy = is_healthy
            self._route()
            if is_healthy:
                self._on_change(f"{replica.name} passes its health check again")
            else:
                self._on_problem(f"{replica.name} fails its health check: {check.fault}.")
        if check.failures >= REPLACED_AFTER:
            error = UserError(
                replica.name,
                "is replaced, because it fails its health check",
                given=f"{check.fault}, {check.failures} times in a row",
                remedy="See the log of that replica",
            )
            self._failed(replica, error)

    def _begin(
        self, replica: Replica, build: ReplicaBuild, *, drains: bool = False
    ) -> Future[None]:
        """Start a replica in a worker thread. It must already be out of Envoy's endpoints."""

        def work() -> None:
            with self._copying:
                build.copy()
            if drains:
                self.proxy.wait_drained(replica.server, _DRAIN_TIMEOUT_S)
                replica.drain()
            replica.start(build, self._load_s)
            served = [pipeline.name for pipeline in replica.pipelines]
            check_device(build.folder, served, replica.server, self._on_change)

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
            self._checks[replica.name].reset()
            self._route()
        elif not isinstance(error, UserError):
            raise error
        elif replica.build > self._proven:
            if self._wanted == replica.build:
                self._wanted = self._proven
            self._on_problem(
                f"{error.message} The new build was not deployed; the replicas keep serving the "
                "previous build."
            )
            self._begin(replica, self._proven)
        else:
            self._failed(replica, error)

    def _failed(self, replica: Replica, error: UserError) -> None:
        was_ready, pause_s = replica.is_ready, replica.failed()
        if was_ready:
            self._route()
        if pause_s is None:
            again = f"failed {replica.max_failed_starts} times in a row and is not restarted"
        else:
            again = f"restarts {f'in {pause_s:g} s' if pause_s else 'now'}"
        self._on_problem(f"{error.message} {replica.name.capitalize()} {again}.")

    def _check_for_builds(self) -> None:
        change = self._builds.poll()
        if change is not None:
            for pipeline in change.gone:
                self._on_problem(f"{pipeline} was removed from the repository, but is still served")
            self._built |= change.built
        if not self._built:
            return
        rejection = self._rejection_reason()
        if not rejection:
            try:
                self._wanted = link_build(self._repository, self._folder, self._wanted.number + 1)
            except UserError as error:
                if change is not None:
                    self._on_problem(f"{error.message} This is retried.")
                return
        self._built.clear()
        if rejection:
            self._on_problem(f"{rejection} The replicas keep serving the previous build.")

    def _rejection_reason(self) -> str:
        """Return why a new build is not tried; empty if it is."""
        if not self._exchanges:
            return (
                f"{', '.join(self._built)} was rebuilt; this profile does not roll out new builds."
            )
        wrong = find_wrong_pipelines(self._repository)
        return " ".join(
            UserError(
                pipeline,
                "was changed after the build",
                given=wrong[pipeline],
                remedy=f"Run `triptych build {pipeline}`",
            ).message
            for pipeline in self._built
            if pipeline in wrong
        )

    def _update_next(self) -> None:
        """Update one replica: failed ones first, and never the only ready one."""
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
