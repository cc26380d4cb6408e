"""Tuning of text generation: goodput, its fields, what lint refuses, and one search on a server."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.generation_cases import fake_backend, write_pipeline, write_tiny_model
from tests.support.generation_load_cases import found
from tests.support.project import ROOT, quiet
from tests.support.tune_cases import Surface, measurement, step
from triptych.base.errors import UserError
from triptych.building.generation.inputs import GenerationInputs, Prompt, read_generation
from triptych.interface.cli.plan_text import describe_text_generation
from triptych.operate.tune import fields, results
from triptych.operate.tune import tune as tuning
from triptych.operate.tune.fields import (
    GENERATION_FIELDS,
    Observation,
    Proposal,
    shared_prefix_ratio,
)
from triptych.operate.tune.kinds import GenerationTuning, Setting, advise_generation, judge_goodput
from triptych.operate.tune.objective import GoodputObjective, LoadFailed, ScoredRound
from triptych.operate.tune.search import TrialCache
from triptych.operate.tune.tune import Tuning, tune_pipeline
from triptych.repository.lint.checks import LintFailure
from triptych.serving.bench.results import Measurement, Streamed, Times
from triptych.serving.server import Server
from triptych.spec.generation_fields import GenerationSpec, load_generation_spec
from triptych.spec.slo import GenerationSlo
from triptych.spec.tuned import TUNABLE_GENERATION, read_tuned

PROMISE = GenerationSlo(ttft_p99="500ms", itl_p99="50ms")


def answers(
    rate: float, *, good: float, ttft_ms: float = 100, itl_ms: float = 20, e2e_ms: float = 1000
) -> Measurement:
    """Requests a second, and those of them that keep the promise; each of 50 tokens."""
    first, between = (Times(100, *[ms * 1e3] * 6) for ms in (ttft_ms, itl_ms))
    streamed = Streamed(int(50 * rate), 50 * rate, good, first, between)
    steps = (step("preprocess", busy=0.1), step("core", busy=0.0), step("postprocess", busy=0.1))
    return measurement(rate, e2e_ms * 1e3, mean_us=e2e_ms * 1e3, streamed=streamed, steps=steps)


def server(most: int) -> Callable[[int], Measurement]:
    """Of `most` places: two answers a second each; who has none waits, and is not answered well."""

    def at(clients: int) -> Measurement:
        rate = 2.0 * min(clients, most)
        waits = clients > most
        good = rate * most / (4 * clients) if waits else rate
        return answers(rate, good=good, ttft_ms=900 if waits else 100)

    return at


def test_goodput_is_found_wherever_it_is_looked_for() -> None:
    for start in (None, 1, 2, 4, 8, 16, 32):
        found = GoodputObjective(PROMISE, 32).score(server(4), start)
        assert (found.score, found.start) == (8.0, 4), start
        assert len(found.by_clients) <= 6, start
    again = GoodputObjective(PROMISE, 32).score(server(4), 4, again=True)
    assert (again.score, list(again.by_clients)) == (8.0, [4])

    # No good answer is worth less than one, and the nearer the more.
    def score(ttft_ms: float) -> float:
        late = answers(9.0, good=0.0, ttft_ms=ttft_ms)
        return GoodputObjective(PROMISE, 8).score(lambda _clients: late).score

    assert 0 < score(5000) < score(1000) < 1  # a second was measured
    assert score(400) == 1  # each answer breaks a limit, and all of them together keep it
    # Without a promise tokens count, and errors never do.
    objective = GoodputObjective(GenerationSlo(throughput=2.0), 16)
    assert (objective.unit, GoodputObjective(PROMISE, 16).unit) == ("tokens/s", "requests/s")
    found = objective.score(server(4))
    assert (found.score, list(found.by_clients)) == (400.0, [16])
    failed = measurement(0.0, errors={"queue full": 3})
    with pytest.raises(LoadFailed, match="3 x queue full"):
        objective.score(lambda _clients: failed)


class Inputs(GenerationInputs):
    """Of a model whose tokens take 1 KiB of the KV cache, and requests of 256 tokens."""

    kv_token_bytes = 1024
    request_tokens = 256


def evidence(
    one: Measurement | None,
    *,
    prompts: tuple[tuple[int, ...], ...] = ((1,) * 40, (2,) * 60),
    promise: GenerationSlo = PROMISE,
    queue: int = 256,
    serving: dict[str, object] | None = None,
    **core: object,
) -> Observation[GenerationInputs]:
    given: dict[str, Any] = {"name": "talk", "task": "text-generation", "model": {"source": "x"}}
    given["core"] = {"backend": fake_backend(), **core}
    given["serving"] = {"queue": {"max_in_flight": queue}, **(serving or {})}
    spec = GenerationSpec.model_validate(given)
    model: Any = None
    inputs = Inputs(spec, model, Path(), 512, tuple(Prompt({}, ids) for ids in prompts))
    return Observation(inputs, one, 2, promise.limits_us)


def proposal_of(key: str, given: Observation[GenerationInputs]) -> Proposal:
    return next(found for field in GENERATION_FIELDS if (found := field(given)).key == key)


BUSY = answers(8.0, good=4.0)  # eight a second of a second each: 8 under way


def test_every_field_that_is_tried_is_tunable_and_one_of_the_spec() -> None:
    keys = [field(evidence(BUSY)).key for field in GENERATION_FIELDS]
    assert sorted(keys) == sorted(TUNABLE_GENERATION)
    reference = (ROOT / "build_scripts/documentation/guides/generation.md").read_text(
        encoding="utf-8"
    )
    assert [key for key in keys if f"| `{key}` | " not in reference] == []
    spec = evidence(BUSY).plan.spec
    for key in keys:
        value: Any = spec
        for part in key.split("."):
            value = getattr(value, part)


CACHE: dict[str, Any] = {"kv_cache": {"memory_mib": 1}}
SYSTEM = tuple(range(40))
SHARED = (SYSTEM, (*SYSTEM, 1, 2), (7,) * 40)
BY_FOUR: dict[str, object] = {"stream_interval": 4}
FULL = evidence(BUSY, max_num_seqs=8, queue=8, promise=GenerationSlo())
NO_CACHE = evidence(BUSY, enable_prefix_caching=False)
NO_TIME = GenerationSlo(ttft_p99="1s")
PROPOSALS: dict[str, list[tuple[Observation[GenerationInputs], tuple[Any, ...], tuple[Any, ...]]]]
PROPOSALS = {
    "core.max_num_seqs": [
        (evidence(BUSY, max_num_seqs=4), (8, 16), (2, 1)),
        (evidence(BUSY, max_num_seqs=4, queue=8), (8,), (2, 1)),
        # Fewer are of use only where each answer is promised something.
        (evidence(BUSY, max_num_seqs=8, queue=8), (4, 2), ()),
    ],
    "core.max_num_batched_tokens": [
        (evidence(BUSY, max_num_seqs=16, max_num_batched_tokens=128), (256, 512), (64,)),
        (evidence(BUSY, prompts=((1,) * 3000,)), (4096, 8192), (1024, 512)),
    ],
    "core.enable_prefix_caching": [
        (evidence(BUSY), (False,), ()),
        (evidence(BUSY, prompts=SHARED, enable_prefix_caching=False), (True,), ()),
    ],
    "serving.stream_interval": [
        (evidence(answers(8.0, good=8.0, itl_ms=3)), (4, 16), ()),
        (evidence(answers(8.0, good=8.0, itl_ms=12)), (4,), ()),
        (evidence(answers(8.0, good=8.0, itl_ms=48), serving={"stream_interval": 4}), (1,), ()),
        (evidence(BUSY, promise=NO_TIME), (4, 16), ()),
    ],
}
"""What was seen, and the values that are tried in one direction and in the other, by field."""
LEFT = [
    ("core.max_num_seqs", evidence(BUSY), "8.0 requests in flight on average, 32"),
    ("core.max_num_seqs", FULL, "8 fit into the batch"),
    ("core.kv_cache.memory_mib", evidence(BUSY), "the KV cache holds 4096"),
    ("core.max_num_batched_tokens", evidence(BUSY), "have 400 tokens, a step computes 2048"),
    ("core.enable_prefix_caching", evidence(BUSY, prompts=SHARED), "and caching is on"),
    ("core.enable_prefix_caching", evidence(BUSY, enable_prefix_caching=False), "a false gain"),
    ("serving.stream_interval", evidence(BUSY), "leaves no time to wait"),
]
"""Fields that are not tried, and the reason."""


def test_a_field_is_tried_where_what_was_seen_speaks_for_it() -> None:
    for key, cases in PROPOSALS.items():
        for given, values, others in cases:
            found = proposal_of(key, given)
            assert (found.values, found.others) == (values, others), (key, found)
    for key, given, reason in LEFT:
        found = proposal_of(key, given)
        assert not found.values, found
        assert reason in found.reason
    assert shared_prefix_ratio(SHARED) == 64 / 122  # two whole blocks of 16 tokens, twice
    assert shared_prefix_ratio([(1, 2), (3, 4)]) == shared_prefix_ratio([()]) == 0


def test_a_batch_grows_with_all_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    key, memory = "core.max_num_seqs", "core.kv_cache.memory_mib"
    assert proposal_of(key, evidence(BUSY, max_num_seqs=4)).along == {}
    tight = evidence(BUSY, max_num_seqs=8, max_num_batched_tokens=16, kv_cache={"memory_mib": 3})
    assert proposal_of(key, tight).along == {
        memory: 8,  # 32 requests of 256 tokens, 1 KiB each
        "core.max_num_batched_tokens": 32,
    }
    # Memory that is not there is not asked for.
    monkeypatch.setattr(fields, "_free_mib", lambda: 1.0)
    assert proposal_of(key, evidence(BUSY, max_num_seqs=4, **CACHE)).values == (2, 1)
    full = evidence(BUSY, max_num_seqs=8, **CACHE)
    assert proposal_of(memory, full).values == (2,)
    monkeypatch.setattr(fields, "_free_mib", lambda: 0.5)
    none = proposal_of(memory, full)
    assert (none.values, "0 MiB are free" in none.reason) == ((), True)


def test_what_goes_along_is_part_of_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIPTYCH_CACHE", str(tmp_path))
    plan = evidence(BUSY, max_num_seqs=4, **CACHE).plan
    tried: list[dict[str, Any]] = []

    def start(overrides: Mapping[str, Any]) -> None:
        tried.append(dict(overrides))
        if overrides["core.max_num_seqs"] == 16:
            raise LintFailure([])

    def score(overrides: Mapping[str, Any]) -> ScoredRound:
        places = overrides.get("core.max_num_seqs", 4)
        return GoodputObjective(PROMISE, 8).score(server(places))

    search = Surface(lambda _overrides: plan, score, start=start).search(
        TrialCache({"test": 1}), [fields.propose_sequences], limits_us=PROMISE.limits_us
    )
    assert tried == [
        {"core.max_num_seqs": places, "core.kv_cache.memory_mib": 4} for places in (8, 16)
    ]
    assert [one.verdict for one in search.trials] == ["better", "failed"]
    assert search.best.overrides == tried[0]
    assert search.trials[0].before == {"core.max_num_seqs": 4, "core.kv_cache.memory_mib": 1}


def test_the_verdict_is_on_the_limits_and_on_the_rate_that_holds_them() -> None:
    slo = GenerationSlo(ttft_p99="200ms", itl_p99="25ms")
    usual = found(slow=1.0)
    rounds = tuple(replace(point, rounds=point.rounds[:1]) for point in usual.points)
    fast = slo.model_copy(update={"throughput": 4.0})
    late = fast.model_copy(update={"ttft_p99": "1ms"})
    held = "goodput 8.00/s of 8.00/s with 4 clients; ttft p99 <= 200 ms"
    below = "is met with 1 client: 2.00/s, 50% below the SLO of 4/s"
    for given, measured, kind, said in (
        (slo, usual, "met", held),
        (fast, found(slow=2.0), "not met", below),
        (late, usual, "not met", "is not met with any tested number of clients"),
        (late, replace(usual, points=rounds), "cannot tell", "is not proven with any tested num"),
        (GenerationSlo(), usual, "none", "no SLO is set"),
        (GenerationSlo(throughput=1.0), usual, "met", ""),
    ):
        verdict = judge_goodput(given, measured)
        assert (verdict.kind, said in verdict.explanation) == (kind, True), verdict
    inputs = replace(evidence(BUSY, backend="vllm", precision="fp32").plan)
    told = " ".join(advise_generation(inputs, late, usual))
    assert "single client" in told
    assert "bf16" in told


@pytest.mark.server  # it starts none, but reads a model by transformers, which looks for torch
def test_what_cannot_be_served_is_refused_before_a_server_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Server, "__enter__", lambda _server: pytest.fail("a server was started"))
    folder = write_pipeline(tmp_path / "talk", write_tiny_model(tmp_path / "model"))
    kind = GenerationTuning(folder, PROMISE, 12, ("parameters.max_tokens=400",))
    repository = tmp_path / "repository"
    assert kind.start(repository, quiet) == Setting()
    said = "`--clients` must be at most serving.queue.max_in_flight 12"
    with pytest.raises(UserError, match=said):
        replace(kind, clients=13).start(repository, quiet)
    assert kind.build(Setting({"core.max_num_seqs": 32}), repository, quiet).changed
    many = Setting({"core.max_num_seqs": 64, "core.max_num_batched_tokens": 4096})
    with pytest.raises(LintFailure, match=r"should hold core.max_num_seqs 64 requests"):
        kind.build(many, repository, quiet)
    for overrides, said in (
        ({"core.kv_cache.memory_mib": 0}, "at least 1"),
        ({"core.max_num_batched_tokens": 16}, "at least core.max_num_seqs"),
    ):
        with pytest.raises(UserError, match=said):
            kind.build(Setting({"core.max_num_seqs": 32, **overrides}), repository, quiet)
    monkeypatch.setattr(GenerationInputs, "kv_token_bytes", 4096)
    with pytest.raises(UserError, match=r"must hold one request of core.max_model_len 512: 2 MiB"):
        kind.build(Setting({"core.kv_cache.memory_mib": 1}), repository, quiet)
    lock = json.loads((repository / "talk/triptych.lock.json").read_bytes())
    assert lock["gate"]["accepted"] == "a trial of `triptych tune`"
    assert lock["spec"]["core"]["max_num_seqs"] == 32


@pytest.mark.server
@pytest.mark.long
def test_a_search_finds_what_the_engine_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One place in the batch and eight clients: with eight there are eight times the tokens.

    A pause of the machine makes a round slow, so only the fastest of each setting are compared.
    """
    eight = Proposal("core.max_num_seqs", (8,), "seven of eight clients wait")
    monkeypatch.setattr(GenerationTuning, "fields", (lambda _evidence: eight,))
    monkeypatch.setattr(tuning, "FINAL_CLIENTS", ())
    monkeypatch.setattr(results, "MIN_FIRST_ROUND_RATIO", 0.0)  # a slow first round ends no trial
    folder = write_pipeline(
        tmp_path / "talk", write_tiny_model(tmp_path / "model"), max_num_seqs=1, token_delay_ms=15.0
    )
    overrides = ("serving.stream_interval=3", "parameters.max_tokens=6")
    wanted = Tuning(GenerationSlo(), 400.0, clients=8, seconds=1.0, overrides=overrides)
    best = tune_pipeline(folder, tmp_path / "repository", wanted, quiet)
    (trial,) = best.trials
    assert trial.change == {"core.max_num_seqs": 8}
    fast, slow = (
        [one.tokens_per_s for point in points for one in point.rounds]
        for points in (trial.points, best.baseline.points)
    )
    assert max(fast) > 2 * min(slow)
    assert (best.unit, best.met) == ("tokens/s", True)
    assert not list(tmp_path.glob(".tune-*"))
    assert not (tmp_path / "repository").exists()
    for point in best.winner.points:
        per_answer = point.typical.tokens_per_s / point.typical.throughput_per_s
        times = point.streamed[0].itl.samples / point.rounds[0].requests
        assert times < per_answer / 2  # three tokens a response
    kept = read_tuned(folder, TUNABLE_GENERATION)
    if not best.winner.overrides:  # several rounds were slow
        assert kept is None
        return
    assert (trial.verdict, best.winner.overrides) == ("better", trial.change)
    assert kept is not None
    assert kept.provenance["after"]["points"][0]["tokens_per_s"] > 0
    lines: list[str] = []
    spec = load_generation_spec(folder)
    inputs = read_generation(spec, lambda _stage, line: lines.append(line))
    assert "core.max_num_seqs=8 (tuned.yaml)" in lines
    assert describe_text_generation(inputs)["tuned"] == {"core.max_num_seqs": 8}
