"""Which optimization profile and which CUDA graph a batch runs in: pure arithmetic on shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from triptych.core.engine.cuda import EngineError
from triptych.spec.engine_spec import Dims, GraphSpec, ShapeRange

Shapes = Mapping[str, Dims]
Profile = Mapping[str, ShapeRange]


class ShapeError(EngineError):
    """A batch that does not fit the engine: its shape is in no profile, or its type is another."""


def choose_profile(profiles: Mapping[int, Profile], shapes: Shapes) -> int:
    """The place of the profile that holds all `shapes` and whose optimum is nearest to them.

    The distance is the sum of differences over all axes, as in Triton's own backend.

    Raises:
        ShapeError: no profile holds them; the message names the first input that fits in none, or
            all of them where each fits somewhere.
    """
    fitting = [
        index
        for index, profile in profiles.items()
        if all(_holds(profile[name], dims) for name, dims in shapes.items())
    ]
    if not fitting:
        raise ShapeError(_misfit(profiles, shapes))
    return min(fitting, key=lambda index: _distance(profiles[index], shapes))


def choose_graph(graphs: Iterable[GraphSpec], shapes: Shapes) -> GraphSpec | None:
    """The smallest CUDA graph that may compute a batch of these shapes, rows first; else None."""
    rows = {dims[0] if dims else 0 for dims in shapes.values()}
    if len(rows) != 1:
        return None
    (count,) = rows
    matching = [
        graph
        for graph in graphs
        if graph.lowest_batch_size <= count <= graph.batch_size
        and all(tuple(graph.inputs[name]) == dims[1:] for name, dims in shapes.items())
    ]
    return min(matching, key=lambda graph: graph.batch_size, default=None)


def _holds(shape_range: ShapeRange, dims: Dims) -> bool:
    return len(dims) == len(shape_range.minimum) and all(
        low <= dim <= high
        for low, dim, high in zip(shape_range.minimum, dims, shape_range.maximum, strict=True)
    )


def _distance(profile: Profile, shapes: Shapes) -> int:
    return sum(
        abs(dim - optimum)
        for name, dims in shapes.items()
        for dim, optimum in zip(dims, profile[name].optimum, strict=True)
    )


def _misfit(profiles: Mapping[int, Profile], shapes: Shapes) -> str:
    alone = [
        name
        for name, dims in shapes.items()
        if not any(_holds(profile[name], dims) for profile in profiles.values())
    ]
    texts = []
    for name in alone[:1] or shapes:
        ranges = [profile[name] for profile in profiles.values()]
        allowed = dict.fromkeys(f"{list(r.minimum)} to {list(r.maximum)}" for r in ranges)
        shape = list(shapes[name])
        texts.append(f"input '{name}' of shape {shape} (allowed: {', '.join(allowed)})")
    return "no optimization profile of the engine holds " + " with ".join(texts)
