"""Steps of each kind of pipeline: read, check, build, verify, measure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from triptych.base.errors import Progress
from triptych.building.encoder import build_encoder_engine, make_encoder_core, render_encoder
from triptych.building.generation.bench import bench_generation
from triptych.building.generation.build import (
    build_no_engine,
    check_folder,
    make_generation_core,
    render_generating,
)
from triptych.building.generation.inputs import read_generation
from triptych.building.generation.live import verify_generation
from triptych.building.generation.text2text import read_text2text
from triptych.building.own_checks import check_own_pipeline
from triptych.building.pipeline_checks import Check, check_pipeline
from triptych.core.gate.answers import check_hooks
from triptych.core.gate.verify import verify_pipeline
from triptych.core.inputs import PipelineInputs, read_inputs
from triptych.core.own_inputs import read_own_inputs
from triptych.repository.records import GateResult
from triptych.repository.render import Rendered
from triptych.serving.bench.bench import bench_pipeline
from triptych.serving.bench.results import BenchResult
from triptych.spec.kind import Kind
from triptych.spec.model_fields import CompiledSpec


@dataclass(frozen=True)
class Steps:
    """Steps of one kind of pipeline, with the specs, inputs and results of that kind.

    Attributes:
        read: Resolves the model and reads the traffic of a spec; writes only to the cache. Its
            arguments are the spec and a `Progress`.
        check_folder: Checks the files of a pipeline without a server or a model.
        check: Runs the pipeline's own functions on answers of the original model.
        make_core: Makes the model that is served and runs the gate; arguments as
            `encoder.make_encoder_core`.
        render: Returns the files around a result of `make_core`; arguments as
            `encoder.render_encoder`.
        build_engine: Builds the engine of a written pipeline if this machine has its hardware.
        verify: Runs the gate through a server; arguments as `verify_pipeline`.
        bench: Measures a built pipeline; arguments as `bench_pipeline`.
    """

    read: Callable[..., Any]
    check_folder: Callable[[Path], Sequence[Check]]
    check: Callable[[Any, Progress], None]
    make_core: Callable[..., Any]
    render: Callable[[Any, Path, Progress, bool], Rendered]
    build_engine: Callable[[Any, Path, Progress], Sequence[str]]
    verify: Callable[..., GateResult]
    bench: Callable[..., BenchResult]


def _check_nothing(_inputs: object, _progress: Progress) -> None:
    """Check nothing, because pipelines that generate text have no hooks."""


_TEXT_GENERATION = Steps(
    read=read_generation,
    check_folder=check_folder,
    check=_check_nothing,
    make_core=make_generation_core,
    render=render_generating,
    build_engine=build_no_engine,
    verify=verify_generation,
    bench=bench_generation,
)

_ENCODER = Steps(
    read=read_inputs,
    check_folder=check_pipeline,
    check=check_hooks,
    make_core=make_encoder_core,
    render=render_encoder,
    build_engine=build_encoder_engine,
    verify=verify_pipeline,
    bench=bench_pipeline,
)

STEPS: Mapping[Kind, Steps] = {
    Kind.ENCODER: _ENCODER,
    Kind.MODEL: replace(_ENCODER, read=read_own_inputs, check_folder=check_own_pipeline),
    Kind.TEXT_GENERATION: _TEXT_GENERATION,
    Kind.TEXT2TEXT: replace(_TEXT_GENERATION, read=read_text2text),
}


def read_compiled(
    spec: CompiledSpec, progress: Progress, *, traffic: Path | None = None
) -> PipelineInputs:
    """Read the inputs of a pipeline whose core is a compiled graph; see `core.inputs.read_inputs`.

    Raises:
        UserError: The spec, the model, the hooks or the traffic has a mistake.
    """
    inputs: PipelineInputs = STEPS[spec.kind].read(spec, progress, traffic=traffic)
    return inputs
