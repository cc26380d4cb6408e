"""Tuning of pipelines that generate text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path

from pydantic import JsonValue

from triptych.base.errors import Progress
from triptych.base.formatting import rounded
from triptych.building.generation.bench import check_clients, requests_of, subject_of
from triptych.building.generation.build import build_trial
from triptych.building.generation.inputs import GenerationInputs, read_generation
from triptych.operate.tune.fields import GENERATION_FIELDS
from triptych.operate.tune.kind import BuiltTrial, TrialConfig
from triptych.operate.tune.results import Outcome, format_margin
from triptych.serving.bench import perf_analyzer
from triptych.serving.bench.bench import WARM_UP_ANSWERS, describe_server
from triptych.serving.bench.measure import WINDOW_FACTOR, BenchTarget, measure
from triptych.serving.bench.results import Measurement, OfferedLoad, Subject
from triptych.spec.generation_fields import GenerationSpec, load_generation_spec
from triptych.spec.slo import GenerationSlo
from triptych.spec.tuned import TUNABLE_GENERATION


@dataclass(frozen=True)
class GenerationTuning:
    """Tuning of a pipeline that generates text; see `TunedPipeline`.

    Attributes:
        base: ``KEY=VALUE`` overrides of the spec; those of a configuration take precedence.
    """

    folder: Path
    slo: GenerationSlo
    clients: int  # maximum number of clients
    base: tuple[str, ...] = ()
    _seconds: dict[int, float] = field(
        default_factory=dict
    )  # duration of a measurement, by clients

    fields = GENERATION_FIELDS
    tunable = TUNABLE_GENERATION
    exchanges = False  # memory may not fit two engines beside the other server's
    searches_rates = False  # a rate needs hundreds of answers, which take seconds each

    def start(self, repository: Path, progress: Progress) -> TrialConfig:
        check_clients("--clients", self.clients, self._spec(TrialConfig()))
        return TrialConfig()

    def make(self, setting: TrialConfig, repository: Path, progress: Progress) -> BuiltTrial:
        inputs = read_generation(self._spec(setting), progress)
        plain = replace(inputs, spec=self._spec(TrialConfig()))
        changed = build_trial(inputs, plain, repository, progress)
        return BuiltTrial(inputs, requests_of(inputs), changed, inputs)

    def warm_up(self, target: BenchTarget, made: BuiltTrial) -> None:
        """Send a few concurrent requests; errors are ignored, because measurements report them."""
        count = min(WARM_UP_ANSWERS, self.clients)
        try:
            perf_analyzer.run(
                target.grpc_url,
                target.pipeline,
                made.requests,
                concurrency=count,
                request_count=count,
                streaming=True,
            )
        except perf_analyzer.LoadError as error:
            if not error.errors and not error.is_late:
                raise

    def measure(
        self, target: BenchTarget, made: BuiltTrial, clients: int, seconds: float
    ) -> Measurement:
        """Measure once; the first measurement sets the duration for this number of clients."""
        known = self._seconds.get(clients)
        one = measure(
            replace(target, promise=self.slo),
            made.requests,
            OfferedLoad("concurrency", float(clients)),
            seconds=known or seconds,
            warmup_requests=0 if known else WARM_UP_ANSWERS,
        )
        if not known and one.requests:
            self._seconds[clients] = max(seconds, one.seconds / WINDOW_FACTOR)
        return one

    def subject(
        self, made: BuiltTrial, repository: Path, overrides: Mapping[str, JsonValue]
    ) -> Subject:
        subject = subject_of(made.origin, server=describe_server(None))
        return replace(subject, overrides=dict(overrides))

    def verdict(self, winner: Outcome) -> tuple[bool, str]:
        return judge_goodput(self.slo, winner)

    def advice(self, made: BuiltTrial, winner: Outcome) -> tuple[str, ...]:
        return suggest_for_generation(made.origin, self.slo, winner)

    def _spec(self, setting: TrialConfig) -> GenerationSpec:
        options = [*self.base, *setting.as_options]
        return load_generation_spec(self.folder, options, untuned=True)


def judge_goodput(slo: GenerationSlo, winner: Outcome) -> tuple[bool, str]:
    """Return whether the winner meets the SLO, and a sentence with its metrics."""
    if slo.is_empty:
        return True, f"no SLO is set; {rounded(winner.score)} tokens/s at the highest load"
    limits = slo.model_copy(update={"throughput": None})
    held = [point for point in winner.points if point.meets(limits)]
    wanted = slo.throughput
    most = max((point.median("throughput_per_s") for point in held), default=0.0)
    if not slo.limits_us:
        return most >= (wanted or 0.0), format_margin(most, wanted or 0.0)
    best = max(winner.points, key=lambda point: point.median("goodput_per_s"))
    said = f"goodput {rounded(best.median('goodput_per_s'))}/s of "
    said += f"{rounded(best.median('throughput_per_s'))}/s with {best.load}"
    if not held:
        return False, f"{said}; {limits} is not met with any tested number of clients"
    said += f"; {limits} is met with {', '.join(str(point.load) for point in held)}"
    if wanted is None:
        return True, said
    return most >= wanted, f"{said}: {format_margin(most, wanted)}"


def suggest_for_generation(
    inputs: GenerationInputs, slo: GenerationSlo, winner: Outcome
) -> tuple[str, ...]:
    """Return advice beyond tuning, one sentence each."""
    found = [f"{winner.bottleneck.says} {winner.bottleneck.remedy}".strip()]
    core = inputs.spec.core
    if core.precision == "fp32":
        found.append(
            "A lower precision computes faster and halves the KV cache: core.precision bf16, "
            "which the accuracy gate checks."
        )
    limits = slo.model_copy(update={"throughput": None})
    held = [point.median("throughput_per_s") for point in winner.points if point.meets(limits)]
    if slo.throughput is not None and held and 0 < max(held) < slo.throughput:
        count = ceil(slo.throughput / max(held))
        found.append(
            f"{count} machines like this one behind a load balancer reach {slo.throughput:g}/s."
        )
    alone = next((point for point in winner.points if point.load.value == 1), None)
    if alone is not None and slo.slo_ratio(alone.latencies_us) > 1:
        found.append(
            "A single client already misses the SLO: batching cannot help, only a faster engine, a "
            "smaller model, or shorter prompts and answers."
        )
    return tuple(found)
