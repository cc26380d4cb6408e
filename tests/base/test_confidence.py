"""Verdicts of repeated measurements: how often noise misleads them or hides a change."""

import random
from collections import Counter
from math import exp, inf, log

import pytest

from triptych.base.confidence import MARGIN, limit_ratio, paired_ratio, separate_ratio

RUNS = 300


def test_intervals_are_those_of_students_distribution() -> None:
    from scipy import stats  # takes a second

    rng = random.Random(5)
    before = [rng.gauss(0, 0.1) for _ in range(4)]
    after = [value + rng.gauss(0.3, 0.02) for value in before]
    paired = stats.ttest_rel(after, before).confidence_interval()
    welch = stats.ttest_ind([*after, 0.5], before, equal_var=False).confidence_interval()
    for ratio, (low, high), rel in (
        (paired_ratio([*map(exp, before)], [*map(exp, after)]), paired, 1e-4),
        (separate_ratio([*map(exp, before)], [*map(exp, [*after, 0.5])]), welch, 0.1),
    ):
        assert (log(ratio.low), log(ratio.high)) == pytest.approx((low, high), rel=rel)


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
