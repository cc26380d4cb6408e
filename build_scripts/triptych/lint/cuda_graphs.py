"""Lint: CUDA graphs that are captured are used, and every planned batch has one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from triptych.lint.engine_facts import EngineCore, Shapes, between, engine_cores
from triptych.lint.flaw import Flaw, dims_text, warning
from triptych.lint.snapshot import Repository
from triptych.lint.warmup import spec_faults

_GIVEN_AT_MOST = 4


def cuda_graphs(repository: Repository) -> Iterator[Flaw]:
    """CUDA graphs engage: on TensorRT, for shapes known beforehand, without gaps or doubles."""
    for model in repository.executed():
        if model.config.optimization.cuda.graphs and model.backend != "tensorrt":
            yield warning(
                model.config_file,
                "should capture CUDA graphs only on the tensorrt backend: others take no notice",
                given=f"optimization.cuda.graphs on backend {model.backend}",
                remedy="Remove optimization.cuda",
            )
    for core in engine_cores(repository):
        cuda = core.model.config.optimization.cuda
        if cuda.graphs:
            yield from _idle_graphs(core)
        elif cuda.graph_spec:
            yield warning(
                core.model.config_file,
                "should turn CUDA graphs on for graph_spec to do anything",
                given=f"{len(cuda.graph_spec)} graph_spec, graphs is off",
                remedy="Write graphs: true in optimization.cuda, or remove graph_spec",
            )


def _idle_graphs(core: EngineCore) -> Iterator[Flaw]:
    specs = core.model.config.optimization.cuda.graph_spec
    if core.ragged:
        yield warning(
            core.model.config_file,
            "should capture no CUDA graphs with ragged inputs: a batch is as long as its rows "
            "happen to be, and hardly ever of a captured shape",
            given="graphs: true, allow_ragged_batch: true",
            remedy="Remove optimization.cuda, or pad to planned lengths",
        )
    elif not specs and core.varies:
        yield warning(
            core.model.config_file,
            "should say for which shapes CUDA graphs are captured: without it they are for the "
            "optimal shape of each profile, and all other batches run without",
            given="graphs: true, no graph_spec, inputs of variable shape",
            remedy="Add a graph_spec with a graph_lower_bound for each length and batch size",
        )
    elif not any(fault for spec in specs for fault in spec_faults(core.model, spec)):
        yield from _uncovered(core) if specs else ()


def _uncovered(core: EngineCore) -> Iterator[Flaw]:
    """Batches of the planned shapes without a graph, or with several."""
    specs = core.model.config.optimization.cuda.graph_spec
    without, several = [], []
    for label, dims in _planned(core):
        fewest = [_fewest_rows(spec) for spec in specs if _is_for(spec, dims)]
        most = [spec.batch_size for spec in specs if _is_for(spec, dims)]
        graphs = {
            size: sum(low <= size <= high for low, high in zip(fewest, most, strict=True))
            for size in range(1, core.model.config.max_batch_size + 1)
        }
        missing = [size for size, count in graphs.items() if count == 0]
        without += [f"{_ranges(missing)} rows{label}"] if missing else []
        double = [size for size, count in graphs.items() if count > 1]
        several += [f"{_ranges(double)} rows{label}"] if double else []
    if without:
        yield warning(
            core.model.config_file,
            "should have a CUDA graph for every batch that can form",
            given=f"none for {_some(without)}",
            remedy="Add a graph_spec, or set batch_size in the graph_lower_bound of the next "
            "larger one to 1 more than that of the next smaller",
        )
    if several:
        yield warning(
            core.model.config_file,
            "should have one CUDA graph for a batch: each takes memory, and time to load",
            given=f"several for {_some(several)}",
            remedy="Raise batch_size in graph_lower_bound above that of the next smaller one",
        )


def _planned(core: EngineCore) -> Iterator[tuple[str, Shapes]]:
    """Dims of the rows that can come; where nothing says so, those that graphs are for."""
    inputs = core.model.config.input
    lengths = sorted({length for rows in core.rows for length in rows.padded})
    if lengths or not core.varies:
        for length in lengths or [0]:
            dims = {t.name: tuple(length if d == -1 else d for d in t.dims) for t in inputs}
            yield f" of {length}" if length else "", dims
        return
    seen = []
    for spec in core.model.config.optimization.cuda.graph_spec:
        dims = {name: tuple(shape.dim) for name, shape in spec.input.items()}
        if dims not in seen:
            seen.append(dims)
            yield " of " + ", ".join(dims_text(dims[name]) for name in sorted(dims)), dims


def _fewest_rows(spec: Any) -> int:
    """The smallest batch that a graph is used for: its own where it names none."""
    bound = spec.graph_lower_bound.batch_size if spec.HasField("graph_lower_bound") else 0
    return int(bound or spec.batch_size)


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
