"""Interface between the search and a pipeline that is tuned; `TUNERS` in `tune` has both forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pydantic import JsonValue

from triptych.base.errors import Progress
from triptych.operate.tune.fields import Propose
from triptych.operate.tune.results import Outcome
from triptych.serving.bench.measure import BenchTarget
from triptych.serving.bench.perf_analyzer import Request
from triptych.serving.bench.results import Measurement, Subject


@dataclass(frozen=True)
class TrialConfig:
    """Configuration to measure: spec fields (dotted) to values; empty for the spec as it is."""

    overrides: Mapping[str, JsonValue] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, ...]:
        """Hashable key, equal for equal configurations."""
        return tuple(sorted(self.as_options))

    @property
    def as_options(self) -> list[str]:
        """Options of the form ``KEY=VALUE``."""
        return [
            f"{key}={'null' if value is None else value}" for key, value in self.overrides.items()
        ]


@dataclass(frozen=True)
class BuiltTrial:
    """A configuration that was built.

    Attributes:
        plan: Plan that the tunable fields read, with its ``spec``: `Plan` or `GenerationInputs`.
        requests: Requests of the traffic for perf_analyzer.
        changed: Models that differ from those in the repository before.
        origin: Inputs of the build.
    """

    plan: Any
    requests: Sequence[Request]
    changed: Sequence[str]
    origin: Any


class TunedPipeline(Protocol):
    """One pipeline that is tuned."""

    @property
    def folder(self) -> Path:
        """Folder of the pipeline."""

    @property
    def fields(self) -> Sequence[Propose]:
        """Tunable fields, in the order of their trials."""

    @property
    def tunable(self) -> Sequence[str]:
        """Keys that ``tuned.yaml`` may contain."""

    @property
    def exchanges(self) -> bool:
        """Whether a server can load a new build while it serves the previous one."""

    @property
    def searches_rates(self) -> bool:
        """Whether the highest rate that meets the SLO is searched at the end."""

    def start(self, repository: Path, progress: Progress) -> TrialConfig:
        """Return the configuration without earlier tuning.

        Raises:
            UserError: The pipeline cannot be tuned.
        """

    def make(self, setting: TrialConfig, repository: Path, progress: Progress) -> BuiltTrial:
        """Build a configuration.

        Raises:
            GateFailure, LintFailure, UserError: It cannot be built.
        """

    def warm_up(self, target: BenchTarget, made: BuiltTrial) -> None:
        """Send the first requests to a pipeline that was just loaded."""

    def measure(
        self, target: BenchTarget, made: BuiltTrial, clients: int, seconds: float
    ) -> Measurement:
        """Measure once in a closed loop."""

    def subject(
        self, made: BuiltTrial, repository: Path, overrides: Mapping[str, JsonValue]
    ) -> Subject:
        """Return a description of the measured pipeline and machine."""

    def verdict(self, winner: Outcome) -> tuple[bool, str]:
        """Return whether the winner meets the SLO, and a sentence with its metrics."""

    def advice(self, made: BuiltTrial, winner: Outcome) -> tuple[str, ...]:
        """Return advice beyond tuning, one sentence each."""
