"""What the looks leave behind: evidence of this build, files that were seen, a line for each look.

No text of a request is in it, nor an answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from triptych.base.errors import UserError
from triptych.operate.watch.findings import Look
from triptych.operate.watch.sequential import Evidence
from triptych.repository.records import plain_data

TIMELINE_FILE = "timeline.json"
MAX_LOOKS = 2000
SCHEMA = 1


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class PastLook:
    """One look in short.

    Attributes:
        means: test to the mean loss of all rows of the build so far.
        evidence: test to its evidence, as a power of ten.
        figures: metric to value, low and high of that look.
    """

    at: float
    build: str
    rows: int
    alarms: tuple[str, ...]
    drifts: tuple[str, ...]
    means: Mapping[str, float | None]
    evidence: Mapping[str, float]
    figures: Mapping[str, tuple[float | None, float | None, float | None]]


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class Timeline:
    """All looks at a pipeline.

    Attributes:
        build: that `evidence` is of.
        evidence: by test.
        files: of the sample that were seen, as far as they are still there.
        last: of those, the ones of the last look that found new ones.
        looks: oldest first.
    """

    schema: int = SCHEMA
    build: str = ""
    evidence: Mapping[str, Evidence] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    looks: tuple[PastLook, ...] = ()

    def of_build(self, build: str) -> Mapping[str, Evidence]:
        """The evidence, where it is of this build; another one begins anew."""
        return self.evidence if self.build == build else {}

    def after(self, look: Look, files: Sequence[str]) -> Timeline:
        """The timeline with one more look; `files` are those of the sample that are known now."""
        past = PastLook(
            at=look.at,
            build=look.build,
            rows=look.rows,
            alarms=look.alarms,
            drifts=look.drifts,
            means={test.name: test.mean for test in look.tests},
            evidence={test.name: test.evidence for test in look.tests},
            figures={one.metric: (one.value, one.low, one.high) for one in look.figures},
        )
        looks = (*self.looks, past)[-MAX_LOOKS:]
        new = tuple(file for file in files if file not in self.files)
        last = new or tuple(file for file in self.last if file in files)
        return Timeline(SCHEMA, look.build, look.evidence, tuple(files), last, looks)

    def as_text(self) -> str:
        plain: Any = plain_data(asdict(self))
        return json.dumps(plain) + "\n"


def read_timeline(folder: Path) -> Timeline:
    """The timeline in a folder; an empty one where there is none.

    Raises:
        UserError: it is damaged, or of another release.
    """
    path = folder / TIMELINE_FILE
    if not path.is_file():
        return Timeline()
    try:
        found = TypeAdapter(Timeline).validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise UserError(
            str(path),
            "must be a timeline of this release of triptych",
            given="something else",
            remedy="Move it away: the watch begins anew",
        ) from error
    if found.schema != SCHEMA:
        raise UserError(
            str(path), f"must have the schema {SCHEMA}", given=found.schema, remedy="Move it away"
        )
    return found
