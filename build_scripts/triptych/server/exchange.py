"""Pipelines that are built anew while a server runs: put into it, or named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from triptych.container.lock_check import check_repository
from triptych.container.locks import LockError, Pipeline, find_pipelines
from triptych.errors import UserError
from triptych.repository.store import is_being_written
from triptych.server.reload import reload
from triptych.server.server import Server

Models = Mapping[str, Mapping[str, str]]
"""Of one pipeline: model -> its files and their hashes, as the lock has them."""


class Exchange:
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
        on_exchange: Callable[[str], None],
        on_problem: Callable[[str], None],
        only: str | None = None,
        production: bool = False,
    ) -> None:
        self._server = server
        self._on_exchange = on_exchange
        self._on_problem = on_problem
        self._production = production
        self._only = only
        self._seen = _stamps(server.repository, only)
        self._loaded = _models(server.repository, only)

    def look(self) -> None:
        """Exchange what was built since the last look; what does not load is told, and stays old.

        To be called now and then: it reads no file where no lock has changed.
        """
        repository = self._server.repository
        stamps = _stamps(repository, self._only)
        if stamps == self._seen or is_being_written(repository):
            return
        self._seen = stamps
        now, wrong = _models(repository, self._only), _wrong(repository)
        for pipeline, models in now.items():
            before = self._loaded.get(pipeline, {})
            changed = [name for name in models if models[name] != before.get(name)]
            if changed:
                self._put(pipeline, changed, wrong.get(pipeline))
        for pipeline in self._loaded.keys() - now.keys():
            self._on_problem(f"{pipeline} is not in the repository any more, but still served")
        self._loaded = now

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


def _pipelines(repository: Path, only: str | None) -> list[Pipeline]:
    return [p for p in find_pipelines(repository) if only in (None, p.name)]


def _stamps(repository: Path, only: str | None) -> dict[str, tuple[int, int]]:
    """What tells that a lock is another one than before."""
    found = {}
    for pipeline in _pipelines(repository, only):
        if pipeline.lock_file.is_file():
            status = pipeline.lock_file.stat()
            found[pipeline.name] = (status.st_ino, status.st_mtime_ns)
    return found


def _models(repository: Path, only: str | None) -> dict[str, Models]:
    found: dict[str, Models] = {}
    for pipeline in _pipelines(repository, only):
        try:
            lock = pipeline.read_lock()
        except LockError:
            continue
        models: dict[str, dict[str, str]] = {}
        for path, digest in sorted(lock.files.items() if lock is not None else ()):
            model, _, inner = path.partition("/")
            models.setdefault(model, {})[inner] = digest
        if models:
            found[pipeline.name] = models
    return found


def _wrong(repository: Path) -> dict[str, str]:
    """Pipelines that are not as they were built, each with what is wrong."""
    return {
        problem.pipeline: problem.line
        for problem in check_repository(repository, None)
        if problem.severity == "error"
    }
