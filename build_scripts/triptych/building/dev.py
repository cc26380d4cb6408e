"""`triptych dev`: watch a pipeline's folder, then check and build the pipeline after a change."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from triptych.base.errors import Progress
from triptych.building.build import BuildOutcome, build
from triptych.building.kinds import STEPS, read_compiled
from triptych.building.pipeline_checks import Check
from triptych.spec.any_spec import load_compiled


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


def rebuild(folder: Path, repository: Path, overrides: Sequence[str], progress: Progress) -> Round:
    """Check the pipeline in `folder` and build it into `repository`.

    Returns every exception as `Round.failure`, so that `dev` continues after an error.
    """
    started = time.monotonic()
    checks: tuple[Check, ...] = ()
    built, failure = None, None
    try:
        spec = load_compiled(folder, overrides)
        checks = tuple(STEPS[spec.kind].check_folder(folder))
        if all(check.severity != "error" for check in checks):
            built = build(read_compiled(spec, progress), repository, progress)
    except Exception as error:
        failure = error
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
