"""What is known of a TensorRT core: its profiles, its build record, and the rows it is sent."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from triptych.lint.snapshot import Model, Repository, enum_name
from triptych.lint.wiring import Wiring, wirings
from triptych.plan.engine_spec import Dims, EnginePlan, ShapeRange
from triptych.repository.lock import LOCK_FILE

# Inputs of these kinds, made by the server, have one entry a row.
_BY_ROW = ("BATCH_ITEM_SHAPE", "BATCH_ITEM_SHAPE_FLATTEN")
Shapes = Mapping[str, Dims]
"""Input to its shape, batch dimension included."""


@dataclass(frozen=True)
class Rows:
    """What one step sends the core.

    Attributes:
        source: name of the step.
        padded: lengths that it pads rows to; empty when it does not.
        longest: tokens a row may have; None when it does not say.
    """

    source: str
    padded: tuple[int, ...]
    longest: int | None


@dataclass(frozen=True)
class EngineCore:
    """A model with backend tensorrt.

    Attributes:
        model: it.
        lock_file: of the pipeline that built it, relative to the repository; empty without one.
        plan: what its engine is built from; None when no lock says.
        record: what the finished engine was built with; empty when no lock says.
        rows: what the steps before it send.
    """

    model: Model
    lock_file: str
    plan: EnginePlan | None
    record: Mapping[str, Any]
    rows: tuple[Rows, ...]

    @property
    def profiles(self) -> tuple[Mapping[str, ShapeRange], ...]:
        """Of the engine; none when they are not known."""
        return self.plan.profiles if self.plan is not None else ()

    @property
    def profile_names(self) -> list[str]:
        """Those that its instances name, each once; empty for the server's choice, the first."""
        groups = self.model.config.instance_group
        return list(dict.fromkeys(name for group in groups for name in group.profile))

    @property
    def row_inputs(self) -> set[str]:
        """Inputs whose first dimension counts the rows of a batch."""
        config = self.model.config
        if config.max_batch_size < 1:
            return set()
        made = [made for made in config.batch_input if enum_name(made, "kind") in _BY_ROW]
        rows = {tensor.name for tensor in config.input if not tensor.allow_ragged_batch}
        return rows | {name for one in made for name in one.target_name}

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

    @property
    def ragged(self) -> bool:
        """Rows of a batch come end to end."""
        return any(tensor.allow_ragged_batch for tensor in self.model.config.input)

    @property
    def varies(self) -> bool:
        """Rows may be of different shape."""
        return any(-1 in tensor.dims for tensor in self.model.config.input)

    def batch(self, rows: int, tokens: int) -> Shapes:
        """Shapes of a batch of `rows` rows, each of `tokens` tokens."""
        return self.joined(
            rows, {t.name: _concrete(t.dims, tokens) for t in self.model.config.input}
        )

    def joined(self, rows: int, dims: Shapes) -> Shapes:
        """Shapes of a batch of `rows` equal rows, from the dims of one."""
        ragged = {tensor.name for tensor in self.model.config.input if tensor.allow_ragged_batch}
        return {
            name: (rows * prod(one),) if name in ragged else self._batched(rows, one)
            for name, one in dims.items()
        }

    def spec_shapes(self, rows: int, inputs: Mapping[str, Any]) -> Shapes:
        """Shapes that a `graph_spec` names: ragged and made inputs are given as joined."""
        config = self.model.config
        whole = {tensor.name for tensor in config.input if tensor.allow_ragged_batch}
        whole.update(name for made in config.batch_input for name in made.target_name)
        return {
            name: tuple(shape.dim) if name in whole else self._batched(rows, tuple(shape.dim))
            for name, shape in inputs.items()
        }

    def _batched(self, rows: int, dims: Dims) -> Dims:
        return (rows, *dims) if self.model.config.max_batch_size > 0 else dims


def engine_cores(repository: Repository) -> Iterator[EngineCore]:
    """Every TensorRT model, with what the locks of its ensembles say."""
    found = wirings(repository)
    for model in repository.executed():
        if model.backend != "tensorrt":
            continue
        users = [w for w in found if any(step.model is model for step in w.steps)]
        owners = [w.ensemble for w in users if _plan_of(w.ensemble.lock) is not None]
        owner = owners[0] if owners else None
        record = owner.lock.get("engine") if owner is not None else None
        yield EngineCore(
            model=model,
            lock_file=f"{owner.name}/{LOCK_FILE}" if owner is not None else "",
            plan=_plan_of(owner.lock) if owner is not None else None,
            record=record if isinstance(record, dict) else {},
            rows=tuple(rows for wiring in users for rows in _rows_sent(wiring, model)),
        )


def between(low: Dims, dims: Dims, high: Dims) -> bool:
    """Whether a shape lies between two others of its rank."""
    return len(low) == len(dims) == len(high) and all(
        a <= b <= c for a, b, c in zip(low, dims, high, strict=True)
    )


def _plan_of(lock: Any) -> EnginePlan | None:
    plan = lock.get("plan") if isinstance(lock, dict) else None
    data = plan.get("engine") if isinstance(plan, dict) else None
    if not isinstance(data, dict):
        return None
    try:
        engine = EnginePlan.from_dict(data)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    sizes = [
        size
        for profile in engine.profiles
        for shapes in profile.values()
        for dims in (shapes.minimum, shapes.optimum, shapes.maximum)
        for size in dims
    ]
    return engine if all(isinstance(size, int) for size in sizes) else None


def _rows_sent(wiring: Wiring, core: Model) -> Iterator[Rows]:
    """Of the steps that make an input of variable length."""
    varying = {tensor.name for tensor in core.config.input if -1 in tensor.dims}
    read = [
        step.inputs[name]
        for step in wiring.steps
        if step.model is core
        for name in sorted(varying & set(step.inputs))
    ]
    producers = {p.index: p for tensor in read for p in wiring.producers.get(tensor, [])}
    for producer in producers.values():
        if producer.model is not None:
            edges = _setting(producer.model, "bucket_edges")
            longest = _setting(producer.model, "max_length")
            yield Rows(
                source=producer.model.name,
                padded=tuple(edges) if _are_sizes(edges) else (),
                longest=longest if _are_sizes([longest]) else None,
            )


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


def _concrete(dims: Sequence[int], tokens: int) -> Dims:
    return tuple(tokens if dim == -1 else dim for dim in dims)
