"""Hill climbing over the tunable fields: trials of one field at a time against the best."""

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
from typing import Generic

from pydantic import JsonValue

from triptych.base.cache import cache_root
from triptych.base.errors import Progress, UserError
from triptych.base.files import write_files
from triptych.base.formatting import rounded
from triptych.core.gate.cached import GateFailure
from triptych.operate.tune.fields import HasSpec, Observation, Planned, Proposal, Propose
from triptych.operate.tune.kinds import Setting
from triptych.operate.tune.objective import LoadFailed, ScoredRound
from triptych.operate.tune.results import (
    MIN_GAIN,
    REQUESTS,
    ScoreUnit,
    Trial,
    TrialVerdict,
    compare_scores,
    format_scores,
)
from triptych.operate.tune.trial_servers import TrialServers
from triptych.repository.lint.checks import LintFailure
from triptych.repository.records import read_record
from triptych.serving.bench.results import LoadPoint, Measurement, OfferedLoad, to_json


class TrialCache:
    """Cache of finished trials, one file each, so that an interrupted run can continue.

    Args:
        key: Plain data of everything that affects a trial, except its settings.
    """

    def __init__(self, key: Mapping[str, object]) -> None:
        self.folder = cache_root() / "tune" / _hash(key)

    def find(self, present: Setting, other: Setting) -> Trial | None:
        """Return the finished trial of `other` against `present`; None without one."""
        try:
            text = self._path(present, other).read_text(encoding="utf-8")
            return read_record(Trial, json.loads(text))
        except (OSError, ValueError):  # missing, or another format
            return None

    def add(self, present: Setting, other: Setting, trial: Trial) -> None:
        """Write a finished trial atomically."""
        path = self._path(present, other)
        write_files(path.parent, {path.name: json.dumps(to_json(trial))})

    def clear(self) -> None:
        """Delete all trials after a complete run, so that the next run measures again."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, present: Setting, other: Setting) -> Path:
        return self.folder / f"{_hash([dict(present.overrides), dict(other.overrides)])}.json"


def _hash(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@dataclass
class Search(Generic[Planned]):
    """Search for the best setting from a baseline on, with the trials that it has measured."""

    servers: TrialServers[Planned]
    cache: TrialCache
    deadline: float  # no trial begins after it (monotonic clock)
    cores: int
    limits_us: Mapping[str, float]  # limits of the SLO, in microseconds
    fields: Sequence[Propose[Planned]]  # tunable fields, in the order of their trials
    progress: Progress  # called at each trial
    best: Setting = field(default_factory=Setting)  # best setting
    trials: list[Trial] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # reason by skipped field
    stopped: str = ""  # reason of the end; empty while it runs
    unit: ScoreUnit = REQUESTS  # unit of the scores
    clock: Callable[[], float] = time.monotonic
    end: float = inf  # deadline that includes the final comparison
    _first_s: float = 0.0  # longest time until the end of a trial's first round
    _baseline: Setting = field(default_factory=Setting)

    def run(self, start: Setting, known: Setting | None = None) -> None:
        """Try every field once, from `start` on.

        Args:
            start: Baseline setting.
            known: Best setting of an earlier search, which is the first trial.
        """
        self.best = start
        self._baseline = start
        try:
            self._plan, scored = self.servers.begin(start)
        except LoadFailed as error:
            raise UserError(
                "--clients",
                "caused errors in the baseline",
                given=error,
                remedy="Lower it, or see the server's log",
            ) from error
        self._latest = scored.by_clients[scored.start]
        self.progress("tune", f"baseline: {rounded(scored.score)} {self.unit}")
        if known is not None and known != start:
            old = start.overrides
            change = {k: v for k, v in known.overrides.items() if k not in old or old[k] != v}
            self._try(known, change, "configuration of tuned.yaml")
        for propose in self.fields:
            proposal = propose(Observation(self._plan, self._latest, self.cores, self.limits_us))
            if not proposal.values:
                self.skipped[proposal.key] = proposal.reason
                continue
            if not self._climb(proposal, proposal.values, proposal.along):
                self._climb(proposal, proposal.others, {})
            if self.stopped:
                return
        self.stopped = "all promising fields were tried"

    def _climb(
        self, proposal: Proposal, values: Sequence[JsonValue], along: Mapping[str, JsonValue]
    ) -> bool:
        """Try values until one is not better; return whether any was better."""
        improved = False
        for value in values:
            # Only the first trial begins if its duration is unknown or exceeds the remaining time.
            fits = not self._first_s or self._fits(self._first_s)
            if self.stopped or self.clock() > self.deadline or not fits:
                self.stopped = "time budget reached"
                break
            change = {proposal.key: value, **along}
            other = Setting({**self.best.overrides, **change})
            if self._try(other, change, proposal.reason) != "better":
                break
            improved = True
        return improved

    def _try(self, other: Setting, change: dict[str, JsonValue], reason: str) -> TrialVerdict:
        number = len(self.trials) + 1
        trial = self.cache.find(self.best, other)
        again = trial is not None
        if trial is None:
            began = self.clock()
            trial = replace(self._measure(other, change, reason), number=number)
            trial = replace(trial, seconds=self.clock() - began)
            if not self.stopped:
                self.cache.add(self.best, other, trial)
        elif trial.verdict == "better":
            self.servers.start_trial(other)
        is_open = self._is_open(trial)
        if is_open:
            trial = replace(trial, says=f"{trial.says}; the final comparison decides")
        self.trials.append(replace(trial, number=number))
        changes = ", ".join(
            f"{key} {trial.before[key]} -> {value}" for key, value in change.items()
        )
        self.progress(
            "tune",
            f"trial {number}: {changes}: {trial.verdict}, {trial.says}"
            + (" (from the cache)" if again else ""),
        )
        if trial.verdict == "better" or is_open:
            self.best = other
            self._plan = self.servers.accept_trial()
            self._latest = trial.points[-1].typical if trial.points else self._latest
        return trial.verdict

    def _fits(self, seconds: float = 0.0) -> bool:
        """Return whether another round and `seconds` leave time for the final comparison."""
        needed = seconds + self.servers.next_round_s() + self.servers.final_s()
        return self.clock() + needed <= self.end

    def _is_open(self, trial: Trial) -> bool:
        """Return whether the final comparison may still prove an unfinished trial better.

        Only trials against the baseline qualify: a proven setting is not replaced.
        """
        if not self.stopped or trial.verdict != "cannot tell" or self.best != self._baseline:
            return False
        if self.clock() > self.end:
            return False
        return (trial.score or 0.0) > (1 + MIN_GAIN) * (trial.against or 0.0)

    def _measure(self, other: Setting, change: dict[str, JsonValue], reason: str) -> Trial:
        rounds: list[tuple[ScoredRound, ScoredRound]] = []
        verdict: TrialVerdict | None = None
        says = ""
        began = self.clock()
        try:
            self.servers.start_trial(other)
            while verdict is None:
                rounds.append(self.servers.round())
                if len(rounds) == 1:
                    self._first_s = max(self._first_s, self.clock() - began)
                scores = pair_scores(rounds)
                verdict, says = compare_scores(scores), format_scores(scores)
                if verdict is None and not self._fits():
                    self.stopped = "time budget reached"
                    verdict, says = "cannot tell", f"{says}, not proven: {self.stopped}"
        except (GateFailure, LintFailure, UserError, LoadFailed) as error:
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
            points=tuple(collect_points([theirs for _, theirs in rounds])),
            seconds=0.0,
        )


def pair_scores(rounds: Sequence[tuple[ScoredRound, ScoredRound]]) -> list[tuple[float, float]]:
    return [(present.score, other.score) for present, other in rounds]


def collect_points(rounds: Sequence[ScoredRound]) -> Iterator[LoadPoint]:
    """Yield the measurements of several rounds as points, ascending in clients."""
    by_clients: dict[int, list[Measurement]] = {}
    for one in rounds:
        for clients, measurement in one.by_clients.items():
            by_clients.setdefault(clients, []).append(measurement)
    for clients, found in sorted(by_clients.items()):
        yield LoadPoint(OfferedLoad("concurrency", float(clients)), tuple(found))


def _value_of(plan: HasSpec, key: str) -> JsonValue:
    value: JsonValue = attrgetter(key)(plan.spec)
    return value
