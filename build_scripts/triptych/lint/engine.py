"""Lint: a TensorRT core has its engine, and the target release can load it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from triptych.export.operators import support_of, unsupported
from triptych.lint.engine_facts import EngineCore, engine_cores
from triptych.lint.files_hash import sha256_of
from triptych.lint.flaw import Flaw, error, names
from triptych.lint.snapshot import Model, Repository, waits_for_engine
from triptych.releases import Release, releases_with, tensorrt_major, tensorrt_of

_MOST_REFUSALS = 3


def engine_built(repository: Repository) -> Iterator[Flaw]:
    """The engine of a TensorRT core is there."""
    for core in engine_cores(repository):
        model = core.model
        if waits_for_engine(model):
            pipeline = core.lock_file.partition("/")[0] or model.name.removesuffix("_core")
            yield error(
                f"{model.name}/{model.served_versions[0]}/{model.model_file}",
                "must have its engine built: the tensorrt backend loads nothing else",
                given="model.onnx alone",
                remedy=f"triptych engine {pipeline}, in the image and on the GPU that serve it",
            )


def engine_version(repository: Repository) -> Iterator[Flaw]:
    """The engine is of the graph beside it, and of a TensorRT that a named release loads."""
    for core in engine_cores(repository):
        record = core.record
        if not record or waits_for_engine(core.model):
            continue
        yield from _stale(repository, core)
        built, compatible = record.get("tensorrt"), record.get("version_compatible") is True
        if not repository.with_engines or not isinstance(built, str):
            continue
        if not re.fullmatch(r"\d+(\.\d+)+", built):
            continue
        obstacle = _obstacle(built, repository.triton, compatible=compatible)
        if obstacle:
            fitting = releases_with(built)
            also = f", or target Triton {names(fitting)}" if fitting else ""
            yield error(
                core.lock_file,
                f"must have an engine that the TensorRT of Triton {repository.triton} loads",
                given=f"an engine of TensorRT {built}; {obstacle}",
                remedy=f"triptych engine {core.lock_file.partition('/')[0]} in the image of "
                f"that release{also}",
            )


def _obstacle(built: str, triton: Release, *, compatible: bool) -> str:
    """Why the image of `triton` cannot load an engine of TensorRT `built`; empty if it may."""
    exact, major = tensorrt_of(triton), tensorrt_major(triton)
    if exact is not None:
        if exact == built:
            return ""
        there = f"Triton {triton} has {exact}"
        if _numbers(built) > _numbers(exact):
            return f"{there}, and none loads one of a newer release"
        if not compatible:
            return f"{there}, and it is not version compatible"
    if major is None:
        return ""
    own, there = _numbers(built)[0], f"Triton {triton} has TensorRT {major}"
    if own > major:
        return f"{there}, and none loads one of a newer release"
    if own < major and not (compatible and (own, major) in ((8, 10), (10, 11))):
        return (
            f"{there}, and it is {'from too far back' if compatible else 'not version compatible'}"
        )
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _stale(repository: Repository, core: EngineCore) -> Iterator[Flaw]:
    wanted = core.record.get("onnx_sha256")
    for graph in core.model.graphs:
        if isinstance(wanted, str) and sha256_of(repository.root / graph.file) != wanted:
            yield error(
                graph.file,
                "must be the graph that the engine was built from",
                given=f"another one than {core.lock_file} records",
                remedy=f"triptych engine {core.lock_file.partition('/')[0]}",
            )


def engine_operators(repository: Repository) -> Iterator[Flaw]:
    """The target's TensorRT takes every operator and element type of the graph."""
    major = tensorrt_major(repository.triton)
    for model in repository.executed():
        if model.backend == "tensorrt" and major is not None:
            yield from _refusals(repository, model, major)


def _refusals(repository: Repository, model: Model, major: int) -> Iterator[Flaw]:
    for graph in model.graphs:
        if graph.problem:
            continue
        try:
            refused = unsupported(repository.root / graph.file, major)
        except Exception as problem:  # shape inference raises errors of its own
            yield error(
                graph.file,
                "must be a graph whose types can be told",
                given=f"{type(problem).__name__}: {problem!s:.200}",
                remedy="Build the pipeline again",
            )
            continue
        reasons = _grouped([r for r in refused if r.certain])
        for reason, nodes in list(reasons.items())[:_MOST_REFUSALS]:
            more = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
            yield error(
                graph.file,
                f"must hold only what TensorRT {support_of(major).tensorrt} takes",
                given=f"{nodes[0]}{more}: {reason}",
                remedy=f"Build with another precision, or for a Triton with a newer TensorRT than "
                f"that of {repository.triton}",
            )


def _grouped(refused: list[Any]) -> Mapping[str, list[str]]:
    nodes: dict[str, list[str]] = {}
    for refusal in refused:
        nodes.setdefault(refusal.reason, []).append(refusal.node)
    return nodes
