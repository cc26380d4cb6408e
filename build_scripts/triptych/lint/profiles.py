"""Lint: the optimization profiles of an engine span all that its core is sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from triptych.lint.config import instances_of
from triptych.lint.engine_facts import EngineCore, Shapes, engine_cores
from triptych.lint.flaw import Flaw, dims_text, error, names, warning
from triptych.lint.snapshot import Repository
from triptych.lint.warmup import sample_faults, spec_faults
from triptych.plan.engine_spec import ShapeRange
from triptych.releases import CONTEXT_MEMORY, first_release

# Each context reserves scratch memory for the largest profile and captures CUDA graphs of its own
# while the model loads. Six buckets, the default, for two instances stay below.
_MOST_CONTEXTS = 16
_MANY_PROFILES = 2
_ALLOCATION_SINCE = first_release(CONTEXT_MEMORY)


def profile_batch(repository: Repository) -> Iterator[Flaw]:
    """Every shape of a row has profiles for 1 to max_batch_size of them."""
    for core in engine_cores(repository):
        limit = core.model.config.max_batch_size
        for shape, (fewest, most) in _row_spans(core).items() if limit > 0 else ():
            given = f"{fewest} to {most} rows of {shape}, max_batch_size is {limit}"
            if most < limit:
                yield error(
                    core.model.config_file,
                    "must not ask for larger batches than the engine's profiles take: the server "
                    "says that the engine only supports a smaller max-batch",
                    given=given,
                    remedy=f"Set max_batch_size: {most}, or build the engine for {limit} rows",
                )
            elif fewest > 1:
                yield error(
                    core.model.config_file,
                    "must have profiles that start at one row: a lone request would be refused",
                    given=given,
                    remedy="Build the engine with a smallest batch of 1",
                )
            elif most > limit:
                yield warning(
                    core.model.config_file,
                    "should use the batches that the engine was built for: it reserves memory for "
                    "them",
                    given=given,
                    remedy=f"Set max_batch_size: {most}, or build the engine for {limit} rows",
                )


def _row_spans(core: EngineCore) -> dict[str, tuple[int, int]]:
    """Shape of a row, to the fewest and the most rows that the profiles for it take."""
    spans: dict[str, tuple[int, int]] = {}
    for profile in core.profiles:
        by_row = {name: profile[name] for name in core.row_inputs if name in profile}
        if any(not (shapes.minimum and shapes.maximum) for shapes in by_row.values()):
            continue
        shape = ", ".join(
            f"{name} {dims_text(shapes.maximum[1:])}" for name, shapes in sorted(by_row.items())
        )
        fewest = max((shapes.minimum[0] for shapes in by_row.values()), default=1)
        most = min((shapes.maximum[0] for shapes in by_row.values()), default=fewest)
        if by_row:
            low, high = spans.get(shape, (fewest, most))
            spans[shape] = min(low, fewest), max(high, most)
    return spans


def profile_names(repository: Repository) -> Iterator[Flaw]:
    """The instances name exactly the profiles that the engine has."""
    for core in engine_cores(repository):
        there = {str(place) for place in range(len(core.profiles))}
        named = {name for name in core.profile_names if name.isdecimal()}
        # Ragged inputs go by one profile, which the check of instance groups holds.
        if not there or (core.ragged and len(named) > 1):
            continue
        if named - there:
            yield error(
                core.model.config_file,
                f"must name only the engine's profiles ({names(there)})",
                given=f"profile {names(named - there)}",
                remedy="Correct profile in instance_group, or build the engine again",
            )
        unused = set() if core.ragged else there - (named or {"0"})
        if unused:
            yield error(
                core.model.config_file,
                "must name every profile: the server runs those alone that are named, and without "
                "names only the first; other shapes are refused",
                given=f"not named: {names(unused)}",
                remedy=f"Write profile: [{_quoted(len(there))}] in instance_group",
            )


def _quoted(count: int) -> str:
    return ", ".join(f'"{place}"' for place in range(count))


def profile_range(repository: Repository) -> Iterator[Flaw]:
    """Whatever is sent to the core, at start and later, lies in a profile."""
    for core in engine_cores(repository):
        if core.profiles:
            for what, shapes in _batches(core):
                if not core.fits(shapes):
                    yield error(
                        core.model.config_file,
                        "must be sent only shapes that lie in a profile of its engine",
                        given=f"{what}: {_text(shapes)}; profiles: {_spans(core)}",
                        remedy="Build the engine again with the preprocess step that is there, or "
                        "correct the shape",
                    )


def _batches(core: EngineCore) -> Iterator[tuple[str, Shapes]]:
    """What is sent, and its shapes; `profile_batch` looks at the number of rows."""
    limit = core.model.config.max_batch_size
    for rows in core.rows:
        for length in () if core.ragged else rows.padded:
            yield f"rows that {rows.source} pads to {length}", core.batch(1, length)
        if rows.longest is not None and core.ragged:
            what = f"{limit} rows of {rows.longest} tokens, the most that {rows.source} sends"
            yield what, core.batch(limit, rows.longest)
        elif rows.longest is not None and rows.longest > max(rows.padded, default=0):
            what = f"a row of {rows.longest} tokens, the most that {rows.source} sends"
            yield what, core.batch(1, rows.longest)
    for index, sample in enumerate(core.model.config.model_warmup):
        dims = {name: tuple(data.dims) for name, data in sample.inputs.items()}
        if sample.batch_size and not any(sample_faults(core.model, sample)):
            label = f"model_warmup {sample.name or index}"
            yield label, core.joined(sample.batch_size, dims)
    for index, spec in enumerate(core.model.config.optimization.cuda.graph_spec):
        if not any(spec_faults(core.model, spec)):
            yield f"graph_spec {index}", core.spec_shapes(spec.batch_size, spec.input)


def _text(shapes: Shapes) -> str:
    return ", ".join(f"{name} {dims_text(dims)}" for name, dims in sorted(shapes.items()))


def _spans(core: EngineCore) -> str:
    """The inputs of variable shape in each profile, smallest to largest."""
    varying = {tensor.name for tensor in core.model.config.input if -1 in tensor.dims}

    def span(profile: Mapping[str, ShapeRange]) -> str:
        return ", ".join(
            f"{name} {dims_text(shapes.minimum)} to {dims_text(shapes.maximum)}"
            for name, shapes in sorted(profile.items())
            if name in varying
        )

    return "; ".join(f"{place}: {span(profile)}" for place, profile in enumerate(core.profiles))


def profile_switching(repository: Repository) -> Iterator[Flaw]:
    """Not so many contexts that loading takes long and memory runs out."""
    for core in engine_cores(repository):
        config = core.model.config
        strategy = config.parameters.get(CONTEXT_MEMORY)
        lean = strategy is not None and strategy.string_value == "ON_PROFILE_CHANGE"
        for index, group in enumerate(config.instance_group):
            profiles, count = max(len(group.profile), 1), instances_of(core.model, group)
            if profiles < _MANY_PROFILES or profiles * count <= _MOST_CONTEXTS or lean:
                continue
            newer = ""
            if repository.triton < _ALLOCATION_SINCE:
                newer = f", from Triton {_ALLOCATION_SINCE} on"
            yield warning(
                core.model.config_file,
                f"should make at most {_MOST_CONTEXTS} execution contexts a GPU: each one reserves "
                "memory for the largest profile and captures CUDA graphs of its own at load",
                given=f"instance_group {group.name or index}: {profiles} profiles for each of "
                f"{count} instances",
                remedy="Plan fewer buckets (core.bucket_count) or instances, or set "
                f"core.engine.context_memory (the parameter {CONTEXT_MEMORY}) to "
                f"on_profile_change{newer}",
            )
