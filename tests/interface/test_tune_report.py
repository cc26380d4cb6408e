"""The report of a tuning: every trial with its evidence, the front, what it was worth."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from load_samples import NOTHING_ANSWERED, measurement, tuned
from triptych.interface.report.tune import write_tune_report
from triptych.operate.tune.results import TuneResult, pareto_front
from triptych.serving.bench.results import LoadPoint, OfferedLoad, from_json


def test_the_record_is_the_result(tmp_path: Path) -> None:
    assert write_tune_report(tuned(), tmp_path) == tmp_path / "report.html"
    document = json.loads((tmp_path / "tune.json").read_text(encoding="utf-8"))
    assert from_json(TuneResult, document) == tuned()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "tune.json"]


def at(rate: float, p99: float, **changes: Any) -> LoadPoint:
    one = measurement(4, throughput_per_s=rate, p99_us=p99, **changes)
    return LoadPoint("p", OfferedLoad("concurrency", rate), (one,))


def test_the_front_is_what_nothing_beats() -> None:
    points = [at(100, 10), at(200, 30), at(150, 40), at(90, 10), at(200, 35), at(50, 5)]
    assert pareto_front(points) == (points[5], points[0], points[1])
    assert pareto_front([]) == ()
    twice = [at(100, 10), at(100, 10)]
    assert pareto_front(twice) == (twice[0],)
    assert pareto_front(twice)[0] is twice[0]


def test_what_failed_is_not_on_the_front() -> None:
    failing = at(900, 1, errors={"deadline": 1})
    silent = replace(at(0, 0), rounds=(measurement(1, **NOTHING_ANSWERED),))
    assert pareto_front([failing, silent]) == ()
    assert pareto_front([failing, silent, at(10, 10)])[0].load.value == 10


def test_the_front_of_all_points_is_beaten_by_none_and_beats_the_rest() -> None:
    points = [at(rate, p99) for rate in range(10, 60, 7) for p99 in range(rate // 2, 90, 11)]
    front = pareto_front(points)

    def figures(one: LoadPoint) -> tuple[float, float]:
        return one.median("throughput_per_s"), one.median("p99_us")

    def beats(one: LoadPoint, other: LoadPoint) -> bool:
        (a, b), (c, d) = figures(one), figures(other)
        return a >= c and b <= d and (a, b) != (c, d)

    assert not any(beats(one, other) for one in points for other in front)
    held = {figures(one) for one in front}
    rest = [one for one in points if figures(one) not in held]
    assert all(any(beats(other, one) for other in front) for one in rest)
