"""Tuning's decisions, on made-up measurements: scores, objective, fields and their sequence."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from triptych.bench.points import Measurement, StepUse
from triptych.errors import UserError
from triptych.pipeline.slo import Slo
from triptych.pipeline.spec import PipelineSpec
from triptych.pipeline.tuned import TUNABLE
from triptych.tune.evidence import Evidence, Proposal, Skip
from triptych.tune.fields import FIELDS
from triptych.tune.kind import Setting
from triptych.tune.objective import CLIENTS, LoadFailed, Objective, Scored
from triptych.tune.score_comparison import MOST_ROUNDS, compare_scores, gain
from triptych.tune.search import Search, TrialCache


def step(name: str, *, busy: float, batch: int = 4) -> StepUse:
    return StepUse(
        name, f"m_{name}", 1, 0, 100, 0, 100 * batch, 100, {batch: 100}, 1, 1, 1, 1, busy
    )


def measurement(rate: float, p99_us: float = 1e3, **fields: Any) -> Measurement:
    half = p99_us / 2
    base = Measurement(
        seconds=1.0,
        requests=max(1, int(rate)),
        errors={},
        throughput_per_s=rate,
        p99_us=p99_us,
        p99_9_us=p99_us,
        is_stable=True,
        steps=(step("preprocess", busy=0.1), step("core", busy=1.0), step("postprocess", busy=0.1)),
        mean_us=half,
        p50_us=half,
        p90_us=half,
        p95_us=half,
    )
    return replace(base, **fields)


def test_a_clear_gain_takes_two_rounds_and_a_clear_loss_one() -> None:
    assert compare_scores([(100, 80)]) == "worse"
    assert compare_scores([(100, 130)]) is None
    assert compare_scores([(100, 130), (90, 118)]) == "better"
    assert compare_scores([(100, 90), (100, 89), (100, 90)]) == "worse"


def test_noise_gets_more_rounds_and_then_no_verdict() -> None:
    rounds = [(100.0, 108.0), (100.0, 95.0), (100.0, 106.0), (100.0, 97.0), (100.0, 103.0)]
    assert [compare_scores(rounds[:n]) for n in range(1, MOST_ROUNDS)] == [None] * (MOST_ROUNDS - 1)
    assert compare_scores(rounds) == "no difference"
    equal = [(100, 100.2), (100, 100.1), (100, 99.8), (100, 100.1), (100, 99.9)]
    assert compare_scores(equal) == "no difference"


def test_two_equal_settings_are_seldom_taken_for_different() -> None:
    noise = random.Random(1)
    better = 0
    for _ in range(400):
        rounds: list[tuple[float, float]] = []
        verdict = None
        while verdict is None:
            rounds.append((100 * noise.gauss(1, 0.04), 100 * noise.gauss(1, 0.04)))
            verdict = compare_scores(rounds)
        better += verdict == "better"
    assert better / 400 < 0.15


def test_a_gain_of_a_tenth_is_mostly_found_in_the_same_noise() -> None:
    noise = random.Random(2)
    found = 0
    for _ in range(400):
        rounds: list[tuple[float, float]] = []
        verdict = None
        while verdict is None:
            rounds.append((100 * noise.gauss(1, 0.04), 110 * noise.gauss(1, 0.04)))
            verdict = compare_scores(rounds)
        found += verdict == "better"
    assert found / 400 > 0.8


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
    objective = Objective(Slo(p99_ms=15.0), clients=32)
    scored = objective.score(curve(4), start)
    # p99 is 10 ms with 4 clients (100/s), 20 ms with 8 (200/s): 15 ms lies half way.
    assert scored.score == pytest.approx(150)
    assert scored.start == 4
    assert len(scored.found) <= 6


def test_the_latency_score_stays_within_what_was_measured() -> None:
    always = Objective(Slo(p99_ms=1e3), clients=32).score(curve(4))
    assert (always.score, always.start) == (200, 32)
    never = Objective(Slo(p99_ms=5.0), clients=32).score(curve(4))
    assert never.score == pytest.approx(25 / 2)  # a lone client takes twice the limit
    assert never.start == 1


def test_without_a_latency_the_score_is_the_throughput_of_the_highest_load() -> None:
    seen: list[int] = []

    def at(clients: int) -> Measurement:
        seen.append(clients)
        return measurement(7.0 * clients)

    assert Objective(Slo(throughput=1.0), clients=48).score(at).score == 336
    assert seen == [48]


def test_errors_have_no_score() -> None:
    def at(_clients: int) -> Measurement:
        return measurement(0.0, errors={"queue full": 3})

    with pytest.raises(LoadFailed, match="3 x queue full"):
        Objective(Slo(), clients=4).score(at)


def evidence(one: Measurement | None = None, cores: int = 2, **fields: Any) -> Evidence[Any]:
    """Of a pipeline with the defaults; `fields` are those of its core."""
    spec = PipelineSpec.model_validate(
        {
            "name": "texts",
            "folder": Path(),
            "task": "text-embedding",
            "model": {"source": "x"},
            "core": fields,
        }
    )
    lengths = SimpleNamespace(mean=10.0)
    plan: Any = SimpleNamespace(
        spec=spec,
        layout="packed" if spec.core.layout == "auto" else spec.core.layout,
        max_batch_size=spec.core.max_batch_size,
        lengths=lengths,
        bucket_edges=(8, 16),
        padding_share=0.1,
    )
    return Evidence(plan, one or measurement(100.0), cores, {})


def found_for(key: str, given: Evidence[Any]) -> Proposal | Skip:
    return next(found for propose in FIELDS if (found := propose(given)).key == key)


def test_every_field_that_is_tried_is_tunable() -> None:
    keys = [propose(evidence()).key for propose in FIELDS]
    assert set(keys) <= set(TUNABLE)
    assert len(set(keys)) == len(FIELDS)
    assert keys[0] == "serving.queue.max_delay_us"


def test_idle_steps_get_no_more_instances_and_busy_ones_do() -> None:
    assert isinstance(found_for("serving.instances.preprocess", evidence()), Skip)
    proposal = found_for("serving.instances.core", evidence())
    assert isinstance(proposal, Proposal)
    assert proposal.values[0] == 2
    assert "100%" in proposal.reason


def test_no_delay_where_batches_fill_by_themselves_nor_beyond_the_promise() -> None:
    full = measurement(1.0, steps=(step("core", busy=1.0, batch=30),))
    assert isinstance(found_for("serving.queue.max_delay_us", evidence(full)), Skip)
    tight = replace(evidence(), limits_us={"p99": 4e3})
    assert isinstance(found_for("serving.queue.max_delay_us", tight), Skip)
    loose = found_for(
        "serving.queue.max_delay_us", replace(evidence(), limits_us={"p50": 9e9, "p99": 50e3})
    )
    assert isinstance(loose, Proposal)
    assert loose.values == (1000, 4000)


def test_the_batch_limit_is_raised_only_where_batches_reach_it() -> None:
    assert isinstance(found_for("core.max_batch_size", evidence()), Skip)
    full = measurement(1.0, steps=(step("core", busy=1.0, batch=30),))
    found = found_for("core.max_batch_size", evidence(full))
    assert isinstance(found, Proposal)
    assert found.values == (64, 128)


def test_fields_of_the_cpu_are_left_alone_on_a_gpu() -> None:
    for key in ("core.token_budget", "core.threads"):
        assert isinstance(found_for(key, evidence(device="gpu")), Skip)
        assert isinstance(found_for(key, evidence(cores=4)), Proposal)


def test_the_other_layout_is_tried_unless_a_build_fell_back_to_this_one() -> None:
    for named in ("packed", "auto"):
        found = found_for("core.layout", evidence(layout=named))
        assert isinstance(found, Proposal)
        assert found.values == ("bucketed",)
    fallen = evidence()
    fallen.plan.layout = "bucketed"
    assert isinstance(found_for("core.layout", fallen), Skip)


class Surface:
    """A contest whose scores come from a function: measuring is what a fake stands for here."""

    def __init__(self, score: Callable[[Mapping[str, Any]], float], noise: float = 0.01) -> None:
        self._score, self._noise, self._random = score, noise, random.Random(0)
        self._present, self._other = Setting(), Setting()
        self.rounds = 0

    def begin(self, present: Setting) -> tuple[Any, Scored]:
        self._present = present
        return self._plan(), self._scored(present)

    def challenge(self, other: Setting) -> None:
        if other.overrides.get("core.threads") == 2:
            raise UserError("core.threads", "must be something else", given=2)
        self._other = other

    def round(self) -> tuple[Scored, Scored]:
        self.rounds += 1
        return self._scored(self._present), self._scored(self._other)

    def promote(self) -> Any:
        self._present = self._other
        return self._plan()

    def _plan(self) -> Any:
        core: dict[str, Any] = {}
        plan = evidence(**core).plan
        spec = plan.spec.model_dump()
        for key, value in self._present.overrides.items():
            *parents, last = key.split(".")
            node = spec
            for part in parents:
                node = node[part]
            node[last] = value
        made: Any = SimpleNamespace(**{**vars(plan), "spec": PipelineSpec.model_validate(spec)})
        made.layout = made.spec.core.layout
        return made

    def _scored(self, setting: Setting) -> Scored:
        rate = self._score(setting.overrides) * self._random.gauss(1, self._noise)
        return Scored(rate, {32: measurement(rate)}, 32)


def searched(
    contest: Surface,
    cache: TrialCache,
    *,
    known: Setting | None = None,
    deadline: float = 1e9,
) -> Search:
    told: list[str] = []
    search = Search(
        contest,
        cache,
        deadline=deadline,
        cores=2,
        limits_us={},
        fields=FIELDS,
        progress=lambda _stage, line: told.append(line),
        clock=lambda: 0.0,
    )
    search.run(Setting(), known)
    assert len(told) == len(search.trials) + 1
    return search


def good(overrides: Mapping[str, Any]) -> float:
    """Best with a delay of 4,000 us, two core instances and pieces of 256 tokens: 100 x 1.728."""
    rate = 100.0
    rate *= {0: 1.0, 1000: 1.1, 4000: 1.2}.get(overrides.get("serving.queue.max_delay_us", 0), 0.9)
    rate *= {1: 1.0, 2: 1.2, 3: 1.1}[overrides.get("serving.instances.core", 1)]
    rate *= {128: 1.0, 256: 1.2, 512: 1.0, 64: 0.9}[overrides.get("core.token_budget", 128)]
    return rate * (0.5 if overrides.get("core.layout") == "bucketed" else 1.0)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrialCache:
    monkeypatch.setenv("TRIPTYCH_CACHE", str(tmp_path))
    return TrialCache({"test": 1})


def test_the_best_of_a_plain_surface_is_found_in_few_trials(cache: TrialCache) -> None:
    search = searched(Surface(good), cache)
    assert dict(search.best.overrides) == {
        "serving.queue.max_delay_us": 4000,
        "serving.instances.core": 2,
        "core.token_budget": 256,
    }
    assert len(search.trials) <= 9  # of 3 x 3 x 4 x 2 x 2 combinations
    assert {trial.verdict for trial in search.trials} == {"better", "worse"}
    assert set(search.skipped) >= {"serving.instances.preprocess", "core.max_batch_size"}
    assert [trial.number for trial in search.trials] == list(range(1, len(search.trials) + 1))


def test_a_flat_surface_leaves_everything_as_it_was(cache: TrialCache) -> None:
    search = searched(Surface(lambda _overrides: 100.0), cache)
    assert search.best == Setting()
    assert {trial.verdict for trial in search.trials} <= {"no difference", "failed", "worse"}


def test_what_cannot_be_served_fails_alone(cache: TrialCache) -> None:
    def score(overrides: Mapping[str, Any]) -> float:
        return 100.0 if overrides.get("serving.instances.core", 1) == 1 else 50.0

    search = searched(Surface(score), cache)
    (failed,) = [trial for trial in search.trials if trial.verdict == "failed"]
    assert failed.change == {"core.threads": 2}
    assert "must be something else" in failed.says
    assert (failed.score, failed.points) == (None, ())


def test_a_pipeline_that_answers_with_errors_as_it_is_is_not_tuned(cache: TrialCache) -> None:
    class Refusing(Surface):
        def begin(self, present: Setting) -> tuple[Any, Scored]:
            raise LoadFailed(measurement(0.0, errors={"queue full": 3}))

    with pytest.raises(UserError, match=r"`--clients` must be such that.*3 x queue full"):
        searched(Refusing(good), cache)


def test_an_interrupted_search_goes_on_where_it_was(cache: TrialCache) -> None:
    first = Surface(good)
    whole = searched(first, cache)
    second = Surface(good)
    again = searched(second, cache)
    assert again.trials == whole.trials
    assert again.best == whole.best
    assert (first.rounds > 0, second.rounds) == (True, 0)
    cache.clear()
    third = Surface(good)
    searched(third, cache)
    assert third.rounds == first.rounds


def test_time_that_is_up_ends_the_search_and_keeps_the_best(cache: TrialCache) -> None:
    search = searched(Surface(good), cache, deadline=-1.0)
    assert search.trials == []
    assert search.stopped == "the time was up"


def test_no_round_is_begun_that_cannot_end_in_time(cache: TrialCache) -> None:
    now = 0.0

    class Slow(Surface):
        def begin(self, present: Setting) -> tuple[Any, Scored]:
            nonlocal now
            now += 10
            return super().begin(present)

        def round(self) -> tuple[Scored, Scored]:
            nonlocal now
            now += 20
            return super().round()

    def clock() -> float:
        return now

    for end in (90, 150, 200, 400):
        now = 0.0
        cache.clear()
        contest = Slow(good, noise=0.05)
        search = Search(
            contest,
            cache,
            deadline=0.65 * end,
            end=end,
            cores=2,
            limits_us={},
            fields=FIELDS,
            progress=lambda _stage, _line: None,
            clock=clock,
        )
        search.run(Setting())
        assert search.trials
        assert search.stopped == "the time was up"
        # The first trial has two rounds where they fit; what is left is for the comparison.
        assert now <= max(end - 60, 30), (end, now)


def test_what_was_tuned_before_is_the_first_trial(cache: TrialCache) -> None:
    known = Setting({"serving.queue.max_delay_us": 4000, "core.token_budget": 256})
    search = searched(Surface(good), cache, known=known)
    assert search.trials[0].change == dict(known.overrides)
    assert search.trials[0].verdict == "better"
    assert good(search.best.overrides) == pytest.approx(172.8)
