"""Results of a monitoring run, their text, and the state that runs leave for the next one.

The state holds no text of a request and no answer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, with_config

from triptych.base.errors import UserError
from triptych.operate.monitor.findings import CategoryDistribution, LengthChange
from triptych.operate.monitor.scores import MeanTest, MetricValue, SequentialEvidence, is_worse
from triptych.repository.records import plain_data


@dataclass(frozen=True)
class RowGroup:
    """Rows of similar length or with the same label."""

    kind: str  # ``tokens`` or ``label``
    name: str
    rows: int
    loss: float  # Mean loss of the first test, from 0 (correct) to 1
    low: float  # Lower bound of the loss's 95 % confidence interval
    high: float  # Upper bound of that interval


@dataclass(frozen=True)
class LargeErrorRow:
    """A row with a large error; its texts are empty unless the user asked for them."""

    location: str
    tokens: int
    row_error: float
    difference: float
    preview: str = ""
    expected: str = ""
    actual: str = ""


@dataclass(frozen=True)
class MonitorRun:
    """Results of one monitoring run."""

    pipeline: str
    at: float  # Unix time of the run, in seconds
    build: str  # Id of the active build
    precision: str
    rows: int  # Number of rows compared with the reference
    redacted: int  # Number of rows with changed inputs or encoded vectors, not compared
    others: int  # Number of excluded rows, which other builds answered
    refused: int  # Number of answered rows that the pipeline now refuses
    damaged: int  # Number of lines that could not be read
    metrics: tuple[MetricValue, ...]
    tests: tuple[MeanTest, ...]
    groups: tuple[RowGroup, ...]
    worst: tuple[LargeErrorRow, ...]
    lengths: LengthChange | None
    distributions: tuple[CategoryDistribution, ...]
    alarms: tuple[str, ...]  # Texts about wrong answers; empty if all answers are correct
    drifts: tuple[str, ...]  # Texts about drifted lengths and distributions
    notes: tuple[str, ...]  # Further texts for the user
    # Evidence since the build, by test.
    evidence: Mapping[str, SequentialEvidence] = field(default_factory=dict, repr=False)

    @property
    def passed(self) -> bool:
        """Whether the run raised no alarm and found no drift."""
        return not (self.alarms or self.drifts)

    @property
    def summary(self) -> str:
        """Text about a run without alarm and drift, and about the evidence that it lacks."""
        if not self.rows:
            return (
                "nothing was compared in this run, so it says nothing about the answers; a server "
                "writes sampled rows at the end of each window (serving.sample.window_s, by "
                "default 60 s), and each row is compared once"
            )
        lacking = [test for test in self.tests if not test.is_proven]
        if not lacking:
            return "no alarms, no drift; the limits are met with 95 % confidence"
        needed = [test.rows_to_prove for test in lacking]
        rows = max((count for count in needed if count is not None), default=0)
        more = f": about {rows:,} rows since the build are needed" if None not in needed else ""
        return f"no alarms, no drift; it is not proven yet that the limits are met{more}"

    @property
    def advice(self) -> str:
        """Text about what adapts a pipeline to requests that have drifted."""
        return (
            f"to adapt the build: triptych traffic {self.pipeline} --replace, "
            f"triptych tune {self.pipeline}, triptych build {self.pipeline}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the data for ``--json``; values that are not finite are null."""
        fields = asdict(replace(self, evidence={}))
        del fields["evidence"]
        for fields_of_test, test in zip(fields["tests"], self.tests, strict=True):
            fields_of_test["is_proven"] = test.is_proven
        fields["passed"] = self.passed
        plain: dict[str, object] = plain_data(fields)
        return plain


def format_run(run: MonitorRun) -> Iterator[tuple[str, str]]:
    """Yield the lines of a run, each with its style."""
    left = f", {run.redacted} more were redacted or encoded" if run.redacted else ""
    yield f"{run.pipeline}, {run.precision}: {run.rows} new rows compared{left}", "bold"
    for metric in run.metrics:
        yield format_metric(metric), "red" if is_worse(metric) else ""
    for test in run.tests:
        yield format_test(test), "red" if test.alarmed else ""
    for group in run.groups:
        interval = f"{group.low:.4f} to {group.high:.4f}"
        yield (
            f"  {group.kind} {group.name}: {group.rows} rows, loss {group.loss:.4f} ({interval})",
            "",
        )
    yield from _format_requests(run)
    if not run.passed:
        yield from _format_worst(run)
    for alarm in run.alarms:
        yield f"alarm: {alarm}", "red"
    for drift in run.drifts:
        yield f"drift: {drift}", "yellow"
    if run.drifts:
        yield run.advice, ""
    if run.passed:
        yield run.summary, "green" if run.rows else "yellow"


def _format_requests(run: MonitorRun) -> Iterator[tuple[str, str]]:
    if run.lengths is not None:
        yield f"  lengths: {run.lengths}", "yellow" if run.lengths.drifted else ""
    for distribution in run.distributions:
        yield (
            f"  {distribution.kind}: {distribution.largest}",
            "yellow" if distribution.drifted else "",
        )
    for note in run.notes:
        yield f"  note: {note}", "yellow"
    if run.refused:
        yield f"  {run.refused} answered rows are refused by the pipeline as it is now", "yellow"


def _format_worst(run: MonitorRun) -> Iterator[tuple[str, str]]:
    yield "rows with the largest error:", "bold"
    for row in run.worst:
        errors = f"row error {row.row_error:.3g}, difference {row.difference:.3g}"
        size = f", {row.tokens} tokens" if row.tokens else ""
        yield f"  {row.location}{size}: {errors}", ""
        if row.preview:
            yield f"    {row.preview!r}", ""
            yield f"    expected {row.expected}", ""
            yield f"    actual   {row.actual}", ""


def format_metric(metric: MetricValue) -> str:
    """Return a metric as a line."""
    interval = "" if metric.low is None else f"({metric.low:.6g} to {metric.high:.6g})"
    limit = "" if metric.limit is None else f"limit {metric.limit:g}"
    built = "" if metric.built is None else f"at build {metric.built:.6g}"
    return f"  {metric.metric:28} {metric.value:>10.6g} {interval:24} {limit:14} {built}".rstrip()


def format_test(test: MeanTest) -> str:
    """Return a test as a line."""
    mean = "-" if test.mean is None else f"{test.mean:.4g}"
    return (
        f"  {test.name}: mean loss {mean} over {test.rows} rows since the build"
        f" (limit {test.allowed:.2g}): {_evidence_in_words(test)}"
        f" (10^{test.evidence:.1f}; an alarm needs 10^{test.needed:.1f})"
    )


def _evidence_in_words(test: MeanTest) -> str:
    """Return how strong the evidence is that a limit is exceeded."""
    if test.alarmed:
        return "the limit is exceeded"
    if test.evidence <= 0:
        return "no evidence that it is exceeded"
    strength = "weak" if test.evidence < test.needed / 2 else "strong"
    return f"{strength} evidence that it is exceeded"


RUN_FOLDER = "monitor"
"""Folder of the state and the report, within the reports of a pipeline."""

TIMELINE_FILE = "timeline.json"
MAX_RUNS = 2000
SCHEMA = 2


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class PastRun:
    """Summary of one monitoring run."""

    at: float  # Unix time of the run, in seconds
    build: str
    rows: int
    alarms: tuple[str, ...]
    drifts: tuple[str, ...]
    means: Mapping[str, float | None]  # Mean loss over all rows since the build, by test
    evidence: Mapping[str, float]  # Evidence as a power of ten, by test
    # Value, lower and upper bound of each metric of the run's rows.
    metrics: Mapping[str, tuple[float | None, float | None, float | None]]


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class Timeline:
    """Monitoring runs of a pipeline."""

    schema: int = SCHEMA
    build: str = ""  # Id of the build that `evidence` is about
    evidence: Mapping[str, SequentialEvidence] = field(default_factory=dict)  # Evidence by test
    files: tuple[str, ...] = ()  # Names of the sample files that were read and still exist
    last: tuple[str, ...] = ()  # Names of the files of the last run that had new files
    runs: tuple[PastRun, ...] = ()  # Past runs, oldest first
    # Rows with the largest errors, without their texts, of the last run of this build that compared
    # rows.
    worst: tuple[LargeErrorRow, ...] = ()

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
        worst = self.worst if self.build == run.build else ()
        if run.rows:
            worst = tuple(replace(row, preview="", expected="", actual="") for row in run.worst)
        return Timeline(SCHEMA, run.build, run.evidence, tuple(files), last, runs, worst)

    def as_text(self) -> str:
        plain: object = plain_data(asdict(self))
        return json.dumps(plain) + "\n"


def read_timeline(folder: Path) -> Timeline:
    """Return the timeline in a folder; empty without one.

    Raises:
        UserError: The file is damaged or was written by another release.
    """
    path = folder / TIMELINE_FILE
    if not path.is_file():
        return Timeline()
    try:
        data = json.loads(path.read_bytes())
        for row in data.get("worst", ()):  # JSON has no infinite error
            row.update({name: math.inf for name, value in row.items() if value is None})
        timeline = TypeAdapter(Timeline).validate_json(json.dumps(data))
    except (OSError, ValueError, AttributeError) as error:
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
