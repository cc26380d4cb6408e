"""A monitoring run and a replay on two builds, with evidence worked out by hand."""

import math
import time
from dataclasses import replace

from tests.support.load_samples import measurement
from triptych.operate.monitor.results import MonitorRun
from triptych.operate.monitor.scores import MeanTest, MetricValue, SequentialEvidence
from triptych.operate.monitor.shadow_verdict import (
    Answers,
    MetricPair,
    PairTest,
    ReplayComparison,
    compare_speeds,
)
from triptych.serving.bench.results import Measurement

NEEDED = math.log(1000)


def look(build: str = "b1") -> MonitorRun:
    evidence = SequentialEvidence(0.02, NEEDED).add([1.0, 1.0, 1.0, 1.0])
    test = MeanTest("label_agreement", 0.02, 1.0, 4, 3.5, 3.0, evidence.alarm_row)
    figure = MetricValue("label_agreement", 0.0, 0.0, 0.4, 0.98, 1.0)
    return MonitorRun(
        pipeline="p",
        at=time.time(),
        build=build,
        precision="fp32",
        rows=4,
        redacted=0,
        others=0,
        refused=0,
        damaged=0,
        metrics=(figure,),
        tests=(test,),
        groups=(),
        worst=(),
        lengths=None,
        distributions=(),
        alarms=("wrong",),
        drifts=(),
        notes=(),
        evidence={"label_agreement": evidence},
    )


RIGHT = PairTest("label_agreement", 500, 0.02, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
WRONG = replace(RIGHT, candidate=0.1, low=0.07, high=0.13, more_low=0.05, more_high=0.12)


def answers(
    test: PairTest = RIGHT, rows: int = 500, *, reference: bool = True, lost: int = 0
) -> Answers:
    """Answers of two builds to the same rows; the candidate lost some."""
    return Answers(rows, 0, (0, lost), reference, (), (replace(test, rows=rows),))


def rounds(*drifts: float) -> list[Measurement]:
    """A measurement of eight clients for each ratio to the usual speed."""
    return [measurement(8, drift=drift) for drift in drifts]


def replayed() -> ReplayComparison:
    """A candidate that is slower and wrong."""
    metric = MetricPair("mean_cosine", 1, None, 0.5, 0.9)
    return ReplayComparison(
        pipeline="p",
        builds=("b1", "b2"),
        precisions=("fp32", "int8"),
        source="sample",
        load="8 clients",
        rounds=3,
        seconds=25.0,
        verdict="reject",
        reasons=("label_agreement is lower",),
        answers=replace(answers(WRONG), left_out=3, metrics=(metric,)),
        speeds=compare_speeds(rounds(0.99, 1.0, 1.01), rounds(0.79, 0.8, 0.81)),
        errors=(("queue is full",), ()),
        notes=("a note",),
    )
