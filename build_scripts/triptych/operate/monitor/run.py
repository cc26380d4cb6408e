"""One monitoring run: compare the new sampled rows of a pipeline with the original model."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from triptych.base.errors import Progress
from triptych.core.gate.answers import reference_answers
from triptych.core.gate.check import describe_outputs
from triptych.core.gate.verify import rules_of
from triptych.core.inputs import PipelineInputs
from triptych.core.reader import RequestReader
from triptych.core.requests import GateRequest, preview_text
from triptych.operate.monitor.findings import (
    NONE,
    CategoryDistribution,
    ComparedRow,
    compare_distributions,
    compare_lengths,
    find_alarms,
    find_changed_files,
    find_drifts,
    first_label,
    main_script,
    make_notes,
)
from triptych.operate.monitor.results import LargeErrorRow, MonitorRun, RowGroup
from triptych.operate.monitor.sample import (
    SampledRow,
    TrafficSample,
    answer_requests,
    exclude_health_checks,
    make_reader,
    read_requests,
    take_evenly,
)
from triptych.operate.monitor.scores import (
    LossTests,
    MeanTest,
    RowScore,
    SequentialEvidence,
    choose_tests,
    compute_metrics,
    full_loss,
    mean_interval,
    score_rows,
)
from triptych.repository.manifest import CompiledManifest, build_id, read_manifest
from triptych.tasks.compare import Outputs

FALSE_ALARM_RATE = 1e-3
"""Maximum probability of an alarm about a correct pipeline, over all monitoring runs of a build."""

MAX_WORST_ROWS = 10
MIN_GROUP_ROWS = 5
QUANTILES = (0.5, 0.9, 0.99)


def run_monitor(
    inputs: PipelineInputs,
    repository: Path,
    sample: TrafficSample,
    progress: Progress,
    *,
    evidence: Mapping[str, SequentialEvidence],
    max_rows: int,
    last: TrafficSample | None = None,
    show_texts: bool = False,
) -> MonitorRun:
    """Compare the sampled rows that the active build answered with the original model.

    Args:
        inputs: Inputs of the pipeline, in the layout of the active build.
        repository: Repository with the active build.
        sample: Rows that no earlier run compared.
        progress: Called at each stage.
        evidence: Evidence of the earlier runs of this build, by test.
        max_rows: Maximum number of rows to compare; of more rows, evenly spaced ones are taken.
        last: Rows of the last run that had some. Lengths are compared of them if there are no new
            rows.
        show_texts: Whether the rows with the largest error include texts and answers.

    Raises:
        UserError: The pipeline has no build, or one of its hooks fails.
    """
    name = inputs.plan.spec.name
    manifest, build = read_manifest(repository, name, CompiledManifest), build_id(repository, name)
    gate = manifest.gate
    rules = rules_of(inputs, gate.precision, gate.rounding)
    of_build = [row for row in sample.rows if row.build == build]
    usable = exclude_health_checks(inputs, of_build)
    chosen = take_evenly(usable, max_rows)
    reader = make_reader(inputs)
    requests = read_requests(reader, chosen)
    comparable = [index for index, row in enumerate(chosen) if row.is_exact]
    rows, refused = _compare_rows(inputs, chosen, requests, comparable, progress)
    answers = reference_answers(inputs, progress)
    usual = [
        (request, answer.outputs)
        for request, answer in zip(inputs.requests, answers, strict=True)
        if not request.edge and not answer.refusal
    ]
    tests = choose_tests(rules, [outputs for _, outputs in usual], gate)
    actual, expected = [row.row.answer for row in rows], [row.expected for row in rows]
    scores = score_rows(rules, tests, actual, expected)
    queries = [row.request.query for row in rows]
    metrics = compute_metrics(rules, gate, scores, actual, expected, queries) if rows else ()
    losses = [score.losses for score in [*scores, *[full_loss(tests)] * refused]]
    needed = math.log(len(tests.allowed) / FALSE_ALARM_RATE)
    updated = {
        test: evidence.get(test, SequentialEvidence(allowed, needed)).add(
            [loss[test] for loss in losses]
        )
        for test, allowed in tests.allowed.items()
    }
    accepted = [request for request in requests if request is not None]
    recent_requests = accepted
    if not usable and last is not None:
        recent = exclude_health_checks(inputs, [row for row in last.rows if row.build == build])
        read_again = read_requests(reader, take_evenly(recent, max_rows))
        recent_requests = [request for request in read_again if request is not None]
    lengths = None
    if isinstance(reader, RequestReader) and inputs.plan.lengths and recent_requests:
        lengths = compare_lengths(inputs.plan, reader.lengths(recent_requests))
    distributions = tuple(_compare_categories(usual, accepted, rows))
    results = tuple(_summarize_test(test, result) for test, result in updated.items())
    notes = make_notes(
        inputs,
        manifest,
        sample,
        of_build=len(of_build),
        of_users=len(usable),
        compared=len(chosen),
    )
    return MonitorRun(
        pipeline=name,
        at=time.time(),
        build=build,
        precision=gate.precision,
        rows=len(rows) + refused,
        redacted=len(chosen) - len(comparable),
        others=len(sample.rows) - len(of_build),
        refused=refused,
        damaged=sample.damaged,
        metrics=tuple(metrics),
        tests=results,
        groups=tuple(_group_rows(inputs, tests, rows, scores)),
        worst=tuple(_find_worst(rows, scores, show_texts=show_texts)),
        lengths=lengths,
        distributions=distributions,
        alarms=tuple(find_alarms(results, find_changed_files(repository, manifest), rows)),
        drifts=tuple(find_drifts(lengths, distributions)),
        notes=tuple(notes),
        evidence=updated,
    )


def _compare_rows(
    inputs: PipelineInputs,
    rows: Sequence[SampledRow],
    requests: Sequence[GateRequest | None],
    comparable: Sequence[int],
    progress: Progress,
) -> tuple[list[ComparedRow], int]:
    """Return the comparable rows with the reference's answers, and how many it refuses."""
    candidates = [(rows[index], requests[index]) for index in comparable]
    pairs = [(row, request) for row, request in candidates if request is not None]
    if pairs:
        progress("monitor", f"{len(pairs)} rows in PyTorch fp32 ...")
    answers = answer_requests(inputs, [request for _, request in pairs], progress)
    compared = [
        ComparedRow(_without_fill(inputs, row, answer.outputs), request, answer.outputs)
        for (row, request), answer in zip(pairs, answers, strict=True)
        if not answer.refusal
    ]
    return compared, len(comparable) - len(compared)


def _without_fill(inputs: PipelineInputs, row: SampledRow, expected: Outputs) -> SampledRow:
    """Return a row without the elements that fill up an output of variable size in a request."""
    if inputs.plan.info.own is None:
        return row
    answer = {}
    for name, array in row.answer.items():
        cut = array[tuple(map(slice, expected[name].shape))]
        answer[name] = cut if np.count_nonzero(cut) == np.count_nonzero(array) else array
    return replace(row, answer=answer)


def _summarize_test(name: str, evidence: SequentialEvidence) -> MeanTest:
    return MeanTest(
        name=name,
        allowed=evidence.allowed,
        mean=evidence.mean,
        rows=evidence.rows,
        evidence=evidence.highest / math.log(10),
        needed=evidence.needed / math.log(10),
        alarm_row=evidence.alarm_row,
    )


def _group_rows(
    inputs: PipelineInputs,
    tests: LossTests,
    rows: Sequence[ComparedRow],
    scores: Sequence[RowScore],
) -> Iterator[RowGroup]:
    test = next(iter(tests.allowed))
    groups: dict[tuple[str, int, str], list[float]] = {}
    lengths = inputs.plan.lengths
    ends = [] if lengths is None else sorted({lengths.quantile(q) for q in QUANTILES})
    for row, score in zip(rows, scores, strict=True):
        loss = score.losses[test]
        if ends:
            index = bisect_left(ends, max(row.lengths, default=0))  # they are of model rows
            name = f"up to {ends[index]}" if index < len(ends) else f"over {ends[-1]}"
            groups.setdefault(("tokens", index, name), []).append(loss)
        label = first_label(row.expected)
        if label is not None:
            groups.setdefault(("label", 0, label), []).append(loss)
    for (kind, _, name), losses in sorted(groups.items()):
        if len(losses) >= MIN_GROUP_ROWS:
            mean = float(np.mean(losses))
            yield RowGroup(kind, name, len(losses), mean, *mean_interval(losses))


def _find_worst(
    rows: Sequence[ComparedRow], scores: Sequence[RowScore], *, show_texts: bool
) -> Iterator[LargeErrorRow]:
    pairs = sorted(
        zip(rows, scores, strict=True),
        key=lambda pair: (sum(pair[1].losses.values()), pair[1].row_error),
        reverse=True,
    )
    for row, score in pairs[:MAX_WORST_ROWS]:
        worst = LargeErrorRow(row.row.location, sum(row.lengths), score.row_error, score.difference)
        if show_texts:
            preview, expected = preview_text(row.row.inputs), describe_outputs(row.expected)
            actual = describe_outputs(row.row.answer)
            worst = replace(worst, preview=preview, expected=expected, actual=actual)
        yield worst


def _compare_categories(
    usual: Sequence[tuple[GateRequest, Outputs]],
    requests: Sequence[GateRequest],
    rows: Sequence[ComparedRow],
) -> Iterator[CategoryDistribution]:
    before = [label for _, outputs in usual if (label := first_label(outputs)) is not None]
    now = [label for row in rows if (label := first_label(row.expected)) is not None]
    scripts = (
        [main_script(request.sent) for request, _ in usual],
        [main_script(request.sent) for request in requests],
    )
    for distribution in (
        compare_distributions("labels", before, now),
        compare_distributions("scripts", *scripts),
    ):
        if distribution is not None and {*distribution.before, *distribution.now} != {NONE}:
            yield distribution
