"""Tuning's numbers: scores and their comparison, and the settings that are tried."""

import random
from collections import Counter
from dataclasses import replace
from math import exp
from typing import Any

import pytest

from tests.support.load_samples import point as sample_point
from tests.support.tune_cases import evidence, measurement, step
from triptych.operate.tune.fields import FIELDS, Observation, Proposal
from triptych.operate.tune.objective import CLIENTS, LoadFailed, ThroughputObjective
from triptych.operate.tune.results import LOOKS, compare_scores, format_scores
from triptych.operate.tune.tune import measured_costs
from triptych.serving.bench.results import Measurement
from triptych.spec.slo import Slo
from triptych.spec.spec import EncoderSpec
from triptych.spec.tuned import TUNABLE

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


@pytest.mark.parametrize(
    ("other", "noise", "wrong", "right"),
    [
        (100, 0.01, ("better", "worse"), "no difference"),
        (100, 0.04, ("better", "worse"), ""),
        (100, 0.1, ("better", "worse"), ""),
        (100, 0.3, ("better", "worse"), "cannot tell"),
        (110, 0.01, ("worse",), "better"),
        (110, 0.04, ("worse",), "better"),
        (110, 0.1, ("worse",), ""),
        (90, 0.1, ("better",), ""),
    ],
)
def test_a_verdict_is_seldom_wrong(
    other: float, noise: float, wrong: tuple[str, ...], right: str
) -> None:
    """On trials of a setting that scores `other` where the present one has 100."""
    rng, found = random.Random(1), Counter[str]()
    for _ in range(TRIALS):
        rounds: list[tuple[float, float]] = []
        verdict = None
        while verdict is None:
            rounds.append((100 * exp(rng.gauss(0, noise)), other * exp(rng.gauss(0, noise))))
            verdict = compare_scores(rounds)
        found[verdict] += 1
    assert max(found[each] for each in wrong) <= MAX_ERRORS, found
    assert not right or found[right] > 0.8 * TRIALS, found


def curve(clients: int) -> Measurement:
    """A server that saturates at 200/s, whose p99 is 10 ms up to 4 clients, then grows."""
    return measurement(min(200.0, 25.0 * clients), p99_us=10e3 * max(1.0, clients / 4))


def test_a_score_is_the_same_wherever_it_begins() -> None:
    for start in (None, *CLIENTS[:6]):
        scored = ThroughputObjective(Slo(p99_ms=15.0), clients=32).score(curve, start)
        # p99 is 10 ms with 4 clients (100/s), 20 ms with 8 (200/s): 15 ms lies half way.
        assert scored.score == pytest.approx(150), start
        assert scored.start == 4, start
        assert len(scored.by_clients) <= 6, start
    # It stays within what was measured; a lone client takes twice the lower limit.
    for p99_ms, score, start in ((1e3, 200, 32), (5.0, 25 / 2, 1)):
        scored = ThroughputObjective(Slo(p99_ms=p99_ms), clients=32).score(curve)
        assert scored.score == pytest.approx(score)
        assert scored.start == start
    # Without a latency it is the throughput of the highest load.
    scored = ThroughputObjective(Slo(throughput=1.0), clients=48).score(
        lambda clients: measurement(7.0 * clients)
    )
    assert (scored.score, list(scored.by_clients)) == (336, [48])
    failed = measurement(0.0, errors={"queue full": 3})
    with pytest.raises(LoadFailed, match="3 x queue full"):
        ThroughputObjective(Slo(), clients=4).score(lambda _clients: failed)


def found_for(key: str, given: Observation[Any]) -> Proposal:
    return next(found for propose in FIELDS if (found := propose(given)).key == key)


def test_every_field_that_is_tried_is_tunable() -> None:
    keys = [propose(evidence()).key for propose in FIELDS]
    assert set(keys) <= set(TUNABLE)
    assert len(set(keys)) == len(FIELDS)
    assert keys[0] == "serving.queue.max_delay_us"


FULL = measurement(1.0, steps=(step("core", busy=1.0, batch=30),))
FALLEN = evidence()
FALLEN.plan.layout = "bucketed"  # as a build left it that could not pack
DELAY = "serving.queue.max_delay_us"
CASES: list[tuple[str, Observation[Any], tuple[Any, ...]]] = [
    ("serving.instances.preprocess", evidence(), ()),  # it is idle
    # Neither where batches fill by themselves nor beyond the SLO.
    (DELAY, evidence(FULL), ()),
    (DELAY, replace(evidence(), limits_us={"p99": 4e3}), ()),
    (DELAY, replace(evidence(), limits_us={"p50": 9e9, "p99": 50e3}), (1000, 4000)),
    # Only where batches reach the limit.
    ("core.max_batch_size", evidence(), ()),
    ("core.max_batch_size", evidence(FULL), (64, 128)),
    # Fewer, on a CPU with several cores.
    ("core.threads", evidence(device="gpu"), ()),
    ("core.threads", evidence(cores=1), ()),
    ("core.threads", evidence(cores=2), (1,)),
    ("core.threads", evidence(cores=8), (4,)),
    ("core.threads", evidence(cores=4, threads=2), (None,)),
    ("core.layout", evidence(layout="packed"), ("bucketed",)),
    ("core.layout", evidence(layout="auto"), ("bucketed",)),
    ("core.layout", FALLEN, ()),
]
"""Field, what was seen, and the values that are tried."""


def test_a_field_is_tried_where_what_was_seen_speaks_for_it() -> None:
    for key, given, values in CASES:
        assert found_for(key, given).values == values, (key, given)
    busy = found_for("serving.instances.core", evidence())
    assert (busy.values[0], "100%" in busy.reason) == (2, True)
    waiting = evidence()
    spec = waiting.plan.spec.model_dump()
    spec["serving"]["queue"]["max_delay_us"] = 400
    waiting.plan.spec = EncoderSpec.model_validate(spec)
    found = found_for(DELAY, waiting)
    assert (found.values, found.others) == ((0, 100), (800,))


def test_costs_of_the_python_steps_are_those_at_the_highest_rate() -> None:
    points = [sample_point(clients) for clients in (1, 8)]
    found = measured_costs(points)
    best = max((one for each in points for one in each.rounds), key=lambda m: m.throughput_per_s)
    assert best.resources is not None
    (used,) = [one for one in best.resources.processes if one.name == "minilm_preprocess"]
    assert found["preprocess"] == pytest.approx(1e3 * used.cpu_cores / best.throughput_per_s, 0.01)
    assert found.keys() == {"rows", "preprocess", "postprocess"}
    assert measured_costs([]) == {}
