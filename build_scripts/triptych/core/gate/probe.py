"""Check of a core of lower precision on the general probe: texts outside the traffic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from triptych.core.gate.check import compare_answers, compare_rows, is_finite
from triptych.core.gate.differences import relative_errors
from triptych.core.gate.runs import (
    Decoding,
    Incomparable,
    RunBatch,
    check_rows,
    run_rows,
    tokens_of,
)
from triptych.core.gate.verdicts import judge_metrics, say_failures, worst_rows
from triptych.core.samples import Expected, GateRequest, by_request, rows_of
from triptych.repository.records import ProbeResult
from triptych.spec.tasks.task import Core

OUTSIDE = "outside your traffic"
WORST_PROBE_ROWS = 5
BATCH_ROWS = 8
"""Maximum number of rows in a batch: memory of packed attention grows with tokens squared."""


def judge_probe(
    run: RunBatch,
    requests: Sequence[GateRequest],
    expected: Sequence[Expected],
    core: Core,
    limits: Mapping[str, float],
    *,
    batch_size: int,
    decoding: Decoding | None,
) -> tuple[ProbeResult, tuple[str, ...]]:
    """Return the result on the probe and its failures in words, fail-closed.

    Rows run once, in batches of similar length: the traffic has shown the effect of other rows in
    the batch.

    Args:
        run: Runs a batch on the artifact.
        requests: Requests of the probe, at least one.
        expected: Outputs of the reference for each core row.
        core: Core whose outputs the artifact returns.
        limits: Worst allowed value of each metric, see `tasks.accuracy.probe_limits`. Only these
            metrics are reported.
        batch_size: Maximum number of rows in a batch of the pipeline.
        decoding: Decoder of core outputs; None to check the core outputs alone.
    """
    samples = rows_of(requests)
    order = sorted(range(len(samples)), key=lambda place: tokens_of(samples[place]))
    try:
        rows = run_rows(run, samples, order, min(batch_size, BATCH_ROWS))
        check_rows(rows, samples, expected, core)
    except Incomparable as fault:
        verdicts = judge_metrics({}, limits, complete=False)
        return ProbeResult(len(requests), verdicts), (f"{OUTSIDE}: {fault}",)
    outputs = [rows[place] for place in range(len(samples))]
    finite = all(map(is_finite, outputs))
    pairs = list(zip(outputs, expected, strict=True))
    errors = relative_errors(pairs, core)
    compared = compare_answers(requests, outputs, expected, core, decoding if finite else None)
    found = {
        "edge_error": float(np.max(errors)),
        **compare_rows(pairs, core),
        **compared.values,
    }
    values = {name: found[name] for name in limits if name in found}
    verdicts = judge_metrics(values, limits, complete=decoding is None or finite)
    errors_of_requests = [float(np.max(each)) for each in by_request(requests, errors)]
    worst = worst_rows(
        requests, compared.badness, errors_of_requests, compared.wanted, compared.got
    )
    failures = [] if finite else ["results are not all finite"]
    failures += say_failures(verdicts, {})
    said = tuple(f"{OUTSIDE}: {failure}" for failure in failures)
    return ProbeResult(len(requests), verdicts, worst[:WORST_PROBE_ROWS]), said


def describe_probe(probe: ProbeResult) -> str:
    """Return the result in one line."""

    def figures() -> Iterator[str]:
        for verdict in probe.verdicts:
            mark = "" if verdict.passed else f" (FAILED: limit {verdict.limit:g})"
            yield f"{verdict.metric} {verdict.value:.4g}{mark}"

    return f"{OUTSIDE}: {probe.rows} varied texts: {', '.join(figures())}"
