"""Verdicts on measured load: of rates or loads, as firm as the noise of the rounds allows."""

import random
from collections import Counter
from dataclasses import replace
from math import exp
from typing import Any

from load_samples import (
    NASTY,
    PROMISE,
    arrivals,
    baseline,
    bench,
    measurement,
    point,
)
from triptych.interface.report.bench import shown_points
from triptych.serving.bench.results import (
    LoadPoint,
    OfferedLoad,
    RateSearch,
    collect_warnings,
    find_best_point,
    find_limiting_bottleneck,
    format_headline,
    judge_slo,
)
from triptych.spec.slo import Slo


def test_the_verdict_is_of_rates_where_they_were_searched() -> None:
    nowhere = RateSearch(PROMISE, 0.0, 5.0, ())
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({}, "met"),
        ({"rate": nowhere}, "not met"),  # though closed loops hold it
        ({"rate": None}, "met"),
        ({"slo": Slo(p99_ms=80.0, throughput=150.0)}, "met"),
        ({"slo": Slo(p99_ms=80.0, throughput=151.0)}, "cannot tell"),  # 165/s is too much
        ({"slo": Slo(p99_ms=80.0, throughput=165.0)}, "not met"),
        ({"slo": Slo(p99_ms=80.0, throughput=151.0), "rate": None}, "cannot tell"),
        ({"slo": Slo(p99_ms=80.0, throughput=200.0), "rate": None}, "not met"),
        ({"slo": Slo(), "rate": None}, "none"),
        ({"points": (), "rate": None}, "cannot tell"),
    )
    for changes, kind in cases:
        assert judge_slo(bench(**changes)).kind == kind, changes
    closed = judge_slo(bench(rate=None)).explanation
    assert closed == "p99 <= 80 ms: met at 1 client, 2 clients, 4 clients."
    for slo, nearest in (
        (Slo(p99_ms=20.0), "68.2/s at 1 client"),
        (Slo(throughput=900.0), "216/s at 32 clients"),
    ):
        assert f"nearest: {nearest}" in judge_slo(bench(slo=slo, rate=None)).explanation


def test_noisy_measurements_do_not_make_a_firm_verdict() -> None:
    """The words of a verdict are on record in `tests/data/tables`."""
    # What missed at a higher rate says nothing about the lower one.
    unproven = RateSearch(PROMISE, 0.0, None, (arrivals(5, 90.0),))
    partly = RateSearch(PROMISE, 0.0, 10.0, (arrivals(5, 90.0), arrivals(10, 300.0)))
    for rate in (unproven, partly):
        verdict = judge_slo(bench(rate=rate))
        assert (verdict.kind, verdict.word, verdict.passed) == (
            "cannot tell",
            "SLO: cannot tell",
            False,
        )
    above = RateSearch(PROMISE, 150.0, 200.0, tuple(arrivals(r, 80.0) for r in (150, 170, 200)))
    assert "and missed at 200/s; cannot tell at 170/s" in judge_slo(bench(rate=above)).explanation

    def judged(*p99_ms: float) -> tuple[str, str]:
        rounds = tuple(measurement(8, p99_us=1e3 * ms) for ms in p99_ms)
        one = LoadPoint("minilm", OfferedLoad("concurrency", 8), rounds)
        verdict = judge_slo(bench(points=(one,), rate=None))
        return verdict.kind, verdict.explanation

    for p99_ms, said in (
        ((60, 130, 70), "the limit: too close to the limit, or too noisy, for 100 rounds."),
        (
            (50, 70, 75),
            "0.800 times (0.467 to 1.37 with 95 % confidence) the limit: about 10 rounds",
        ),
        ((60,), "one round does not show the noise"),
    ):
        kind, explanation = judged(*p99_ms)
        assert kind == "cannot tell", p99_ms
        assert said in explanation, p99_ms
    failing = judge_slo(bench(points=(point(8, errors={"x": 1}),), rate=None))
    assert failing.kind == "not met"


def test_the_verdict_on_a_load_is_seldom_wrong() -> None:
    for noise in (0.02, 0.1, 0.3):
        for level, wrong in ((0.99, "missed"), (1.01, "met"), (0.5, "missed"), (2.0, "met")):
            rng, found = random.Random(9), Counter[str]()
            for _ in range(300):
                rounds = tuple(
                    measurement(8, p99_us=80e3 * level * exp(rng.gauss(0, noise)), steps=())
                    for _ in range(3)
                )
                one = LoadPoint("minilm", OfferedLoad("concurrency", 8), rounds)
                found[one.judge(PROMISE)] += 1
            assert found[wrong] <= 23, (noise, level, found)  # 5 % and two standard errors
            if noise < 0.05 and level in (0.5, 2.0):
                assert found["cannot tell"] == 0, (noise, level, found)


def test_the_best_point_holds_the_promise_where_one_does() -> None:
    points = bench().points
    for slo, clients in ((PROMISE, 4), (Slo(), 32), (Slo(p99_ms=0.1), 32)):
        best = find_best_point(points, slo)
        assert best is not None
        assert best.load.value == clients
    failing = point(64, errors={"deadline": 1})
    best = find_best_point((*points, failing), Slo())
    assert best is not None
    assert best.load.value == 32
    assert find_best_point((), Slo()) is None
    assert format_headline(bench(points=())) == ""
    assert find_limiting_bottleneck(()) is None
    assert find_limiting_bottleneck((baseline("x", OfferedLoad("in_process", 1), 9.0),)) is None


def test_warnings_that_differ_in_numbers_are_told_once() -> None:
    points = [point(clients, warnings=(f"differs by {clients} %",)) for clients in (1, 8)]
    assert collect_warnings([*points, point(2)]) == [
        "differs by 1 %, 6 similar warnings (minilm, 1 client; minilm, 8 clients)"
    ]
    one = replace(points[0], rounds=points[0].rounds[:1])
    assert collect_warnings([one]) == ["differs by 1 % (minilm, 1 client)"]


def test_the_best_and_the_largest_load_are_shown() -> None:
    assert [one.load.value for one in shown_points(bench())] == [4, 32]
    assert [one.load.value for one in shown_points(bench(slo=Slo()))] == [1, 32]
    assert [one.load.value for one in shown_points(NASTY["one point"])] == [8]
    assert shown_points(NASTY["no point"]) == []
