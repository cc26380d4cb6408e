"""Specs of every kind of pipeline: loaders and SLO options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from triptych.spec.generation_fields import (
    GenerationSpec,
    Text2TextSpec,
    TextSpec,
    load_generation_spec,
    load_text2text_spec,
)
from triptych.spec.kind import Kind, kind_of_task
from triptych.spec.model_fields import CompiledSpec, ModelSpec, load_model_spec
from triptych.spec.slo import AnySlo, parse_generation_slo, parse_slo
from triptych.spec.spec import EncoderSpec, load_spec, task_of

AnySpec = CompiledSpec | TextSpec


SPECS: Mapping[Kind, type[AnySpec]] = {
    Kind.ENCODER: EncoderSpec,
    Kind.MODEL: ModelSpec,
    Kind.TEXT_GENERATION: GenerationSpec,
    Kind.TEXT2TEXT: Text2TextSpec,
}
"""Class of the specs of each kind."""


def kind_in(folder: Path) -> Kind:
    """Return the kind of the pipeline in a folder, by the task that its spec names.

    Raises:
        UserError: There is no spec, or it is not YAML.
    """
    return kind_of_task(task_of(folder))


def load_any_spec(folder: Path, overrides: Sequence[str] = (), *, untuned: bool = False) -> AnySpec:
    """Read the spec of a pipeline of any kind.

    Args:
        folder: Folder of the pipeline.
        overrides: ``KEY=VALUE`` each: dotted keys, YAML values.
        untuned: Whether to ignore ``tuned.yaml``.

    Raises:
        UserError: See `load_spec`.
    """
    match kind_in(folder):
        case Kind.ENCODER | Kind.MODEL:
            return load_compiled(folder, overrides, untuned=untuned)
        case Kind.TEXT_GENERATION:
            return load_generation_spec(folder, overrides, untuned=untuned)
        case Kind.TEXT2TEXT:
            return load_text2text_spec(folder, overrides)


def load_compiled(
    folder: Path, overrides: Sequence[str] = (), *, untuned: bool = False
) -> CompiledSpec:
    """Read the spec of a pipeline whose core is a compiled graph; arguments as `load_spec`.

    Raises:
        UserError: See `load_spec`.
    """
    load = load_model_spec if kind_in(folder) is Kind.MODEL else load_spec
    return load(folder, overrides, untuned=untuned)


def parse_any_slo(spec: AnySpec, limits: Sequence[str], throughput: float | None) -> AnySlo:
    """Return the SLO that options give for a pipeline, or that of its spec where they give none.

    Raises:
        UserError: A limit does not apply to pipelines of this kind.
    """
    match spec:
        case EncoderSpec() | ModelSpec():
            return parse_slo(limits, throughput, spec.serving.slo)
        case GenerationSpec() | Text2TextSpec():
            return parse_generation_slo(limits, throughput, spec.serving.slo)
