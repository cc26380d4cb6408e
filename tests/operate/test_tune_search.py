"""Tuning's sequence of trials, on made-up scores: what is found, and when it ends."""

import contextlib
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.mistakes import check_refused
from tests.support.project import quiet, write_pipeline
from tests.support.tune_cases import Surface, evidence, measurement
from triptych.base.errors import UserError
from triptych.operate.tune import trial_servers, tune
from triptych.operate.tune.fields import FIELDS
from triptych.operate.tune.kinds import Setting
from triptych.operate.tune.objective import GoodputObjective, LoadFailed, ScoredRound
from triptych.operate.tune.search import Search, TrialCache
from triptych.serving.bench.results import Measurement, Streamed, Times
from triptych.spec.slo import GenerationSlo
from triptych.spec.spec import EncoderSpec, load_spec
from triptych.spec.tuned import TUNABLE, read_tuned

PROMISE = GenerationSlo(e2e_p99="1s")
DELAY = "serving.queue.max_delay_us"


def plan(overrides: Mapping[str, Any]) -> Any:
    usual = evidence().plan
    spec = usual.spec.model_dump()
    for key, value in overrides.items():
        *parents, last = key.split(".")
        node = spec
        for part in parents:
            node = node[part]
        node[last] = value
    made: Any = SimpleNamespace(**{**vars(usual), "spec": EncoderSpec.model_validate(spec)})
    made.layout = made.spec.core.layout
    return made


def surface(
    rate: Callable[[Mapping[str, Any]], float], noise: float = 0.01, **options: Any
) -> Surface:
    """Trial servers with these rates, but for noise."""
    rng = random.Random(0)

    def score(overrides: Mapping[str, Any]) -> ScoredRound:
        found = rate(overrides) * rng.gauss(1, noise)
        return ScoredRound(found, {32: measurement(found)}, 32)

    return Surface(plan, score, **options)


def good(overrides: Mapping[str, Any]) -> float:
    """Return a rate that is highest, 144, with a delay of 4,000 us and two core instances."""
    rate = 100.0
    rate *= {0: 1.0, 1000: 1.1, 4000: 1.2}.get(overrides.get(DELAY, 0), 0.9)
    rate *= {1: 1.0, 2: 1.2, 3: 1.1}[overrides.get("serving.instances.core", 1)]
    rate *= {None: 1.0, 1: 0.9}[overrides.get("core.threads")]
    return rate * (0.5 if overrides.get("core.layout") == "bucketed" else 1.0)


BEST = {DELAY: 4000, "serving.instances.core": 2}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrialCache:
    monkeypatch.setenv("TRIPTYCH_CACHE", str(tmp_path))
    return TrialCache({"test": 1})


def test_the_best_of_a_plain_surface_is_found_in_few_trials(cache: TrialCache) -> None:
    first = surface(good)
    search = first.search(cache)
    assert dict(search.best.overrides) == BEST
    assert len(search.trials) <= 9  # of 3 x 3 x 2 x 2 combinations
    assert {trial.verdict for trial in search.trials} <= {"better", "worse", "cannot tell"}
    assert set(search.skipped) >= {"serving.instances.preprocess", "core.max_batch_size"}
    assert [trial.number for trial in search.trials] == list(range(1, len(search.trials) + 1))
    # An interrupted search goes on where it was.
    second = surface(good)
    again = second.search(cache)
    assert (again.trials, again.best) == (search.trials, search.best)
    assert (first.rounds > 0, second.rounds) == (True, 0)
    cache.clear()
    third = surface(good)
    third.search(cache)
    assert third.rounds == first.rounds
    # What was tuned before is the first trial.
    known = surface(good).search(cache, known=Setting(BEST))
    assert (known.trials[0].change, known.trials[0].verdict) == (BEST, "better")
    assert good(known.best.overrides) == pytest.approx(144)


def test_a_flat_surface_leaves_everything_as_it_was(cache: TrialCache) -> None:
    search = surface(lambda _overrides: 100.0).search(cache)
    assert search.best == Setting()
    verdicts = {trial.verdict for trial in search.trials}
    assert verdicts <= {"no difference", "failed", "worse", "cannot tell"}
    late = surface(good).search(cache, deadline=-1.0)
    assert (late.trials, late.stopped) == ([], "time budget reached")


def test_what_cannot_be_served_fails_alone(cache: TrialCache) -> None:
    def start(overrides: Mapping[str, Any]) -> None:
        if overrides.get("core.threads") == 1:
            raise UserError("core.threads", "must be something else", given=1)

    def rate(overrides: Mapping[str, Any]) -> float:
        return 100.0 if overrides.get("serving.instances.core", 1) == 1 else 50.0

    search = surface(rate, start=start).search(cache)
    (failed,) = [trial for trial in search.trials if trial.verdict == "failed"]
    assert failed.change == {"core.threads": 1}
    assert "must be something else" in failed.says
    assert (failed.score, failed.points) == (None, ())

    def refuse(_overrides: Mapping[str, Any]) -> float:
        raise LoadFailed(measurement(0.0, errors={"queue full": 3}))

    said = ["`--clients` caused errors in the baseline", "3 x queue full"]
    check_refused(said, surface(refuse).search, cache)


def searched(slow: Surface, cache: TrialCache, end: float) -> Search[Any]:
    cache.clear()
    search = slow.search(cache, deadline=0.65 * end, end=end)
    assert search.trials
    assert search.stopped == "time budget reached"
    return search


def test_no_round_is_begun_that_cannot_end_in_time(cache: TrialCache) -> None:
    for end in (90, 150, 200, 400):
        slow = surface(good, noise=0.05, round_s=20.0)
        searched(slow, cache, end)
        # The first trial has three rounds where they fit; what is left is for the comparison.
        assert slow.now <= max(end - 40, 30), (end, slow.now)


def test_what_time_leaves_open_is_proven_at_the_end_or_not_at_all(cache: TrialCache) -> None:
    def slow(rate: Callable[[Mapping[str, Any]], float]) -> Surface:
        return surface(rate, noise=0.0, round_s=20.0)

    def rate(overrides: Mapping[str, Any]) -> float:
        return {0: 100.0, 1000: 120.0, 4000: 123.0}[overrides.get(DELAY, 0)]

    search = searched(slow(rate), cache, end=80)
    (trial,) = search.trials
    assert (trial.rounds, trial.verdict, trial.change) == (1, "cannot tell", {DELAY: 1000})
    assert trial.says.endswith("not proven: time budget reached; the final comparison decides")
    assert dict(search.best.overrides) == {DELAY: 1000}
    # Nothing is begun where no time is left at all.
    assert searched(slow(rate), cache, end=25).best == Setting()
    # What is proven is not given up for it, nor is the baseline for what is slower.
    search = searched(slow(rate), cache, end=175)
    verdicts = [(one.rounds, one.verdict) for one in search.trials]
    assert verdicts == [(3, "better"), (3, "cannot tell")]
    assert search.trials[-1].says.endswith("time budget reached")
    assert dict(search.best.overrides) == {DELAY: 1000}
    worse = slow(lambda overrides: 97.0 if overrides else 100.0)
    assert searched(worse, cache, end=80).best == Setting()


def test_an_interrupted_run_writes_what_its_trials_have_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIPTYCH_CACHE", str(tmp_path / "cache"))
    folder = write_pipeline(tmp_path / "texts")
    pipeline: Any = SimpleNamespace(
        folder=folder,
        objective=SimpleNamespace(says="throughput", unit="requests/s"),
        start=lambda *_: Setting(),
        fields=FIELDS,
        tunable=TUNABLE,
        searches_rates=False,
    )

    def interrupted_after(rounds: int) -> dict[str, Any] | None:
        def rate(overrides: Mapping[str, Any]) -> float:
            if slow.rounds > rounds:
                raise KeyboardInterrupt
            return good(overrides)

        slow: Any = surface(rate)
        slow.best, slow.put = None, lambda *_: None
        monkeypatch.setattr(tune, "trial_servers", lambda *_: contextlib.nullcontext(slow))
        with pytest.raises(KeyboardInterrupt):
            tune._tune(pipeline, tmp_path, tune.Tuning(), quiet)
        found = read_tuned(folder)
        return None if found is None else {**found.overrides}

    assert interrupted_after(2) is None  # before the first verdict
    assert interrupted_after(3) == {DELAY: 1000}
    assert load_spec(folder).tuned == {DELAY: 1000}
    assert interrupted_after(0) == {DELAY: 1000}  # what is known already stays


class FakeSlot:
    """Of a clock that a measurement takes forward by 5 s a client, the first of each by more."""

    def __init__(self, clock: list[float], places: int) -> None:
        self.setting: Setting | None = None
        self.served = SimpleNamespace(plan=None)
        self.target = SimpleNamespace(pipeline="talk")
        self.clock, self.places = clock, places
        self.spoilt: set[int] = set()
        self._seen: set[int] = set()

    def put(self, setting: Setting, *_progress: object) -> None:
        self.clock[0] += 0 if setting == self.setting else 30
        self.setting = setting

    def measure(self, clients: int, _seconds: float) -> Measurement:
        self.clock[0] += 5 * clients * (1 if clients in self._seen else 1.5)
        late = clients > self.places or (clients in self.spoilt and clients not in self._seen)
        self._seen.add(clients)
        rate = float(min(clients, self.places))
        streamed = Streamed(
            10, 10.0, rate / clients / 3 if late else rate, *[Times(1, *[9.0] * 6)] * 2
        )
        return measurement(rate, 9e6 if late else 1e3, streamed=streamed)


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    clock = [0.0]
    for module in (trial_servers, tune):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    return [FakeSlot(clock, places=2), FakeSlot(clock, places=2)]


@pytest.fixture
def servers(slots: list[Any]) -> trial_servers.TrialServers[Any]:
    return trial_servers.TrialServers(
        slots[0], slots[1], GoodputObjective(PROMISE, 32), 1.0, lambda *_told: None
    )


def test_what_is_left_to_do_is_known_by_what_was_measured(servers: Any, slots: list[Any]) -> None:
    slots[1].places = 4
    start, other = Setting(), Setting({"core.max_num_seqs": 4})
    servers.put(slots[0], start)
    _, scored = servers.begin(start)
    # With eight, most answers are late: sixteen are not tried. With two, all are in time.
    assert (list(scored.by_clients), scored.score) == ([8, 4, 2], 2.0)
    assert (servers.next_round_s(), servers.final_s()) == (30.0, 90.0)  # the first ones took longer
    servers.start_trial(other)
    first, second = servers.round(), servers.round()
    assert [list(one.by_clients) for one in (*first, *second)] == [[2, 4], [2, 4, 8], [2], [4]]
    assert servers.next_round_s() == 10 + 20
    assert servers.final_s() == 3 * (10 + 10)
    servers.accept_trial()
    assert servers.final_s() == 30 + 3 * (20 + 10) + 20 + 10
    assert [servers.measure_s(clients) for clients in (1, 2, 16)] == [10.0, 10.0, 140.0]
    # The baseline once more, in whatever slot: its clients are known, and those of the winner.
    servers.start_trial(Setting({"core.max_num_seqs": 8}))
    servers.start_trial(start)
    assert [list(one.by_clients) for one in servers.round()] == [[4, 2], [2, 4]]


def test_a_spoilt_measurement_makes_no_winner(servers: Any, slots: list[Any]) -> None:
    slots[0].spoilt = {2}  # what else ran then made all answers late
    _, scored = servers.begin(Setting())
    assert scored.start == 1
    servers.start_trial(Setting({"core.enable_prefix_caching": False}))
    for _ in range(2):
        present, other = servers.round()
        assert (present.score, other.score) == (2.0, 2.0)


def final_comparison(
    servers: Any, clients: int, end_s: float, told: list[str]
) -> Callable[[Setting, Setting], tuple[Any, Any, str]]:
    kind: Any = SimpleNamespace(searches_rates=False)
    wanted = tune.Tuning(PROMISE, clients=clients)
    final = tune._Final(servers, kind, wanted, end_s, lambda _, line: told.append(line))
    return final.compare


def accept(servers: Any, slots: list[Any]) -> Setting:
    """Accept a trial with twice the places."""
    slots[1].places = 4
    other = Setting({"core.max_num_seqs": 4})
    servers.start_trial(other)
    servers.round()
    servers.accept_trial()
    return other


def test_the_comparison_at_the_end_takes_what_time_there_is(servers: Any, slots: list[Any]) -> None:
    def compare(best: Setting, left_s: float) -> tuple[Any, Any, str, float]:
        began = slots[0].clock[0]
        found = final_comparison(servers, 32, began + left_s, [])(best, Setting())
        return *found, slots[0].clock[0] - began

    servers.begin(Setting())
    for left_s, took_s in ((0, 0), (25, 20), (35, 30)):
        before, after, doubt, seconds = compare(Setting(), left_s)
        assert (before, seconds) == (after, took_s), left_s
        assert doubt == "no trial is better than the defaults"
        assert {point.load.value for point in after.points} >= {2, 4, 8}
    other = accept(servers, slots)
    foreseen_s = servers.final_s() - 30  # the baseline is served
    before, after, doubt, seconds = compare(other, 0)
    assert (before.score, after.score, doubt) == (2.0, 4.0, "")
    assert seconds <= foreseen_s
    assert after.overrides == other.overrides


def test_both_sides_are_held_together_at_their_best(
    servers: Any, slots: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two clients the baseline has most, where the search saw late answers alone."""
    monkeypatch.setattr(tune, "FINAL_CLIENTS", (2,))
    slots[0].spoilt = {2}
    _, scored = servers.begin(Setting())
    other = accept(servers, slots)
    assert (scored.start, scored.score) == (1, 1.0)
    told: list[str] = []
    before, after, doubt = final_comparison(servers, 4, 1e9, told)(other, Setting())
    assert (before.score, after.score, doubt) == (2.0, 4.0, "")
    assert "winner against baseline: 2.00 times (1.95 to 2.05" in told[-1]
