"""Tuning's numbers: the score of a setting, and whether one is better than another."""

import random
from collections.abc import Callable

import pytest

from triptych.operate.tune.objective import CLIENTS, LoadFailed, ThroughputObjective
from triptych.operate.tune.results import MAX_ROUNDS, compare_scores, gain
from triptych.serving.bench.results import Measurement
from triptych.spec.slo import Slo
from tune_cases import measurement


def test_a_clear_gain_takes_two_rounds_and_a_clear_loss_one() -> None:
    assert compare_scores([(100, 80)]) == "worse"
    assert compare_scores([(100, 130)]) is None
    assert compare_scores([(100, 130), (90, 118)]) == "better"
    assert compare_scores([(100, 90), (100, 89), (100, 90)]) == "worse"


def test_noise_gets_more_rounds_and_then_no_verdict() -> None:
    rounds = [(100.0, 108.0), (100.0, 95.0), (100.0, 106.0), (100.0, 97.0), (100.0, 103.0)]
    assert [compare_scores(rounds[:n]) for n in range(1, MAX_ROUNDS)] == [None] * (MAX_ROUNDS - 1)
    assert compare_scores(rounds) == "no difference"
    equal = [(100, 100.2), (100, 100.1), (100, 99.8), (100, 100.1), (100, 99.9)]
    assert compare_scores(equal) == "no difference"


@pytest.mark.parametrize(("other", "low", "high"), [(100, 0.0, 0.15), (110, 0.8, 1.0)])
def test_in_noise_a_gain_of_a_tenth_is_mostly_found_and_none_is_seldom_seen(
    other: float, low: float, high: float
) -> None:
    noise = random.Random(1)
    better = 0
    for _ in range(400):
        rounds: list[tuple[float, float]] = []
        verdict = None
        while verdict is None:
            rounds.append((100 * noise.gauss(1, 0.04), other * noise.gauss(1, 0.04)))
            verdict = compare_scores(rounds)
        better += verdict == "better"
    assert low <= better / 400 <= high


def test_the_gain_is_the_mean_ratio() -> None:
    share, half = gain([(100, 110), (200, 220)])
    assert share == pytest.approx(0.1)
    assert 0 < half < 0.1
    assert gain([(100, 90)])[1] == float("inf")


def curve(knee: float) -> Callable[[int], Measurement]:
    """A server that saturates at 200/s, whose p99 is 10 ms up to `knee` clients, then grows."""

    def at(clients: int) -> Measurement:
        rate = min(200.0, 25.0 * clients)
        return measurement(rate, p99_us=10e3 * max(1.0, clients / knee))

    return at


@pytest.mark.parametrize("start", [None, *CLIENTS[:6]])
def test_the_latency_score_is_the_same_wherever_it_begins(start: int | None) -> None:
    objective = ThroughputObjective(Slo(p99_ms=15.0), clients=32)
    scored = objective.score(curve(4), start)
    # p99 is 10 ms with 4 clients (100/s), 20 ms with 8 (200/s): 15 ms lies half way.
    assert scored.score == pytest.approx(150)
    assert scored.start == 4
    assert len(scored.by_clients) <= 6


def test_the_latency_score_stays_within_what_was_measured() -> None:
    always = ThroughputObjective(Slo(p99_ms=1e3), clients=32).score(curve(4))
    assert (always.score, always.start) == (200, 32)
    never = ThroughputObjective(Slo(p99_ms=5.0), clients=32).score(curve(4))
    assert never.score == pytest.approx(25 / 2)  # a lone client takes twice the limit
    assert never.start == 1


def test_without_a_latency_the_score_is_the_throughput_of_the_highest_load() -> None:
    seen: list[int] = []

    def at(clients: int) -> Measurement:
        seen.append(clients)
        return measurement(7.0 * clients)

    assert ThroughputObjective(Slo(throughput=1.0), clients=48).score(at).score == 336
    assert seen == [48]


def test_errors_have_no_score() -> None:
    def at(_clients: int) -> Measurement:
        return measurement(0.0, errors={"queue full": 3})

    with pytest.raises(LoadFailed, match="3 x queue full"):
        ThroughputObjective(Slo(), clients=4).score(at)
