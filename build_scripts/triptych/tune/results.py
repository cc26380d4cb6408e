"""What `tune` found: every trial with its evidence, what won, and what that is worth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from triptych.bench.points import Bottleneck, Cost, Point, RateSearch, Subject
from triptych.pipeline.slo import Slo

Verdict = Literal["better", "worse", "no difference", "failed"]


@dataclass(frozen=True)
class Trial:
    """One change against the best settings so far, measured in turns with them.

    Attributes:
        number: from 1; the baseline is no trial.
        change: dotted key of the spec to its new value.
        before: the same keys to their values in the best settings so far.
        reason: why it was worth a try: what the last measurement showed.
        verdict: against the best settings so far; only ``better`` takes their place.
        says: the figures behind the verdict, or what failed.
        score: of the trial, in requests a second; median of its rounds. None where it failed.
        against: of the best settings, in the same rounds.
        rounds: that it took to tell.
        points: of the trial, ascending in load.
        seconds: that it took altogether.
    """

    number: int
    change: dict[str, Any]
    before: dict[str, Any]
    reason: str
    verdict: Verdict
    says: str
    score: float | None
    against: float | None
    rounds: int
    points: tuple[Point, ...]
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """One setting, measured at length in turns with the other one.

    Attributes:
        overrides: dotted key to value, of all that differs from the spec; empty for the baseline.
        score: what tuning maximises, in requests a second; median of the rounds.
        points: closed loops, ascending in clients.
        bottleneck: at the load where throughput no longer grows.
        rate: the highest Poisson rate that holds the promise; None where no latency is promised.
        cost: where a price was given.
    """

    overrides: dict[str, Any]
    score: float
    points: tuple[Point, ...]
    bottleneck: Bottleneck
    rate: RateSearch | None = None
    cost: Cost | None = None


@dataclass(frozen=True)
class TuneResult:
    """Everything `tune` found.

    Attributes:
        subject: what was tuned, and on what; its ``overrides`` are the winner's.
        slo: what is promised.
        objective: what the score is, in a sentence.
        trials: in order.
        skipped: key of the spec to why it was not worth a trial.
        baseline: the settings before, as they came.
        winner: the best settings; the baseline's where nothing was better.
        met: whether the winner holds all of `slo`.
        verdict: by how much it does, or what is missing; a sentence.
        advice: what else would help, a sentence each; there is some where `met` is false.
        stopped: why the search ended.
        seconds: that it took altogether.
        schema: of this form.
    """

    subject: Subject
    slo: Slo
    objective: str
    trials: tuple[Trial, ...]
    skipped: dict[str, str]
    baseline: Outcome
    winner: Outcome
    met: bool
    verdict: str
    advice: tuple[str, ...]
    stopped: str
    seconds: float
    schema: Literal["triptych-tune/1"] = "triptych-tune/1"
