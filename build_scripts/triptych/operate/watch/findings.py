"""What one look found, as types.

Whether requests are of another kind than those that a pipeline was built for.

What a look calls for: alarms, drifts and notes, in words.

A look in lines of text.
"""

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
from triptych.core.samples import GateRequest
from triptych.operate.tune.drift import Drift, describe_drift
from triptych.operate.watch.sample import Sample, SampledRow
from triptych.operate.watch.scores import Figure, is_worse
from triptych.operate.watch.sequential import Evidence
from triptych.repository.lock import Lock
from triptych.repository.records import plain_data
from triptych.runtime.hooking import HOOKS_FILE
from triptych.spec.spec import SPEC_FILE
from triptych.spec.tasks.compare import Outputs, texts
from triptych.spec.tuned import TUNED_FILE

CHANCE = 1e-6
"""How often two samples of one mix may be called different: over 1,000 looks, once in 1,000."""

MIN_EXPECTED = 5.0
"""Categories of which fewer rows are expected on a side are taken together."""

MAX_LETTERS = 400
NONE = "(none)"


@dataclass(frozen=True)
class Mix:
    """Shares of categories then and now.

    Attributes:
        kind: what is counted.
        before: rows by category, of the gate's requests.
        now: of the sample.
        chance: of a difference like this in two samples of one mix.
    """

    kind: str
    before: Mapping[str, int]
    now: Mapping[str, int]
    chance: float

    @property
    def moved(self) -> bool:
        return self.chance < CHANCE

    @property
    def largest(self) -> str:
        """The category whose share changed most, in words."""
        before, now = sum(self.before.values()), sum(self.now.values())
        shares = {
            name: (self.before.get(name, 0) / before, self.now.get(name, 0) / now)
            for name in {**self.before, **self.now}
        }
        name = max(sorted(shares), key=lambda one: abs(shares[one][1] - shares[one][0]))
        return f"{name} from {shares[name][0]:.0%} to {shares[name][1]:.0%}"


def compare_mixes(kind: str, before: Sequence[str], now: Sequence[str]) -> Mix | None:
    """The mix of `kind` on both sides; None where a side has no rows."""
    if not before or not now:
        return None
    old, new = Counter(before), Counter(now)
    return Mix(kind, dict(old.most_common()), dict(new.most_common()), _chance(old, new))


def _chance(old: Counter[str], new: Counter[str]) -> float:
    """Of Pearson's chi-square of two samples, by Wilson and Hilferty's approximation (1931)."""
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


def script_of(inputs: Mapping[str, str | bytes]) -> str:
    """The script that most letters of a request are of: ``LATIN``, ``CYRILLIC``, ``CJK``."""
    text = " ".join(value for value in inputs.values() if isinstance(value, str))
    letters = [char for char in text[: 4 * MAX_LETTERS] if char.isalpha()][:MAX_LETTERS]
    names = Counter(unicodedata.name(char, NONE).partition(" ")[0] for char in letters)
    return names.most_common(1)[0][0] if names else NONE


def label_of(outputs: Outputs) -> str | None:
    """The first label of an answer, or the label of its first entity; None where there are none."""
    if labels := texts(outputs, "label"):
        return labels[0] or NONE
    if found := texts(outputs, "entities"):
        try:
            return str(json.loads(found[0])[0]["entity"])
        except (ValueError, LookupError, TypeError):
            return NONE
    return None


@dataclass(frozen=True)
class Held:
    """A row with the request that it makes, and what the reference answers."""

    row: SampledRow
    request: GateRequest
    wanted: Outputs

    @property
    def tokens(self) -> int:
        return sum(len(row.ids) for row in self.request.rows if isinstance(row, TokenRow))


@dataclass(frozen=True)
class Group:
    """Rows that have something in common.

    Attributes:
        kind: ``tokens`` or ``label``.
        loss: mean of the first test's losses; 0 where all is right.
        low: end of its 95 % confidence interval.
        high: the other end.
    """

    kind: str
    name: str
    rows: int
    loss: float
    low: float
    high: float


@dataclass(frozen=True)
class Worst:
    """A row far from the reference; texts only where they were asked for."""

    place: str
    tokens: int
    badness: float
    difference: float
    shown: str = ""
    wanted: str = ""
    got: str = ""


@dataclass(frozen=True)
class MeanTest:
    """What all looks at this build tell of one mean.

    Attributes:
        name: a metric, or what `scores` calls it.
        allowed: mean loss that is still right.
        mean: of all rows so far; None before the first.
        rows: so far.
        evidence: factor by which what was seen is likelier with more loss than is allowed, at its
            highest, as a power of ten.
        needed: where it is an alarm, likewise.
        alarm_row: the row of the build, from 1, since which it is one; None where it is none.
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
class Look:
    """What one look found.

    Attributes:
        at: seconds since 1970.
        build: id of the build that is in the repository.
        rows: held against the reference.
        redacted: rows that `redact` changed: they count for lengths and mixes alone.
        others: rows of other builds, left out.
        refused: rows that were answered although the pipeline as it is here refuses them.
        damaged: lines that could not be read.
        alarms: what is wrong, in words; empty where all is well.
        drifts: what moved, in words.
        notes: what else a user should know.
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
    figures: tuple[Figure, ...]
    tests: tuple[MeanTest, ...]
    groups: tuple[Group, ...]
    worst: tuple[Worst, ...]
    drift: Drift | None
    mixes: tuple[Mix, ...]
    alarms: tuple[str, ...]
    drifts: tuple[str, ...]
    notes: tuple[str, ...]
    evidence: Mapping[str, Evidence] = field(default_factory=dict, repr=False)

    @property
    def passed(self) -> bool:
        """Whether nothing calls for anybody."""
        return not (self.alarms or self.drifts)

    def as_dict(self) -> dict[str, Any]:
        """For ``--json`` and the timeline; what is no number is null."""
        fields = asdict(replace(self, drift=None, evidence={}))
        del fields["evidence"]
        fields["drift"] = None if self.drift is None else self.drift.as_dict()
        fields["passed"] = self.passed
        plain: dict[str, Any] = plain_data(fields)
        return plain


def drifts_in(drift: Drift | None, mixes: Sequence[Mix]) -> Iterator[str]:
    if drift is not None and (drift.drifted or drift.action != "keep"):
        yield (
            f"lengths: {drift.now.mean_tokens:.1f} tokens on average, built for"
            f" {drift.before.mean_tokens:.1f}; {drift.action}: {drift.reason}"
        )
    for mix in mixes:
        if mix.moved:
            yield f"{mix.kind}: {mix.largest}"


def notes_on(
    inputs: PipelineInputs,
    lock: Lock,
    sample: Sample,
    own: int,
    mine: int,
    chosen: int,
) -> Iterator[str]:
    if not sample.rows:
        yield "no new rows: nothing is said of the answers since the last look"
    elif not own:
        yield "all rows were answered by other builds than the one in the repository"
    if mine < own:
        yield f"left out: {own - mine} rows that are the health check's question"
    if chosen < mine:
        yield f"of {mine} rows, {chosen} evenly spread ones were compared"
    for what in edits_since(inputs, lock):
        yield f"{what} not as built: what is said here is of the pipeline as it is now"


def hooks_differ(inputs: PipelineInputs, lock: Lock) -> bool:
    """Whether a build has other functions of the pipeline's own than the pipeline has now."""
    built = lock.files.get(f"{inputs.plan.spec.name}_preprocess/1/{HOOKS_FILE}")
    file = inputs.plan.spec.folder / HOOKS_FILE
    return (sha256_of(file) if file.is_file() else None) != built


def edits_since(inputs: PipelineInputs, lock: Lock) -> Iterator[str]:
    """What of the pipeline, but for its traffic, is not as it was built, with the verb."""
    if lock.model_sha256 != inputs.plan.facts.sha256:
        yield "the model's files are"
    if hooks_differ(inputs, lock):
        yield f"{HOOKS_FILE} is"
    own, built = (
        spec.model_dump(mode="json", exclude={"folder"}) for spec in (inputs.plan.spec, lock.spec)
    )
    if own != built:
        yield f"{SPEC_FILE} or {TUNED_FILE} is"


def changed_files(repository: Path, lock: Lock) -> list[str]:
    """Files of the repository that are not as they were built."""
    return [
        name
        for name, digest in lock.files.items()
        if not (repository / name).is_file() or sha256_of(repository / name) != digest
    ]


def alarms_in(look: Look, changed: Sequence[str], held: Sequence[Held]) -> Iterator[str]:
    for test in look.tests:
        if test.alarmed and test.mean is not None:
            yield (
                f"{test.name}: the mean loss is {test.mean:.4g} over {test.rows} rows,"
                f" {test.allowed:.2g} is allowed (evidence 10^{test.evidence:.1f},"
                f" needed 10^{test.needed:.1f}, since row {test.alarm_row})"
            )
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        yield f"not as it was built: {', '.join(changed[:3])}{more}"
    if any(test.alarmed for test in look.tests) and (renamed := _renamed(held)):
        yield f"labels go by other names: {renamed}"


def _renamed(held: Sequence[Held]) -> str:
    """Labels that are always called otherwise, in words; empty where that does not explain it."""
    names: dict[str, set[str]] = {}
    for one in held:
        right, mine = label_of(one.wanted), label_of(one.row.answer)
        if right is not None and mine is not None:
            names.setdefault(right, set()).add(mine)
    other = {right: next(iter(mine)) for right, mine in names.items() if len(mine) == 1}
    moved = {right: mine for right, mine in other.items() if right != mine}
    if len(other) < len(names) or not moved or len(set(other.values())) < len(other):
        return ""
    return ", ".join(f"{right} is {mine}" for right, mine in sorted(moved.items())[:4])


def describe_look(look: Look) -> Iterator[tuple[str, str]]:
    """The lines that show it, each with its style."""
    left = f", {look.redacted} more were redacted" if look.redacted else ""
    yield f"{look.pipeline}, {look.precision}: {look.rows} new rows compared{left}", "bold"
    for figure in look.figures:
        yield describe_figure(figure), "red" if is_worse(figure) else ""
    for test in look.tests:
        yield describe_test(test), "red" if test.alarmed else ""
    for group in look.groups:
        interval = f"{group.low:.4f} to {group.high:.4f}"
        yield (
            f"  {group.kind} {group.name}: {group.rows} rows, loss {group.loss:.4f} ({interval})",
            "",
        )
    yield from _describe_requests(look)
    if not look.passed:
        yield from _describe_worst(look)
    for alarm in look.alarms:
        yield f"alarm: {alarm}", "red"
    for drift in look.drifts:
        yield f"drift: {drift}", "yellow"
    if look.drift is not None and look.drift.proposal is not None:
        yield f"build what is proposed with these rows: triptych watch {look.pipeline} --apply", ""
    if look.passed:
        yield "all is well", "green"


def _describe_requests(look: Look) -> Iterator[tuple[str, str]]:
    if look.drift is not None:
        for line, style in describe_drift(look.drift):
            yield f"  {line}", style
    for mix in look.mixes:
        yield f"  {mix.kind}: {mix.largest}", "yellow" if mix.moved else ""
    for note in look.notes:
        yield f"  note: {note}", "yellow"
    if look.refused:
        yield f"  {look.refused} rows were answered that the pipeline now refuses", "yellow"


def _describe_worst(look: Look) -> Iterator[tuple[str, str]]:
    yield "rows furthest from the reference:", "bold"
    for row in look.worst:
        figures = f"badness {row.badness:.3g}, difference {row.difference:.3g}"
        yield f"  {row.place}, {row.tokens} tokens: {figures}", ""
        if row.shown:
            yield f"    {row.shown!r}", ""
            yield f"    wanted {row.wanted}", ""
            yield f"    got    {row.got}", ""


def describe_figure(figure: Figure) -> str:
    """A metric in a line."""
    interval = "" if figure.low is None else f"({figure.low:.6g} to {figure.high:.6g})"
    limit = "" if figure.limit is None else f"limit {figure.limit:g}"
    built = "" if figure.built is None else f"built with {figure.built:.6g}"
    return f"  {figure.metric:28} {figure.value:>10.6g} {interval:24} {limit:14} {built}".rstrip()


def describe_test(test: MeanTest) -> str:
    """A test in a line."""
    mean = "-" if test.mean is None else f"{test.mean:.4g}"
    evidence = f"evidence 10^{test.evidence:.1f} of 10^{test.needed:.1f}"
    return (
        f"  since the build, {test.rows} rows: {test.name} loses {mean}"
        f" ({test.allowed:.2g} are allowed), {evidence}"
    )
