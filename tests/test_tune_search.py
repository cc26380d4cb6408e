"""Tuning's sequence of trials, on made-up scores: what is found, and when it ends."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from triptych.errors import UserError
from triptych.pipeline.spec import PipelineSpec
from triptych.tune.fields import FIELDS
from triptych.tune.kind import Setting
from triptych.tune.objective import LoadFailed, Scored
from triptych.tune.search import Search, TrialCache
from tune_cases import evidence, measurement


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
