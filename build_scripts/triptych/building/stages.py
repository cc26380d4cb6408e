"""Types of a build: the stages of one kind of pipeline, their options, and what passes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from triptych.base.errors import Progress
from triptych.building.pipeline_checks import Check
from triptych.core.gate.verify import LiveOptions
from triptych.repository.records import GateResult
from triptych.repository.render import Rendered
from triptych.serving.bench.bench import BenchOptions
from triptych.serving.bench.results import BenchResult
from triptych.spec.any_spec import AnySpec
from triptych.spec.plan import Plan


class CheckedModel(Protocol):
    """A model that passed the gate, or whose failed gate was accepted."""

    @property
    def spec(self) -> AnySpec: ...

    @property
    def gate(self) -> GateResult: ...

    @property
    def plan(self) -> Plan | None:
        """Plan of a compiled core; None for an engine that generates text."""

    @property
    def not_packed_reason(self) -> str:
        """Reason why the layout is not packed although the spec requests it; else empty."""

    @property
    def attention(self) -> str:
        """Operators that compute attention for a GPU, with the reason; empty for a CPU."""


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Options of a build that are not part of the spec."""

    repository: Path  # folder of the models
    progress: Progress  # receives each stage and its result
    accept: str = ""  # reason why a failed gate is accepted; empty to fail instead
    built_after: Sequence[str] | None = ()
    """Names of the pipelines that are built right after this one; None to skip the check of
    pipelines that share this core."""
    engine_dry_run: bool = True  # whether an engine that cannot be built here is built in a dry run
    before_write: Callable[[CheckedModel], object] | None = None
    """Called with the checked model just before the files are written; an error of it leaves the
    repository as it was."""


SpecT = TypeVar("SpecT", contravariant=True)
InputsT = TypeVar("InputsT")
ModelT = TypeVar("ModelT", bound=CheckedModel)


class BuildStages(Protocol[SpecT, InputsT, ModelT]):
    """Stages of one kind of pipeline, with its own spec, inputs and model."""

    def check_files(self, spec: SpecT) -> Sequence[Check]:
        """Check the files of a pipeline without a server or a model."""

    def read(self, spec: SpecT, progress: Progress) -> InputsT:
        """Resolve the model and read the traffic; only the cache is written."""

    def make_model(self, inputs: InputsT, options: BuildOptions) -> ModelT:
        """Check the pipeline's own functions, make the model that is served, and run the gate."""

    def render(self, model: ModelT, options: BuildOptions) -> Rendered:
        """Return the files around a model, with its build manifest."""

    def build_engine(self, model: ModelT, options: BuildOptions) -> Sequence[str]:
        """Build the engine of a written pipeline if possible; return names of changed models."""

    def verify(self, inputs: InputsT, options: LiveOptions) -> GateResult:
        """Run the gate through a server."""

    def bench(self, inputs: InputsT, options: BenchOptions) -> BenchResult:
        """Measure a built pipeline."""
