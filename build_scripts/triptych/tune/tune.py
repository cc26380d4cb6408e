"""`triptych tune`: baseline, a few good trials, the winner against the baseline, `tuned.yaml`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from triptych.bench.bench import Price, bottleneck_of, line, machine, subject_of
from triptych.bench.points import Measurement, Point
from triptych.bench.rates import highest_rate
from triptych.build import make_core
from triptych.cache import code_hash, sha256_of
from triptych.errors import Progress, UserError
from triptych.pipeline.slo import Slo
from triptych.pipeline.spec import SPEC_FILE, load_spec
from triptych.pipeline.traffic import TRAFFIC_FILE
from triptych.pipeline.tuned import TUNED_FILE, Tuned, read_tuned, write_tuned
from triptych.plan.plan import Plan
from triptych.precision.auto import AUTO
from triptych.requests.inputs import PipelineInputs, read_inputs
from triptych.tune.advice import advice, verdict
from triptych.tune.arena import Arena, Setting, Slot, arena
from triptych.tune.journal import Journal
from triptych.tune.judge import describe, gain
from triptych.tune.objective import Objective, Scored
from triptych.tune.results import Outcome, TuneResult
from triptych.tune.search import Search, points_of, scores_of

CODE = (
    "tune/*.py",
    "bench/*.py",
    "server/backends/*/*.py",
    "server/stand_in/*.py",
    "runtime/*.py",
    "repository/*.py",
)
FINAL_CLIENTS = (1, 4, 16)
"""Closed loops of the final comparison, besides those that the score is made of."""

FINAL_ROUNDS = 3
SEARCH_SHARE = 0.65
"""Of the time, for trials; the rest is for the winner against the baseline."""


@dataclass(frozen=True)
class Tuning:
    """What to tune for.

    Attributes:
        slo: the promise; an empty one tunes for throughput.
        budget_s: time for everything, in seconds, the first build apart.
        clients: of the highest load.
        seconds: of each measurement.
        price: to tell the cost before and after.
        overrides: ``KEY=VALUE`` of the spec, for this run; no trial changes them back.
    """

    slo: Slo = field(default_factory=Slo)
    budget_s: float = 900.0
    clients: int = 32
    seconds: float = 2.4
    price: Price | None = None
    overrides: tuple[str, ...] = ()


class _Contest:
    """The arena as the search sees it; rounds begin with another one each time."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._start: int | None = None
        self._turn = 0

    def begin(self, present: Setting) -> tuple[Plan, Scored]:
        self._arena.put(self._arena.best, present)
        scored = self._arena.score(self._arena.best, self._start)
        self._start = scored.start
        return self._arena.best.served.plan, scored

    def challenge(self, other: Setting) -> None:
        self._arena.put(self._arena.challenger, other)

    def round(self) -> tuple[Scored, Scored]:
        slots = [self._arena.best, self._arena.challenger]
        self._turn += 1
        found = {}
        for slot in slots if self._turn % 2 else reversed(slots):
            found[slot] = self._arena.score(slot, self._start)
        self._start = found[slots[0]].start
        return found[slots[0]], found[slots[1]]

    def promote(self) -> Plan:
        self._arena.promote()
        return self._arena.best.served.plan


def tune_pipeline(folder: Path, repository: Path, tuning: Tuning, progress: Progress) -> TuneResult:
    """Find the best numbers for a promise, and write them to ``tuned.yaml`` beside the spec.

    The repository is left alone: trials are built beside it, and `build` picks the result up.
    An interrupted run leaves nothing changed; the next one goes on where it was.

    Args:
        folder: of the pipeline.
        repository: folder of the models.
        tuning: what to tune for.
        progress: told every trial.

    Raises:
        GateFailure, LintFailure, UserError: the baseline cannot be built or served.
    """
    prepared, start = _baseline(folder, repository, tuning, progress)
    objective = Objective(tuning.slo, tuning.clients)
    journal = Journal(_journal_key(folder, tuning, start))
    old = read_tuned(folder)
    limits = tuning.slo.limits_us.values()
    with arena(
        folder, repository, objective, tuning.seconds, progress, base=tuning.overrides
    ) as found:
        found.put(found.best, start)  # the first build takes the time it takes
        began = time.monotonic()
        contest = _Contest(found)
        search = Search(
            contest,
            journal,
            deadline=began + SEARCH_SHARE * tuning.budget_s,
            cores=len(os.sched_getaffinity(0)),
            limit_us=min(limits, default=None),
            progress=progress,
        )
        search.run(start, None if old is None else Setting({**start.overrides, **old.overrides}))
        before, after, doubt = _final(found, contest, search.best, start, tuning, began, progress)
        best = found.best
        subject = subject_of(
            best.served, best.repository, server="embedded", overrides=after.overrides
        )
    met, said = verdict(tuning.slo, after, doubt)
    result = TuneResult(
        subject=subject,
        slo=tuning.slo,
        objective=objective.says,
        trials=tuple(search.trials),
        skipped=search.skipped,
        baseline=before,
        winner=after,
        met=met,
        verdict=said,
        advice=() if met else advice(prepared.plan, tuning.slo, after),
        stopped=search.stopped,
        seconds=time.monotonic() - began,
    )
    _write(folder, result, progress)
    journal.close()
    return result


def _baseline(
    folder: Path, repository: Path, tuning: Tuning, progress: Progress
) -> tuple[PipelineInputs, Setting]:
    """The spec without what was tuned before; of ``auto``, with the precision it chooses."""
    prepared = read_inputs(load_spec(folder, tuning.overrides, untuned=True), progress)
    owner = prepared.plan.spec.core.share
    if owner is not None:
        raise UserError(
            "core.share",
            "must not be set in a pipeline that is tuned",
            given=owner,
            remedy=f"Run `triptych tune {owner}`: it has the core",
        )
    if prepared.plan.spec.core.precision != AUTO:
        return prepared, Setting()
    core = make_core(prepared, repository, progress)
    return prepared, Setting({"core.precision": core.gate.precision})


def _journal_key(folder: Path, tuning: Tuning, start: Setting) -> dict[str, Any]:
    files = {name: sha256_of(folder / name) for name in (SPEC_FILE, TRAFFIC_FILE)}
    return {
        "files": files,
        "folder": str(folder.resolve()),
        "start": dict(start.overrides),
        "slo": tuning.slo.model_dump(),
        "load": [tuning.clients, tuning.seconds, list(tuning.overrides)],
        "machine": machine(),
        "code": code_hash(*CODE),
    }


def _final(
    arena: Arena,
    contest: _Contest,
    best: Setting,
    start: Setting,
    tuning: Tuning,
    began: float,
    progress: Progress,
) -> tuple[Outcome, Outcome, str]:
    """Baseline and winner at length, in turns; why the baseline stays the winner if it does."""
    arena.put(arena.best, best)
    if best == start:
        rounds = [contest.begin(best)[1] for _ in range(FINAL_ROUNDS)]
        points = _curve(arena, rounds, None, tuning, progress)[0]
        outcome = _outcome(arena.best, best, rounds, points, tuning, began, progress)
        return outcome, outcome, "nothing that was tried is better than the defaults"
    arena.put(arena.challenger, start)
    pairs = [contest.round() for _ in range(FINAL_ROUNDS)]
    winners, losers = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    points, others = _curve(arena, winners, losers, tuning, progress)
    after = _outcome(arena.best, best, winners, points, tuning, began, progress)
    before = _outcome(arena.challenger, start, losers, others, tuning, began, progress)
    scores = [(old, new) for new, old in scores_of(pairs)]
    share, half = gain(scores)
    progress("tune", f"winner against baseline: {describe(scores)}")
    if share - half > 0:
        return before, after, ""
    arena.promote()  # the baseline is the best again
    return before, before, f"the winner's gain is within the noise: {describe(scores)}"


def _curve(
    arena: Arena,
    winners: Sequence[Scored],
    losers: Sequence[Scored] | None,
    tuning: Tuning,
    progress: Progress,
) -> tuple[tuple[Point, ...], tuple[Point, ...]]:
    """The points that scores are made of, and the rest of the throughput-latency curve."""
    wanted = {clients for clients in FINAL_CLIENTS if clients < tuning.clients} | {tuning.clients}
    sides = [(arena.best, winners)]
    if losers is not None:
        sides.append((arena.challenger, losers))
    extra: list[list[Scored]] = [[], []]
    for clients in sorted(wanted - set(winners[0].found)):
        for _ in range(FINAL_ROUNDS - 1):
            for index, (slot, _rounds) in enumerate(sides):
                one = slot.measure(clients, tuning.seconds)
                extra[index].append(Scored(0.0, {clients: one}, clients))
                _tell(progress, "winner" if index == 0 else "baseline", clients, one)
    name = arena.best.target.pipeline
    curves = [
        tuple(points_of(name, [*rounds, *extra[index]])) for index, (_, rounds) in enumerate(sides)
    ]
    return curves[0], curves[-1]


def _tell(progress: Progress, name: str, clients: int, one: Measurement) -> None:
    progress("tune", f"{name}, {clients} clients: {line(one)}")


def _outcome(
    slot: Slot,
    setting: Setting,
    rounds: Sequence[Scored],
    points: tuple[Point, ...],
    tuning: Tuning,
    began: float,
    progress: Progress,
) -> Outcome:
    """What the setting that `slot` serves is worth."""
    score = sorted(one.score for one in rounds)[len(rounds) // 2]
    rate = None
    if tuning.slo.limits_us:
        left = max(30.0, tuning.budget_s - (time.monotonic() - began))
        rate = highest_rate(
            slot.target,
            slot.served.traffic,
            tuning.slo,
            start_per_s=max(1.0, 0.7 * score),
            seconds=tuning.seconds,
            budget_s=min(left, tuning.budget_s * (1 - SEARCH_SHARE) / 3),
            progress=progress,
        )
    sustained = score if rate is None else rate.highest_per_s
    busiest = max(points, key=lambda point: point.median("throughput_per_s"))
    return Outcome(
        overrides=dict(setting.overrides),
        score=score,
        points=points,
        bottleneck=bottleneck_of(busiest),
        rate=rate,
        cost=tuning.price.cost(sustained) if tuning.price else None,
    )


def _write(folder: Path, result: TuneResult, progress: Progress) -> None:
    """Put the winner beside the spec; without one, take away what was there."""
    if not result.winner.overrides:
        if (folder / TUNED_FILE).is_file():
            (folder / TUNED_FILE).unlink()
            progress("tuned", f"{TUNED_FILE} removed: the defaults are as good")
        return
    path = write_tuned(
        folder, Tuned(result.winner.overrides, _provenance(folder, result)), spec_file=SPEC_FILE
    )
    changes = ", ".join(f"{key}={value}" for key, value in result.winner.overrides.items())
    progress("tuned", f"{path}: {changes}")


def _provenance(folder: Path, result: TuneResult) -> dict[str, Any]:
    def figures(outcome: Outcome) -> dict[str, Any]:
        rate = {} if outcome.rate is None else {"highest_rate_per_s": outcome.rate.highest_per_s}
        return {
            "score_per_s": round(outcome.score, 1),
            **rate,
            "points": [
                {
                    "clients": int(point.load.value),
                    "throughput_per_s": round(point.median("throughput_per_s"), 1),
                    "p50_ms": round(point.median("p50_us") / 1e3, 2),
                    "p99_ms": round(point.median("p99_us") / 1e3, 2),
                }
                for point in outcome.points
            ],
        }

    return {
        "slo": str(result.slo),
        "objective": result.objective,
        "measured_at": result.subject.measured_at,
        "machine": result.subject.machine,
        "versions": result.subject.versions,
        "traffic": {"requests": result.subject.requests, "padding": result.subject.padding},
        "spec_sha256": sha256_of(folder / SPEC_FILE),
        "trials": len(result.trials),
        "before": figures(result.baseline),
        "after": figures(result.winner),
    }
