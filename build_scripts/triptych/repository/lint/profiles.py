"""Lint: profiles of an engine span all that its core is sent; CUDA graphs are used, and suffice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from triptych.base.releases import CONTEXT_MEMORY, first_release
from triptych.repository.lint.config import sample_faults, spec_faults
from triptych.repository.lint.engine import EngineCore, Shapes, between, engine_cores
from triptych.repository.lint.snapshot import Flaw, Model, dims_text, error, names, warning
from triptych.spec.engine_plan import ShapeRange

# Each context reserves scratch memory for the largest profile and captures CUDA graphs of its own
# while the model loads. Six buckets, the default, for two instances stay below.
_MAX_CONTEXTS = 16
_MANY_PROFILES = 2
_ALLOCATION_SINCE = first_release(CONTEXT_MEMORY)
_GIVEN_AT_MOST = 4


def profile_batch(core: EngineCore) -> Iterator[Flaw]:
    """Every shape of a row has profiles for 1 to max_batch_size of them."""
    limit = core.config.max_batch_size
    for shape, (fewest, most) in _row_spans(core).items() if limit > 0 else ():
        given = f"{fewest} to {most} rows of {shape}, max_batch_size is {limit}"
        remedy = f"Set max_batch_size: {most}, or build the engine for {limit} rows"
        if most < limit:
            yield error(
                "must not ask for larger batches than the engine's profiles take: the server says "
                "that the engine only supports a smaller max-batch",
                given,
                remedy,
            )
        elif fewest > 1:
            yield error(
                "must have profiles that start at one row: a lone request would be refused",
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
    """Shape of a row, to the fewest and the most rows that the profiles for it take."""
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
    """The instances name exactly the profiles that the engine has."""
    there = {str(place) for place in range(len(core.profiles))}
    given = {name for group in core.config.instance_group for name in group.profile}
    named = {name for name in given if name.isdecimal()}
    # Ragged inputs go by one profile, which the check of instance groups holds.
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
            "must name every profile: the server runs those alone that are named, and without "
            "names only the first; other shapes are refused",
            f"not named: {names(unused)}",
            f"Write profile: [{every}] in instance_group",
        )


def profile_range(core: EngineCore) -> Iterator[Flaw]:
    """Whatever is sent to the core, at start and later, lies in a profile."""
    for what, shapes in _batches(core) if core.profiles else ():
        if not core.fits(shapes):
            sent = ", ".join(f"{name} {dims_text(dims)}" for name, dims in sorted(shapes.items()))
            yield error(
                "must be sent only shapes that lie in a profile of its engine",
                f"{what}: {sent}; profiles: {_spans(core)}",
                "Build the engine again with the preprocess step that is there, or correct the "
                "shape",
            )


def _batches(core: EngineCore) -> Iterator[tuple[str, Shapes]]:
    """What is sent, and its shapes; `profile_batch` looks at the number of rows."""
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
        if sample.batch_size and not any(sample_faults(core.model, sample)):
            label = f"model_warmup {sample.name or index}"
            yield label, core.joined(sample.batch_size, dims)
    for index, spec in enumerate(core.config.optimization.cuda.graph_spec):
        if not any(spec_faults(core.model, spec)):
            yield f"graph_spec {index}", core.spec_shapes(spec.batch_size, spec.input)


def _spans(core: EngineCore) -> str:
    """The inputs of variable shape in each profile, smallest to largest."""

    def span(profile: Mapping[str, ShapeRange]) -> str:
        return ", ".join(
            f"{name} {dims_text(shapes.minimum)} to {dims_text(shapes.maximum)}"
            for name, shapes in sorted(profile.items())
            if name in core.model.varying
        )

    return "; ".join(f"{place}: {span(profile)}" for place, profile in enumerate(core.profiles))


def profile_switching(core: EngineCore) -> Iterator[Flaw]:
    """Not so many contexts that loading takes long and memory runs out."""
    strategy = core.config.parameters.get(CONTEXT_MEMORY)
    lean = strategy is not None and strategy.string_value == "ON_PROFILE_CHANGE"
    older = core.model.repository.triton < _ALLOCATION_SINCE
    newer = f", from Triton {_ALLOCATION_SINCE} on" if older else ""
    for index, group in enumerate(core.config.instance_group):
        profiles, count = max(len(group.profile), 1), core.model.instances_of(group)
        if profiles >= _MANY_PROFILES and profiles * count > _MAX_CONTEXTS and not lean:
            yield warning(
                f"should make at most {_MAX_CONTEXTS} execution contexts a GPU: each one reserves "
                "memory for the largest profile and captures CUDA graphs of its own at load",
                f"instance_group {group.name or index}: {profiles} profiles for each of {count} "
                "instances",
                "Plan fewer buckets (core.bucket_count) or instances, or set "
                f"core.engine.context_memory (the parameter {CONTEXT_MEMORY}) to "
                f"on_profile_change{newer}",
            )


def cuda_graphs(model: Model) -> Iterator[Flaw]:
    """CUDA graphs engage: on TensorRT, for shapes known beforehand, without gaps or doubles."""
    cuda = model.config.optimization.cuda
    if cuda.graphs and model.backend != "tensorrt":
        yield warning(
            "should capture CUDA graphs only on the tensorrt backend: others take no notice",
            f"optimization.cuda.graphs on backend {model.backend}",
            "Remove optimization.cuda",
        )
    elif cuda.graphs and model.ragged:
        yield warning(
            "should capture no CUDA graphs with ragged inputs: a batch is as long as its rows "
            "happen to be, and hardly ever of a captured shape",
            "graphs: true, allow_ragged_batch: true",
            "Remove optimization.cuda, or pad to planned lengths",
        )
    elif cuda.graphs and not cuda.graph_spec and model.varying:
        yield warning(
            "should say for which shapes CUDA graphs are captured: without it they are for the "
            "optimal shape of each profile, and all other batches run without",
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
    """Batches of the planned shapes without a graph, or with several."""
    without, several = [], []
    for label, dims in _planned(core):
        specs = [s for s in core.config.optimization.cuda.graph_spec if _is_for(s, dims)]
        # A graph is used for its own number of rows alone where it names no lower bound.
        spans = [(s.graph_lower_bound.batch_size or s.batch_size, s.batch_size) for s in specs]
        counts = {
            size: sum(low <= size <= high for low, high in spans)
            for size in range(1, core.config.max_batch_size + 1)
        }
        missing = [size for size, count in counts.items() if count == 0]
        without += [f"{_ranges(missing)} rows{label}"] if missing else []
        double = [size for size, count in counts.items() if count > 1]
        several += [f"{_ranges(double)} rows{label}"] if double else []
    if without:
        yield warning(
            "should have a CUDA graph for every batch that can form",
            f"none for {_some(without)}",
            "Add a graph_spec, or set batch_size in the graph_lower_bound of the next larger one "
            "to 1 more than that of the next smaller",
        )
    if several:
        yield warning(
            "should have one CUDA graph for a batch: each takes memory, and time to load",
            f"several for {_some(several)}",
            "Raise batch_size in graph_lower_bound above that of the next smaller one",
        )


def _planned(core: EngineCore) -> Iterator[tuple[str, Shapes]]:
    """Dims of the rows that can come; where nothing says so, those that graphs are for."""
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


def _is_for(spec: Any, dims: Shapes) -> bool:
    """Whether a graph is used for rows of these dims; inputs it does not name are left out."""
    low = spec.graph_lower_bound.input
    return all(
        between(tuple(low[name].dim if name in low else one.dim), dims[name], tuple(one.dim))
        for name, one in spec.input.items()
        if name in dims
    )


def _ranges(sizes: list[int]) -> str:
    """``3, 5 to 7``."""
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
