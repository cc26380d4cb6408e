"""Checks that an engine's profiles cover all shapes it receives, and that CUDA graphs are used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from triptych.base.releases import CONTEXT_MEMORY, first_release
from triptych.repository.lint.config import spec_faults
from triptych.repository.lint.engine import EngineCore, Shapes, between, engine_cores
from triptych.repository.lint.snapshot import Flaw, Model, dims_text, error, names, warning
from triptych.spec.engine_plan import MAX_GRAPHS, ShapeRange

if TYPE_CHECKING:
    from tritonclient.grpc.model_config_pb2 import ModelOptimizationPolicy

# Each context reserves scratch memory for the largest profile and captures its own CUDA graphs
# while the model loads. Six buckets, the default, for two instances are below the limit.
_MAX_CONTEXTS = 16
_MANY_PROFILES = 2
_ALLOCATION_SINCE = first_release(CONTEXT_MEMORY)
_GIVEN_AT_MOST = 4


def profile_batch(core: EngineCore) -> Iterator[Flaw]:
    """Check that every shape of a row has profiles for 1 to max_batch_size rows."""
    limit = core.config.max_batch_size
    for shape, (fewest, most) in _row_spans(core).items() if limit > 0 else ():
        given = f"{fewest} to {most} rows of {shape}, max_batch_size is {limit}"
        remedy = f"Set max_batch_size: {most}, or build the engine for {limit} rows"
        if most < limit:
            yield error(
                "must not allow larger batches than the engine's profiles: the server reports that "
                "the engine only supports a smaller max-batch",
                given,
                remedy,
            )
        elif fewest > 1:
            yield error(
                "must have profiles that start at one row: a single request would be rejected",
                given,
                "Build the engine with a smallest batch of 1",
            )
        elif most > limit:
            yield warning(
                "should use the batches that the engine was built for: it reserves memory for them",
                given,
                remedy,
            )


def _row_spans(core: EngineCore) -> dict[str, tuple[int, int]]:
    """Return the minimum and maximum number of rows in the profiles, by shape of a row."""
    spans: dict[str, tuple[int, int]] = {}
    for profile in core.profiles:
        by_row = {name: profile[name] for name in core.row_inputs if name in profile}
        if not by_row or not all(s.minimum and s.maximum for s in by_row.values()):
            continue
        shape = ", ".join(
            f"{name} {dims_text(shapes.maximum[1:])}" for name, shapes in sorted(by_row.items())
        )
        fewest = max(shapes.minimum[0] for shapes in by_row.values())
        most = min(shapes.maximum[0] for shapes in by_row.values())
        low, high = spans.get(shape, (fewest, most))
        spans[shape] = min(low, fewest), max(high, most)
    return spans


def profile_names(core: EngineCore) -> Iterator[Flaw]:
    """Check that the instances name exactly the engine's profiles."""
    there = {str(place) for place in range(len(core.profiles))}
    given = {name for group in core.config.instance_group for name in group.profile}
    named = {name for name in given if name.isdecimal()}
    # The check of instance groups requires one profile for ragged inputs.
    if not there or (core.model.ragged and len(named) > 1):
        return
    if named - there:
        yield error(
            f"must name only the engine's profiles ({names(there)})",
            f"profile {names(named - there)}",
            "Correct profile in instance_group, or build the engine again",
        )
    unused = set() if core.model.ragged else there - (named or {"0"})
    if unused:
        every = ", ".join(f'"{place}"' for place in range(len(there)))
        yield error(
            "must name every profile: the server only uses named profiles, and without names only "
            "the first; other shapes are rejected",
            f"not named: {names(unused)}",
            f"Write profile: [{every}] in instance_group",
        )


def profile_range(core: EngineCore) -> Iterator[Flaw]:
    """Check that all shapes sent to the core, at start and later, are in a profile."""
    for what, shapes in _batches(core) if core.profiles else ():
        if not core.fits(shapes):
            sent = ", ".join(f"{name} {dims_text(dims)}" for name, dims in sorted(shapes.items()))
            yield error(
                "must only receive shapes in a profile of its engine",
                f"{what}: {sent}; profiles: {_spans(core)}",
                "Build the engine again with the preprocess step that is there, or correct the "
                "shape",
            )


def _batches(core: EngineCore) -> Iterator[tuple[str, Shapes]]:
    """Yield a description and the shapes of each batch.

    `profile_batch` checks the number of rows.
    """
    limit = core.config.max_batch_size
    for rows in core.rows:
        for length in () if core.model.ragged else rows.padded:
            yield f"rows that {rows.source} pads to {length}", core.joined(1, core.row(length))
        longest, count, what = rows.longest or 0, 1, "a row"
        if core.model.ragged:
            count, what = limit, f"{limit} rows"
        if (core.model.ragged and longest) or longest > max(rows.padded, default=0):
            what = f"{what} of {longest} tokens, the most that {rows.source} sends"
            yield what, core.joined(count, core.row(longest))
    for index, sample in enumerate(core.config.model_warmup):
        dims = {name: tuple(data.dims) for name, data in sample.inputs.items()}
        if sample.batch_size:
            label = f"model_warmup {sample.name or index}"
            yield label, core.joined(sample.batch_size, dims)
    for index, spec in enumerate(core.config.optimization.cuda.graph_spec):
        if not any(spec_faults(core.model, spec)):
            yield f"graph_spec {index}", core.spec_shapes(spec.batch_size, spec.input)


def _spans(core: EngineCore) -> str:
    """Return the variable inputs of each profile, smallest to largest, as text."""

    def span(profile: Mapping[str, ShapeRange]) -> str:
        return ", ".join(
            f"{name} {dims_text(shapes.minimum)} to {dims_text(shapes.maximum)}"
            for name, shapes in sorted(profile.items())
            if name in core.model.varying
        )

    return "; ".join(f"{place}: {span(profile)}" for place, profile in enumerate(core.profiles))


def profile_switching(core: EngineCore) -> Iterator[Flaw]:
    """Check that there are not so many contexts that loading is slow and memory runs out."""
    strategy = core.config.parameters.get(CONTEXT_MEMORY)
    lean = strategy is not None and strategy.string_value == "ON_PROFILE_CHANGE"
    older = core.model.repository.triton < _ALLOCATION_SINCE
    newer = f", from Triton {_ALLOCATION_SINCE} on" if older else ""
    for index, group in enumerate(core.config.instance_group):
        profiles, count = max(len(group.profile), 1), core.model.instances_of(group)
        if profiles >= _MANY_PROFILES and profiles * count > _MAX_CONTEXTS and not lean:
            yield warning(
                f"should make at most {_MAX_CONTEXTS} execution contexts per GPU: each reserves "
                "memory for the largest profile and captures its own CUDA graphs at load",
                f"instance_group {group.name or index}: {profiles} profiles for each of {count} "
                "instances",
                "Plan fewer buckets (core.bucket_count) or instances, or set "
                f"core.engine.context_memory (the parameter {CONTEXT_MEMORY}) to "
                f"on_profile_change{newer}",
            )


def cuda_graphs(model: Model) -> Iterator[Flaw]:
    """Check that CUDA graphs are used: on TensorRT, for known shapes, without gaps or overlaps."""
    cuda = model.config.optimization.cuda
    if cuda.graphs and model.backend != "tensorrt":
        yield warning(
            "should capture CUDA graphs only on the tensorrt backend: others ignore the setting",
            f"optimization.cuda.graphs on backend {model.backend}",
            "Remove optimization.cuda",
        )
    elif cuda.graphs and model.ragged:
        yield warning(
            "should capture no CUDA graphs with ragged inputs: the length of a batch varies with "
            "its rows and rarely equals a captured shape",
            "graphs: true, allow_ragged_batch: true",
            "Remove optimization.cuda, or pad to planned lengths",
        )
    elif cuda.graphs and not cuda.graph_spec and model.varying:
        yield warning(
            "should specify the shapes of CUDA graphs: without it they are captured for the "
            "optimal shape of each profile, and all other batches run without a graph",
            "graphs: true, no graph_spec, inputs of variable shape",
            "Add a graph_spec with a graph_lower_bound for each length and batch size",
        )
    elif cuda.graphs:
        if cuda.graph_spec and not any(any(spec_faults(model, s)) for s in cuda.graph_spec):
            yield from _uncovered(
                next(c for c in engine_cores(model.repository) if c.model is model)
            )
    elif cuda.graph_spec and model.backend == "tensorrt":
        yield warning(
            "should turn CUDA graphs on for graph_spec to do anything",
            f"{len(cuda.graph_spec)} graph_spec, graphs is off",
            "Write graphs: true in optimization.cuda, or remove graph_spec",
        )


def _uncovered(core: EngineCore) -> Iterator[Flaw]:
    """Yield batches of the planned shapes without a graph, or with several."""
    without, several = [], []
    for label, dims in _planned(core):
        specs = [s for s in core.config.optimization.cuda.graph_spec if _is_for(s, dims)]
        # Without a lower bound a graph is only used for its own number of rows.
        spans = [(s.graph_lower_bound.batch_size or s.batch_size, s.batch_size) for s in specs]
        counts = {
            size: sum(low <= size <= high for low, high in spans)
            for size in range(1, core.config.max_batch_size + 1)
        }
        missing = [size for size, count in counts.items() if count == 0]
        without += [f"{_ranges(missing)} rows{label}"] if missing else []
        double = [size for size, count in counts.items() if count > 1]
        several += [f"{_ranges(double)} rows{label}"] if double else []
    if without and len(core.config.optimization.cuda.graph_spec) < MAX_GRAPHS:
        yield warning(
            "should have a CUDA graph for every batch that can form",
            f"none for {_some(without)}",
            "Add a graph_spec, or set batch_size in the graph_lower_bound of the next larger one "
            "to 1 more than that of the next smaller",
        )
    if several:
        yield warning(
            "should have one CUDA graph for a batch: each takes memory and load time",
            f"several for {_some(several)}",
            "Raise batch_size in graph_lower_bound above that of the next smaller one",
        )


def _planned(core: EngineCore) -> Iterator[tuple[str, Shapes]]:
    """Yield the dims of possible rows; if they are unknown, the dims of the graphs."""
    lengths = sorted({length for rows in core.rows for length in rows.padded})
    if lengths or not core.model.varying:
        for length in lengths or [0]:
            yield f" of {length}" if length else "", core.row(length)
        return
    seen: list[Shapes] = []
    for spec in core.config.optimization.cuda.graph_spec:
        dims = {name: tuple(shape.dim) for name, shape in spec.input.items()}
        if dims not in seen:
            seen.append(dims)
            yield " of " + ", ".join(dims_text(dims[name]) for name in sorted(dims)), dims


def _is_for(spec: ModelOptimizationPolicy.Cuda.GraphSpec, dims: Shapes) -> bool:
    """Return whether a graph is used for rows of these dims; unnamed inputs are ignored."""
    low = spec.graph_lower_bound.input
    return all(
        between(tuple(low[name].dim if name in low else one.dim), dims[name], tuple(one.dim))
        for name, one in spec.input.items()
        if name in dims
    )


def _ranges(sizes: list[int]) -> str:
    """Return sizes as text, such as ``3, 5 to 7``."""
    runs: list[list[int]] = []
    for size in sizes:
        if runs and size == runs[-1][-1] + 1:
            runs[-1].append(size)
        else:
            runs.append([size])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _some(items: list[str]) -> str:
    more = len(items) - _GIVEN_AT_MOST
    return "; ".join(items[:_GIVEN_AT_MOST]) + (f"; and {more} more" if more > 0 else "")
