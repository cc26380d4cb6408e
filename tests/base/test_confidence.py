"""Verdicts of repeated measurements: how often noise misleads them or hides a change."""

import random
from collections import Counter
from collections.abc import Callable
from itertools import product
from math import exp, inf, sqrt

import pytest

from triptych.base.confidence import (
    MARGIN,
    limit_ratio,
    paired_ratio,
    separate_ratio,
    student_quantile,
)

RUNS = 300
MAX_ERROR = 0.05 + 2 * sqrt(0.05 * 0.95 / RUNS)
"""Share of wrong verdicts of `RUNS` whose probability is 5 %, with two standard errors."""

Draw = Callable[[random.Random], float]


def steady(noise: float) -> Draw:
    """The logarithm of a round whose noise is the same throughout."""
    return lambda rng: rng.gauss(0, noise)


def bursts(rng: random.Random) -> float:
    """The logarithm of a round beside other work, which slows every tenth one by up to 2.7."""
    return rng.gauss(0, 0.03) + (rng.uniform(0.3, 1) if rng.random() < 0.1 else 0)


NOISES = (steady(0.02), steady(0.05), steady(0.1), steady(0.3), bursts)


def test_the_quantiles_of_student_are_those_of_the_tables() -> None:
    known = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 10: 2.2281, 29: 2.0452, 100: 1.9840}
    for freedom, quantile in known.items():
        assert student_quantile(freedom) == pytest.approx(quantile, abs=1e-4), freedom


def test_a_ratio_has_its_interval_or_says_that_there_is_none() -> None:
    once = paired_ratio([100], [102])
    assert (str(once), once.side_of(1e9), once.rounds_needed()) == (
        "1.02 times in 1 round",
        "open",
        None,
    )
    ratio = paired_ratio([100, 101, 99, 100], [102, 107, 97, 102])
    assert str(ratio) == "1.02 times (0.969 to 1.07 with 95 % confidence)"
    assert [ratio.side_of(limit) for limit in (0.9, 1.0, 1.1)] == ["above", "open", "below"]
    assert ratio.is_between(0.9, 1.1)
    assert not ratio.is_between(0.98, 1.1)
    # Rounds that agree by chance do not make a certain verdict.
    assert paired_ratio([100, 100], [101, 101]).side_of(1) == "open"
    with pytest.raises(ValueError, match="zip"):
        paired_ratio([1, 2], [1])
    one_sided = separate_ratio([1], [2, 2])
    assert one_sided.value == pytest.approx(2)
    assert (one_sided.bounds, one_sided.brief) == (None, "2.00 (1 round)")
    assert (one_sided.low, one_sided.high) == (0, inf)


def test_slow_changes_of_the_machine_cancel_in_rounds_in_turns() -> None:
    rng, ours, theirs = random.Random(5), [], []
    for _ in range(20):
        level = exp(rng.gauss(0, 0.5))
        ours.append(level * exp(rng.gauss(0, 0.02)))
        theirs.append(1.2 * level * exp(rng.gauss(0, 0.02)))
    assert paired_ratio(ours, theirs).side_of(1 + MARGIN) == "above"
    assert separate_ratio(ours, theirs).side_of(1 + MARGIN) == "open"


def test_intervals_miss_the_true_ratio_in_at_most_one_of_twenty() -> None:
    for noise, rounds, truth in product(NOISES, (3, 10), (1.3,)):
        for separate in (False, True):
            rng, missed = random.Random(7), 0
            for _ in range(RUNS):
                before, after = (
                    [each * exp(noise(rng)) for _ in range(rounds)] for each in (1.0, truth)
                )
                ratio = (separate_ratio if separate else paired_ratio)(before, after)
                missed += not ratio.low <= truth <= ratio.high
            assert missed / RUNS <= MAX_ERROR, (rounds, truth, separate)


def test_noisy_rounds_are_left_out_of_many() -> None:
    quiet = [0.01, -0.01] * 5
    ratio = limit_ratio([*quiet, 1.0, -0.8])
    assert ratio.is_between(0.98, 1.02)
    assert limit_ratio([0.01, -0.01, 0.01, 1.0]).high > 2  # four rounds cannot tell which is noise
    assert limit_ratio([0.3] * 4 + quiet).value == pytest.approx(exp(0.0365), abs=0.05)


def test_as_many_rounds_as_are_needed_find_a_tenth() -> None:
    """Equal builds are told apart from 10 % with about the promised power, and seldom more."""
    for noise in (0.03, 0.1):
        pilot = limit_ratio([noise, -noise] * 10)
        needed = pilot.rounds_needed()
        assert needed is not None
        rng, sides = random.Random(3), Counter[str]()
        for _ in range(RUNS):
            drawn = [rng.gauss(0, noise) for _ in range(max(needed, 5))]
            sides[limit_ratio(drawn).side_of(1 + MARGIN)] += 1
        assert sides["below"] / RUNS > 0.7, (noise, sides)
        assert sides["above"] / RUNS < 0.01, (noise, sides)
    few, more = (limit_ratio([noise, -noise] * 3).rounds_needed() for noise in (0.05, 0.5))
    assert few is not None
    assert more is not None
    assert more == pytest.approx(100 * few, rel=0.2)
