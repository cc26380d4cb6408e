"""Pipelines that are built anew while a server runs: put into it, or named.

What `triptych build` puts into a repository while something serves it, noticed by its locks.

A pipeline that was built anew, put into a running server; what does not load is told.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from triptych.base.errors import UserError
from triptych.client.server_info import reload_pipeline
from triptych.container.lock_check import check_repository
from triptych.container.manifests import ManifestError, ServedPipeline, find_pipelines
from triptych.container.supervisor import EndlessLoad
from triptych.repository.store import is_being_written
from triptych.serving.readiness import read_load_state
from triptych.serving.server import Server

Models = Mapping[str, Mapping[str, str]]
"""Of one pipeline: model -> its files and their hashes, as the lock has them."""


@dataclass(frozen=True)
class BuildChange:
    """What is another than before: models that changed by their pipeline, pipelines that went."""

    built: Mapping[str, list[str]]
    gone: list[str]


class BuildPoller:
    """Looks at a repository now and then; what it holds now is what counts as known.

    Args:
        repository: folder of the models.
        only: the one pipeline that matters; None for all.
    """

    def __init__(self, repository: Path, only: str | None = None) -> None:
        self._repository = repository
        self._only = only
        self._seen = self._stamps()
        self._known = self._models()

    def poll(self) -> BuildChange | None:
        """What changed since the last look; None while a build is being written.

        It reads no file where no lock has changed.
        """
        stamps = self._stamps()
        if stamps == self._seen or is_being_written(self._repository):
            return None
        self._seen = stamps
        before, self._known = self._known, self._models()
        built = {}
        for pipeline, models in self._known.items():
            old = before.get(pipeline, {})
            changed = [name for name in models if models[name] != old.get(name)]
            if changed:
                built[pipeline] = changed
        return BuildChange(built, sorted(before.keys() - self._known.keys()))

    def _pipelines(self) -> list[ServedPipeline]:
        return [p for p in find_pipelines(self._repository) if self._only in (None, p.name)]

    def _stamps(self) -> dict[str, tuple[int, int]]:
        """What tells that a lock is another one than before."""
        found = {}
        for pipeline in self._pipelines():
            if pipeline.lock_file.is_file():
                status = pipeline.lock_file.stat()
                found[pipeline.name] = (status.st_ino, status.st_mtime_ns)
        return found

    def _models(self) -> dict[str, Models]:
        found: dict[str, Models] = {}
        for pipeline in self._pipelines():
            try:
                lock = pipeline.read_manifest()
            except ManifestError:
                continue
            models: dict[str, dict[str, str]] = {}
            for path, digest in sorted(lock.files.items() if lock is not None else ()):
                model, _, inner = path.partition("/")
                models.setdefault(model, {})[inner] = digest
            if models:
                found[pipeline.name] = models
        return found


_LAST_ANSWERS_S = 5.0
"""Steps that were exchanged end once they have answered what they had."""

_POLL_S = 0.05


def reload(server: Server, pipeline: str) -> None:
    """Load what changed of a pipeline while the models before serve, until it is ready.

    A step that would load for ever is ended, and all of it tried once more.

    Args:
        server: one that exchanges models, or was started with some.
        pipeline: the ensemble.

    Raises:
        UserError: a model does not load; the one before goes on serving.
    """
    if server.log_file is None:
        raise RuntimeError("the server was not started")
    with server.log_file.open("rb") as log, _kill_stuck_steps(server) as ended:
        try:
            _load(server, pipeline, log)
        except UserError:
            if not ended:
                raise
            _load(server, pipeline, log)


def _load(server: Server, pipeline: str, log: BinaryIO) -> None:
    before = Counter(server.living_steps().values())
    log.seek(0, 2)
    try:
        reload_pipeline(server.grpc_url, pipeline, server.operator_headers)
    finally:  # until the old ones have ended, `death` would take them for dead
        deadline = time.monotonic() + _LAST_ANSWERS_S
        while Counter(server.living_steps().values()) > before and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    # An ensemble loads although a step did not, which then is the one from before.
    failures = read_load_state(log.read().decode("utf-8", "replace"), server.repository).failures
    if failures:
        raise UserError(failures[0].step, "must load", given=failures[0].reason)


@contextmanager
def _kill_stuck_steps(server: Server) -> Iterator[list[int]]:
    """Meanwhile each step that would load for ever is killed, which fails its load; their ids."""
    ended: list[int] = []
    is_over, endless = threading.Event(), EndlessLoad()

    def poll() -> None:
        while not is_over.wait(_POLL_S):
            for pid in endless.steps(server.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                ended.append(pid)

    watch = threading.Thread(target=poll, name="endless loads", daemon=True)
    watch.start()
    try:
        yield ended
    finally:
        is_over.set()
        watch.join()


class HotReload:
    """Keeps a server at what its repository holds.

    Args:
        server: that serves the repository; it exchanges models, or it is of the production profile.
        on_exchange: told in a line what was exchanged.
        on_problem: told in a line what was not, and why.
        only: the one pipeline that it serves; None where it serves all.
        production: whether the server goes on with what it loaded when it started.
    """

    def __init__(
        self,
        server: Server,
        *,
        on_reload: Callable[[str], None],
        on_problem: Callable[[str], None],
        only: str | None = None,
        production: bool = False,
    ) -> None:
        self._server = server
        self._on_exchange = on_reload
        self._on_problem = on_problem
        self._production = production
        self._builds = BuildPoller(server.repository, only)

    def poll(self) -> None:
        """Exchange what was built since the last look; what does not load is told, and stays old.

        To be called now and then: it reads no file where no lock has changed.
        """
        change = self._builds.poll()
        if change is None:
            return
        wrong = find_wrong_pipelines(self._server.repository)
        for pipeline, changed in change.built.items():
            self._put(pipeline, changed, wrong.get(pipeline))
        for pipeline in change.gone:
            self._on_problem(f"{pipeline} is not in the repository any more, but still served")

    def _put(self, pipeline: str, changed: list[str], wrong: str | None) -> None:
        if self._production:
            self._on_problem(
                f"{pipeline} was built anew: this server goes on with the old one until it is"
                " started again"
            )
            return
        try:
            if wrong is not None:
                raise UserError(pipeline, "must be as it was built", given=wrong)
            reload(self._server, pipeline)
        except UserError as error:
            self._on_problem(f"{error.message} What was loaded before goes on serving.")
        else:
            self._on_exchange(f"{pipeline} was built anew and exchanged: {', '.join(changed)}")


def find_wrong_pipelines(repository: Path) -> dict[str, str]:
    """Pipelines that are not as they were built, each with what is wrong."""
    return {
        problem.pipeline: problem.line
        for problem in check_repository(repository, None)
        if problem.severity == "error"
    }
