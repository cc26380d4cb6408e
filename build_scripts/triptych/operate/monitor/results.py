"""Results of a monitoring run: category distributions, tests, alarms, drifts, and their text."""

from __future__ import annotations

import json
import math
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from triptych.base.cache import sha256_of
from triptych.base.tensors import TokenRow
from triptych.core.inputs import PipelineInputs
from triptych.core.requests import GateRequest
from triptych.operate.monitor.sample import SampledRow, TrafficSample
from triptych.operate.monitor.scores import MetricValue, is_worse
from triptych.operate.monitor.sequential import SequentialEvidence
from triptych.operate.tune.drift import Drift, format_drift
from triptych.repository.manifest import EncoderManifest
from triptych.repository.records import plain_data
from triptych.runtime.hooking import HOOKS_FILE
from triptych.spec.spec import SPEC_FILE
from triptych.spec.tasks.compare import Outputs, texts
from triptych.spec.tuned import TUNED_FILE

SIGNIFICANCE = 1e-6
"""Significance level of each drift test: 1,000 runs find false drift with probability 0.001."""

MIN_EXPECTED = 5.0
"""Minimum expected number of rows of a category in each sample; rarer categories are pooled."""

MAX_LETTERS = 400
NONE = "(none)"


@dataclass(frozen=True)
class CategoryDistribution:
    """Distribution of a category in the gate's requests and in the sample.

    Attributes:
        kind: Name of the category: ``labels`` or ``scripts``.
        before: Number of rows of the gate's requests, by category.
        now: Number of sampled rows, by category.
        p_value: Probability of a difference this large between two samples of one distribution.
    """

    kind: str
    before: Mapping[str, int]
    now: Mapping[str, int]
    p_value: float

    @property
    def drifted(self) -> bool:
        return self.p_value < SIGNIFICANCE

    @property
    def largest(self) -> str:
        """Text about the category whose share changed most."""
        before, now = sum(self.before.values()), sum(self.now.values())
        shares = {
            name: (self.before.get(name, 0) / before, self.now.get(name, 0) / now)
            for name in {**self.before, **self.now}
        }
        name = max(sorted(shares), key=lambda each: abs(shares[each][1] - shares[each][0]))
        return f"{name} from {shares[name][0]:.0%} to {shares[name][1]:.0%}"


def compare_distributions(
    kind: str, before: Sequence[str], now: Sequence[str]
) -> CategoryDistribution | None:
    """Return the distribution of `kind` in both samples; None if a sample has no rows."""
    if not before or not now:
        return None
    old, new = Counter(before), Counter(now)
    return CategoryDistribution(
        kind, dict(old.most_common()), dict(new.most_common()), _p_value(old, new)
    )


def _p_value(old: Counter[str], new: Counter[str]) -> float:
    """Return the p-value of Pearson's chi-square test, after Wilson and Hilferty (1931)."""
    rows = old.total(), new.total()
    every = sum(rows)
    cells: list[tuple[int, int]] = []
    rest = (0, 0)
    for name in {**old, **new}:
        pair = old[name], new[name]
        if min(rows) * sum(pair) / every < MIN_EXPECTED:
            rest = rest[0] + pair[0], rest[1] + pair[1]
        else:
            cells.append(pair)
    if sum(rest):
        cells.append(rest)
    freedom = len(cells) - 1
    if not freedom:
        return 1.0
    square = sum(
        (count - total * sum(pair) / every) ** 2 / (total * sum(pair) / every)
        for pair in cells
        for count, total in zip(pair, rows, strict=True)
    )
    spread = 2 / (9 * freedom)
    return 0.5 * math.erfc(((square / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(2 * spread))


def main_script(inputs: Mapping[str, str | bytes]) -> str:
    """Return the most frequent script of a request's letters: ``LATIN``, ``CYRILLIC``, ``CJK``."""
    text = " ".join(value for value in inputs.values() if isinstance(value, str))
    letters = [char for char in text[: 4 * MAX_LETTERS] if char.isalpha()][:MAX_LETTERS]
    names = Counter(unicodedata.name(char, NONE).partition(" ")[0] for char in letters)
    return names.most_common(1)[0][0] if names else NONE


def first_label(outputs: Outputs) -> str | None:
    """Return an answer's first label or the label of its first entity; None without either."""
    if labels := texts(outputs, "label"):
        return labels[0] or NONE
    if entities := texts(outputs, "entities"):
        try:
            return str(json.loads(entities[0])[0]["entity"])
        except (ValueError, LookupError, TypeError):
            return NONE
    return None


@dataclass(frozen=True)
class ComparedRow:
    """A sampled row, its request, and the reference's answer."""

    row: SampledRow
    request: GateRequest
    expected: Outputs

    @property
    def tokens(self) -> int:
        return sum(len(row.ids) for row in self.request.rows if isinstance(row, TokenRow))


@dataclass(frozen=True)
class RowGroup:
    """Rows of similar length or with the same label.

    Attributes:
        kind: ``tokens`` or ``label``.
        loss: Mean loss of the first test, from 0 (correct) to 1.
        low: Lower bound of the loss's 95 % confidence interval.
        high: Upper bound of that interval.
    """

    kind: str
    name: str
    rows: int
    loss: float
    low: float
    high: float


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
class MeanTest:
    """Sequential test of one mean loss over all monitoring runs of this build.

    Attributes:
        name: A metric, or a test of `scores`.
        allowed: Maximum mean loss of a correct pipeline.
        mean: Mean loss of all rows; None before the first row.
        rows: Number of rows since the build.
        evidence: Highest evidence against a mean of at most `allowed`, as a power of ten.
        needed: Evidence that raises an alarm, as a power of ten.
        alarm_row: Number of the row, from 1, that raised the alarm; None without an alarm.
    """

    name: str
    allowed: float
    mean: float | None
    rows: int
    evidence: float
    needed: float
    alarm_row: int | None

    @property
    def alarmed(self) -> bool:
        return self.alarm_row is not None


@dataclass(frozen=True)
class MonitorRun:
    """Results of one monitoring run.

    Attributes:
        at: Unix time of the run, in seconds.
        build: Id of the active build.
        rows: Number of rows compared with the reference.
        redacted: Number of rows that `redact` changed. Only lengths and distributions use them.
        others: Number of excluded rows, which other builds answered.
        refused: Number of answered rows that the pipeline now refuses.
        damaged: Number of lines that could not be read.
        alarms: Texts about wrong answers; empty if all answers are correct.
        drifts: Texts about drifted lengths and distributions.
        notes: Further texts for the user.
    """

    pipeline: str
    at: float
    build: str
    precision: str
    rows: int
    redacted: int
    others: int
    refused: int
    damaged: int
    metrics: tuple[MetricValue, ...]
    tests: tuple[MeanTest, ...]
    groups: tuple[RowGroup, ...]
    worst: tuple[LargeErrorRow, ...]
    drift: Drift | None
    distributions: tuple[CategoryDistribution, ...]
    alarms: tuple[str, ...]
    drifts: tuple[str, ...]
    notes: tuple[str, ...]
    evidence: Mapping[str, SequentialEvidence] = field(default_factory=dict, repr=False)

    @property
    def passed(self) -> bool:
        """Whether the run raised no alarm and found no drift."""
        return not (self.alarms or self.drifts)

    def as_dict(self) -> dict[str, Any]:
        """Return the data for ``--json``; values that are not finite are null."""
        fields = asdict(replace(self, drift=None, evidence={}))
        del fields["evidence"]
        fields["drift"] = None if self.drift is None else self.drift.as_dict()
        fields["passed"] = self.passed
        plain: dict[str, Any] = plain_data(fields)
        return plain


def find_drifts(
    drift: Drift | None, distributions: Sequence[CategoryDistribution]
) -> Iterator[str]:
    if drift is not None and (drift.drifted or drift.action != "keep"):
        yield (
            f"lengths: {drift.now.mean_tokens:.1f} tokens on average, built for"
            f" {drift.before.mean_tokens:.1f}; {drift.action}: {drift.reason}"
        )
    for distribution in distributions:
        if distribution.drifted:
            yield f"{distribution.kind}: {distribution.largest}"


def make_notes(
    inputs: PipelineInputs,
    lock: EncoderManifest,
    sample: TrafficSample,
    own: int,
    mine: int,
    chosen: int,
) -> Iterator[str]:
    if not sample.rows:
        yield "no new rows: the answers since the last run were not checked"
    elif not own:
        yield "other builds than the active one answered all rows"
    if mine < own:
        yield f"excluded: {own - mine} rows with the input of the health check"
    if chosen < mine:
        yield f"{chosen} of {mine} rows were compared, evenly spaced"
    for edit in list_edits(inputs, lock):
        yield f"{edit} since the build: these results are for the pipeline as it is now"


def hooks_differ(inputs: PipelineInputs, lock: EncoderManifest) -> bool:
    """Return whether the pipeline's hooks were edited after the build."""
    built = lock.files.get(f"{inputs.plan.spec.name}_preprocess/1/{HOOKS_FILE}")
    file = inputs.plan.spec.folder / HOOKS_FILE
    return (sha256_of(file) if file.is_file() else None) != built


def list_edits(inputs: PipelineInputs, lock: EncoderManifest) -> Iterator[str]:
    """Yield text about each part of the pipeline, except traffic, edited after the build."""
    if lock.model_sha256 != inputs.plan.facts.sha256:
        yield "the model's files changed"
    if hooks_differ(inputs, lock):
        yield f"{HOOKS_FILE} changed"
    own, built = (
        spec.model_dump(mode="json", exclude={"folder"}) for spec in (inputs.plan.spec, lock.spec)
    )
    if own != built:
        yield f"{SPEC_FILE} or {TUNED_FILE} changed"


def find_changed_files(repository: Path, lock: EncoderManifest) -> list[str]:
    """Return the repository's files that were edited or deleted after the build."""
    return [
        name
        for name, digest in lock.files.items()
        if not (repository / name).is_file() or sha256_of(repository / name) != digest
    ]


def find_alarms(
    run: MonitorRun, changed: Sequence[str], rows: Sequence[ComparedRow]
) -> Iterator[str]:
    for test in run.tests:
        if test.alarmed and test.mean is not None:
            yield (
                f"{test.name}: the mean loss is {test.mean:.4g} over {test.rows} rows,"
                f" the limit is {test.allowed:.2g} (evidence 10^{test.evidence:.1f},"
                f" alarm from 10^{test.needed:.1f}, raised at row {test.alarm_row})"
            )
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        yield f"changed since the build: {', '.join(changed[:3])}{more}"
    if any(test.alarmed for test in run.tests) and (renamed := _describe_renamed(rows)):
        yield f"labels were renamed: {renamed}"


def _describe_renamed(rows: Sequence[ComparedRow]) -> str:
    """Return text about renamed labels; empty if renaming does not explain the errors."""
    names: dict[str, set[str]] = {}
    for row in rows:
        right, mine = first_label(row.expected), first_label(row.row.answer)
        if right is not None and mine is not None:
            names.setdefault(right, set()).add(mine)
    other = {right: next(iter(mine)) for right, mine in names.items() if len(mine) == 1}
    drifted = {right: mine for right, mine in other.items() if right != mine}
    if len(other) < len(names) or not drifted or len(set(other.values())) < len(other):
        return ""
    return ", ".join(f"{right} is now {mine}" for right, mine in sorted(drifted.items())[:4])


def format_run(run: MonitorRun) -> Iterator[tuple[str, str]]:
    """Yield the lines of a run, each with its style."""
    left = f", {run.redacted} more were redacted" if run.redacted else ""
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
    if run.drift is not None and run.drift.proposal is not None:
        yield f"build the proposal with these rows: triptych monitor {run.pipeline} --apply", ""
    if run.passed:
        yield "no alarms, no drift", "green"


def _format_requests(run: MonitorRun) -> Iterator[tuple[str, str]]:
    if run.drift is not None:
        for line, style in format_drift(run.drift):
            yield f"  {line}", style
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
        yield f"  {row.location}, {row.tokens} tokens: {errors}", ""
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
        f" (limit {test.allowed:.2g}), evidence 10^{test.evidence:.1f},"
        f" alarm from 10^{test.needed:.1f}"
    )
