"""Pipelines that can be tuned: interface to the search, encoders, and text generation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import ClassVar, Generic

from pydantic import JsonValue

from triptych.base.errors import Progress, UserError
from triptych.base.formatting import rounded
from triptych.building.build import build
from triptych.building.compiled import CompiledStages, read_compiled
from triptych.building.generation.bench import check_clients, requests_of, subject_of
from triptych.building.generation.build import build_trial
from triptych.building.generation.inputs import GenerationInputs, read_generation
from triptych.building.stages import BuildOptions
from triptych.operate.tune.fields import FIELDS, GENERATION_FIELDS, Planned, Propose
from triptych.operate.tune.objective import GoodputObjective, Objective, ThroughputObjective
from triptych.operate.tune.results import Outcome
from triptych.serving.bench import perf_analyzer
from triptych.serving.bench.bench import WARM_UP_ANSWERS, describe_server, describe_target
from triptych.serving.bench.measure import WINDOW_FACTOR, BenchTarget, measure
from triptych.serving.bench.perf_analyzer import Duration, Request, RequestForm
from triptych.serving.bench.results import (
    SLO_KINDS,
    Measurement,
    OfferedLoad,
    SloVerdict,
    Subject,
    format_rates,
    judge_points,
)
from triptych.spec.any_spec import load_compiled
from triptych.spec.generation_fields import GenerationSpec, load_generation_spec
from triptych.spec.plan import Plan
from triptych.spec.slo import AnySlo, GenerationSlo, Slo
from triptych.spec.tuned import TUNABLE, TUNABLE_GENERATION

WARM_UP_REQUESTS = 60


@dataclass(frozen=True)
class Setting:
    """Changes of the spec: values by field (dotted); empty for the spec as it is."""

    overrides: Mapping[str, JsonValue] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, ...]:
        """Hashable key, equal for equal settings."""
        return tuple(sorted(self.as_options))

    @property
    def as_options(self) -> list[str]:
        """Options of the form ``KEY=VALUE``."""
        return [
            f"{key}={'null' if value is None else value}" for key, value in self.overrides.items()
        ]


@dataclass(frozen=True)
class BuiltSetting(Generic[Planned]):
    """A build of a setting."""

    plan: Planned  # Plan that the tunable fields read
    requests: Sequence[Request]  # Requests of the traffic for perf_analyzer
    changed: Sequence[str]  # Models that differ from those in the repository before
    # Returns a description of the measured pipeline and machine; its arguments are the repository
    # and the overrides of the spec.
    describe: Callable[[Path, Mapping[str, JsonValue]], Subject]


@dataclass(frozen=True)
class TunedPipeline(ABC, Generic[Planned]):
    """A pipeline that is tuned."""

    folder: Path
    slo: AnySlo
    clients: int  # Maximum number of clients
    # ``KEY=VALUE`` overrides of the spec; those of a setting take precedence.
    base: tuple[str, ...] = ()

    tunable: ClassVar[Sequence[str]]  # Keys that ``tuned.yaml`` may contain
    # Whether a server can load a new build while it serves the previous one.
    reloads: ClassVar[bool]
    # Whether the highest rate that meets the SLO is searched at the end.
    searches_rates: ClassVar[bool]

    @property
    @abstractmethod
    def fields(self) -> Sequence[Propose[Planned]]:
        """Functions that propose values of a field, in the order of their trials."""

    @property
    @abstractmethod
    def objective(self) -> Objective:
        """Objective that scores the settings."""

    @abstractmethod
    def start(self, repository: Path, progress: Progress) -> Setting:
        """Return the setting without earlier tuning.

        Raises:
            UserError: The pipeline cannot be tuned.
        """

    @abstractmethod
    def build(
        self, setting: Setting, repository: Path, progress: Progress
    ) -> BuiltSetting[Planned]:
        """Build a setting.

        Raises:
            GateFailure, LintFailure, UserError: It cannot be built.
        """

    @abstractmethod
    def warm_up(self, target: BenchTarget, requests: Sequence[Request]) -> None:
        """Send the first requests to a pipeline that was just loaded."""

    @abstractmethod
    def measure(
        self, target: BenchTarget, requests: Sequence[Request], clients: int, seconds: float
    ) -> Measurement:
        """Measure once in a closed loop."""

    @abstractmethod
    def judge(self, winner: Outcome) -> SloVerdict:
        """Return whether the winner meets the SLO, with its metrics."""

    @abstractmethod
    def advise(self, plan: Planned, winner: Outcome) -> tuple[str, ...]:
        """Return advice beyond tuning, one sentence each."""


class CompiledTuning(TunedPipeline[Plan]):
    """Tuning of a pipeline whose core is a compiled graph."""

    slo: Slo

    fields = FIELDS
    tunable = TUNABLE
    reloads = True
    searches_rates = True

    @property
    def objective(self) -> Objective:
        return ThroughputObjective(self.slo, self.clients)

    def start(self, repository: Path, progress: Progress) -> Setting:
        """Return the base setting; a precision of ``auto`` is replaced by the chosen one."""
        inputs = read_compiled(load_compiled(self.folder, self.base, untuned=True), progress)
        owner = inputs.plan.spec.core.shared_from
        if owner is not None:
            raise UserError(
                "core.shared_from",
                "is not supported for tuning, because another pipeline owns the core",
                given=owner,
                remedy=f"Run `triptych tune {owner}`",
            )
        if inputs.plan.spec.core.precision != "auto":
            return Setting()
        options = BuildOptions(repository=repository, progress=progress, built_after=None)
        core = CompiledStages().make_model(inputs, options)
        return Setting({"core.precision": core.gate.precision})

    def build(self, setting: Setting, repository: Path, progress: Progress) -> BuiltSetting[Plan]:
        spec = load_compiled(self.folder, [*self.base, *setting.as_options], untuned=True)
        inputs = read_compiled(spec, progress)
        options = BuildOptions(repository=repository, progress=progress)
        outcome = build(CompiledStages(), inputs, options)

        def describe(repository: Path, overrides: Mapping[str, JsonValue]) -> Subject:
            server = describe_server(None, spec.core.backend)
            return describe_target(inputs, repository, server=server, overrides=overrides)

        return BuiltSetting(inputs.plan, inputs.traffic, outcome.changed, describe)

    def warm_up(self, target: BenchTarget, requests: Sequence[Request]) -> None:
        load = OfferedLoad("concurrency", 8)
        measure(target, requests, load, seconds=0.5, warmup_requests=WARM_UP_REQUESTS)

    def measure(
        self, target: BenchTarget, requests: Sequence[Request], clients: int, seconds: float
    ) -> Measurement:
        load = OfferedLoad("concurrency", float(clients))
        return measure(target, requests, load, seconds=seconds)

    def judge(self, winner: Outcome) -> SloVerdict:
        return judge_outcome(self.slo, winner)

    def advise(self, plan: Plan, winner: Outcome) -> tuple[str, ...]:
        # The original spec shows whether the precision was ``auto``.
        spec = load_compiled(self.folder, self.base, untuned=True)
        return advise_encoder(replace(plan, spec=spec), self.slo, winner)


@dataclass(frozen=True)
class GenerationTuning(TunedPipeline[GenerationInputs]):
    """Tuning of a pipeline that generates text."""

    slo: GenerationSlo
    _seconds: dict[int, float] = field(default_factory=dict)
    """Duration of a measurement, by clients."""

    fields = GENERATION_FIELDS
    tunable = TUNABLE_GENERATION
    reloads = False  # memory may not fit two engines beside the other server's
    searches_rates = False  # a rate needs hundreds of answers, which take seconds each

    @property
    def objective(self) -> Objective:
        return GoodputObjective(self.slo, self.clients)

    def start(self, repository: Path, progress: Progress) -> Setting:
        check_clients("--clients", self.clients, self._spec(Setting()))
        return Setting()

    def build(
        self, setting: Setting, repository: Path, progress: Progress
    ) -> BuiltSetting[GenerationInputs]:
        inputs = read_generation(self._spec(setting), progress)
        untuned = replace(inputs, spec=self._spec(Setting()))
        changed = build_trial(inputs, untuned, repository, progress)

        def describe(_repository: Path, overrides: Mapping[str, JsonValue]) -> Subject:
            subject = subject_of(inputs, server=describe_server(None))
            return replace(subject, overrides=dict(overrides))

        return BuiltSetting(inputs, requests_of(inputs), changed, describe)

    def warm_up(self, target: BenchTarget, requests: Sequence[Request]) -> None:
        """Send a few concurrent requests; errors are ignored, because measurements report them."""
        count = min(WARM_UP_ANSWERS, self.clients)
        try:
            perf_analyzer.run(
                target.grpc_url,
                target.pipeline,
                requests,
                OfferedLoad("concurrency", count),
                Duration(request_count=count),
                form=RequestForm(streaming=True),
            )
        except perf_analyzer.LoadError as error:
            if not error.errors and not error.is_late:
                raise

    def measure(
        self,
        target: BenchTarget,
        requests: Sequence[Request],
        clients: int,
        seconds: float,
    ) -> Measurement:
        """Measure once; the first measurement sets the duration for this number of clients."""
        known_s = self._seconds.get(clients)
        result = measure(
            replace(target, streaming_slo=self.slo),
            requests,
            OfferedLoad("concurrency", float(clients)),
            seconds=known_s or seconds,
            warmup_requests=0 if known_s else WARM_UP_ANSWERS,
        )
        if not known_s and result.requests:
            self._seconds[clients] = max(seconds, result.seconds / WINDOW_FACTOR)
        return result

    def judge(self, winner: Outcome) -> SloVerdict:
        return judge_goodput(self.slo, winner)

    def advise(self, plan: GenerationInputs, winner: Outcome) -> tuple[str, ...]:
        return advise_generation(plan, self.slo, winner)

    def _spec(self, setting: Setting) -> GenerationSpec:
        options = [*self.base, *setting.as_options]
        return load_generation_spec(self.folder, options, untuned=True)


def judge_outcome(slo: Slo, winner: Outcome) -> SloVerdict:
    """Return whether an encoder's winner meets the SLO, with its metrics."""
    if slo.is_empty:
        return SloVerdict("none", f"no SLO is set; {winner.score:.0f}/s at the highest load")
    if winner.rate is None:
        return _judge_throughput(slo, winner, winner.score)
    rate = replace(winner.rate, slo=slo)
    text = f"{slo.without_throughput}: {format_rates(rate)}"
    if slo.throughput is not None and rate.highest_per_s:
        text += f": {_format_margin(rate.highest_per_s, slo.throughput)}"
    return SloVerdict(SLO_KINDS[rate.verdict], text)


def judge_goodput(slo: GenerationSlo, winner: Outcome) -> SloVerdict:
    """Return whether the winner meets the SLO of streamed answers, with its metrics."""
    if slo.is_empty:
        text = f"no SLO is set; {rounded(winner.score)} tokens/s at the highest load"
        return SloVerdict("none", text)
    if not slo.limits_us:
        fastest = max(point.median("throughput_per_s") for point in winner.points)
        return _judge_throughput(slo, winner, fastest)
    best = max(winner.points, key=lambda point: point.median("goodput_per_s"))
    text = f"goodput {rounded(best.median('goodput_per_s'))}/s of "
    text += f"{rounded(best.median('throughput_per_s'))}/s with {best.load}"
    limits = slo.without_throughput
    within = [point for point in winner.points if point.judge(limits) == "met"]
    if not within:
        verb = "met" if judge_points(winner.points, limits) == "missed" else "proven"
        text += f"; {limits} is not {verb} with any tested number of clients"
    else:
        text += f"; {limits} is met with {', '.join(str(point.load) for point in within)}"
    if within and slo.throughput is not None:
        highest = max(point.median("throughput_per_s") for point in within)
        text += f": {_format_margin(highest, slo.throughput)}"
    return SloVerdict(SLO_KINDS[judge_points(winner.points, slo)], text)


def _judge_throughput(slo: AnySlo, winner: Outcome, rate_per_s: float) -> SloVerdict:
    """Return the verdict on an SLO without latencies."""
    text = _format_margin(rate_per_s, slo.throughput or 0.0)
    return SloVerdict(SLO_KINDS[judge_points(winner.points, slo)], text)


def _format_margin(rate: float, wanted: float) -> str:
    side = "above" if rate >= wanted else "below"
    return f"{rounded(rate)}/s, {abs(rate / wanted - 1):.0%} {side} the SLO of {wanted:g}/s"


def advise_encoder(plan: Plan, slo: Slo, winner: Outcome) -> tuple[str, ...]:
    """Return advice beyond tuning, one sentence each."""
    sustained = winner.score if winner.rate is None else winner.rate.highest_per_s
    advice = _common_advice(
        slo,
        winner,
        sustained,
        ""
        if plan.spec.core.precision != "fp32"
        else "A lower precision computes faster: "
        "`--set core.precision=auto` tries those that pass the accuracy gate.",
    )
    alone = next((point for point in winner.points if point.load.value == 1), None)
    if alone and not sustained and slo.slo_ratio(alone.typical.latencies_us) > 1:
        advice.append(
            f"A single client already misses the SLO (p99 {alone.median('p99_us') / 1e3:.1f} ms):"
            " batching cannot help, only a faster core or shorter texts."
        )
    lengths = plan.lengths
    if lengths is not None and lengths.quantile(0.99) > 4 * lengths.mean:
        advice.append(
            f"1 % of the rows have {lengths.quantile(0.99)} tokens or more, "
            f"{lengths.mean:.0f} on average: a lower tokenizer.max_length truncates them."
        )
    if plan.spec.core.device == "cpu":
        advice.append("Use a GPU or more cores.")
    return tuple(advice)


def advise_generation(
    inputs: GenerationInputs, slo: GenerationSlo, winner: Outcome
) -> tuple[str, ...]:
    """Return advice beyond tuning, one sentence each."""
    within = [point for point in winner.points if point.meets(slo.without_throughput)]
    advice = _common_advice(
        slo,
        winner,
        max((point.median("throughput_per_s") for point in within), default=0.0),
        ""
        if inputs.spec.core.precision != "fp32"
        else "A lower precision computes faster and "
        "halves the KV cache: core.precision bf16, which the accuracy gate checks.",
    )
    alone = next((point for point in winner.points if point.load.value == 1), None)
    if alone is not None and slo.slo_ratio(alone.latencies_us) > 1:
        advice.append(
            "A single client already misses the SLO: batching cannot help, only a faster engine, a "
            "smaller model, or shorter prompts and answers."
        )
    return tuple(advice)


def _common_advice(slo: AnySlo, winner: Outcome, sustained: float, precision: str) -> list[str]:
    """Return advice about the bottleneck, the precision, and the number of machines."""
    remedy = winner.bottleneck.remedy
    advice = [text for text in (f"{remedy}." if remedy else "", precision) if text]
    if slo.throughput is not None and 0 < sustained < slo.throughput:
        count = ceil(slo.throughput / sustained)
        advice.append(
            f"{count} machines like this one behind a load balancer reach {slo.throughput:g}/s."
        )
    return advice
