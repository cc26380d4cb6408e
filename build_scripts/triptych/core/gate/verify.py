"""`triptych verify`: compare the answers of a served pipeline with the reference.

The limits are those of the accuracy gate.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from triptych.base.errors import Progress, UserError
from triptych.core.gate.answers import reference_answers
from triptych.core.gate.cached import limits_of, overrides_of
from triptych.core.gate.check import (
    WORST_ROWS,
    describe_outputs,
    failure_messages,
    judge_metrics,
)
from triptych.core.gate.live import (
    ALONE,
    WAYS,
    AnswerRules,
    ExpectedAnswer,
    LiveRuns,
    SortedResponses,
    describe_faults,
    differences,
    live_requests,
    refusals,
    run_live,
    same,
    shape_fault,
    sort_responses,
)
from triptych.core.inputs import PipelineInputs
from triptych.core.requests import MIN_RECOMMENDED_ROWS
from triptych.repository.manifest import CompiledManifest, find_manifest
from triptych.repository.records import GateResult, LiveRun, Verdict, WorstRow
from triptych.spec.backends import Precision
from triptych.spec.plan import Plan
from triptych.tasks.accuracy import Tolerance, above_rounding, is_lower_better, is_met
from triptych.tasks.compare import Outputs
from triptych.tasks.labeled import describe_labeled

ANSWER_AGREEMENT = "answers_alike"
"""Ratio of requests whose whole answer is like the reference's. It is measured if no metric of the
task applies to the outputs, for example because hooks changed them."""

MIN_ANSWER_AGREEMENT: Mapping[Tolerance, float] = {"exact": 0.99, "close": 0.95, "quantized": 0.5}
# Hooks that print digits print different digits after any rounding, so quantized cores get 0.5.
_LOOSE = 0.05
"""Maximum difference of answers that count as alike, if the precision sets no limit."""

CORE_LEVEL = ("max_difference", "batch_sensitivity")
CORE_METRICS = ("edge_error",)
"""Metrics of the core's outputs that answers do not show."""

MIN_BATCH = 1.2
"""Minimum mean batch size of the core for a run to show the effect of batches."""


def judge_live(cases: Sequence[ExpectedAnswer], runs: LiveRuns, rules: AnswerRules) -> GateResult:
    """Compare every response, in the order of the cases, with the spec and the reference.

    An answer that cannot be compared is a failure. Each metric has its worst value over all ways of
    sending.
    """
    ways = {way: sort_responses(cases, runs.responses[way], rules) for way in WAYS}
    held = _LiveReference(cases, rules)
    read = {way: held.figures(view) for way, view in ways.items()}
    alone = ways[ALONE].answers
    values = {
        **_worst_values([figures.values for figures in read.values()]),
        "max_difference": held.largest(
            (answer, cases[place].wanted)
            for view in ways.values()
            for place, answer in view.answers.items()
        ),
        "batch_sensitivity": held.largest(
            (answer, alone[place])
            for way, view in ways.items()
            for place, answer in view.answers.items()
            if way != ALONE and place in alone
        ),
    }
    verdicts = _verdicts(values, held.readable, rules)
    failures = [fault for way, view in ways.items() for fault in describe_faults(cases, view, way)]
    agreement = values.get(ANSWER_AGREEMENT, 0.0)
    low = f"only {agreement:.1%} of the answers are like the reference's"
    failures += failure_messages(verdicts, {ANSWER_AGREEMENT: [low]})
    edges = sum(case.edge for case in cases)
    return GateResult(
        precision=rules.precision,
        rows=len(cases) - edges,
        edge_case_rows=edges,
        finite=all(view.finite for view in ways.values()),
        verdicts=verdicts,
        failures=tuple(failures),
        worst=tuple(_worst(ways, read, held)),
        notes=tuple(_notes(cases, runs, rules, held.readable)),
        live=LiveRun(
            by_way={way: figures.values for way, figures in read.items()},
            edge_values=held.figures(ways[ALONE], edge=True).values,
            counts=dict(sum((view.counts for view in ways.values()), Counter())),
        ),
    )


class _Figures(NamedTuple):
    """Metrics of one way of sending, and the error of each row by index of its case."""

    values: Mapping[str, float]
    badness: Mapping[int, float]


class _LiveReference:
    """Cases that answers are compared with.

    Attributes:
        cases: Cases in the order of the requests sent.
        readable: Names of the task's metrics that the answers show. If the reference misses a limit
            against itself, hooks removed the values that the metric needs.
    """

    def __init__(self, cases: Sequence[ExpectedAnswer], rules: AnswerRules) -> None:
        self.cases = cases
        self._rules = rules
        # Differences are relative to the largest number of the reference, if that is above 1.
        self._scales: dict[str, float] = {}
        for case in cases:
            for name, array in case.wanted.items():
                if np.issubdtype(array.dtype, np.floating) and array.size:
                    largest = max(self._scales.get(name, 1.0), float(np.abs(array).max()))
                    self._scales[name] = largest
        rows = [case for case in cases if not case.edge and not case.refusal]
        wanted = [case.wanted for case in rows]
        found = rules.task.compare(wanted, wanted, [case.query for case in rows]).values
        self.readable = tuple(
            name
            for name, value in found.items()
            if name not in rules.limits or is_met(name, value, rules.limits[name])
        )

    def figures(self, view: SortedResponses, *, edge: bool = False) -> _Figures:
        """Return the task's metrics over the rows of the traffic, or over the edge cases."""
        places = [place for place in view.answers if self.cases[place].edge == edge]
        if not places:
            return _Figures({}, {})
        got = [view.answers[place] for place in places]
        wanted = [self.cases[place].wanted for place in places]
        if not self.readable:
            alike = [self._alike(g, w) for g, w in zip(got, wanted, strict=True)]
            badness = {place: float(not same) for place, same in zip(places, alike, strict=True)}
            return _Figures({ANSWER_AGREEMENT: float(np.mean(alike))}, badness)
        queries = [self.cases[place].query for place in places]
        found = self._rules.task.compare(got, wanted, queries)
        values = {name: value for name, value in found.values.items() if name in self.readable}
        return _Figures(values, dict(zip(places, found.badness, strict=True)))

    def _alike(self, got: Outputs, wanted: Outputs) -> bool:
        if shape_fault(got, wanted) or not same(got, wanted):
            return False
        return self.difference(got, wanted) <= self._rules.limits.get("max_difference", _LOOSE)

    def difference(self, one: Outputs, other: Outputs) -> float:
        """Return the largest difference of two answers; infinite if they cannot be compared."""
        if shape_fault(one, other):
            return math.inf
        found = differences(one, other, self._rules.json_outputs)
        scaled = (value / self._scales.get(name, 1.0) for name, value in found.items())
        return float(np.max([0.0, *scaled]))

    def largest(self, pairs: Iterable[tuple[Outputs, Outputs]]) -> float:
        """Return the largest `difference` of any pair; NaN if there are no pairs."""
        found = [self.difference(one, other) for one, other in pairs]
        return float(np.max(found)) if found else math.nan


def _worst_values(ways: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the worst value of each metric over all ways of sending."""
    worst: dict[str, float] = {}
    for values in ways:
        for name, value in values.items():
            pick = max if is_lower_better(name) else min
            worst[name] = pick(worst.get(name, value), value)
    return worst


def _verdicts(
    values: Mapping[str, float], readable: Sequence[str], rules: AnswerRules
) -> tuple[Verdict, ...]:
    judged = [*readable, *(() if rules.hooked else CORE_LEVEL)]
    limits = {name: limit for name, limit in rules.limits.items() if name in judged}
    verdicts = judge_metrics(values, limits, complete=False)
    if readable:
        return verdicts
    value, limit = values.get(ANSWER_AGREEMENT, math.nan), MIN_ANSWER_AGREEMENT[rules.tolerance]
    return (Verdict(ANSWER_AGREEMENT, value, limit, value >= limit), *verdicts)


def _notes(
    cases: Sequence[ExpectedAnswer], runs: LiveRuns, rules: AnswerRules, readable: Sequence[str]
) -> Iterator[str]:
    elsewhere = (*readable, *CORE_LEVEL, *CORE_METRICS)
    skipped = [name for name in rules.limits if name not in elsewhere]
    if skipped:
        yield f"cannot be read off the answers, so not measured: {', '.join(skipped)}"
    if rules.hooked:
        yield (
            f"no limit on {' and '.join(CORE_LEVEL)}: functions of the pipeline's own made the"
            " outputs, and they may round"
        )
    if runs.mean_batch is not None and runs.mean_batch < MIN_BATCH:
        yield (
            f"the core ran {runs.mean_batch:.1f} rows at a time: hardly anything shared a batch,"
            " so that little is known of neighbors; raise --clients"
        )
    rows = sum(not case.edge for case in cases)
    if rows < MIN_RECOMMENDED_ROWS:
        yield f"only {rows} rows of traffic decide: {MIN_RECOMMENDED_ROWS} or more are better"


def _worst(
    ways: Mapping[str, SortedResponses], read: Mapping[str, _Figures], held: _LiveReference
) -> list[WorstRow]:
    rows: dict[int, WorstRow] = {}
    for way, figures in read.items():
        for place, badness in figures.badness.items():
            case, answer = held.cases[place], ways[way].answers[place]
            got = {
                name: answer[name] for name in case.wanted if name in answer
            }  # Keep the order of `wanted`.
            difference = held.difference(got, case.wanted)
            shown = describe_outputs(case.wanted), describe_outputs(got)
            row = WorstRow(case.preview, badness, difference, *shown)
            if place not in rows or _rank(rows[place]) < _rank(row):
                rows[place] = row
    return sorted(rows.values(), key=_rank, reverse=True)[:WORST_ROWS]


def _rank(row: WorstRow) -> tuple[float, float]:
    difference = math.inf if math.isnan(row.difference) else row.difference
    return row.row_error, difference


class ReadyServer(Protocol):
    """Server that is ready for requests."""

    @property
    def grpc_url(self) -> str:
        """``host:port`` of the server's gRPC endpoint."""


@dataclass(frozen=True)
class LiveOptions:
    """Options of the gate on a served pipeline."""

    repository: Path  # folder of the models, whose build manifest has the precision
    server: AbstractContextManager[ReadyServer]  # entered once everything else is ready
    progress: Progress  # receives each stage
    clients: int  # number of requests in flight, if requests are sent concurrently
    timeout_s: float  # deadline of each request in seconds


def verify_pipeline(inputs: PipelineInputs, options: LiveOptions) -> GateResult:
    """Send the gate's requests to the served pipeline and compare with the reference.

    Raises:
        UserError: No server answers, or the server does not serve this pipeline.
    """
    plan, progress, clients = inputs.plan, options.progress, options.clients
    manifest = find_manifest(options.repository, plan.spec.name, CompiledManifest)
    precision = _precision(plan, options.repository, manifest)
    rules = rules_of(inputs, precision, None if manifest is None else manifest.gate.rounding)
    sent = live_requests(plan, inputs.requests)
    progress("verify", f"{len(inputs.requests)} requests in {plan.original} fp32 ...")
    wanted = reference_answers(inputs, progress)
    refused = refusals(plan, inputs.tokenizer_folder, inputs.requests, sent)
    cases = [
        ExpectedAnswer(
            request.preview, request.query, request.edge, answer.outputs, words or answer.refusal
        )
        for request, answer, words in zip(inputs.requests, wanted, refused, strict=True)
    ]
    with options.server as reached:
        endpoint = reached.grpc_url
        started = time.monotonic()
        runs = run_live(
            plan,
            endpoint,
            sent,
            clients=clients,
            timeout_s=options.timeout_s,
            progress=lambda line: progress("verify", line),
        )
        seconds = time.monotonic() - started
    found = judge_live(cases, runs, rules)
    counts = {} if found.live is None else found.live.counts
    outcomes = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    batch = "" if runs.mean_batch is None else f", {runs.mean_batch:.1f} rows a batch"
    live = replace(
        found.live or LiveRun(),
        pipeline=plan.spec.name,
        url=endpoint,
        clients=clients,
        mean_batch=runs.mean_batch,
        seconds=seconds,
        sent=(
            f"{found.rows} rows of the traffic and {found.edge_case_rows} edge-case rows: "
            f"{outcomes}",
            f"each sent alone and twice with others ({clients} at a time{batch}), in "
            f"{seconds:.1f} s",
        ),
    )
    return replace(found, live=live, accepted="" if manifest is None else manifest.gate.accepted)


def verification_data(result: GateResult) -> dict[str, object]:
    """Return a live result as plain data for ``verify --json``, in one form for every kind."""
    gate = {**result.as_dict(), "accepted": result.accepted}
    live = gate.pop("live") or {}
    del live["sent"]
    return {**live, **gate, "passed": result.passed, "gate": gate}


def rules_of(inputs: PipelineInputs, precision: Precision, rounding: float | None) -> AnswerRules:
    """Return the rules that the answers of a build must meet.

    Args:
        precision: Precision of the core that was built.
        rounding: PyTorch's rounding, see `GateResult`; None if unknown.
    """
    plan = inputs.plan
    return AnswerRules(
        task=plan.task,
        precision=precision,
        limits=above_rounding(limits_of(inputs, precision), rounding, overrides_of(inputs)),
        hooked=plan.spec.makes_outputs or inputs.find_hook("after") is not None,
    )


def _precision(plan: Plan, repository: Path, manifest: CompiledManifest | None) -> Precision:
    """Return the precision of the core that was built; without a build, that of the spec.

    Raises:
        UserError: Nothing is built, and the spec leaves the precision to the build.
    """
    spec = plan.spec
    precision = spec.core.precision if manifest is None else manifest.gate.precision
    if precision == "auto":
        raise UserError(
            "core.precision",
            "is not known, so there are no limits to compare answers with",
            given=f"{precision}, and no build of {spec.name} in {repository}",
            remedy="Name the repository with --repository, or write --set core.precision=int8",
        )
    return precision


def describe_verification(result: GateResult) -> Iterator[tuple[str, str]]:
    """Yield the lines that show a live result, each with its color or text style."""
    live = result.live or LiveRun()
    yield f"{live.pipeline} at {live.url}, with the limits of {result.precision}", "bold"
    for verdict in result.verdicts:
        value = "-" if math.isnan(verdict.value) else f"{verdict.value:.7g}"
        limit = "" if verdict.limit is None else f"limit {verdict.limit:g}"
        state = "ok" if verdict.passed else "FAILED"
        line = f"  {verdict.metric:28} {value:>12}  {limit:16} {state if limit else ''}".rstrip()
        yield line, "" if verdict.passed else "red"
    for line in live.sent:
        yield f"  {line}", ""
    if result.labeled is not None:
        failed = "red" if result.labeled.failure else ""
        yield f"  {describe_labeled(result.labeled)}", failed
    if result.accepted:
        yield f"  note: built although the gate failed, since: {result.accepted}", "yellow"
    for note in result.notes:
        yield f"  note: {note}", "yellow"
    if result.failures:
        yield "rows with the largest error:", "bold"
        for row in result.worst:
            yield f"  {row.preview!r}  (difference {row.difference:.3g})", ""
            yield f"    expected {row.expected}", ""
            yield f"    actual   {row.actual}", ""
    for failure in result.failures:
        yield f"failed: {failure}", "red"
    if not result.failures:
        yield "passed", "green"
