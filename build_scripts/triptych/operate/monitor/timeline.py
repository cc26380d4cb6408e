"""State of a pipeline's monitoring: evidence about the active build, files read, and past runs.

The state holds no text of a request and no answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from triptych.base.errors import UserError
from triptych.operate.monitor.results import MonitorRun
from triptych.operate.monitor.sequential import SequentialEvidence
from triptych.repository.records import plain_data

RUN_FOLDER = "monitor"
"""Folder of the state and the report, within the reports of a pipeline."""

TIMELINE_FILE = "timeline.json"
MAX_RUNS = 2000
SCHEMA = 2

_OLD_FOLDER = "watch"
_OLD_SCHEMA = 1


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class PastRun:
    """Summary of one monitoring run.

    Attributes:
        at: Unix time of the run, in seconds.
        means: Mean loss over all rows since the build, by test.
        evidence: Evidence as a power of ten, by test.
        metrics: Value, lower and upper bound of each metric of the run's rows.
    """

    at: float
    build: str
    rows: int
    alarms: tuple[str, ...]
    drifts: tuple[str, ...]
    means: Mapping[str, float | None]
    evidence: Mapping[str, float]
    metrics: Mapping[str, tuple[float | None, float | None, float | None]]


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class Timeline:
    """Monitoring runs of a pipeline.

    Attributes:
        build: Id of the build that `evidence` is about.
        evidence: Evidence by test.
        files: Names of the sample files that were read and still exist.
        last: Names of the files of the last run that had new files.
        runs: Past runs, oldest first.
    """

    schema: int = SCHEMA
    build: str = ""
    evidence: Mapping[str, SequentialEvidence] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    runs: tuple[PastRun, ...] = ()

    def evidence_about(self, build: str) -> Mapping[str, SequentialEvidence]:
        """Return the evidence about `build`; empty for another build than the last run's."""
        return self.evidence if self.build == build else {}

    def after(self, run: MonitorRun, files: Sequence[str]) -> Timeline:
        """Return the timeline with one more run; `files` are the sample files that exist now."""
        past = PastRun(
            at=run.at,
            build=run.build,
            rows=run.rows,
            alarms=run.alarms,
            drifts=run.drifts,
            means={test.name: test.mean for test in run.tests},
            evidence={test.name: test.evidence for test in run.tests},
            metrics={each.metric: (each.value, each.low, each.high) for each in run.metrics},
        )
        runs = (*self.runs, past)[-MAX_RUNS:]
        new = tuple(file for file in files if file not in self.files)
        last = new or tuple(file for file in self.last if file in files)
        return Timeline(SCHEMA, run.build, run.evidence, tuple(files), last, runs)

    def as_text(self) -> str:
        plain: Any = plain_data(asdict(self))
        return json.dumps(plain) + "\n"


def read_timeline(folder: Path) -> Timeline:
    """Return the timeline in a folder, or in the folder of an earlier release; empty without one.

    Raises:
        UserError: The file is damaged or was written by another release.
    """
    path = folder / TIMELINE_FILE
    if not path.is_file():
        path = folder.parent / _OLD_FOLDER / TIMELINE_FILE
    if not path.is_file():
        return Timeline()
    try:
        data = json.loads(path.read_bytes())
        if data["schema"] == _OLD_SCHEMA:
            data["schema"], data["runs"] = SCHEMA, data.pop("looks")
            for past in data["runs"]:
                past["metrics"] = past.pop("figures")
            for evidence in data["evidence"].values():
                evidence["log_wealth"] = evidence.pop("log_capitals")
        timeline = TypeAdapter(Timeline).validate_json(json.dumps(data))
    except (OSError, ValueError, LookupError, TypeError, ValidationError) as error:
        raise UserError(
            str(path),
            "is not a timeline of this release of triptych",
            given="a file that cannot be read",
            remedy="Move the file away; monitoring then starts again without evidence",
        ) from error
    if timeline.schema != SCHEMA:
        raise UserError(
            str(path),
            f"must have schema {SCHEMA}",
            given=timeline.schema,
            remedy="Move the file away; monitoring then starts again without evidence",
        )
    return timeline
