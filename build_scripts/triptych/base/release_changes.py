"""Known defects of Triton and changes of its behavior, from ``release_changes.json``.

A release has a fix if its branch rYY.MM contains the commit. For 26.09 to 26.11, whose branches
were not read, the source is the release notes or the main branch.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from triptych.base.releases import Release, parse_release

Feature = Literal[
    "any server",
    "ensemble",
    "dynamic batching",
    "python step",
    "python metrics",
    "decoupled model",
    "response cache",
    "environment archive",
    "TensorRT engine",
]
"""Part of a repository or server without which a defect or change has no effect."""


@dataclass(frozen=True)
class KnownDefect:
    """Defect that every supported release has until it is `fixed`."""

    feature: Feature  # Part of a repository that meets it
    effect: str  # Clause that follows "In this release,"
    fixed: Release | None  # First release without the defect; None if no release has a fix
    source: str  # Issue or pull request of Triton, or its release notes
    # Sentence for users who cannot use another release; empty if nothing helps.
    workaround: str = ""

    def is_in(self, release: Release) -> bool:
        """Return whether a release has the defect."""
        return self.fixed is None or release < self.fixed


@dataclass(frozen=True)
class ReleaseChange:
    """Intended change of what a server does for an unchanged repository."""

    feature: Feature  # Part of a repository that is concerned
    release: Release  # First release with the change
    effect: str  # Sentence on what differs
    source: str  # Issue or pull request of Triton, or its release notes


_DATA = json.loads(Path(__file__).with_suffix(".json").read_bytes())

KNOWN_DEFECTS = tuple(
    KnownDefect(**{**row, "fixed": row["fixed"] and parse_release(row["fixed"])})
    for row in _DATA["defects"]
)
"""Defects in the order in which they are listed: those of every server first."""

CHANGES = tuple(
    ReleaseChange(**{**row, "release": parse_release(row["release"])}) for row in _DATA["changes"]
)
"""Changes in order of release."""


def defects_of(release: Release, features: Collection[str]) -> list[KnownDefect]:
    """Return the known defects of a release that concern one of the `features`."""
    return [
        defect for defect in KNOWN_DEFECTS if defect.feature in features and defect.is_in(release)
    ]


def changes_between(
    before: Release, after: Release, features: Collection[str]
) -> list[ReleaseChange]:
    """Return the changes in the releases after `before` up to `after` that concern `features`."""
    return [
        change
        for change in CHANGES
        if change.feature in features and before < change.release <= after
    ]
