"""What has changed in a folder since the last look, by size and time of its files.

One round of work on a pipeline: its tests, then its build; a mistake ends it, and is told.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from triptych.base.errors import Progress
from triptych.building.build import BuildOutcome, build
from triptych.building.hook_tests import Check, check_pipeline
from triptych.core.inputs import read_inputs
from triptych.spec.spec import load_spec


@dataclass(frozen=True)
class Round:
    """What one round found.

    Attributes:
        checks: of the pipeline's own files; empty where they could not be read.
        built: None where a check or the build failed: the repository is as it was.
        failure: what ended it, where a check did not.
        seconds: that it took.
    """

    checks: tuple[Check, ...]
    built: BuildOutcome | None
    failure: Exception | None
    seconds: float

    @property
    def problems(self) -> list[Check]:
        """Checks that were not well."""
        return [check for check in self.checks if check.severity != "ok"]


def rebuild(folder: Path, repository: Path, overrides: Sequence[str], progress: Progress) -> Round:
    """Test the pipeline in `folder` and build it into `repository`.

    Raises nothing but what ends a process: whoever writes a pipeline goes on after a mistake.
    """
    started = time.monotonic()
    checks: tuple[Check, ...] = ()
    built, failure = None, None
    try:
        checks = tuple(check_pipeline(folder))
        if all(check.severity != "error" for check in checks):
            built = build(read_inputs(load_spec(folder, overrides), progress), repository, progress)
    except Exception as error:
        failure = error
    return Round(checks, built, failure, time.monotonic() - started)


_SETTLE_S = 0.1
_MAX_SETTLE_S = 2.0
_PASSING = (".swp", ".tmp", "~", ".pyc")
"""Ends of the names of what editors and Python leave beside a file."""

Stamps = dict[str, tuple[int, int]]


class Watch:
    """The files of `folder`, at any depth, but hidden ones and what editors leave for a moment."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen = self._look()

    def changed(self) -> list[str]:
        """Files that are new, gone or not as they were, once nobody is writing any more."""
        now = self._look()
        if now == self._seen:
            return []
        deadline = time.monotonic() + _MAX_SETTLE_S
        while time.monotonic() < deadline:  # an editor empties a file, and then fills it
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
                except OSError:  # gone meanwhile
                    continue
                shown = path.relative_to(self._folder).as_posix()
                found[shown] = (status.st_mtime_ns, status.st_size)
        return found
