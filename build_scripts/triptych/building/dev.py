"""`triptych dev`: watch a pipeline's folder, then check and build the pipeline after a change."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from triptych.base.errors import Progress

if TYPE_CHECKING:
    from triptych.building.build import BuildOutcome
    from triptych.building.pipeline_checks import Check


@dataclass(frozen=True)
class Round:
    """Result of checking and building a pipeline once.

    Attributes:
        checks: Checks of the pipeline's files; empty if the files could not be read.
        built: Outcome of the build; None if a check or the build failed.
        failure: Exception that ended the round; None if there was none.
        seconds: Duration of the round in seconds.
    """

    checks: tuple[Check, ...]
    built: BuildOutcome | None
    failure: Exception | None
    seconds: float

    @property
    def problems(self) -> list[Check]:
        """Checks with a warning or an error."""
        return [check for check in self.checks if check.severity != "ok"]


def rebuild(
    folder: Path,
    repository: Path,
    overrides: Sequence[str],
    progress: Progress,
    changed: Sequence[str] = (),
) -> Round:
    """Check the pipeline in `folder` and build it into `repository`.

    If only ``hooks.py`` has `changed`, the build in the repository gets it before the gate runs;
    if the gate or another stage then fails, the build before is put back.

    Returns every exception as `Round.failure`, so that `dev` continues after an error.
    """
    # They take seconds to load, in which a server can start.
    from triptych.building.pipeline import open_pipeline
    from triptych.building.stages import BuildOptions
    from triptych.building.unchecked import write_unchecked
    from triptych.repository.history import rollback
    from triptych.runtime.hooking import HOOKS_FILE
    from triptych.spec.any_spec import load_compiled

    started = time.monotonic()
    checks: tuple[Check, ...] = ()
    built, failure, before = None, None, ""
    try:
        pipeline = open_pipeline(load_compiled(folder, overrides))
        checks = tuple(pipeline.check_files())
        if all(check.severity != "error" for check in checks):
            if list(changed) == [HOOKS_FILE]:
                before = write_unchecked(folder, repository)
            if before:
                progress("hooks", "the edit is served, unchecked; the gate runs behind it")
            built = pipeline.build(BuildOptions(repository=repository, progress=progress))
    except Exception as error:
        failure = error
    if before and built is None:
        rollback(repository, folder.name, before)
        progress("hooks", "the edit failed: the build before it is served again")
    return Round(checks, built, failure, time.monotonic() - started)


_SETTLE_S = 0.1
_MAX_SETTLE_S = 2.0
_PASSING = (".swp", ".tmp", "~", ".pyc")
"""Suffixes of temporary files of editors and of Python."""

Stamps = dict[str, tuple[int, int]]


class Watch:
    """Poller for changes of files at any depth of `folder`, except hidden and temporary files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen = self._look()

    def changed(self) -> list[str]:
        """Return the paths of files that were added, removed or changed.

        Waits until the files stop changing, at most `_MAX_SETTLE_S`.
        """
        now = self._look()
        if now == self._seen:
            return []
        deadline = time.monotonic() + _MAX_SETTLE_S
        while time.monotonic() < deadline:  # an editor truncates a file before it writes it
            before = now
            time.sleep(_SETTLE_S)
            now = self._look()
            if now == before:
                break
        seen, self._seen = self._seen, now
        return sorted(name for name in {*seen, *now} if seen.get(name) != now.get(name))

    def _look(self) -> Stamps:
        found: Stamps = {}
        for root, folders, names in os.walk(self._folder):
            folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
            for name in names:
                if name.startswith(".") or name.endswith(_PASSING):
                    continue
                path = Path(root, name)
                try:
                    status = path.stat()
                except OSError:  # removed in the meantime
                    continue
                shown = path.relative_to(self._folder).as_posix()
                found[shown] = (status.st_mtime_ns, status.st_size)
        return found


class DevBuilds:
    """Builds of a pipeline after each change of its files, in a thread beside its server.

    Args:
        folder: Folder of the pipeline.
        build: Builds the pipeline after a change of these files.
        show: Called with the changed files and the result of each build.
    """

    def __init__(
        self,
        folder: Path,
        build: Callable[[list[str]], Round],
        show: Callable[[list[str], Round], None],
    ) -> None:
        self._watch = Watch(folder)
        self._build = build
        self._show = show
        self._changed: set[str] = set()
        self._ended: queue.SimpleQueue[tuple[list[str], Round]] = queue.SimpleQueue()
        self.is_busy = False

    def poll(self) -> None:
        """Show the result of a build that has ended, and begin one if files have changed."""
        self._changed.update(self._watch.changed())
        if not self._ended.empty():
            self.is_busy = False
            self._show(*self._ended.get())
        if self._changed and not self.is_busy:
            self.start()

    def start(self) -> None:
        """Begin a build; no other build may be in progress."""
        changed = sorted(self._changed)
        self._changed.clear()
        self.is_busy = True

        def run() -> None:
            self._ended.put((changed, self._build(changed)))

        # The end of the server ends a build as well, which leaves the repository as it is.
        threading.Thread(target=run, daemon=True).start()
