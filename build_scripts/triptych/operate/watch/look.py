"""One look at a served pipeline: the new rows of its sample, held against the original model."""

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
from triptych.core.gate.live import show_answer
from triptych.core.gate.verify import rules_of
from triptych.core.inputs import PipelineInputs
from triptych.core.reader import RequestReader
from triptych.core.samples import GateRequest, shown_text
from triptych.operate.tune.drift import Drift, check_drift
from triptych.operate.tune.new_traffic import NewTraffic
from triptych.operate.tune.proposal import MeasuredLoad
from triptych.operate.watch.findings import (
    CHANCE,
    Group,
    Held,
    Look,
    MeanTest,
    Mix,
    Worst,
    alarms_in,
    changed_files,
    compare_mixes,
    drifts_in,
    label_of,
    notes_on,
    script_of,
)
from triptych.operate.watch.sample import Sample, SampledRow, answers_to, reader_of, requests_of
from triptych.operate.watch.scores import (
    RowScore,
    Tests,
    figures_of,
    lost,
    mean_interval,
    score_rows,
    tests_for,
)
from triptych.operate.watch.sequential import Evidence
from triptych.repository.lock import build_id, read_lock
from triptych.spec.tasks.compare import Outputs

ALPHA = 1e-3
"""How often a pipeline that is right may ever be called wrong, over all looks at one build."""

WORST = 10
MIN_GROUP = 5
QUANTILES = (0.5, 0.9, 0.99)


def look_at(
    inputs: PipelineInputs,
    repository: Path,
    sample: Sample,
    progress: Progress,
    *,
    evidence: Mapping[str, Evidence],
    most: int,
    last: Sample | None = None,
    measured: MeasuredLoad | None = None,
    servers: int | None = None,
    show_texts: bool = False,
) -> Look:
    """Hold the rows of a sample that the present build answered against the original model.

    Args:
        inputs: of the pipeline, in the layout that it was built in.
        repository: with its lock.
        sample: rows that no look has seen.
        progress: told each stage.
        evidence: of the looks before at this build.
        most: rows that are compared: of more, as many evenly spread ones.
        last: rows of the last look that had some: where there are no new ones, theirs is the drift.
        measured: what a load test found; None leaves the estimates out.
        servers: that sampled, which tells the rate of each; None where that is not known.
        show_texts: whether the worst rows have their texts and answers.

    Raises:
        UserError: there is no build, or a function of the pipeline's fails.
    """
    name = inputs.plan.spec.name
    lock, build = read_lock(repository, name), build_id(repository, name)
    rules = rules_of(inputs, lock.gate.precision, lock.gate.rounding)
    question = dict(inputs.shortest_row)  # what health checks ask, and no user need have asked
    own = [row for row in sample.rows if row.build == build]
    mine = [row for row in own if row.inputs != question]
    chosen = _spread(mine, most)
    reader = reader_of(inputs)
    requests = requests_of(reader, chosen)
    comparable = [place for place, row in enumerate(chosen) if not row.redacted]
    held, refused = _hold(inputs, chosen, requests, comparable, progress)
    traffic = reference_answers(inputs, progress)
    usual = [
        (request, answer.outputs)
        for request, answer in zip(inputs.requests, traffic, strict=True)
        if not request.edge and not answer.refusal
    ]
    tests = tests_for(rules, [outputs for _, outputs in usual], lock.gate)
    got, wanted = [one.row.answer for one in held], [one.wanted for one in held]
    scores = score_rows(rules, tests, got, wanted)
    queries = [one.request.query for one in held]
    figures = tuple(figures_of(rules, lock.gate, scores, got, wanted, queries)) if held else ()
    losses = [score.losses for score in [*scores, *[lost(tests)] * refused]]
    needed = math.log(len(tests.allowed) / ALPHA)
    now = {
        test: evidence.get(test, Evidence(allowed, needed)).add([loss[test] for loss in losses])
        for test, allowed in tests.allowed.items()
    }
    results = tuple(_result(test, one) for test, one in now.items())
    accepted = [request for request in requests if request is not None]
    seen, moved = mine, accepted
    if not mine and last is not None:
        seen = [row for row in last.rows if row.build == build and row.inputs != question]
        again = requests_of(reader, _spread(seen, most))
        moved = [request for request in again if request is not None]
    rate_per_s = None if servers is None else _rate_of(inputs, seen, servers)
    drift = _length_drift(inputs, reader, moved, measured, rate_per_s)
    mixes = tuple(_mixes(usual, accepted, held))
    found = Look(
        pipeline=name,
        at=time.time(),
        build=build,
        precision=lock.gate.precision,
        rows=len(held) + refused,
        redacted=len(chosen) - len(comparable),
        others=len(sample.rows) - len(own),
        refused=refused,
        damaged=sample.damaged,
        figures=figures,
        tests=results,
        groups=tuple(_groups(inputs, tests, held, scores)),
        worst=tuple(_worst(held, scores, show_texts=show_texts)),
        drift=drift,
        mixes=mixes,
        alarms=(),
        drifts=tuple(drifts_in(drift, mixes)),
        notes=tuple(notes_on(inputs, lock, sample, len(own), len(mine), len(chosen))),
        evidence=now,
    )
    changed = changed_files(repository, lock)
    return replace(found, alarms=tuple(alarms_in(found, changed, held)))


def _hold(
    inputs: PipelineInputs,
    rows: Sequence[SampledRow],
    requests: Sequence[GateRequest | None],
    comparable: Sequence[int],
    progress: Progress,
) -> tuple[list[Held], int]:
    """The comparable rows with the reference's answers; and how many that refuses."""
    asked = [(rows[place], requests[place]) for place in comparable]
    pairs = [(row, request) for row, request in asked if request is not None]
    if pairs:
        progress("watch", f"{len(pairs)} rows in PyTorch fp32 ...")
    answers = answers_to(inputs, [request for _, request in pairs], progress)
    held = [
        Held(row, request, answer.outputs)
        for (row, request), answer in zip(pairs, answers, strict=True)
        if not answer.refusal
    ]
    return held, len(comparable) - len(held)


def _result(name: str, evidence: Evidence) -> MeanTest:
    return MeanTest(
        name=name,
        allowed=evidence.allowed,
        mean=evidence.mean,
        rows=evidence.rows,
        evidence=evidence.highest / math.log(10),
        needed=evidence.needed / math.log(10),
        alarm_row=evidence.alarm_row,
    )


def _groups(
    inputs: PipelineInputs, tests: Tests, held: Sequence[Held], scores: Sequence[RowScore]
) -> Iterator[Group]:
    test = next(iter(tests.allowed))
    groups: dict[tuple[str, int, str], list[float]] = {}
    lengths = inputs.plan.lengths
    ends = [] if lengths is None else sorted({lengths.quantile(q) for q in QUANTILES})
    for one, score in zip(held, scores, strict=True):
        loss = score.losses[test]
        if ends:
            place = bisect_left(ends, one.tokens)
            name = f"up to {ends[place]}" if place < len(ends) else f"over {ends[-1]}"
            groups.setdefault(("tokens", place, name), []).append(loss)
        label = label_of(one.wanted)
        if label is not None:
            groups.setdefault(("label", 0, label), []).append(loss)
    for (kind, _, name), losses in sorted(groups.items()):
        if len(losses) >= MIN_GROUP:
            yield Group(kind, name, len(losses), float(np.mean(losses)), *mean_interval(losses))


def _worst(
    held: Sequence[Held], scores: Sequence[RowScore], *, show_texts: bool
) -> Iterator[Worst]:
    pairs = sorted(
        zip(held, scores, strict=True),
        key=lambda pair: (sum(pair[1].losses.values()), pair[1].badness),
        reverse=True,
    )
    for one, score in pairs[:WORST]:
        row = Worst(one.row.place, one.tokens, score.badness, score.difference)
        if show_texts:
            shown, right = shown_text(one.row.inputs), show_answer(one.wanted)
            row = replace(row, shown=shown, wanted=right, got=show_answer(one.row.answer))
        yield row


def _length_drift(
    inputs: PipelineInputs,
    reader: RequestReader,
    requests: Sequence[GateRequest],
    measured: MeasuredLoad | None,
    rate_per_s: float | None,
) -> Drift | None:
    if inputs.plan.lengths is None or not requests:
        return None
    lengths = reader.lengths(requests)
    take = f"run triptych traffic {inputs.plan.spec.name} --from-sample --replace"
    new = NewTraffic(f"{len(requests)} sampled rows", lengths, lengths.mean, take=take)
    return check_drift(inputs, new, measured=measured, rate_per_s=rate_per_s, chance=CHANCE)


def _rate_of(inputs: PipelineInputs, rows: Sequence[SampledRow], servers: int) -> float | None:
    """Rows a second that came to each server, on average; None where that cannot be told."""
    times, sampling = [row.at for row in rows], inputs.plan.spec.serving.sample
    seconds = max(times, default=0.0) - min(times, default=0.0)
    if sampling is None or seconds <= 0:
        return None
    return (len(times) - 1) / seconds / sampling.rate / servers


def _spread(rows: Sequence[SampledRow], most: int) -> list[SampledRow]:
    places = np.linspace(0, len(rows) - 1, min(most, len(rows))).astype(int)
    return [rows[place] for place in places]


def _mixes(
    usual: Sequence[tuple[GateRequest, Outputs]],
    requests: Sequence[GateRequest],
    held: Sequence[Held],
) -> Iterator[Mix]:
    before = [label for _, outputs in usual if (label := label_of(outputs)) is not None]
    now = [label for one in held if (label := label_of(one.wanted)) is not None]
    scripts = (
        [script_of(request.sent) for request, _ in usual],
        [script_of(request.sent) for request in requests],
    )
    for mix in (compare_mixes("labels", before, now), compare_mixes("scripts", *scripts)):
        if mix is not None:
            yield mix
