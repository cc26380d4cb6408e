"""Manifests of a built pipeline for each target."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path

from triptych.deploy.checks.pods import BuildInfo, read_encoder_info, read_generation_info
from triptych.deploy.context import DeploymentContext, Manifests, read_context
from triptych.deploy.generation import read_generation_context
from triptych.deploy.options import DeployOptions
from triptych.repository.lint.checks import find_known_defects
from triptych.repository.manifest import kind_of_build
from triptych.spec.kind import Kind


def make_manifests(
    repository: Path, pipeline: str, options: DeployOptions, reports: Path
) -> Manifests:
    """Return the manifests of a built pipeline for one target.

    Args:
        repository: Repository with this pipeline.
        pipeline: Name of the pipeline.
        options: Options of the user.
        reports: Folder of the pipeline's reports, with the result of `bench`; not read for a
            pipeline that generates text.

    Raises:
        UserError: The pipeline cannot be deployed with these options.
    """
    context = _read_context(repository, pipeline, options, reports)
    target = import_module(f"triptych.deploy.{options.target}")
    manifests: Manifests = target.make_files(context)
    triton = context.options.triton
    return replace(
        manifests,
        triton=triton,
        known_defects=find_known_defects(repository, pipeline, triton),
        assumptions=context.assumptions,
    )


def _read_context(
    repository: Path, pipeline: str, options: DeployOptions, reports: Path
) -> DeploymentContext:
    match kind_of_build(repository, pipeline):
        case Kind.ENCODER | Kind.MODEL:
            return read_context(repository, pipeline, options, reports)
        case Kind.TEXT_GENERATION | Kind.TEXT2TEXT:
            return read_generation_context(repository, pipeline, options)


def read_build_info(repository: Path, pipeline: str, reports: Path) -> BuildInfo:
    """Return the information about a built pipeline with which manifests are checked.

    Raises:
        UserError: The pipeline is not built, or the result of its `bench` cannot be read.
    """
    match kind_of_build(repository, pipeline):
        case Kind.ENCODER | Kind.MODEL:
            return read_encoder_info(repository, pipeline, reports)
        case Kind.TEXT_GENERATION | Kind.TEXT2TEXT:
            return read_generation_info(repository, pipeline)
