"""What `tune` found: every trial with its evidence, what won, and what that is worth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import JsonValue

from triptych.serving.bench.points import Bottleneck, Cost, Point, RateSearch, Subject
from triptych.spec.slo import AnySlo

TrialVerdict = Literal["better", "worse", "no difference", "failed"]
ScoreUnit = Literal["requests/s", "tokens/s"]
REQUESTS: ScoreUnit = "requests/s"


@dataclass(frozen=True)
class Trial:
    """One change against the best settings so far, measured in turns with them."""

    number: int  # from 1; the baseline is no trial
    change: dict[str, JsonValue]  # dotted key of the spec to its new value
    before: dict[str, JsonValue]  # the same keys to their values in the best settings so far
    reason: str  # why it was worth a try: what the last measurement showed
    verdict: TrialVerdict  # only `better` takes the place of the best settings so far
    says: str  # the figures behind the verdict, or what failed
    score: float | None  # median of its rounds, in the result's unit; None where it failed
    against: float | None  # of the best settings, in the same rounds
    rounds: int  # that it took to tell
    points: tuple[Point, ...]  # of the trial, ascending in load
    seconds: float  # that it took altogether


@dataclass(frozen=True)
class Outcome:
    """One setting, measured at length in turns with the other one."""

    overrides: dict[str, JsonValue]  # all that differs from the spec; empty for the baseline
    score: float  # what tuning maximises, in the result's unit; median of the rounds
    points: tuple[Point, ...]  # closed loops, ascending in clients
    bottleneck: Bottleneck  # at the load where throughput no longer grows
    rate: RateSearch | None = None  # None where no latency is promised, and of streamed answers
    cost: Cost | None = None  # where a price was given


@dataclass(frozen=True)
class TuneResult:
    subject: Subject  # its overrides are the winner's
    slo: AnySlo
    objective: str  # what the score is, in a sentence
    trials: tuple[Trial, ...]
    skipped: dict[str, str]  # key of the spec to why it was not worth a trial
    baseline: Outcome
    winner: Outcome  # the baseline where nothing was better
    met: bool  # whether the winner holds all of `slo`
    verdict: str  # by how much it does, or what is missing; a sentence
    advice: tuple[str, ...]  # what else would help, a sentence each; some where it is not met
    stopped: str  # why the search ended
    seconds: float  # that it took altogether
    unit: ScoreUnit = REQUESTS  # of all scores
    schema: Literal["triptych-tune/1"] = "triptych-tune/1"
