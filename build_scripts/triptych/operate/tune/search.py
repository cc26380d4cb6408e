"""The sequence of trials: one field at a time, each against the best so far, until time is up."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any, Literal, Protocol

from pydantic import JsonValue

from triptych.base.cache import cache_root
from triptych.base.errors import Progress, UserError
from triptych.base.files import write_files
from triptych.base.formatting import rounded
from triptych.building.generation.gate import GenerationGateFailure
from triptych.core.gate.cached import GateFailure
from triptych.operate.tune.fields import Evidence, Proposal, Propose, Skip
from triptych.operate.tune.kind import Setting
from triptych.operate.tune.objective import LoadFailed, Scored
from triptych.operate.tune.results import (
    MIN_GAIN,
    REQUESTS,
    ScoreUnit,
    Trial,
    TrialVerdict,
    compare_scores,
    describe,
)
from triptych.repository.lint.checks import LintFailure
from triptych.serving.bench.results import Load, Measurement, Point, from_json, to_json


class Contest(Protocol):
    """Measures the best setting so far and another one in turns; see `TrialServers`."""

    def begin(self, present: Setting) -> tuple[Any, Scored]: ...

    def challenge(self, other: Setting) -> None: ...

    def round(self) -> tuple[Scored, Scored]: ...

    def promote(self) -> Any: ...

    def next_round_s(self) -> float: ...

    def final_s(self) -> float: ...


@dataclass(frozen=True)
class _StoredTrial:
    trial: Trial
    schema: Literal["triptych-trial/1"] = "triptych-trial/1"


class TrialCache:
    """Finished trials, a file each, so that a run that was interrupted measures none again.

    Args:
        key: all that decides what a trial finds, but for its settings; plain data.
    """

    def __init__(self, key: Mapping[str, object]) -> None:
        self.folder = cache_root() / "tune" / _hash(key)

    def find(self, present: Setting, other: Setting) -> Trial | None:
        """The trial of `other` against `present`, if it was finished."""
        try:
            text = self._path(present, other).read_text(encoding="utf-8")
            return from_json(_StoredTrial, json.loads(text)).trial
        except (OSError, ValueError):  # none, or of another form
            return None

    def add(self, present: Setting, other: Setting, trial: Trial) -> None:
        """Keep a finished trial; its file appears whole or not at all."""
        path = self._path(present, other)
        write_files(path.parent, {path.name: json.dumps(to_json(_StoredTrial(trial)))})

    def clear(self) -> None:
        """Forget everything: the run came to its end, and the next one measures afresh."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, present: Setting, other: Setting) -> Path:
        return self.folder / f"{_hash([dict(present.overrides), dict(other.overrides)])}.json"


def _hash(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@dataclass
class Search:
    contest: Contest
    cache: TrialCache
    deadline: float  # on the monotonic clock; no trial is begun after it
    cores: int
    limits_us: Mapping[str, float]  # that are promised
    fields: Sequence[Propose]  # that may be changed, in the order they are tried
    progress: Progress  # told every trial
    best: Setting = field(default_factory=Setting)  # so far
    trials: list[Trial] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # field to why it was not tried
    stopped: str = ""  # why the search ended; empty while it goes on
    unit: ScoreUnit = REQUESTS  # of the scores
    clock: Callable[[], float] = time.monotonic
    end: float = inf  # by which the winner has been held against the baseline, too; see `Contest`
    _first_s: float = 0.0  # the longest time until the first round of a trial was over
    _baseline: Setting = field(default_factory=Setting)

    def run(self, start: Setting, known: Setting | None = None) -> None:
        """Try every field once, from `start` on.

        Args:
            start: the baseline.
            known: what an earlier search found best; the first trial.
        """
        self.best = start
        self._baseline = start
        try:
            self._plan, scored = self.contest.begin(start)
        except LoadFailed as error:
            raise UserError(
                "--clients",
                "must be such that the pipeline as it is answers without an error",
                given=error,
                remedy="Lower it, or see what the server's log says",
            ) from error
        self._latest = scored.found[scored.start]
        self.progress("tune", f"baseline: {rounded(scored.score)} {self.unit}")
        if known is not None and known != start:
            old = start.overrides
            change = {k: v for k, v in known.overrides.items() if k not in old or old[k] != v}
            self._try(known, change, "what tuned.yaml has")
        for propose in self.fields:
            found = propose(Evidence(self._plan, self._latest, self.cores, self.limits_us))
            if isinstance(found, Skip):
                self.skipped[found.key] = found.reason
                continue
            if not self._climb(found, found.values, found.along):
                self._climb(found, found.others, {})
            if self.stopped:
                return
        self.stopped = "every field worth a trial was tried"

    def _climb(
        self, found: Proposal, values: Sequence[JsonValue], along: Mapping[str, JsonValue]
    ) -> bool:
        """Try values until one is no better; whether any was."""
        climbed = False
        for value in values:
            # The first trial may be longer than what is left; the others are not begun then.
            fits = not self._first_s or self._fits(self._first_s)
            if self.stopped or self.clock() > self.deadline or not fits:
                self.stopped = "the time was up"
                break
            change = {found.key: value, **along}
            other = Setting({**self.best.overrides, **change})
            if self._try(other, change, found.reason) != "better":
                break
            climbed = True
        return climbed

    def _try(self, other: Setting, change: dict[str, JsonValue], reason: str) -> TrialVerdict:
        number = len(self.trials) + 1
        trial = self.cache.find(self.best, other)
        again = trial is not None
        if trial is None:
            began = self.clock()
            trial = replace(self._measured(other, change, reason), number=number)
            trial = replace(trial, seconds=self.clock() - began)
            if not self.stopped:
                self.cache.add(self.best, other, trial)
        elif trial.verdict == "better":
            self.contest.challenge(other)
        is_open = self._is_open(trial)
        if is_open:
            trial = replace(trial, says=f"{trial.says}; the comparison at the end decides")
        self.trials.append(replace(trial, number=number))
        told = ", ".join(f"{key} {trial.before[key]} -> {value}" for key, value in change.items())
        self.progress(
            "tune",
            f"trial {number}: {told}: {trial.verdict}, {trial.says}"
            + (" (measured before)" if again else ""),
        )
        if trial.verdict == "better" or is_open:
            self.best = other
            self._plan = self.contest.promote()
            self._latest = trial.points[-1].typical if trial.points else self._latest
        return trial.verdict

    def _fits(self, seconds: float = 0.0) -> bool:
        """Whether that and another round leave time for the comparison at the end."""
        needed = seconds + self.contest.next_round_s() + self.contest.final_s()
        return self.clock() + needed <= self.end

    def _is_open(self, trial: Trial) -> bool:
        """Whether time was short in a trial that may win: the comparison at the end can prove it.

        Only against the baseline: a setting that was proven is not given up for one that is not.
        """
        if not self.stopped or trial.verdict != "no difference" or self.best != self._baseline:
            return False
        if self.clock() > self.end:
            return False
        return (trial.score or 0.0) > (1 + MIN_GAIN) * (trial.against or 0.0)

    def _measured(self, other: Setting, change: dict[str, JsonValue], reason: str) -> Trial:
        rounds: list[tuple[Scored, Scored]] = []
        verdict: TrialVerdict | None = None
        says = ""
        began = self.clock()
        try:
            self.contest.challenge(other)
            while verdict is None:
                rounds.append(self.contest.round())
                if len(rounds) == 1:
                    self._first_s = max(self._first_s, self.clock() - began)
                scores = scores_of(rounds)
                verdict, says = compare_scores(scores), describe(scores)
                if verdict is None and not self._fits():
                    self.stopped = "the time was up"
                    verdict, says = "no difference", f"{says}, not proven: {self.stopped}"
        except (GateFailure, GenerationGateFailure, LintFailure, UserError, LoadFailed) as error:
            self._first_s = max(self._first_s, self.clock() - began)
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
    return [(present.score, other.score) for present, other in rounds]


def points_of(contender: str, rounds: Sequence[Scored]) -> Iterator[Point]:
    """All that was measured in several rounds, as points ascending in clients."""
    by_clients: dict[int, list[Measurement]] = {}
    for one in rounds:
        for clients, measurement in one.found.items():
            by_clients.setdefault(clients, []).append(measurement)
    for clients, found in sorted(by_clients.items()):
        yield Point(contender, Load("concurrency", float(clients)), tuple(found))


def _value_of(plan: Any, key: str) -> JsonValue:
    value: JsonValue = attrgetter(key)(plan.spec)
    return value
