"""A monitoring run with evidence worked out by hand."""

from __future__ import annotations

import math
import time

from triptych.operate.monitor.results import (
    MonitorRun,
)
from triptych.operate.monitor.scores import MeanTest, MetricValue, SequentialEvidence

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
        drift=None,
        distributions=(),
        alarms=("wrong",),
        drifts=(),
        notes=(),
        evidence={"label_agreement": evidence},
    )
