"""Tuning's numbers: the score of a setting, and whether one is better than another."""

import random
from collections import Counter
from collections.abc import Callable
from math import exp

import pytest

from triptych.operate.tune.objective import CLIENTS, LoadFailed, ThroughputObjective
from triptych.operate.tune.results import LOOKS, compare_scores, format_scores
from triptych.serving.bench.results import Measurement
from triptych.spec.slo import Slo
from tune_cases import measurement

TRIALS = 400
MAX_ERRORS = 29
"""Number of wrong verdicts that 5 % of `TRIALS` exceed with a probability of 2 %."""


def test_a_clear_gain_or_loss_takes_three_rounds_and_noise_more() -> None:
    assert compare_scores([(100, 80)]) == "cannot tell"  # too low for another round
    assert compare_scores([(100, 130)]) is None
    assert compare_scores([(100, 130), (90, 118)]) is None
    assert compare_scores([(100, 130), (90, 118), (100, 131)]) == "better"
    assert compare_scores([(100, 90), (100, 89), (100, 90)]) == "worse"
    rounds = [(100.0, each) for each in (118.0, 95.0, 106.0, 97.0, 130.0, 101.0)]
    assert [compare_scores(rounds[:n]) for n in range(1, LOOKS[-1])] == [None] * (LOOKS[-1] - 1)
    assert compare_scores(rounds) == "cannot tell"
    equal = [(100, 100.2), (100, 100.1), (100, 99.8)]
    assert compare_scores(equal) == "no difference"  # proven to be within 10 %
    assert compare_scores([(100, 120), (100, 80), (100, 95)]) == "cannot tell"
    assert format_scores([(100, 110), (200, 220), (90, 99)]) == (
        "1.10 times (1.07 to 1.13 with 95 % confidence) in 3 rounds"
    )
    assert format_scores([(100, 90)]) == "0.900 times in 1 round"


@pytest.mark.parametrize("noise", [0.01, 0.04, 0.1, 0.3])
def test_an_equal_setting_is_seldom_called_better_or_worse(noise: float) -> None:
    found = judged(100, noise)
    assert found["better"] <= MAX_ERRORS, found
    assert found["worse"] <= MAX_ERRORS, found
    if noise > 0.2:
        assert found["cannot tell"] > 0.8 * TRIALS, found
    if noise < 0.02:
        assert found["no difference"] > 0.8 * TRIALS, found


@pytest.mark.parametrize("noise", [0.01, 0.04, 0.1])
def test_a_gain_of_a_tenth_is_mostly_found_and_seldom_called_a_loss(noise: float) -> None:
    found = judged(110, noise)
    assert found["worse"] <= MAX_ERRORS, found
    if noise < 0.05:
        assert found["better"] > 0.8 * TRIALS, found
    assert judged(90, noise)["better"] <= MAX_ERRORS


def judged(other: float, noise: float) -> Counter[str]:
    """Return the verdicts on trials of a setting that scores `other` where the present has 100."""
    rng, found = random.Random(1), Counter[str]()
    for _ in range(TRIALS):
        rounds: list[tuple[float, float]] = []
        verdict = None
        while verdict is None:
            rounds.append((100 * exp(rng.gauss(0, noise)), other * exp(rng.gauss(0, noise))))
            verdict = compare_scores(rounds)
        found[verdict] += 1
    return found


def curve(knee: float) -> Callable[[int], Measurement]:
    """A server that saturates at 200/s, whose p99 is 10 ms up to `knee` clients, then grows."""

    def at(clients: int) -> Measurement:
        rate = min(200.0, 25.0 * clients)
        return measurement(rate, p99_us=10e3 * max(1.0, clients / knee))

    return at


def test_the_latency_score_is_the_same_wherever_it_begins() -> None:
    for start in (None, *CLIENTS[:6]):
        scored = ThroughputObjective(Slo(p99_ms=15.0), clients=32).score(curve(4), start)
        # p99 is 10 ms with 4 clients (100/s), 20 ms with 8 (200/s): 15 ms lies half way.
        assert scored.score == pytest.approx(150), start
        assert scored.start == 4, start
        assert len(scored.by_clients) <= 6, start
    # It stays within what was measured.
    always = ThroughputObjective(Slo(p99_ms=1e3), clients=32).score(curve(4))
    assert (always.score, always.start) == (200, 32)
    never = ThroughputObjective(Slo(p99_ms=5.0), clients=32).score(curve(4))
    assert never.score == pytest.approx(25 / 2)  # a lone client takes twice the limit
    assert never.start == 1


def test_without_a_latency_the_score_is_the_throughput_of_the_highest_load() -> None:
    scored = ThroughputObjective(Slo(throughput=1.0), clients=48).score(
        lambda clients: measurement(7.0 * clients)
    )
    assert (scored.score, list(scored.by_clients)) == (336, [48])
    failed = measurement(0.0, errors={"queue full": 3})
    with pytest.raises(LoadFailed, match="3 x queue full"):
        ThroughputObjective(Slo(), clients=4).score(lambda _clients: failed)
