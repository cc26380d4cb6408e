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
from triptych.serving.bench.measure import Target
from triptych.serving.bench.perf_analyzer import Request
from triptych.serving.bench.results import Measurement, Subject


@dataclass(frozen=True)
class Setting:
    """Numbers to be measured: dotted key of the spec to its value; empty for the spec as it is."""

    overrides: Mapping[str, JsonValue] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, ...]:
        """The same for equal settings."""
        return tuple(sorted(self.as_options))

    @property
    def as_options(self) -> list[str]:
        """``KEY=VALUE`` each."""
        return [
            f"{key}={'null' if value is None else value}" for key, value in self.overrides.items()
        ]


@dataclass(frozen=True)
class Made:
    """A setting that was built.

    Attributes:
        plan: what the fields look at, with its ``spec``: a `Plan` or `GenerationInputs`.
        requests: of the traffic, as perf_analyzer sends them.
        changed: models that differ from those that lay there.
        origin: whatever the kind made it of.
    """

    plan: Any
    requests: Sequence[Request]
    changed: Sequence[str]
    origin: Any


class TunedPipeline(Protocol):
    """One pipeline that is tuned."""

    @property
    def folder(self) -> Path:
        """Of the pipeline."""

    @property
    def fields(self) -> Sequence[Propose]:
        """What may be changed, in the order in which it is tried."""

    @property
    def tunable(self) -> Sequence[str]:
        """Keys that ``tuned.yaml`` may have."""

    @property
    def exchanges(self) -> bool:
        """Whether a server loads a new build while the one before is served; else it is ended."""

    @property
    def searches_rates(self) -> bool:
        """Whether the highest rate that keeps the promise is searched at the end."""

    def start(self, repository: Path, progress: Progress) -> Setting:
        """The pipeline without what was tuned before.

        Raises:
            UserError: it cannot be tuned.
        """

    def make(self, setting: Setting, repository: Path, progress: Progress) -> Made:
        """Read and build a setting.

        Raises:
            GateFailure, LintFailure, GenerationGateFailure, UserError: it cannot be built.
        """

    def warm_up(self, target: Target, made: Made) -> None:
        """Let a pipeline that was just loaded answer its first requests."""

    def measure(self, target: Target, made: Made, clients: int, seconds: float) -> Measurement:
        """One measurement in a closed loop."""

    def subject(self, made: Made, repository: Path, overrides: Mapping[str, JsonValue]) -> Subject:
        """What was measured, and on what."""

    def verdict(self, winner: Outcome) -> tuple[bool, str]:
        """Whether the winner keeps the promise, and the sentence that says so with its figures."""

    def advice(self, made: Made, winner: Outcome) -> tuple[str, ...]:
        """What would help where tuning alone does not."""
