"""A pipeline of any kind, and what each verb of the command line does with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeAlias, Union

from triptych.building.build import BuildOutcome, build
from triptych.building.pipeline_checks import Check
from triptych.building.stages import (
    BuildOptions,
    BuildStages,
    InputsT,
    ModelT,
    SpecT,
)
from triptych.core.gate.verify import LiveOptions
from triptych.repository.records import GateResult
from triptych.serving.bench.bench import BenchOptions
from triptych.serving.bench.results import BenchResult
from triptych.spec.any_spec import AnySpec
from triptych.spec.generation_fields import GenerationSpec, Text2TextSpec, TextSpec
from triptych.spec.model_fields import CompiledSpec, ModelSpec
from triptych.spec.spec import EncoderSpec

if TYPE_CHECKING:
    from triptych.building.generation.build import CheckedEngine
    from triptych.building.generation.inputs import GeneratingInputs
    from triptych.core.inputs import PipelineInputs
    from triptych.core.precision.stage import CheckedCore


@dataclass(frozen=True)
class OpenPipeline(Generic[SpecT, InputsT, ModelT]):
    """A pipeline: its spec, with the stages of its kind."""

    stages: BuildStages[SpecT, InputsT, ModelT]
    spec: SpecT

    def check_files(self) -> Sequence[Check]:
        """Check the files without a server or a model; see `BuildStages.check_files`."""
        return self.stages.check_files(self.spec)

    def build(self, options: BuildOptions) -> BuildOutcome:
        """Build the pipeline; see `build.build`."""
        return build(self.stages, self.stages.read(self.spec, options.progress), options)

    def verify(self, options: LiveOptions) -> GateResult:
        """Run the gate through a server; see `verify_pipeline`."""
        return self.stages.verify(self.stages.read(self.spec, options.progress), options)

    def bench(self, options: BenchOptions) -> BenchResult:
        """Measure the built pipeline; see `bench_pipeline`."""
        return self.stages.bench(self.stages.read(self.spec, options.progress), options)


AnyPipeline: TypeAlias = Union[
    "OpenPipeline[CompiledSpec, PipelineInputs, CheckedCore]",
    "OpenPipeline[TextSpec, GeneratingInputs, CheckedEngine]",
]


def open_pipeline(spec: AnySpec) -> AnyPipeline:
    """Return the pipeline of a spec, whose class decides the kind.

    Only the modules of this kind are imported, which takes a tenth of a second.
    """
    match spec:
        case EncoderSpec() | ModelSpec():
            from triptych.building.compiled import CompiledStages

            return OpenPipeline(CompiledStages(), spec)
        case GenerationSpec() | Text2TextSpec():
            from triptych.building.generation.build import GeneratingStages

            return OpenPipeline(GeneratingStages(), spec)
