"""Lint: a TensorRT core has its engine, and the target release can load it.

What is known of such a core is here, too: its profiles, its build record, and the rows it is sent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from triptych.base import cache
from triptych.base.releases import TENSORRT_VERSIONS, Release, releases_with, tensorrt_major
from triptych.repository.lint.ensemble import Wiring, wirings
from triptych.repository.lint.operators import support_of, unsupported
from triptych.repository.lint.snapshot import Flaw, Model, Repository, enum_name, error, names
from triptych.spec.engine_plan import Dims, EnginePlan, ShapeRange

# Inputs of these kinds, made by the server, have one entry a row.
_BY_ROW = ("BATCH_ITEM_SHAPE", "BATCH_ITEM_SHAPE_FLATTEN")
_MAX_REFUSALS = 3
Shapes = Mapping[str, Dims]
"""Input to its shape, batch dimension included."""


@dataclass(frozen=True)
class SentRows:
    """What the step `source` sends the core.

    Attributes:
        padded: lengths that it pads rows to; empty when it does not.
        longest: tokens a row may have; None when it does not say.
    """

    source: str
    padded: tuple[int, ...]
    longest: int | None


class EngineCore:
    """A model with backend tensorrt.

    Attributes:
        pipeline: that built it; empty when no lock says.
        lock_file: of that pipeline, relative to the repository.
        profiles: of its engine; none when they are not known.
        record: what the finished engine was built with; empty when no lock says.
        rows: what the steps before it send.
    """

    def __init__(self, model: Model) -> None:
        every = wirings(model.repository)
        users = [w for w in every if any(step.model is model for step in w.steps)]
        self.model, self.config, self.config_file = model, model.config, model.config_file
        plans = ((user.ensemble, _plan_of(user.ensemble.lock)) for user in users)
        owner, plan = next(((owner, plan) for owner, plan in plans if plan), (None, None))
        record = owner.lock.get("engine") if owner is not None else None
        self.pipeline = owner.name if owner is not None else ""
        self.lock_file = owner.lock_file if owner is not None else ""
        self.profiles: tuple[Mapping[str, ShapeRange], ...] = plan.profiles if plan else ()
        self.record: Mapping[str, object] = record if isinstance(record, dict) else {}
        self.rows = tuple(rows for user in users for rows in _rows_sent(user, model))

    @cached_property
    def row_inputs(self) -> set[str]:
        """Inputs whose first dimension counts the rows of a batch."""
        if self.config.max_batch_size < 1:
            return set()
        added = [each for each in self.config.batch_input if enum_name(each, "kind") in _BY_ROW]
        rows = {tensor.name for tensor in self.config.input if not tensor.allow_ragged_batch}
        return rows | {name for each in added for name in each.target_name}

    def fits(self, shapes: Shapes) -> bool:
        """Whether some profile spans these shapes, however many rows they are of."""
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
        """Dims of a row of `tokens` tokens."""
        inputs = self.config.input
        return {t.name: tuple(tokens if dim == -1 else dim for dim in t.dims) for t in inputs}

    def joined(self, rows: int, dims: Shapes) -> Shapes:
        """Shapes of a batch of `rows` equal rows, from the dims of one."""
        ragged = {name: (rows * prod(dims[name]),) for name in self.model.ragged & dims.keys()}
        return {**{name: self._batched(rows, each) for name, each in dims.items()}, **ragged}

    def spec_shapes(self, rows: int, inputs: Mapping[str, Any]) -> Shapes:
        """Shapes that a `graph_spec` names: ragged and added inputs are given as joined."""
        as_given = {n: tuple(s.dim) for n, s in inputs.items()}
        joined = self.model.ragged | self.model.added
        return {n: d if n in joined else self._batched(rows, d) for n, d in as_given.items()}

    def _batched(self, rows: int, dims: Dims) -> Dims:
        return (rows, *dims) if self.config.max_batch_size > 0 else dims


def engine_cores(repository: Repository) -> Iterator[EngineCore]:
    """Every TensorRT model, with what the locks of its ensembles say."""
    for model in repository.executed():
        if model.backend == "tensorrt":
            yield EngineCore(model)


def between(low: Dims, dims: Dims, high: Dims) -> bool:
    """Whether a shape lies between two others of its rank."""
    trios = zip(low, dims, high, strict=False)
    return len(low) == len(dims) == len(high) and all(a <= b <= c for a, b, c in trios)


def _plan_of(lock: Any) -> EnginePlan | None:
    plan = lock.get("plan") if isinstance(lock, dict) else None
    try:
        return EnginePlan.from_dict(plan["engine"]) if isinstance(plan, dict) else None
    except (KeyError, TypeError, ValueError):
        return None


def _rows_sent(wiring: Wiring, core: Model) -> Iterator[SentRows]:
    """Of the steps that make an input of variable length."""
    for producer in {p.index: p for p in wiring.feeding(core, core.varying)}.values():
        if producer.model is not None:
            edges = _setting(producer.model, "bucket_edges")
            longest = _setting(producer.model, "max_length")
            padded = tuple(edges) if _are_sizes(edges) else ()
            yield SentRows(producer.model.name, padded, longest if _are_sizes([longest]) else None)


def _setting(model: Model, key: str) -> Any:
    """A parameter of a step of ours: JSON."""
    if not model.is_ours or key not in model.config.parameters:
        return None
    try:
        return json.loads(model.config.parameters[key].string_value)
    except (ValueError, RecursionError):
        return None


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and v > 0 for v in values)


def sha256_of(path: Path) -> str:
    """In hex; empty when the file cannot be read."""
    try:
        return cache.sha256_of(path)
    except OSError:
        return ""


def engine_built(core: EngineCore) -> Iterator[Flaw]:
    """The engine of a TensorRT core is there."""
    model = core.model
    if model.waits_for_engine:
        pipeline = core.pipeline or model.name.removesuffix("_core")
        yield error(
            "must have its engine built: the tensorrt backend loads nothing else",
            "model.onnx alone",
            f"triptych engine {pipeline}, in the image and on the GPU that serve it",
            f"{model.name}/{model.served_versions[0]}/{model.model_file}",
        )


def engine_version(core: EngineCore) -> Iterator[Flaw]:
    """The engine is of the graph beside it, and of a TensorRT that a named release loads."""
    repository, record = core.model.repository, core.record
    if not record or core.model.waits_for_engine:
        return
    wanted, built = record.get("onnx_sha256"), record.get("tensorrt")
    for graph in core.model.graphs:
        if isinstance(wanted, str) and sha256_of(repository.root / graph.file) != wanted:
            yield error(
                "must be the graph that the engine was built from",
                f"another one than {core.lock_file} records",
                f"triptych engine {core.pipeline}",
                graph.file,
            )
    if not isinstance(built, str) or not re.fullmatch(r"\d+(\.\d+)+", built):
        return
    compatible = record.get("version_compatible") is True
    obstacle = _obstacle(built, repository.triton, compatible=compatible)
    if repository.with_engines and obstacle:
        fitting = releases_with(built)
        also = f", or target Triton {names(fitting)}" if fitting else ""
        yield error(
            f"must have an engine that the TensorRT of Triton {repository.triton} loads",
            f"an engine of TensorRT {built}; {obstacle}",
            f"triptych engine {core.pipeline} in the image of that release{also}",
            core.lock_file,
        )


def _obstacle(built: str, triton: Release, *, compatible: bool) -> str:
    """Why the image of `triton` cannot load an engine of TensorRT `built`; empty if it may."""
    exact, major = TENSORRT_VERSIONS.get(triton), tensorrt_major(triton)
    if major is None or (exact is not None and _same(exact, built)):
        return ""
    there, newer = f"Triton {triton} has {exact}", "none loads one of a newer release"
    if exact is not None and _numbers(built) > _numbers(exact):
        return f"{there}, and {newer}"
    if exact is not None and not compatible:
        return f"{there}, and it is not version compatible"
    own, there = _numbers(built)[0], f"Triton {triton} has TensorRT {major}"
    if own > major:
        return f"{there}, and {newer}"
    if own < major and not compatible:
        return f"{there}, and it is not version compatible"
    return f"{there}, and it is from too far back" if (own, major) == (8, 11) else ""


def _same(one: str, other: str) -> bool:
    """Whether two versions agree as far as both are known: ``11.2.1`` and ``11.2.1.2`` do."""
    return all(a == b for a, b in zip(_numbers(one), _numbers(other), strict=False))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def engine_operators(core: EngineCore) -> Iterator[Flaw]:
    """The target's TensorRT takes every operator and element type of the graph."""
    repository = core.model.repository
    major = tensorrt_major(repository.triton)
    for graph in core.model.graphs:
        if graph.problem or major is None:
            continue
        try:
            refused = unsupported(repository.root / graph.file, major)
        except Exception as problem:  # shape inference raises errors of its own
            yield error(
                "must be a graph whose types can be told",
                f"{type(problem).__name__}: {problem!s:.200}",
                "Build the pipeline again",
                graph.file,
            )
            continue
        nodes: dict[str, list[str]] = {}
        for refusal in refused:
            if refusal.certain:
                nodes.setdefault(refusal.reason, []).append(refusal.node)
        for reason, (first, *others) in list(nodes.items())[:_MAX_REFUSALS]:
            more = f" and {len(others)} more" if others else ""
            yield error(
                f"must hold only what TensorRT {support_of(major).tensorrt} takes",
                f"{first}{more}: {reason}",
                "Build with another precision, or for a Triton with a newer TensorRT than that of "
                f"{repository.triton}",
                graph.file,
            )
