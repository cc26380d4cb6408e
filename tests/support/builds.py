"""Builds of inputs that a test has read, and perhaps changed."""

from pathlib import Path
from typing import Any

from triptych.base.errors import Progress
from triptych.building import build as building
from triptych.building.build import BuildOutcome
from triptych.building.compiled import CompiledStages
from triptych.building.generation.build import GeneratingStages
from triptych.building.generation.inputs import GeneratingInputs
from triptych.building.stages import BuildOptions
from triptych.core.inputs import PipelineInputs


def build(
    inputs: PipelineInputs | GeneratingInputs,
    repository: Path,
    progress: Progress = lambda *_: None,
    **options: Any,
) -> BuildOutcome:
    """Build a pipeline of any kind from its inputs; other options are those of `BuildOptions`."""
    chosen = BuildOptions(repository=repository, progress=progress, **options)
    if isinstance(inputs, PipelineInputs):
        return building.build(CompiledStages(), inputs, chosen)
    return building.build(GeneratingStages(), inputs, chosen)
