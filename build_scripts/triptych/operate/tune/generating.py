"""Tuning of a pipeline that generates text."""

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
from triptych.operate.tune.kind import Made, Setting
from triptych.operate.tune.results import Outcome, against
from triptych.serving.bench import perf_analyzer
from triptych.serving.bench.bench import WARM_UP_ANSWERS, server_of
from triptych.serving.bench.measure import STRETCH, Target, measure
from triptych.serving.bench.results import Load, Measurement, Subject
from triptych.spec.generation_fields import GenerationSpec, load_generation_spec
from triptych.spec.slo import GenerationSlo
from triptych.spec.tuned import TUNABLE_GENERATION


@dataclass(frozen=True)
class Generating:
    """See `TunedPipeline`.

    Attributes:
        base: ``KEY=VALUE`` overrides of the spec, below those of a setting.
    """

    folder: Path
    slo: GenerationSlo
    clients: int  # of the highest load
    base: tuple[str, ...] = ()
    _seconds: dict[int, float] = field(default_factory=dict)  # by clients, to measure for

    fields = GENERATION_FIELDS
    tunable = TUNABLE_GENERATION
    exchanges = False  # two engines at once may not fit into the memory, beside the other server's
    searches_rates = False  # a rate wants hundreds of answers, of seconds each

    def start(self, repository: Path, progress: Progress) -> Setting:
        check_clients("--clients", self.clients, self._spec(Setting()))
        return Setting()

    def make(self, setting: Setting, repository: Path, progress: Progress) -> Made:
        inputs = read_generation(self._spec(setting), progress)
        plain = replace(inputs, spec=self._spec(Setting()))
        changed = build_trial(inputs, plain, repository, progress)
        return Made(inputs, requests_of(inputs), changed, inputs)

    def warm_up(self, target: Target, made: Made) -> None:
        """A few answers at once, without the windows of a measurement; errors are seen there."""
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

    def measure(self, target: Target, made: Made, clients: int, seconds: float) -> Measurement:
        """The first with so many clients finds out how long the others take, too."""
        known = self._seconds.get(clients)
        one = measure(
            replace(target, promise=self.slo),
            made.requests,
            Load("concurrency", float(clients)),
            seconds=known or seconds,
            warmup_requests=0 if known else WARM_UP_ANSWERS,
        )
        if not known and one.requests:
            self._seconds[clients] = max(seconds, one.seconds / STRETCH)
        return one

    def subject(self, made: Made, repository: Path, overrides: Mapping[str, JsonValue]) -> Subject:
        found = subject_of(made.origin, server=server_of(None))
        return replace(found, overrides=dict(overrides))

    def verdict(self, winner: Outcome) -> tuple[bool, str]:
        return describe_goodput(self.slo, winner)

    def advice(self, made: Made, winner: Outcome) -> tuple[str, ...]:
        return generation_advice(made.origin, self.slo, winner)

    def _spec(self, setting: Setting) -> GenerationSpec:
        options = [*self.base, *setting.as_options]
        return load_generation_spec(self.folder, options, untuned=True)


def describe_goodput(slo: GenerationSlo, winner: Outcome) -> tuple[bool, str]:
    """Whether the winner keeps the promise, and the sentence that says so with its figures."""
    if slo.is_empty:
        return True, f"nothing is promised; {rounded(winner.score)} tokens/s at the highest load"
    limits = slo.model_copy(update={"throughput": None})
    held = [point for point in winner.points if point.meets(limits)]
    wanted = slo.throughput
    most = max((point.median("throughput_per_s") for point in held), default=0.0)
    if not slo.limits_us:
        return most >= (wanted or 0.0), against(most, wanted or 0.0)
    best = max(winner.points, key=lambda point: point.median("goodput_per_s"))
    said = f"goodput {rounded(best.median('goodput_per_s'))}/s of "
    said += f"{rounded(best.median('throughput_per_s'))}/s with {best.load}"
    if not held:
        return False, f"{said}; {limits} holds with no number of clients that was tried"
    said += f"; {limits} holds with {', '.join(str(point.load) for point in held)}"
    if wanted is None:
        return True, said
    return most >= wanted, f"{said}: {against(most, wanted)}"


def generation_advice(
    inputs: GenerationInputs, slo: GenerationSlo, winner: Outcome
) -> tuple[str, ...]:
    """What would help where tuning alone does not."""
    found = [f"{winner.bottleneck.says} {winner.bottleneck.remedy}".strip()]
    core = inputs.spec.core
    if core.precision == "fp32" and core.backend != "scripted":
        found.append(
            "A lower precision computes faster and halves the KV cache: core.precision bf16, "
            "which goes through the gate."
        )
    limits = slo.model_copy(update={"throughput": None})
    held = [point.median("throughput_per_s") for point in winner.points if point.meets(limits)]
    if slo.throughput is not None and held and 0 < max(held) < slo.throughput:
        count = ceil(slo.throughput / max(held))
        found.append(f"{count} such machines behind a load balancer reach {slo.throughput:g}/s.")
    alone = next((point for point in winner.points if point.load.value == 1), None)
    if alone is not None and slo.strain(alone.latencies_us) > 1:
        found.append(
            "Not even a lone client is answered in time: no setting of a batch can help, only a "
            "faster engine, a smaller model or shorter prompts and answers."
        )
    return tuple(found)
