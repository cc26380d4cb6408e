"""Accuracy gate: an artifact ships only if it answers like the reference, in any batch.

Lower precisions are also checked on the general probe: texts outside the traffic.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from triptych.core.gate.differences import (
    Measured,
    Pairs,
    best_agree,
    cosines,
    measure,
    relative_errors,
)
from triptych.core.gate.runs import (
    IN_BATCHES,
    Decoded,
    Decoding,
    Incomparable,
    RunBatch,
    check_rows,
    decode,
    decode_reference,
    reference_row_outputs,
    run_rows,
    run_ways,
    tokens_of,
)
from triptych.core.requests import (
    MIN_RECOMMENDED_ROWS,
    GateRequest,
    Sample,
    by_request,
    rows_of,
    shorten,
)
from triptych.repository.records import GateResult, ProbeResult, Verdict, WorstRow
from triptych.spec.backends import Precision
from triptych.tasks.accuracy import METRICS, is_lower_better
from triptych.tasks.labeled import LabeledResult, LabeledRow, compare_labeled
from triptych.tasks.metric import OWN_METRICS
from triptych.tasks.results import Expected, RowOutputs
from triptych.tasks.task import Core

WORST_ROWS = 10
MAX_ANSWER = 120
_FEW = 4


def judge_metrics(
    values: Mapping[str, float], limits: Mapping[str, float], *, complete: bool
) -> tuple[Verdict, ...]:
    """Return verdicts on the metrics that were measured or have a limit, ordered as `METRICS`.

    Args:
        values: Measured values, by metric.
        limits: Worst allowed values, by metric.
        complete: Whether all applicable metrics were measured. If not, a limit without a value
            fails; else it gets no verdict.
    """
    verdicts = []
    names = [name for name in {**values, **limits} if "." in name]
    own = {name: OWN_METRICS[name.rpartition(".")[2]] for name in names}
    for name, metric in {**METRICS, **own}.items():
        limit = limits.get(name)
        if name not in values and (limit is None or complete):
            continue
        value = values.get(name, math.nan)
        verdicts.append(Verdict(name, value, limit, limit is None or metric.meets(value, limit)))
    return tuple(verdicts)


def failure_messages(
    verdicts: Sequence[Verdict], messages: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """Yield the `messages` of the metric for each failed verdict, or a default sentence."""
    for verdict in verdicts:
        if verdict.passed:
            continue
        if messages.get(verdict.metric):
            yield from messages[verdict.metric]
        else:
            side = "above" if is_lower_better(verdict.metric) else "below"
            yield f"{verdict.metric} is {verdict.value:.6g}, {side} {verdict.limit}"


def worst_rows(
    requests: Sequence[GateRequest],
    badness: Sequence[float],
    differences: Sequence[float],
    wanted: Sequence[Mapping[str, NDArray[np.generic]]],
    got: Sequence[Mapping[str, NDArray[np.generic]]],
) -> tuple[WorstRow, ...]:
    """Return the `WORST_ROWS` rows with the largest errors, then differences; NaN is the worst.

    Every argument has one entry for each request; `wanted` and `got` are its outputs.
    """
    pairs = np.array([badness, differences])
    ranks = -np.where(np.isnan(pairs), np.inf, pairs)
    return tuple(
        WorstRow(
            requests[index].preview,
            float(badness[index]),
            float(differences[index]),
            describe_outputs(wanted[index]),
            describe_outputs(got[index]),
        )
        for index in np.lexsort(ranks[::-1])[:WORST_ROWS]
    )


def describe_outputs(outputs: Mapping[str, NDArray[np.generic]]) -> str:
    """Return the outputs of one request in one line: entities, named scores, or values."""
    filled = {name: array.ravel() for name, array in outputs.items() if array.size}
    if "entities" in filled:
        text = _entities(filled["entities"][0])
    elif "score" in filled and (names := _names(filled, len(filled["score"]))) is not None:
        pairs = zip(names[:_FEW], filled["score"][:_FEW], strict=False)
        text = ", ".join(f"{name} {score:.4f}" for name, score in pairs)
    else:
        text = "; ".join(_values(array) for array in filled.values())
    return shorten(text, MAX_ANSWER)


def _names(filled: Mapping[str, NDArray[np.generic]], count: int) -> list[str] | None:
    for array in filled.values():
        if array.dtype == object and len(array) == count:
            return [item.decode("utf-8", "replace") or "(nothing)" for item in array]
    return None


def _entities(content: bytes) -> str:
    try:
        said = [f"{e['entity']} {e['text']!r} {e['start']}-{e['end']}" for e in json.loads(content)]
    except (ValueError, TypeError, KeyError):  # A live server may answer anything.
        return repr(content)
    return ", ".join(said) or "(nothing)"


def _values(array: NDArray[np.generic]) -> str:
    if array.dtype == object:
        return ", ".join(str(item.decode("utf-8", "replace")) for item in array[:_FEW])
    shown = " ".join(f"{value:.4g}" for value in array[:_FEW].tolist())
    return shown if len(array) <= _FEW else f"{shown} … ({len(array)} numbers)"


NOT_FINITE = "results are not all finite"
ALONE_BATCHES = 2
"""Number of batches of traffic whose rows also run alone. All edge cases run alone."""


@dataclass(frozen=True)
class GateLabels:
    """Labeled rows of the user, for the gate."""

    rows: tuple[LabeledRow, ...]  # Rows as the user labeled them
    requests: tuple[GateRequest, ...]  # Requests of the gate with these rows
    expected: Sequence[Expected]  # Outputs of the reference for each core row
    max_drop: float  # Maximum allowed loss of the metric against the reference


@dataclass(frozen=True, kw_only=True)
class GateCase:
    """Rows of a gate with their right results, and how an artifact is held against these."""

    requests: Sequence[GateRequest]  # Requests of the gate
    # Outputs of the reference for each core row, in the order of the requests' rows.
    expected: Sequence[Expected]
    core: Core  # Core whose outputs the artifact returns
    limits: Mapping[str, float]  # Worst allowed value of each metric, see `tasks.accuracy`
    batch_size: int  # Maximum number of rows in a batch
    # Decoder of core outputs; None to check the core outputs alone.
    decoding: Decoding | None = None

    @property
    def samples(self) -> list[Sample]:
        """Core rows of all requests."""
        return rows_of(self.requests)


def check(
    run: RunBatch,
    case: GateCase,
    precision: Precision,
    metrics: Sequence[str],
    *,
    labeled: GateLabels | None = None,
    notes: Sequence[str] = (),
) -> GateResult:
    """Compare the artifact with the reference, fail-closed.

    Args:
        case: Rows of the gate, edge cases first. All rows also run in reverse order and by length,
            some also alone.
        metrics: Names of the metrics to report, from `tasks.accuracy.METRICS`.

    Raises:
        ValueError: The number of expected results differs from the number of core rows.
    """
    requests, samples, limits = case.requests, case.samples, case.limits
    if len(samples) != len(case.expected):
        raise ValueError(f"{len(samples)} core rows, but {len(case.expected)} expected results")
    edges = sum(request.edge for request in requests)
    traffic = len(requests) - edges
    if traffic < MIN_RECOMMENDED_ROWS:
        notes = [
            *notes,
            f"only {traffic} rows of traffic decide: {MIN_RECOMMENDED_ROWS} or more are better",
        ]
    first = sum(len(request.rows) for request in requests if request.edge)
    alone = range(min(len(samples), first + ALONE_BATCHES * case.batch_size))
    try:
        runs = run_ways(
            run, samples, case.expected, case.core, batch_size=case.batch_size, alone=alone
        )
        labeled_rows = [] if labeled is None else _run_labeled(run, labeled, case)
    except Incomparable as fault:
        verdicts = judge_metrics({}, limits, complete=False)
        return GateResult(
            precision, traffic, edges, False, verdicts, (str(fault),), notes=tuple(notes)
        )
    every = [row for rows in runs.values() for row in rows.values()]
    finite = all(map(is_finite, [*every, *labeled_rows]))
    batched = runs.pop(IN_BATCHES)
    # Differences of infinities are NaN, which fails like any other excess.
    with np.errstate(invalid="ignore", over="ignore"):
        measured = measure(batched, list(runs.values()), case.expected, case.core)
    outputs = [batched[index] for index in range(len(samples))]
    compared = _compare_answers(case, outputs, is_decodable=finite)
    values = {**_core_values(case, outputs, measured), **compared.values}
    values = {name: values[name] for name in metrics if name in values}
    complete = case.decoding is None or finite
    verdicts = judge_metrics(values, limits, complete=complete)
    truth = None
    if labeled is not None and case.decoding is not None and finite:
        truth = _compare_labeled(labeled, labeled_rows, case.core, case.decoding)
    failures = [*failure_messages(verdicts, _said(measured, limits))]
    failures += [] if finite else [NOT_FINITE]
    failures += [truth.failure] if truth is not None and truth.failure else []
    unmeasured = [name for name in limits if name not in values] if complete else []
    row_differences = np.max([view.rows for view in measured], axis=0)
    differences = [float(np.max(rows)) for rows in by_request(requests, row_differences)]
    return GateResult(
        precision=precision,
        rows=traffic,
        edge_case_rows=edges,
        finite=finite,
        verdicts=verdicts,
        failures=tuple(failures),
        worst=worst_rows(requests, compared.badness, differences, compared.wanted, compared.got),
        notes=(*notes, *(f"{name} cannot be measured on these rows" for name in unmeasured)),
        row_differences=tuple(differences),
        labeled=truth,
    )


@dataclass(frozen=True)
class Compared:
    """Answers of all requests and their comparison; without a decoder, the first core rows."""

    values: Mapping[str, float]
    badness: Sequence[float]
    wanted: Sequence[Decoded]
    got: Sequence[Decoded]


def _compare_answers(
    case: GateCase, outputs: Sequence[RowOutputs], *, is_decodable: bool
) -> Compared:
    """Decode the answers to all requests and compare those of the traffic."""
    requests, core = case.requests, case.core
    right = reference_row_outputs(core, case.expected, like=outputs)
    badness = [0.0] * len(requests)
    if case.decoding is None or not is_decodable:
        firsts = [[rows[0] for rows in by_request(requests, each)] for each in (right, outputs)]
        return Compared({}, badness, *firsts)
    got = decode(case.decoding, requests, outputs)
    wanted = decode_reference(case.decoding, requests, right)
    kept = [index for index, request in enumerate(requests) if not request.edge]
    comparison = case.decoding.task.compare(
        [got[index] for index in kept],
        [wanted[index] for index in kept],
        [requests[index].query for index in kept],
    )
    for index, value in zip(kept, comparison.badness, strict=True):
        badness[index] = value
    return Compared(comparison.values, badness, wanted, got)


def _core_values(
    case: GateCase, outputs: Sequence[RowOutputs], measured: Sequence[Measured]
) -> dict[str, float]:
    """Return the metrics of the core's outputs; `compare_rows` covers the traffic alone."""
    with np.errstate(invalid="ignore"):
        values = {
            "max_difference": float(np.max([view.difference for view in measured])),
            "batch_sensitivity": float(np.max([view.effect for view in measured])),
        }
    edges = [request.edge for request in case.requests for _ in request.rows]
    pairs = list(zip(outputs, case.expected, strict=True))
    synthetic = [pair for pair, edge in zip(pairs, edges, strict=True) if edge]
    traffic = [pair for pair, edge in zip(pairs, edges, strict=True) if not edge]
    if synthetic:
        values["edge_error"] = float(np.max(relative_errors(synthetic, case.core)))
    return {**values, **(compare_rows(traffic, case.core) if traffic else {})}


def compare_rows(pairs: Pairs, core: Core) -> dict[str, float]:
    """Return the cosine and label-agreement metrics of at least one row."""
    values: dict[str, float] = {}
    if (angles := cosines(pairs, core)) is not None:
        values |= {"min_cosine": float(angles.min()), "mean_cosine": float(angles.mean())}
    if (agrees := best_agree(pairs, core)) is not None:
        values["label_agreement"] = float(agrees.mean())
    return values


def _said(measured: Sequence[Measured], limits: Mapping[str, float]) -> dict[str, list[str]]:
    limit = limits.get("max_difference", math.inf)
    allowed = limits.get("batch_sensitivity", math.inf)
    return {
        "max_difference": [
            f"{view.name} differs from the reference by {view.difference:.2e}, above {limit:g}"
            for view in measured
            if not view.difference <= limit
        ],
        "batch_sensitivity": [
            f"batch neighbors change {view.name} by {view.effect:.2e}, above {allowed:g}"
            for view in measured
            if not view.effect <= allowed
        ],
    }


def is_finite(row: RowOutputs) -> bool:
    """Return whether all numbers of a row are finite."""
    return all(bool(np.isfinite(values).all()) for values in row.values())


def _run_labeled(run: RunBatch, labeled: GateLabels, case: GateCase) -> list[RowOutputs]:
    samples = rows_of(labeled.requests)
    rows = run_rows(run, samples, range(len(samples)), case.batch_size)
    check_rows(rows, samples, labeled.expected, case.core)
    return [rows[index] for index in range(len(samples))]


def _compare_labeled(
    labeled: GateLabels, outputs: Sequence[RowOutputs], core: Core, decoding: Decoding
) -> LabeledResult | None:
    if decoding.task.labeled is None:
        return None
    right = reference_row_outputs(core, labeled.expected, like=outputs)
    return compare_labeled(
        decoding.task.labeled,
        labeled.rows,
        decode(decoding, labeled.requests, outputs),
        decode(decoding, labeled.requests, right),
        max_drop=labeled.max_drop,
    )


OUTSIDE = "outside your traffic"
WORST_PROBE_ROWS = 5
BATCH_ROWS = 8
"""Maximum number of rows in a batch: memory of packed attention grows with tokens squared."""


def judge_probe(run: RunBatch, case: GateCase) -> tuple[ProbeResult, tuple[str, ...]]:
    """Return the result on the probe and its failures in words, fail-closed.

    Rows run once, in batches of similar length: the traffic has shown the effect of other rows in
    the batch. Only the metrics that have a limit are reported.

    Args:
        case: Requests of the probe, at least one, with the limits of `tasks.accuracy.probe_limits`.
    """
    requests, samples, limits = case.requests, case.samples, case.limits
    order = sorted(range(len(samples)), key=lambda index: tokens_of(samples[index]))
    try:
        rows = run_rows(run, samples, order, min(case.batch_size, BATCH_ROWS))
        check_rows(rows, samples, case.expected, case.core)
    except Incomparable as fault:
        verdicts = judge_metrics({}, limits, complete=False)
        return ProbeResult(len(requests), verdicts), (f"{OUTSIDE}: {fault}",)
    outputs = [rows[index] for index in range(len(samples))]
    finite = all(map(is_finite, outputs))
    pairs = list(zip(outputs, case.expected, strict=True))
    errors = relative_errors(pairs, case.core)
    compared = _compare_answers(case, outputs, is_decodable=finite)
    found = {
        "edge_error": float(np.max(errors)),
        **compare_rows(pairs, case.core),
        **compared.values,
    }
    values = {name: found[name] for name in limits if name in found}
    verdicts = judge_metrics(values, limits, complete=case.decoding is None or finite)
    errors_of_requests = [float(np.max(each)) for each in by_request(requests, errors)]
    worst = worst_rows(
        requests, compared.badness, errors_of_requests, compared.wanted, compared.got
    )
    failures = [] if finite else [NOT_FINITE]
    failures += failure_messages(verdicts, {})
    said = tuple(f"{OUTSIDE}: {failure}" for failure in failures)
    return ProbeResult(len(requests), verdicts, worst[:WORST_PROBE_ROWS]), said


def describe_probe(probe: ProbeResult) -> str:
    """Return the result in one line."""
    figures = [
        f"{verdict.metric} {verdict.value:.4g}"
        + ("" if verdict.passed else f" (FAILED: limit {verdict.limit:g})")
        for verdict in probe.verdicts
    ]
    return f"{OUTSIDE}: {probe.rows} varied texts: {', '.join(figures)}"
