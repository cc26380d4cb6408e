"""Findings of a monitoring run: changed categories, alarms, drifts, and edits since the build."""

from __future__ import annotations

import json
import math
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from triptych.base.cache import sha256_of
from triptych.base.formatting import amount
from triptych.base.tensors import TokenRow
from triptych.core.inputs import PipelineInputs
from triptych.core.requests import GateRequest
from triptych.operate.monitor.sample import SampledRow, TrafficSample
from triptych.operate.monitor.scores import MeanTest
from triptych.repository.manifest import CompiledManifest
from triptych.runtime.hooking import HOOKS_FILE
from triptych.spec.padded_lengths import bucket_of
from triptych.spec.plan import Plan
from triptych.spec.spec import SPEC_FILE
from triptych.spec.traffic import Lengths
from triptych.spec.tuned import TUNED_FILE
from triptych.tasks.compare import Outputs, texts

SIGNIFICANCE = 1e-6
"""Significance level of each drift test: 1,000 runs find false drift with probability 0.001."""

MIN_EXPECTED = 5.0
"""Minimum expected number of rows of a category in each sample; rarer categories are pooled."""

MAX_LETTERS = 400
NONE = "(none)"


@dataclass(frozen=True)
class RowLengths:
    """Summary of the tokens of rows."""

    rows: int
    mean: float
    p99: int
    at_limit: float  # share of rows with the maximum length, which are truncated or just fit


@dataclass(frozen=True)
class LengthChange:
    """Lengths of the rows of the build's traffic and of the sample."""

    before: RowLengths
    now: RowLengths
    computed: float  # Tokens that the core computes for a row, with padding, relative to the build
    distance: float  # Largest difference of the two distributions (Kolmogorov-Smirnov), 0 to 1
    # Distance that two samples of one distribution exceed with a probability of `SIGNIFICANCE`.
    critical: float

    @property
    def drifted(self) -> bool:
        return self.distance > self.critical

    def __str__(self) -> str:
        """Return the size of the change as text."""
        now, before = self.now, self.before
        return (
            f"{now.mean:.1f} tokens on average (built for {before.mean:.1f}),"
            f" p99 {now.p99} ({before.p99}), {now.at_limit:.1%} of the rows at the limit"
            f" ({before.at_limit:.1%}); a row computes {self.computed:.2f} times as many"
        )


def compare_lengths(plan: Plan, now: Lengths) -> LengthChange | None:
    """Return the change of the lengths since the build; None for rows without lengths."""
    before = plan.lengths
    if before is None:
        return None
    places = np.array(sorted({*before.counts, *now.counts}))
    rows = before.rows, now.rows
    # The formula is for large samples, and conservative for ties and for small samples.
    scale = math.sqrt(-math.log(SIGNIFICANCE / 2) / 2)
    return LengthChange(
        before=_summarize(before, plan.max_length),
        now=_summarize(now, plan.max_length),
        computed=_computed_tokens(now, plan) / _computed_tokens(before, plan),
        distance=float(np.abs(_share_up_to(before, places) - _share_up_to(now, places)).max()),
        critical=min(1.0, scale * math.sqrt(sum(rows) / math.prod(rows))),
    )


def _summarize(lengths: Lengths, max_length: int) -> RowLengths:
    at_limit = lengths.counts.get(max_length, 0) / lengths.rows
    return RowLengths(lengths.rows, lengths.mean, lengths.quantile(0.99), at_limit)


def _computed_tokens(lengths: Lengths, plan: Plan) -> float:
    """Return the mean tokens that the core computes for a row, with padding if there is any."""
    if not plan.bucket_edges:
        return max(lengths.mean, 1.0)
    padded = (bucket_of(length, plan.bucket_edges) * n for length, n in lengths.counts.items())
    return sum(padded) / lengths.rows


def _share_up_to(lengths: Lengths, places: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the share of rows with at most each of some lengths, which are ascending."""
    counts = np.array([lengths.counts.get(place, 0) for place in places.tolist()])
    found: NDArray[np.float64] = counts.cumsum() / lengths.rows
    return found


@dataclass(frozen=True)
class CategoryDistribution:
    """Distribution of a category in the gate's requests and in the sample."""

    kind: str  # Name of the category: ``labels`` or ``scripts``
    before: Mapping[str, int]  # Number of rows of the gate's requests, by category
    now: Mapping[str, int]  # Number of sampled rows, by category
    p_value: float  # Probability of a difference this large between two samples of one distribution

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
    def lengths(self) -> list[int]:
        """Number of tokens of each model row; empty for images."""
        return [len(row.ids) for row in self.request.rows if isinstance(row, TokenRow)]


def find_drifts(
    lengths: LengthChange | None, distributions: Sequence[CategoryDistribution]
) -> Iterator[str]:
    if lengths is not None and lengths.drifted:
        yield f"lengths changed: {lengths}"
    for distribution in distributions:
        if distribution.drifted:
            yield f"{distribution.kind}: {distribution.largest}"


def make_notes(
    inputs: PipelineInputs,
    manifest: CompiledManifest,
    sample: TrafficSample,
    *,
    of_build: int,
    of_users: int,
    compared: int,
) -> Iterator[str]:
    """Yield notes on damaged files, excluded rows and edits.

    Args:
        of_build: Number of rows that the active build answered.
        of_users: Number of those rows without the health check's.
        compared: Number of those rows that were compared.
    """
    if sample.damaged:
        yield f"{amount(sample.damaged, 'line')} of the sample cannot be read"
    if not sample.rows:
        yield "no new rows: the answers since the last run were not checked"
    elif not of_build:
        yield "other builds than the active one answered all rows"
    if of_users < of_build:
        yield f"excluded: {of_build - of_users} rows with the input of the health check"
    if compared < of_users:
        yield f"{compared} of {of_users} rows were compared, evenly spaced"
    for edit in list_edits(inputs, manifest):
        yield f"{edit} since the build: these results are for the pipeline as it is now"


def hooks_differ(inputs: PipelineInputs, manifest: CompiledManifest) -> bool:
    """Return whether the pipeline's hooks were edited after the build."""
    built = manifest.files.get(f"{inputs.plan.spec.name}_preprocess/1/{HOOKS_FILE}")
    file = inputs.plan.spec.folder / HOOKS_FILE
    return (sha256_of(file) if file.is_file() else None) != built


def list_edits(inputs: PipelineInputs, manifest: CompiledManifest) -> Iterator[str]:
    """Yield text about each part of the pipeline, except traffic, edited after the build."""
    if manifest.model_sha256 != inputs.plan.info.sha256:
        yield "the model's files changed"
    if hooks_differ(inputs, manifest):
        yield f"{HOOKS_FILE} changed"
    own, built = (
        spec.model_dump(mode="json", exclude={"folder"})
        for spec in (inputs.plan.spec, manifest.spec)
    )
    if own != built:
        yield f"{SPEC_FILE} or {TUNED_FILE} changed"


def find_changed_files(repository: Path, manifest: CompiledManifest) -> list[str]:
    """Return the repository's files that were edited or deleted after the build."""
    return [
        name
        for name, digest in manifest.files.items()
        if not (repository / name).is_file() or sha256_of(repository / name) != digest
    ]


def find_alarms(
    tests: Sequence[MeanTest], changed: Sequence[str], rows: Sequence[ComparedRow]
) -> Iterator[str]:
    for test in tests:
        if test.alarmed and test.mean is not None:
            yield (
                f"{test.name}: the mean loss is {test.mean:.4g} over {test.rows} rows,"
                f" the limit is {test.allowed:.2g} (evidence 10^{test.evidence:.1f},"
                f" alarm from 10^{test.needed:.1f}, raised at row {test.alarm_row})"
            )
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        yield f"changed since the build: {', '.join(changed[:3])}{more}"
    if any(test.alarmed for test in tests) and (renamed := _describe_renamed(rows)):
        yield f"labels were renamed: {renamed}"


def _describe_renamed(rows: Sequence[ComparedRow]) -> str:
    """Return text about renamed labels; empty if renaming does not explain the errors."""
    actual_by_expected: dict[str, set[str]] = {}
    for row in rows:
        expected, actual = first_label(row.expected), first_label(row.row.answer)
        if expected is not None and actual is not None:
            actual_by_expected.setdefault(expected, set()).add(actual)
    renamed = {old: new.pop() for old, new in actual_by_expected.items() if len(new) == 1}
    is_one_to_one = len(set(renamed.values())) == len(renamed) == len(actual_by_expected)
    changed = {old: new for old, new in renamed.items() if old != new}
    if not is_one_to_one:
        return ""
    return ", ".join(f"{old} is now {new}" for old, new in sorted(changed.items())[:4])
