"""Specs of every kind of pipeline: loaders and SLO options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from triptych.spec.spec import PipelineSpec, load_spec, task_of

AnySpec = CompiledSpec | TextSpec


@dataclass(frozen=True)
class SpecReader:
    """Reader of the specs of one kind.

    Attributes:
        model: Class of the specs.
        load: Reads the spec in a pipeline's folder; arguments as `load_any_spec`.
        parse_slo: Reads an SLO; arguments as `parse_any_slo`, with the SLO of the spec last.
    """

    model: type[AnySpec]
    load: Callable[..., AnySpec]
    parse_slo: Callable[[Sequence[str], float | None, Any], AnySlo]


READERS: Mapping[Kind, SpecReader] = {
    Kind.ENCODER: SpecReader(PipelineSpec, load_spec, parse_slo),
    Kind.TEXT_GENERATION: SpecReader(GenerationSpec, load_generation_spec, parse_generation_slo),
    Kind.TEXT2TEXT: SpecReader(Text2TextSpec, load_text2text_spec, parse_generation_slo),
    Kind.MODEL: SpecReader(ModelSpec, load_model_spec, parse_slo),
}


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
    return READERS[kind_in(folder)].load(folder, overrides, untuned=untuned)


def load_compiled(
    folder: Path,
    overrides: Sequence[str] = (),
    *,
    untuned: bool = False,
    tuned: Mapping[str, Any] | None = None,
) -> CompiledSpec:
    """Read the spec of a pipeline whose core is a compiled graph; arguments as `load_spec`.

    Raises:
        UserError: See `load_spec`.
    """
    load = load_model_spec if kind_in(folder) is Kind.MODEL else load_spec
    return load(folder, overrides, untuned=untuned, tuned=tuned)


def parse_any_slo(spec: AnySpec, limits: Sequence[str], throughput: float | None) -> AnySlo:
    """Return the SLO that options give for a pipeline, or that of its spec where they give none.

    Raises:
        UserError: A limit does not apply to pipelines of this kind.
    """
    return READERS[spec.kind].parse_slo(limits, throughput, spec.serving.slo)
