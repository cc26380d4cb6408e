"""What a measured capacity becomes when a request takes more work, and where it was measured."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from load_samples import bench
from triptych.base.errors import UserError
from triptych.interface.report.bench import write_bench_report
from triptych.operate.tune.proposal import MeasuredLoad, estimate_capacity, read_measured_load
from triptych.spec.slo import Slo
from tune_cases import SEARCH, point

MEASURED = MeasuredLoad.of((), SEARCH, Slo())


def test_more_work_stretches_rate_and_time() -> None:
    assert MEASURED.core_share == pytest.approx(0.9)  # of the busy time
    assert (MEASURED.highest_per_s, MEASURED.slo) == (200.0, SEARCH.slo)
    same = estimate_capacity(MEASURED, 1.0, 100.0)
    assert (same.work, same.holds) == (1.0, True)
    assert same.highest_per_s == pytest.approx(200.0)
    assert same.p99_us == pytest.approx(20_000)
    assert estimate_capacity(MEASURED, 1.0, 201.0).holds is False
    assert estimate_capacity(MEASURED, 1.0, None).holds is None
    busy = replace(MEASURED, core_share=1.0)
    heavy = estimate_capacity(busy, 2.0, 50.0)
    # As 100/s before, twice as long: 40 ms. The limit of 50 ms is met up to 25 ms before: 116.7/s.
    assert heavy.p99_us == pytest.approx(40_000)
    assert heavy.highest_per_s == pytest.approx(116.67 / 2, rel=0.01)
    assert heavy.holds is True
    assert estimate_capacity(busy, 2.0, 60.0).holds is False
    assert estimate_capacity(busy, 2.0, 200.0).p99_us is None
    assert estimate_capacity(busy, 100.0, 1.0).highest_per_s == 0.0


def test_a_closed_loop_alone_gives_the_throughput() -> None:
    measured = MeasuredLoad.of((point(80, 10), point(120, 30)), None, Slo(throughput=100.0))
    found = estimate_capacity(measured, 2.0, None)
    assert (found.highest_before_per_s, found.p99_us) == (120.0, None)
    assert found.highest_per_s == pytest.approx(120 / 1.9)
    assert estimate_capacity(measured, 2.0, 50.0).holds is False  # what is promised is more
    assert estimate_capacity(replace(measured, slo=Slo()), 2.0, 50.0).holds is True
    # A server that answered nothing has no latency.
    broken = replace(SEARCH, points=(*SEARCH.points, point(400, float("nan"))))
    assert len(MeasuredLoad.of((), broken, Slo()).points) == 4


def test_the_last_report_tells_what_was_measured(tmp_path: Path) -> None:
    assert read_measured_load(tmp_path) is None
    result = bench()
    write_bench_report(result, tmp_path / "bench")
    found = MeasuredLoad.of(result.points, result.rate, result.slo, result.subject)
    assert read_measured_load(tmp_path) == found
    lengths, padding = result.subject.lengths, result.subject.padding
    tokens = sum(length * rows for length, rows in lengths.items()) / sum(lengths.values())
    assert found.row_tokens == pytest.approx(tokens / (1 - padding))
    (tmp_path / "bench/bench.json").write_text(json.dumps({"points": 3}), encoding="utf-8")
    with pytest.raises(UserError, match="must be a result of bench or tune"):
        read_measured_load(tmp_path)
