"""Hot reload: find rebuilt pipelines by their manifests, and load them into a running server."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from triptych.base.errors import UserError
from triptych.client.server_info import reload_pipeline
from triptych.container.lock_check import check_repository
from triptych.container.manifests import (
    ManifestError,
    ServedPipeline,
    find_pipelines,
    remove_byte_code,
)
from triptych.container.supervisor import EndlessLoad
from triptych.repository.store import is_being_written
from triptych.serving.readiness import read_load_state
from triptych.serving.server import Server

Models = Mapping[str, Mapping[str, str]]
"""Hashes of a pipeline's files by model and path, from the build manifest."""


@dataclass(frozen=True)
class BuildChange:
    """Changes of a repository: changed models by pipeline, and removed pipelines."""

    built: Mapping[str, list[str]]
    gone: list[str]


class BuildPoller:
    """Poller of a repository for rebuilt pipelines; the builds at its creation count as known.

    Args:
        repository: Folder of the models.
        only: Name of the only pipeline to check; None for all.
    """

    def __init__(self, repository: Path, only: str | None = None) -> None:
        self._repository = repository
        self._only = only
        self._seen = self._stamps()
        self._known = self._models()

    def poll(self) -> BuildChange | None:
        """Return the changes since the last poll; None without any or while a build is written.

        Files are only read if a build manifest has changed.
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
        """Return inode and modification time of each build manifest, by pipeline."""
        found = {}
        for pipeline in self._pipelines():
            with suppress(OSError):  # a pipeline without a manifest, or just removed
                status = pipeline.manifest_file.stat()
                found[pipeline.name] = (status.st_ino, status.st_mtime_ns)
        return found

    def _models(self) -> dict[str, Models]:
        found: dict[str, Models] = {}
        for pipeline in self._pipelines():
            try:
                manifest = pipeline.read_manifest()
            except ManifestError:
                continue
            models: dict[str, dict[str, str]] = {}
            for path, digest in sorted(manifest.files.items() if manifest is not None else ()):
                model, _, inner = path.partition("/")
                models.setdefault(model, {})[inner] = digest
            if models:
                found[pipeline.name] = models
        return found


_LAST_ANSWERS_S = 5.0
"""Maximum time for replaced steps to answer their last requests, in seconds."""

_POLL_S = 0.05


def reload(server: Server, pipeline: str) -> None:
    """Load the changed models of a pipeline while the previous ones serve; return when ready.

    Triton swaps each step when it is loaded, and the ensemble after all of them. Requests of that
    time fail if the tensors between the steps have changed. If a step is stuck while it loads, it
    is killed and the reload is repeated once.

    Args:
        server: Server with model control, started with `models` or `exchanges`.
        pipeline: Name of the ensemble.

    Raises:
        UserError: A model does not load; the previous one keeps serving.
    """
    if server.log_file is None:
        raise RuntimeError("the server was not started")
    remove_byte_code(server.repository)
    with server.log_file.open("rb") as log, _kill_stuck_steps(server) as ended:
        try:
            _load(server, pipeline, log)
        except UserError:
            if not ended:
                raise
            _load(server, pipeline, log)
    remove_byte_code(server.repository)


def _load(server: Server, pipeline: str, log: BinaryIO) -> None:
    before = server.living_steps()
    log.seek(0, 2)
    try:
        reload_pipeline(server.grpc_url, pipeline, server.operator_headers)
    finally:  # until the old steps have ended, `find_crash` would report them
        deadline = time.monotonic() + _LAST_ANSWERS_S
        while (replaced := _replaced(before, server.living_steps())) and (
            time.monotonic() < deadline
        ):
            time.sleep(_POLL_S)
        server.forget_steps(replaced)  # such as one that still sends a long generation
    # An ensemble loads even if a step does not; it then uses the previous version of the step.
    failures = read_load_state(log.read().decode("utf-8", "replace"), server.repository).failures
    if failures:
        raise UserError(
            failures[0].step,
            "does not load",
            given=failures[0].reason,
            remedy="Fix the error and build again",
        )


def _replaced(before: Mapping[int, str], now: Mapping[int, str]) -> set[int]:
    """Return the processes of steps that live although their model has new ones."""
    new = {model for pid, model in now.items() if pid not in before}
    return {pid for pid in now if before.get(pid) in new}


@contextmanager
def _kill_stuck_steps(server: Server) -> Iterator[list[int]]:
    """Kill steps that are stuck while loading while the block runs; yield their process ids."""
    ended: list[int] = []
    is_over, endless = threading.Event(), EndlessLoad()

    def poll() -> None:
        while not is_over.wait(_POLL_S):
            for pid in endless.steps(server.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                ended.append(pid)

    watcher = threading.Thread(target=poll, name="endless loads", daemon=True)
    watcher.start()
    try:
        yield ended
    finally:
        is_over.set()
        watcher.join()


class HotReload:
    """Updater that reloads a server's pipelines after changes of its repository.

    Args:
        server: Server on the repository, with model control or with the production profile.
        on_reload: Called with a line about each reloaded pipeline.
        on_problem: Called with a line about each pipeline that was not reloaded.
        only: Name of the only pipeline it serves; None if it serves all.
        production: Whether the server keeps the models that it loaded at its start.
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
        self._on_reload = on_reload
        self._on_problem = on_problem
        self._production = production
        self._builds = BuildPoller(server.repository, only)
        self._refused: dict[str, list[str]] = {}  # Builds that a build of their pair may mend

    def poll(self) -> bool:
        """Reload pipelines built since the last poll; report those that do not load.

        Call it periodically; files are only read if a build manifest has changed.

        Returns:
            Whether a pipeline was reloaded.
        """
        change = self._builds.poll()
        if change is None:
            return False
        wrong = find_wrong_pipelines(self._server.repository)
        builds = {**self._refused, **change.built}
        self._refused = {name: changed for name, changed in builds.items() if name in wrong}
        reloaded = [self._put(*built, wrong) for built in builds.items()]
        for pipeline in change.gone:
            self._on_problem(f"{pipeline} was removed from the repository, but is still served")
        return any(reloaded)

    def _put(self, pipeline: str, changed: list[str], wrong: Mapping[str, str]) -> bool:
        """Reload a pipeline; return whether its new build is served."""
        if self._production:
            self._on_problem(
                f"{pipeline} was rebuilt: this server keeps serving the previous build until it is"
                " restarted"
            )
            return False
        try:
            if pipeline in wrong:
                raise UserError(
                    pipeline,
                    "was changed after the build",
                    given=wrong[pipeline],
                    remedy=f"Run `triptych build {pipeline}`",
                )
            reload(self._server, pipeline)
        except UserError as error:
            self._on_problem(f"{error.message} The previous build keeps serving.")
            return False
        self._on_reload(f"{pipeline} was rebuilt and reloaded: {', '.join(changed)}")
        return True


def find_wrong_pipelines(repository: Path) -> dict[str, str]:
    """Return the pipelines that were changed after their build, each with the error."""
    return {
        problem.pipeline: problem.line
        for problem in check_repository(repository, None)
        if problem.severity == "error"
    }
