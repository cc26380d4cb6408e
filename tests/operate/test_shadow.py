"""The verdict of a replay on simulated builds: planted slow ones, equal ones, and noise."""

import random
from collections import Counter
from math import exp

import pytest

from load_samples import measurement
from monitor_cases import answers
from triptych.operate.monitor.shadow import FIRST_ROUNDS, measure_in_turns
from triptych.operate.monitor.shadow_verdict import compare_speeds, judge
from triptych.serving.bench.results import Measurement

RUNS = 60
MAX_ERRORS = 6
"""Number of wrong verdicts among `RUNS` that 1 of 20 exceeds with a probability below 5 %."""


def replay(
    rng: random.Random, *, slower: float, noise: float, bursts: float = 0.0, max_rounds: int = 30
) -> tuple[str, int]:
    """Return the verdict on a candidate that is `slower` times, and the number of rounds."""

    def draw() -> float:
        burst = rng.uniform(0.3, 1) if rng.random() < bursts else 0
        return exp(rng.gauss(0, noise) + burst)

    def measure_side(side: int, _number: int) -> Measurement:
        p50, p99, rate = (draw() * (slower if side else 1) for _ in range(3))
        return measurement(
            8, p50_us=35e3 * p50, p99_us=65e3 * p99, throughput_per_s=180 / rate, steps=()
        )

    sides = measure_in_turns(measure_side, max_rounds)
    decision, _ = judge(answers(), compare_speeds(*sides), ((), ()))
    return decision, len(sides[0])


@pytest.mark.parametrize(
    ("slower", "noise", "bursts", "wrong", "right"),
    [
        (1.0, 0.05, 0.0, "reject", "promote"),
        (1.0, 0.03, 0.1, "reject", "promote"),  # one round of ten is noisy
        (1.1, 0.03, 0.0, "promote", ""),  # just the difference that must be found
        (1.1, 0.15, 0.0, "promote", ""),
        (1.1, 0.03, 0.1, "promote", ""),
        (1.25, 0.03, 0.0, "promote", "reject"),
        (1.69, 0.1, 0.0, "promote", "reject"),
        (0.7, 0.05, 0.0, "reject", "promote"),
    ],
)
def test_noise_seldom_misleads_the_verdict(
    slower: float, noise: float, bursts: float, wrong: str, right: str
) -> None:
    rng, found = random.Random(11), Counter[str]()
    for _ in range(RUNS):
        decision, rounds = replay(rng, slower=slower, noise=noise, bursts=bursts)
        assert FIRST_ROUNDS <= rounds <= 30
        found[decision] += 1
    assert found[wrong] <= MAX_ERRORS, found
    if right:
        assert found[right] > RUNS / 2, found


def test_noise_makes_no_verdict_and_quiet_takes_few_rounds() -> None:
    rng = random.Random(12)
    noisy = [replay(rng, slower=1.0, noise=0.6) for _ in range(RUNS)]
    assert Counter(decision for decision, _ in noisy)["inconclusive"] > 0.9 * RUNS
    assert sum(rounds == 30 for _, rounds in noisy) > 0.9 * RUNS
    quiet = [replay(rng, slower=1.0, noise=0.01) for _ in range(RUNS)]
    assert {decision for decision, _ in quiet} == {"promote"}
    assert {rounds for _, rounds in quiet} == {FIRST_ROUNDS}
    assert replay(rng, slower=2.0, noise=0.01) == ("reject", FIRST_ROUNDS)
    assert replay(rng, slower=1.0, noise=0.01, max_rounds=1) == ("inconclusive", 1)
    assert replay(rng, slower=1.0, noise=0.01, max_rounds=0) == ("promote", 0)


def test_one_noisy_round_of_the_active_build_hides_no_regression() -> None:
    """The replay of a report: p50 up 69 %, p99 up 73 %, and one noisy round of the active build."""
    for rounds, wanted in ((5, "inconclusive"), (30, "reject")):
        factors = iter((1.0, 1.1, 2.1, 0.95, 1.0, *[1.0] * 25))

        def measure_side(side: int, _number: int) -> Measurement:
            factor = 1.69 if side else next(factors)  # noqa: B023
            return measurement(8, p50_us=20e3 * factor, p99_us=40e3 * factor, resources=None)

        before, after = measure_in_turns(measure_side, rounds)
        decision, reasons = judge(answers(), compare_speeds(before, after), ((), ()), 8.0)
        assert decision == wanted, reasons
        if wanted == "inconclusive":
            assert "p50 ms 1.44 times" in reasons[0]
            assert "rounds (" in reasons[0]
