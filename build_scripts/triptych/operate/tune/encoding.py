"""Tuning of encoder pipelines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import JsonValue

from triptych.base.errors import Progress, UserError
from triptych.building import build as building
from triptych.building.auto import AUTO
from triptych.core.inputs import read_inputs
from triptych.operate.tune.fields import FIELDS
from triptych.operate.tune.kind import BuiltTrial, TrialConfig
from triptych.operate.tune.results import Outcome, judge_outcome, suggest_improvements
from triptych.serving.bench.bench import describe_server, describe_target
from triptych.serving.bench.measure import BenchTarget, measure
from triptych.serving.bench.results import Measurement, OfferedLoad, Subject
from triptych.spec.slo import Slo
from triptych.spec.spec import load_spec
from triptych.spec.tuned import TUNABLE

WARM_UP_REQUESTS = 60


@dataclass(frozen=True)
class EncoderTuning:
    """Tuning of an encoder pipeline; see `TunedPipeline`.

    Attributes:
        base: ``KEY=VALUE`` overrides of the spec; those of a configuration take precedence.
    """

    folder: Path
    slo: Slo
    base: tuple[str, ...] = ()

    fields = FIELDS
    tunable = TUNABLE
    exchanges = True
    searches_rates = True

    def start(self, repository: Path, progress: Progress) -> TrialConfig:
        """Return the base configuration; a precision of ``auto`` is replaced by the chosen one."""
        inputs = read_inputs(load_spec(self.folder, self.base, untuned=True), progress)
        owner = inputs.plan.spec.core.shared_from
        if owner is not None:
            raise UserError(
                "core.shared_from",
                "is not supported for tuning, because another pipeline owns the core",
                given=owner,
                remedy=f"Run `triptych tune {owner}`",
            )
        if inputs.plan.spec.core.precision != AUTO:
            return TrialConfig()
        core = building.build_checked_core(inputs, repository, progress)
        return TrialConfig({"core.precision": core.gate.precision})

    def make(self, setting: TrialConfig, repository: Path, progress: Progress) -> BuiltTrial:
        spec = load_spec(self.folder, [*self.base, *setting.as_options], untuned=True)
        inputs = read_inputs(spec, progress)
        built = building.build(inputs, repository, progress)
        return BuiltTrial(inputs.plan, inputs.traffic, built.changed, inputs)

    def warm_up(self, target: BenchTarget, made: BuiltTrial) -> None:
        load = OfferedLoad("concurrency", 8)
        measure(target, made.requests, load, seconds=0.5, warmup_requests=WARM_UP_REQUESTS)

    def measure(
        self, target: BenchTarget, made: BuiltTrial, clients: int, seconds: float
    ) -> Measurement:
        load = OfferedLoad("concurrency", float(clients))
        return measure(target, made.requests, load, seconds=seconds)

    def subject(
        self, made: BuiltTrial, repository: Path, overrides: Mapping[str, JsonValue]
    ) -> Subject:
        server = describe_server(None, made.plan.spec.core.backend)
        return describe_target(made.origin, repository, server=server, overrides=overrides)

    def verdict(self, winner: Outcome) -> tuple[bool, str]:
        return judge_outcome(self.slo, winner)

    def advice(self, made: BuiltTrial, winner: Outcome) -> tuple[str, ...]:
        # The original spec shows whether the precision was ``auto``.
        spec = load_spec(self.folder, self.base, untuned=True)
        return suggest_improvements(replace(made.plan, spec=spec), self.slo, winner)
