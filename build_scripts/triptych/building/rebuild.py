"""One round of work on a pipeline: its tests, then its build; a mistake ends it, and is told."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from triptych.base.errors import Progress
from triptych.building.build import Built, build
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
    built: Built | None
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
