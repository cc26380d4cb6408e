"""Tuning of a pipeline that answers at once."""

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
from triptych.operate.tune.kind import Made, Setting
from triptych.operate.tune.results import Outcome, advice, describe_outcome
from triptych.serving.bench.bench import server_of, subject_of
from triptych.serving.bench.measure import Target, measure
from triptych.serving.bench.results import Load, Measurement, Subject
from triptych.spec.slo import Slo
from triptych.spec.spec import load_spec
from triptych.spec.tuned import TUNABLE

WARM_UP_REQUESTS = 60


@dataclass(frozen=True)
class Encoding:
    """See `TunedPipeline`.

    Attributes:
        base: ``KEY=VALUE`` overrides of the spec, below those of a setting.
    """

    folder: Path
    slo: Slo
    base: tuple[str, ...] = ()

    fields = FIELDS
    tunable = TUNABLE
    exchanges = True
    searches_rates = True

    def start(self, repository: Path, progress: Progress) -> Setting:
        """Of ``auto``, with the precision it chooses."""
        inputs = read_inputs(load_spec(self.folder, self.base, untuned=True), progress)
        owner = inputs.plan.spec.core.shared_from
        if owner is not None:
            raise UserError(
                "core.shared_from",
                "must not be set in a pipeline that is tuned",
                given=owner,
                remedy=f"Run `triptych tune {owner}`: it has the core",
            )
        if inputs.plan.spec.core.precision != AUTO:
            return Setting()
        core = building.make_core(inputs, repository, progress)
        return Setting({"core.precision": core.gate.precision})

    def make(self, setting: Setting, repository: Path, progress: Progress) -> Made:
        spec = load_spec(self.folder, [*self.base, *setting.as_options], untuned=True)
        inputs = read_inputs(spec, progress)
        built = building.build(inputs, repository, progress)
        return Made(inputs.plan, inputs.traffic, built.changed, inputs)

    def warm_up(self, target: Target, made: Made) -> None:
        load = Load("concurrency", 8)
        measure(target, made.requests, load, seconds=0.5, warmup_requests=WARM_UP_REQUESTS)

    def measure(self, target: Target, made: Made, clients: int, seconds: float) -> Measurement:
        load = Load("concurrency", float(clients))
        return measure(target, made.requests, load, seconds=seconds)

    def subject(self, made: Made, repository: Path, overrides: Mapping[str, JsonValue]) -> Subject:
        server = server_of(None, made.plan.spec.core.backend)
        return subject_of(made.origin, repository, server=server, overrides=overrides)

    def verdict(self, winner: Outcome) -> tuple[bool, str]:
        return describe_outcome(self.slo, winner)

    def advice(self, made: Made, winner: Outcome) -> tuple[str, ...]:
        # Of ``auto`` the precision was chosen: only the spec tells that.
        spec = load_spec(self.folder, self.base, untuned=True)
        return advice(replace(made.plan, spec=spec), self.slo, winner)
