"""`triptych tune`: baseline, trials, final comparison of winner and baseline, `tuned.yaml`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Generic, cast

from triptych.base.cache import code_hash, sha256_of
from triptych.base.errors import Progress, UserError
from triptych.operate.tune.fields import Planned
from triptych.operate.tune.kinds import CompiledTuning, GenerationTuning, Setting, TunedPipeline
from triptych.operate.tune.objective import LoadFailed, ScoredRound
from triptych.operate.tune.results import Outcome, TuneResult, format_scores, ratio_of
from triptych.operate.tune.search import Search, TrialCache, collect_points, pair_scores
from triptych.operate.tune.trial_servers import MIN_ROUNDS, TrialServer, TrialServers, trial_servers
from triptych.serving.bench.bench import describe_machine, mean_answer_tokens, sustained_rate
from triptych.serving.bench.bottleneck import find_bottleneck
from triptych.serving.bench.comparison import Price
from triptych.serving.bench.rates import find_highest_rate
from triptych.serving.bench.results import LoadPoint
from triptych.spec.any_spec import kind_in
from triptych.spec.kind import Kind
from triptych.spec.slo import AnySlo, GenerationSlo, Slo
from triptych.spec.spec import SPEC_FILE, not_known_here, task_of
from triptych.spec.traffic import TRAFFIC_FILE
from triptych.spec.tuned import TUNED_FILE, Tuned, read_tuned, write_tuned

CODE = (
    "operate/tune/*.py",
    "serving/bench/*.py",
    "building/generation/*.py",
    "serving/backends/*/*.py",
    "serving/backends/*.py",
    "runtime/*.py",
    "repository/*.py",
)
FINAL_CLIENTS = (1, 4, 16)
"""Numbers of clients in the final comparison, besides those of the score."""

FINAL_ROUNDS = 5
"""Number of rounds of the final comparison, if time is left."""

MAX_FINAL_ROUNDS = 10
"""Maximum number of rounds, if the noise requires more to detect a difference."""

SINGLE_ROUNDS = 3
"""Number of rounds of each load that is not compared."""

_MIN_RATE_S = 12.0
"""Minimum time of the search for the highest rate, in durations of one measurement."""

SEARCH_SHARE = 0.65
"""Share of the time budget in which trials begin; the rest is for the final comparison."""


@dataclass(frozen=True)
class Tuning:
    """Options of `tune_pipeline`."""

    slo: AnySlo = field(default_factory=Slo)  # SLO; an empty one maximizes throughput
    budget_s: float = 900.0  # time budget, without the first build
    clients: int = 32  # maximum number of clients
    seconds: float = 2.4  # duration of a measurement
    price: Price | None = None  # price, to compute the cost before and after
    overrides: tuple[str, ...] = ()  # fixed overrides of the spec, `KEY=VALUE`


def tune_pipeline(folder: Path, repository: Path, tuning: Tuning, progress: Progress) -> TuneResult:
    """Find the best settings for an SLO, and write them to ``tuned.yaml`` beside the spec.

    The repository is not changed: trials are built in a temporary folder, and `build` uses the
    result. An interrupted run writes the settings that its trials have proven; the next run
    continues it.

    Args:
        folder: Folder of the pipeline.
        repository: Folder of the models.
        tuning: Options.
        progress: Called at each trial.

    Raises:
        GateFailure, LintFailure, UserError: The baseline cannot be built or served.
    """
    match kind_in(folder):
        case Kind.ENCODER | Kind.MODEL:
            compiled = CompiledTuning(
                folder, cast(Slo, tuning.slo), tuning.clients, tuning.overrides
            )
            return _tune(compiled, repository, tuning, progress)
        case Kind.TEXT_GENERATION:
            generation = GenerationTuning(
                folder, cast(GenerationSlo, tuning.slo), tuning.clients, tuning.overrides
            )
            return _tune(generation, repository, tuning, progress)
        case Kind.TEXT2TEXT:
            raise not_known_here("task", task_of(folder))


def _tune(
    pipeline: TunedPipeline[Planned], repository: Path, tuning: Tuning, progress: Progress
) -> TuneResult:
    folder, objective = pipeline.folder, pipeline.objective
    start = pipeline.start(repository, progress)
    cache = TrialCache(_cache_key(folder, tuning, start))
    old = read_tuned(folder, pipeline.tunable)
    with trial_servers(pipeline, repository, tuning.seconds, progress) as servers:
        servers.put(servers.best, start)  # the time budget excludes the first build
        began = time.monotonic()
        search = Search(
            servers,
            cache,
            deadline=began + SEARCH_SHARE * tuning.budget_s,
            end=began + tuning.budget_s - _min_rates_s(pipeline, tuning),
            cores=len(os.sched_getaffinity(0)),
            limits_us=tuning.slo.limits_us,
            fields=pipeline.fields,
            unit=objective.unit,
            progress=progress,
        )
        known = None if old is None else Setting({**start.overrides, **old.overrides})
        final = _Final(servers, pipeline, tuning, began + tuning.budget_s, progress)
        try:
            search.run(start, known)
            before, after, doubt = final.compare(search.best, start)
        except KeyboardInterrupt:
            if search.best != known:
                _write_proven(folder, search, tuning, objective.says, progress)
            raise
        except LoadFailed as error:
            raise UserError(
                "tune",
                "had errors in the final comparison",
                given=error,
                remedy="See the server's log, and run tune again; finished trials are kept",
            ) from error
        server = servers.best
        subject = server.served.describe(server.repository, after.overrides)
        slo = pipeline.judge(after)
        advice = () if slo.passed else pipeline.advise(server.served.plan, after)
    result = TuneResult(
        subject=subject,
        slo=tuning.slo,
        objective=objective.says,
        trials=tuple(search.trials),
        skipped=search.skipped,
        baseline=before,
        winner=after,
        met=slo.passed,
        verdict=f"{slo.explanation}; {doubt}" if doubt else slo.explanation,
        advice=advice,
        stopped=search.stopped,
        seconds=time.monotonic() - began,
        unit=objective.unit,
        slo_kind=slo.kind,
    )
    _write(folder, result, progress)
    cache.clear()
    return result


def _min_rates_s(pipeline: TunedPipeline[Planned], tuning: Tuning) -> float:
    """Return the minimum time of both rate searches, in seconds; 0 without searches."""
    searched = pipeline.searches_rates and tuning.slo.limits_us
    return 2 * _MIN_RATE_S * tuning.seconds if searched else 0.0


def _cache_key(folder: Path, tuning: Tuning, start: Setting) -> dict[str, object]:
    return {
        "files": {name: sha256_of(folder / name) for name in (SPEC_FILE, TRAFFIC_FILE)},
        "folder": str(folder.resolve()),
        "start": dict(start.overrides),
        "slo": tuning.slo.model_dump(),
        "load": [tuning.clients, tuning.seconds, list(tuning.overrides)],
        "machine": describe_machine(),
        "code": code_hash(*CODE),
    }


@dataclass(frozen=True)
class _Final(Generic[Planned]):
    """Final comparison of the baseline and the winner of the search, in turns."""

    servers: TrialServers[Planned]
    pipeline: TunedPipeline[Planned]
    tuning: Tuning
    end: float  # deadline (monotonic clock); mandatory measurements may exceed it
    progress: Progress

    def compare(self, best: Setting, start: Setting) -> tuple[Outcome, Outcome, str]:
        """Return the outcomes of baseline and winner, and why the baseline won if it did."""
        servers = self.servers
        servers.put(servers.best, best)
        if best == start:
            seen = tuple(servers.scored(best))  # rounds of the search, used if no time is left
            rounds = self._single_rounds(best) or [*seen]
            (outcome,) = self._outcomes({"winner": (servers.best, best, rounds)})
            return outcome, outcome, "no trial is better than the defaults"
        servers.put(servers.trial, start)
        pairs = self._rounds()
        after, before = self._outcomes(
            {
                "winner": (servers.best, best, [pair[0] for pair in pairs]),
                "baseline": (servers.trial, start, [pair[1] for pair in pairs]),
            }
        )
        scores = [(old, new) for new, old in pair_scores(pairs)]
        if isinstance(self.tuning.slo, GenerationSlo) and self.tuning.slo.limits_us:
            before, after, scores = _at_their_best(before, after, scores)
        self.progress("tune", f"winner against baseline: {format_scores(scores)}")
        if ratio_of(scores).low > 1:
            return before, after, ""
        servers.accept_trial()  # the baseline is the best again
        return before, before, f"the winner's gain is not proven: {format_scores(scores)}"

    def _single_rounds(self, best: Setting) -> list[ScoredRound]:
        """Measure rounds of one setting until the time is used."""
        rounds: list[ScoredRound] = []
        while len(rounds) < SINGLE_ROUNDS and self._is_time_for(self.servers.next_round_s() / 2):
            rounds.append(self.servers.begin(best)[1])
        return rounds

    def _rounds(self) -> list[tuple[ScoredRound, ScoredRound]]:
        """Measure rounds of both settings until noise or time is used; at least `MIN_ROUNDS`."""
        rounds: list[tuple[ScoredRound, ScoredRound]] = []
        while len(rounds) < MAX_FINAL_ROUNDS:
            if len(rounds) >= MIN_ROUNDS:
                needed = ratio_of(pair_scores(rounds)).rounds_needed() or 0
                is_time = self._is_time_for(self.servers.next_round_s())
                if not is_time or len(rounds) >= max(FINAL_ROUNDS, needed):
                    break
            rounds.append(self.servers.round())
        return rounds

    def _is_time_for(self, seconds: float) -> bool:
        """Return whether `seconds` and both rate searches fit into the remaining time."""
        left_s = self.end - _min_rates_s(self.pipeline, self.tuning) - time.monotonic()
        return seconds < left_s

    def _outcomes(
        self, sides: dict[str, tuple[TrialServer[Planned], Setting, list[ScoredRound]]]
    ) -> list[Outcome]:
        """Return the outcome of each side, after measuring the remaining numbers of clients."""
        tuning = self.tuning
        _, _, first = next(iter(sides.values()))
        wanted = {clients for clients in FINAL_CLIENTS if clients < tuning.clients}
        extra: dict[str, list[ScoredRound]] = {name: [] for name in sides}
        for clients in sorted((wanted | {tuning.clients}) - set(first[0].by_clients)):
            for _ in range(SINGLE_ROUNDS):
                if not self._is_time_for(len(sides) * self.servers.measure_s(clients)):
                    break
                for name, (server, _, _) in sides.items():
                    one = self.servers.measure(server, clients)
                    extra[name].append(ScoredRound(0.0, {clients: one}, clients))
                    self.progress("tune", f"{name}, {clients} clients: {one}")
        return [
            self._outcome(
                server,
                setting,
                rounds,
                self._points(server, setting, [*rounds, *extra[name]]),
                share=1 / (len(sides) - index),
            )
            for index, (name, (server, setting, rounds)) in enumerate(sides.items())
        ]

    def _points(
        self, server: TrialServer[Planned], setting: Setting, final: Sequence[ScoredRound]
    ) -> tuple[LoadPoint, ...]:
        """Return all points of a setting; the search provides those the final lacks."""
        measured = {clients for scored in final for clients in scored.by_clients}
        earlier = []
        for scored in self.servers.scored(setting):
            missing = {n: one for n, one in scored.by_clients.items() if n not in measured}
            earlier.append(replace(scored, by_clients=missing))
        return tuple(collect_points([*final, *earlier]))

    def _outcome(
        self,
        server: TrialServer[Planned],
        setting: Setting,
        rounds: Sequence[ScoredRound],
        points: tuple[LoadPoint, ...],
        *,
        share: float,
    ) -> Outcome:
        tuning = self.tuning
        score = median(one.score for one in rounds)
        rate = None
        if _min_rates_s(self.pipeline, tuning):
            left = share * (self.end - time.monotonic())
            most = tuning.budget_s * (1 - SEARCH_SHARE) / 3
            rate = find_highest_rate(
                server.target,
                server.served.requests,
                tuning.slo,
                start_per_s=max(1.0, 0.7 * score),
                seconds=tuning.seconds,
                budget_s=max(_MIN_RATE_S * tuning.seconds, min(left, most)),
                progress=self.progress,
            )
        if isinstance(tuning.slo, GenerationSlo):
            sustained_per_s = sustained_rate(points, tuning.slo, None)
        else:
            sustained_per_s = score if rate is None else rate.highest_per_s
        busiest = max(points, key=lambda point: point.median("throughput_per_s"))
        return Outcome(
            overrides=dict(setting.overrides),
            score=score,
            points=points,
            bottleneck=find_bottleneck(busiest.typical, busiest.load),
            rate=rate,
            cost=tuning.price.cost(sustained_per_s, mean_answer_tokens(points))
            if tuning.price
            else None,
        )


def _at_their_best(
    before: Outcome, after: Outcome, scores: list[tuple[float, float]]
) -> tuple[Outcome, Outcome, list[tuple[float, float]]]:
    """Return both outcomes with their highest goodput over all repeated numbers of clients.

    Other work on the machine can hide the baseline's best number of clients in the search, which
    would look like a gain of the winner.
    """
    rounds = []
    for one in (before, after):
        points = [point for point in one.points if len(point.rounds) >= MIN_ROUNDS]
        best = max(points, key=lambda point: point.median("goodput_per_s"))
        rounds.append([each.goodput_per_s for each in best.rounds])
    if not all(map(min, rounds)):  # no answer met the SLO, so the scores are more precise
        return before, after, scores
    before, after = (
        replace(one, score=median(found))
        for one, found in zip((before, after), rounds, strict=True)
    )
    return before, after, list(zip(*rounds, strict=False))


def _write(folder: Path, result: TuneResult, progress: Progress) -> None:
    """Write the winner's ``tuned.yaml``, or remove the file if the baseline won."""
    if not result.winner.overrides:
        if (folder / TUNED_FILE).is_file():
            (folder / TUNED_FILE).unlink()
            progress("tuned", f"{TUNED_FILE} removed, because the defaults are as good")
        return
    path = write_tuned(folder, Tuned(result.winner.overrides, _provenance(folder, result)))
    changes = ", ".join(f"{key}={value}" for key, value in result.winner.overrides.items())
    progress("tuned", f"{path}: {changes}")


def _write_proven(
    folder: Path, search: Search[Planned], tuning: Tuning, objective: str, progress: Progress
) -> None:
    """Write the ``tuned.yaml`` of a search that ends before the final comparison.

    Without a trial that is proven better, the file stays as it is.
    """
    proven = next((one for one in reversed(search.trials) if one.verdict == "better"), None)
    if proven is None:
        return
    provenance = {
        "slo": str(tuning.slo),
        "objective": objective,
        "machine": describe_machine(),
        "spec_sha256": sha256_of(folder / SPEC_FILE),
        "trials": len(search.trials),
        "stopped": "interrupted before the final comparison with the defaults",
        "costs": measured_costs(proven.points),
        "before": {"score_per_s": round(proven.against or 0.0, 2)},
        "after": {"score_per_s": round(proven.score or 0.0, 2)},
    }
    path = write_tuned(folder, Tuned(search.best.overrides, provenance))
    changes = ", ".join(f"{key}={value}" for key, value in search.best.overrides.items())
    progress("tuned", f"{path}: {changes}: proven by the trials so far")


def _provenance(folder: Path, result: TuneResult) -> dict[str, object]:
    return {
        "slo": str(result.slo),
        "objective": result.objective,
        "measured_at": result.subject.measured_at,
        "machine": result.subject.machine,
        "versions": result.subject.versions,
        "traffic": {"requests": result.subject.requests, "padding": result.subject.padding},
        "spec_sha256": sha256_of(folder / SPEC_FILE),
        "trials": len(result.trials),
        "costs": measured_costs(result.winner.points),
        "before": _summarize_outcome(result.baseline),
        "after": _summarize_outcome(result.winner),
    }


def measured_costs(points: Sequence[LoadPoint]) -> dict[str, float]:
    """Return the processor time of the Python steps at the highest rate, for later plans.

    Returns:
        ``rows``, the mean rows of a request, and the core-ms of a request in preprocess and
        postprocess; empty if the processes were not observed. See `spec.placement`.
    """
    rounds = [one for point in points for one in point.rounds if one.resources and one.steps]
    if not rounds:
        return {}
    best = max(rounds, key=lambda one: one.throughput_per_s)
    first, processes = best.steps[0], () if best.resources is None else best.resources.processes
    found = {"rows": round(first.rows / max(1, first.requests), 2)}
    for use in processes:
        step = use.name.rpartition("_")[2]
        if step in ("preprocess", "postprocess"):
            found[step] = round(1e3 * use.cpu_cores / best.throughput_per_s, 4)
    return found if len(found) > 1 and best.throughput_per_s else {}


def _summarize_outcome(outcome: Outcome) -> dict[str, object]:
    rate = {} if outcome.rate is None else {"highest_rate_per_s": outcome.rate.highest_per_s}
    return {
        "score_per_s": round(outcome.score, 2),
        **rate,
        "points": [
            {
                "clients": int(point.load.value),
                "throughput_per_s": round(point.median("throughput_per_s"), 2),
                "p50_ms": round(point.median("p50_us") / 1e3, 2),
                "p99_ms": round(point.median("p99_us") / 1e3, 2),
                **(_summarize_streaming(point) if point.streamed else {}),
            }
            for point in outcome.points
        ],
    }


def _summarize_streaming(point: LoadPoint) -> dict[str, object]:
    return {
        "tokens_per_s": round(point.median("tokens_per_s"), 1),
        "goodput_per_s": round(point.median("goodput_per_s"), 2),
        "ttft_p99_ms": round(point.latencies_us["ttft_p99"] / 1e3, 2),
        "itl_p99_ms": round(point.latencies_us["itl_p99"] / 1e3, 2),
    }
