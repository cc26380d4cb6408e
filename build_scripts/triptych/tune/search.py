"""The sequence of trials: one field at a time, each against the best so far, until time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Protocol

from triptych.bench.points import Load, Measurement, Point
from triptych.errors import Progress, UserError
from triptych.gate.cached import GateFailure
from triptych.lint.rendered import LintFailure
from triptych.plan.plan import Plan
from triptych.tune.arena import Setting
from triptych.tune.journal import Journal
from triptych.tune.judge import describe, judge
from triptych.tune.knobs import KNOBS, Evidence, Ladder, Skip
from triptych.tune.objective import LoadFailed, Scored
from triptych.tune.results import Trial, Verdict


class Contest(Protocol):
    """Measures the best settings so far (``present``) and another one in turns."""

    def begin(self, present: Setting) -> tuple[Plan, Scored]:
        """Serve `present` and score it once."""

    def challenge(self, other: Setting) -> None:
        """Serve `other` beside it.

        Raises:
            GateFailure, LintFailure, UserError: it cannot be built or served.
        """

    def round(self) -> tuple[Scored, Scored]:
        """Score both once: the present one, and the other.

        Raises:
            LoadFailed: one of them answers with errors.
        """

    def promote(self) -> Plan:
        """The other one is the present one from now on."""


@dataclass
class Search:
    """A search under way.

    Attributes:
        contest: measures.
        journal: trials of an earlier run that was interrupted, and where this one's go.
        deadline: on the monotonic clock; no trial is begun after it.
        cores: of this machine.
        limit_us: the lowest latency that is promised.
        progress: told every trial.
        best: settings so far.
        trials: so far.
        skipped: field to why it was not tried.
        stopped: why the search ended; empty while it goes on.
    """

    contest: Contest
    journal: Journal
    deadline: float
    cores: int
    limit_us: float | None
    progress: Progress
    best: Setting = field(default_factory=Setting)
    trials: list[Trial] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    stopped: str = ""
    clock: Callable[[], float] = time.monotonic

    def run(self, start: Setting, known: Setting | None = None) -> None:
        """Try every knob once, from `start` on.

        Args:
            start: the baseline.
            known: what an earlier search found best; the first trial.
        """
        self.best = start
        self._plan, scored = self.contest.begin(start)
        self._latest = scored.found[scored.start]
        self.progress("tune", f"baseline: {scored.score:.0f}/s")
        if known is not None and known != start:
            change = dict(known.overrides.items() - start.overrides.items())
            self._try(known, change, "what tuned.yaml has")
        for knob in KNOBS:
            found = knob(Evidence(self._plan, self._latest, self.cores, self.limit_us))
            if isinstance(found, Skip):
                self.skipped[found.key] = found.reason
                continue
            for ladder in (found.values, found.others):
                if self._climb(found, ladder):
                    break
            if self.stopped:
                return
        self.stopped = "every field worth a trial was tried"

    def _climb(self, found: Ladder, values: tuple[Any, ...]) -> bool:
        """Try values until one is no better; whether any was."""
        climbed = False
        for value in values:
            if self.clock() > self.deadline:
                self.stopped = "the time was up"
                break
            other = self.best.with_change(found.key, value)
            if self._try(other, {found.key: value}, found.reason) != "better":
                break
            climbed = True
        return climbed

    def _try(self, other: Setting, change: dict[str, Any], reason: str) -> Verdict:
        number = len(self.trials) + 1
        trial = self.journal.find(self.best.overrides, other.overrides)
        again = trial is not None
        if trial is None:
            began = self.clock()
            trial = self._measured(other, change, reason)
            trial = replace(trial, number=number, seconds=self.clock() - began)
            self.journal.add(self.best.overrides, other.overrides, trial)
        elif trial.verdict == "better":
            self.contest.challenge(other)
        self.trials.append(replace(trial, number=number))
        told = ", ".join(f"{key} {trial.before[key]} -> {value}" for key, value in change.items())
        self.progress(
            "tune",
            f"trial {number}: {told}: {trial.verdict}, {trial.says}"
            + (" (measured before)" if again else ""),
        )
        if trial.verdict == "better":
            self.best = other
            self._plan = self.contest.promote()
            self._latest = trial.points[-1].typical if trial.points else self._latest
        return trial.verdict

    def _measured(self, other: Setting, change: dict[str, Any], reason: str) -> Trial:
        rounds: list[tuple[Scored, Scored]] = []
        verdict: Verdict | None = None
        says = ""
        try:
            self.contest.challenge(other)
            while verdict is None:
                rounds.append(self.contest.round())
                scores = scores_of(rounds)
                verdict, says = judge(scores), describe(scores)
        except (GateFailure, LintFailure, UserError, LoadFailed) as error:
            verdict, says = "failed", str(error)
        return Trial(
            number=0,
            change=change,
            before={key: _value_of(self._plan, key) for key in change},
            reason=reason,
            verdict=verdict,
            says=says,
            score=median(theirs.score for _, theirs in rounds) if rounds else None,
            against=median(present.score for present, _ in rounds) if rounds else None,
            rounds=len(rounds),
            points=tuple(points_of(self._plan.spec.name, [theirs for _, theirs in rounds])),
            seconds=0.0,
        )


def scores_of(rounds: Sequence[tuple[Scored, Scored]]) -> list[tuple[float, float]]:
    """The scores alone."""
    return [(present.score, other.score) for present, other in rounds]


def points_of(contender: str, rounds: Sequence[Scored]) -> Iterator[Point]:
    """All that was measured in several rounds, as points ascending in clients."""
    by_clients: dict[int, list[Measurement]] = {}
    for one in rounds:
        for clients, measurement in one.found.items():
            by_clients.setdefault(clients, []).append(measurement)
    for clients, found in sorted(by_clients.items()):
        yield Point(contender, Load("concurrency", float(clients)), tuple(found))


def _value_of(plan: Plan, key: str) -> Any:
    value: Any = plan.spec
    for part in key.split("."):
        value = getattr(value, part)
    return value
