"""Replicas behind Envoy: what dies is replaced, what is built anew is put in one at a time."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from triptych.base.errors import UserError
from triptych.serving.builds import Builds
from triptych.serving.exchange import wrong_pipelines
from triptych.serving.fleet.builds import Build, keep_build
from triptych.serving.fleet.candidate import Candidate
from triptych.serving.fleet.proxy import Proxy
from triptych.serving.fleet.replica import Replica
from triptych.serving.server import Server

_TAKEN_OUT_S = 10.0
_FOUND_S = 30.0
Tell = Callable[[str], None]


class Fleet:
    """Servers on what a repository holds, kept up; never outlives this process.

    All is decided in `look`, by one thread; what takes long is done by others meanwhile.

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
        candidate: Candidate | None = None,
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
        self._builds = Builds(repository)
        self._built: dict[str, list[str]] = {}
        self._proven = self._wanted = keep_build(repository, folder, 1)
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

    def look(self) -> None:
        """Replace what died, put in what was built; to be called about three times a second.

        Raises:
            UserError: no replica is left, and none is started again.
        """
        for replica in self.replicas:
            self._look_at(replica)
        if all(replica.is_given_up for replica in self.replicas):
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
            self._candidate.look()
        self._look_for_builds()
        self._exchange_next()

    def take_out(self, replica: Replica) -> None:
        """Let Envoy give this replica nothing more; what is under way goes on.

        Returns at once: `Proxy.wait_out` waits until it is so.
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
        if not self.proxy.wait_in(servers, _FOUND_S):
            raise self.proxy.failure("must find its replicas healthy")

    def _route(self) -> None:
        self.proxy.route_to(replica.server for replica in self.ready)

    def _look_at(self, replica: Replica) -> None:
        if replica.work is not None:
            if replica.work.done():
                self._end_work(replica, replica.work.exception())
        elif replica.is_ready:
            death = replica.server.death(0.0)
            if death is not None:
                self._failed(replica, death)
        elif replica.again_at is not None and time.monotonic() >= replica.again_at:
            self._begin(replica, self._proven)

    def _begin(self, replica: Replica, build: Build, *, drains: bool = False) -> Future[None]:
        """Start a replica that gets no requests any more, in a thread of its own."""

        def work() -> None:
            if drains:
                self.proxy.wait_out(replica.server, _TAKEN_OUT_S)
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

    def _look_for_builds(self) -> None:
        change = self._builds.look()
        if change is not None:
            for pipeline in change.gone:
                self._on_problem(f"{pipeline} is not in the repository any more, but still served")
            self._built |= change.built
        if not self._built:
            return
        refusal = self._refusal()
        if not refusal:
            try:
                self._wanted = keep_build(self._repository, self._folder, self._wanted.number + 1)
            except UserError as error:
                if change is not None:
                    self._on_problem(f"{error.message} It is tried again.")
                return
        self._built.clear()
        if refusal:
            self._on_problem(f"{refusal} The replicas go on with what they serve.")

    def _refusal(self) -> str:
        """Why what was built is not even tried; empty where it is."""
        if not self._exchanges:
            return f"{', '.join(self._built)} was built anew; this profile exchanges nothing."
        wrong = wrong_pipelines(self._repository)
        return " ".join(
            UserError(pipeline, "must be as it was built", given=wrong[pipeline]).message
            for pipeline in self._built
            if pipeline in wrong
        )

    def _exchange_next(self) -> None:
        """One replica at a time, first those that failed, and never the only one that answers."""
        if any(replica.work or replica.again_at is not None for replica in self.replicas):
            return
        old = [replica for replica in self.replicas if replica.build != self._wanted]
        for replica in sorted(old, key=lambda replica: replica.is_ready):
            if not replica.is_ready:
                self._begin(replica, self._wanted)
                return
            if len(self.ready) > 1:
                self.take_out(replica)
                self._begin(replica, self._wanted, drains=True)
                return

    def _remove_old_builds(self) -> None:
        used = {self._wanted, self._proven, *(replica.build for replica in self.replicas)}
        for folder in self._folder.glob("build-*"):
            if folder not in {build.folder for build in used}:
                shutil.rmtree(folder, ignore_errors=True)
