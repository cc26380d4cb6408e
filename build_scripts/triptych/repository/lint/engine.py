"""Checks of TensorRT cores: the engine exists, and the target release can load it.

`EngineCore` has the profiles, the build record and the rows that a core receives.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triptych.base.cache import sha256_of as hash_file
from triptych.base.releases import TENSORRT_VERSIONS, Release, releases_with, tensorrt_major
from triptych.container.machine import version_numbers
from triptych.repository.lint.ensemble import Wiring, wirings
from triptych.repository.lint.snapshot import Flaw, Model, Repository, enum_name, error, names
from triptych.spec.engine_plan import Dims, EnginePlan, ShapeRange

if TYPE_CHECKING:
    from tritonclient.grpc.model_config_pb2 import ModelOptimizationPolicy

# The server makes inputs of these kinds with one entry per row.
_BY_ROW = ("BATCH_ITEM_SHAPE", "BATCH_ITEM_SHAPE_FLATTEN")
Shapes = Mapping[str, Dims]
"""Shape of each input, with the batch dimension."""


@dataclass(frozen=True)
class SentRows:
    """Rows that the step `source` sends to the core."""

    source: str
    padded: tuple[int, ...]  # Lengths that it pads rows to; empty if it does not pad
    longest: int | None  # Maximum number of tokens of a row; None if unknown


class EngineCore:
    """A model with backend tensorrt.

    Attributes:
        pipeline: Pipeline that built it; empty if no build manifest names it.
        manifest_file: Build manifest of that pipeline, relative to the repository.
        profiles: Profiles of its engine; none if unknown.
        record: Record of the finished engine; empty if no build manifest has it.
        rows: Rows that the steps before it send.
    """

    def __init__(self, model: Model) -> None:
        every = wirings(model.repository)
        users = [w for w in every if any(step.model is model for step in w.steps)]
        self.model, self.config, self.where = model, model.config, model.where
        plans = ((user.ensemble, _plan_of(user.ensemble.manifest)) for user in users)
        owner, plan = next(((owner, plan) for owner, plan in plans if plan), (None, None))
        record = owner.manifest.get("engine") if owner is not None else None
        self.pipeline = owner.name if owner is not None else ""
        self.manifest_file = owner.manifest_file if owner is not None else ""
        self.profiles: tuple[Mapping[str, ShapeRange], ...] = plan.profiles if plan else ()
        self.record: Mapping[str, object] = record if isinstance(record, dict) else {}
        self.rows = tuple(rows for user in users for rows in _rows_sent(user, model))

    @cached_property
    def row_inputs(self) -> set[str]:
        """Inputs whose first dimension is the number of rows of a batch."""
        if self.config.max_batch_size < 1:
            return set()
        added = [each for each in self.config.batch_input if enum_name(each, "kind") in _BY_ROW]
        rows = {tensor.name for tensor in self.config.input if not tensor.allow_ragged_batch}
        return rows | {name for each in added for name in each.target_name}

    def fits(self, shapes: Shapes) -> bool:
        """Return whether some profile allows these shapes, whatever the number of rows."""
        return any(
            all(
                between(profile[name].minimum[skip:], dims[skip:], profile[name].maximum[skip:])
                for name, dims in shapes.items()
                if name in profile
                for skip in [int(name in self.row_inputs)]
            )
            for profile in self.profiles
        )

    def row(self, tokens: int) -> Shapes:
        """Return the dims of a row of `tokens` tokens."""
        inputs = self.config.input
        return {t.name: tuple(tokens if dim == -1 else dim for dim in t.dims) for t in inputs}

    def joined(self, rows: int, dims: Shapes) -> Shapes:
        """Return the shapes of a batch of `rows` equal rows, from the dims of one."""
        ragged = {name: (rows * prod(dims[name]),) for name in self.model.ragged & dims.keys()}
        return {**{name: self._batched(rows, each) for name, each in dims.items()}, **ragged}

    def spec_shapes(
        self, rows: int, inputs: Mapping[str, ModelOptimizationPolicy.Cuda.GraphSpec.Shape]
    ) -> Shapes:
        """Return the shapes in a `graph_spec`, which has ragged and added inputs after joining."""
        as_given = {n: tuple(s.dim) for n, s in inputs.items()}
        joined = self.model.ragged | self.model.added
        return {n: d if n in joined else self._batched(rows, d) for n, d in as_given.items()}

    def _batched(self, rows: int, dims: Dims) -> Dims:
        return (rows, *dims) if self.config.max_batch_size > 0 else dims


def engine_cores(repository: Repository) -> Iterator[EngineCore]:
    """Yield every TensorRT model, with data from the build manifests of its ensembles."""
    for model in repository.executed():
        if model.backend == "tensorrt":
            yield EngineCore(model)


def between(low: Dims, dims: Dims, high: Dims) -> bool:
    """Return whether a shape is between two others of its rank."""
    trios = zip(low, dims, high, strict=False)
    return len(low) == len(dims) == len(high) and all(a <= b <= c for a, b, c in trios)


def _plan_of(manifest: object) -> EnginePlan | None:
    plan = manifest.get("plan") if isinstance(manifest, dict) else None
    try:
        return EnginePlan.from_dict(plan["engine"]) if isinstance(plan, dict) else None
    except (KeyError, TypeError, ValueError):
        return None


def _rows_sent(wiring: Wiring, core: Model) -> Iterator[SentRows]:
    """Yield the rows of the steps that make an input of variable length."""
    for producer in {p.index: p for p in wiring.feeding(core, core.varying)}.values():
        if producer.model is not None:
            edges: Any = producer.model.settings.get("bucket_edges")
            longest = producer.model.settings.get("max_length")
            padded = tuple(edges) if _are_sizes(edges) else ()
            yield SentRows(producer.model.name, padded, longest if _are_sizes([longest]) else None)


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(type(v) is int and v > 0 for v in values)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hex; empty if the file cannot be read."""
    try:
        return hash_file(path)
    except OSError:
        return ""


def engine_built(core: EngineCore) -> Iterator[Flaw]:
    """Check that the engine of a TensorRT core exists."""
    model = core.model
    if model.waits_for_engine:
        pipeline = core.pipeline or model.name.removesuffix("_core")
        yield error(
            "must have its engine built: the tensorrt backend cannot load a graph",
            "model.onnx alone",
            f"triptych engine {pipeline}, in the image and on the GPU that serve it",
            f"{model.name}/{model.served_versions[0]}/{model.model_file}",
        )


def engine_version(core: EngineCore) -> Iterator[Flaw]:
    """Check that the engine belongs to its graph, and that the target release can load it."""
    repository, record = core.model.repository, core.record
    if not record or core.model.waits_for_engine:
        return
    wanted, built = record.get("onnx_sha256"), record.get("tensorrt")
    for graph in core.model.graphs:
        if isinstance(wanted, str) and sha256_of(repository.root / graph.file) != wanted:
            yield error(
                "must be the graph that the engine was built from",
                f"another graph than {core.manifest_file} records",
                f"triptych engine {core.pipeline}",
                graph.file,
            )
    if not isinstance(built, str) or not re.fullmatch(r"\d+(\.\d+)+", built):
        return
    compatible = record.get("version_compatible") is True
    obstacle = _obstacle(built, repository.triton, compatible=compatible)
    if repository.is_exact and obstacle:
        fitting = releases_with(built)
        also = f", or target Triton {names(fitting)}" if fitting else ""
        yield error(
            f"must have an engine that the TensorRT of Triton {repository.triton} loads",
            f"an engine of TensorRT {built}; {obstacle}",
            f"triptych engine {core.pipeline} in the image of that release{also}",
            core.manifest_file,
        )


def _obstacle(built: str, triton: Release, *, compatible: bool) -> str:
    """Return why the image of `triton` cannot load an engine of TensorRT `built`.

    Empty if it may be able to.
    """
    exact, major = TENSORRT_VERSIONS.get(triton), tensorrt_major(triton)
    if major is None or (exact is not None and _same(exact, built)):
        return ""
    there, newer = f"Triton {triton} has {exact}", "none loads one of a newer release"
    if exact is not None and version_numbers(built) > version_numbers(exact):
        return f"{there}, and {newer}"
    if exact is not None and not compatible:
        return f"{there}, and it is not version compatible"
    own, there = version_numbers(built)[0], f"Triton {triton} has TensorRT {major}"
    if own > major:
        return f"{there}, and {newer}"
    if own < major and not compatible:
        return f"{there}, and it is not version compatible"
    return f"{there}, and it is from too far back" if (own, major) == (8, 11) else ""


def _same(one: str, other: str) -> bool:
    """Return whether two versions agree as far as both are known: ``11.2.1`` and ``11.2.1.2``."""
    return all(a == b for a, b in zip(version_numbers(one), version_numbers(other), strict=False))
