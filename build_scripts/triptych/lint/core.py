"""Lint: a compiled core and its config agree, ragged inputs and what the server adds included."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from triptych.lint.flaw import Flaw, dims_text, error, info, names, warning
from triptych.lint.graph import Graph, GraphTensor
from triptych.lint.snapshot import (
    Model,
    Repository,
    enum_name,
    exists,
    waits_for_engine,
)

# How many dims the tensor has that the server makes for each kind of batch_input.
_RANKS = {"BATCH_ITEM_SHAPE": 2}


def onnx_readable(repository: Repository) -> Iterator[Flaw]:
    """ONNX files can be read; without the onnx package their checks are left out."""
    skipped = [
        model.name
        for model in repository.executed()
        if model.backend == "onnxruntime" or waits_for_engine(model)
    ]
    if skipped and not repository.reads_graphs:
        yield info(
            "",
            "compares configs with ONNX files only where the package onnx is installed",
            given=f"not compared: {names(skipped)}",
            remedy="pip install onnx",
        )
    for model in repository.executed():
        for graph in model.graphs:
            if graph.problem:
                yield error(
                    graph.file,
                    "must be an ONNX file",
                    given=graph.problem,
                    remedy="Build the pipeline again",
                )


def onnx_data(repository: Repository) -> Iterator[Flaw]:
    """The weights that an ONNX file keeps in files of their own are beside it."""
    for model in repository.executed():
        for graph in model.graphs:
            folder = (repository.root / graph.file).parent
            missing = [name for name in graph.data_files if not exists(folder / name)]
            if missing:
                yield error(
                    graph.file,
                    "must have its external weights beside it",
                    given=f"missing: {names(missing)}",
                    remedy="Copy them along with the ONNX file, or build the pipeline again",
                )


def _readable_graphs(repository: Repository) -> Iterator[tuple[Model, Graph]]:
    for model in repository.executed():
        for graph in model.graphs:
            if not graph.problem:
                yield model, graph


def onnx_tensors(repository: Repository) -> Iterator[Flaw]:
    """Names, dtypes and dims of the config are those of the ONNX file."""
    for model, graph in _readable_graphs(repository):
        for kind, there in (("input", graph.inputs), ("output", graph.outputs)):
            for tensor in getattr(model.config, kind):
                for rule, given in _tensor_faults(model, kind, tensor, there):
                    yield error(
                        model.config_file,
                        rule,
                        given=f"{kind} {tensor.name}: {given}",
                        remedy=f"Correct the {kind} here, or export {graph.file} again",
                    )
        yield from _unfed_inputs(model, graph)


def _tensor_faults(
    model: Model, kind: str, tensor: Any, there: dict[str, GraphTensor]
) -> Iterator[tuple[str, str]]:
    found = there.get(tensor.name)
    if found is None:
        yield f"must declare {kind}s that the ONNX file has", f"not in it; it has: {names(there)}"
        return
    declared = enum_name(tensor, "data_type")
    if declared != found.data_type:
        yield f"must have the ONNX file's dtype ({found.data_type})", declared
    if found.dims is None or tensor.name in _scattered(model):
        return
    if kind == "input" and tensor.allow_ragged_batch:
        if found.dims != (-1,):
            yield "must be [-1] in the ONNX file to be ragged", dims_text(found.dims)
        return
    dims = tuple(tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims)
    batched = model.config.max_batch_size > 0
    if batched and found.dims[:1] != (-1,):
        rule = "must have a variable first dimension in the ONNX file when max_batch_size is set"
        yield rule, dims_text(found.dims)
    elif not _same(dims, found.dims[1:] if batched else found.dims, exact=kind == "output"):
        yield (
            "must have the ONNX file's dims" + (", without the batch" if batched else ""),
            f"{dims_text(dims)}, the ONNX file has {dims_text(found.dims)}",
        )


def _scattered(model: Model) -> set[str]:
    return {name for output in model.config.batch_output for name in output.target_name}


def _same(declared: tuple[int, ...], found: tuple[int, ...], *, exact: bool) -> bool:
    # The backend takes a narrower input than the graph's, but compares outputs exactly.
    return len(declared) == len(found) and all(
        want == got or (got == -1 and not exact) for want, got in zip(declared, found, strict=True)
    )


def _unfed_inputs(model: Model, graph: Graph) -> Iterator[Flaw]:
    config = model.config
    fed = {tensor.name for tensor in config.input}
    fed.update(name for batch_input in config.batch_input for name in batch_input.target_name)
    fed.update(control.name for control in config.sequence_batching.control_input)
    fed.update(state.input_name for state in config.sequence_batching.state)
    unfed = set(graph.inputs) - fed
    if config.input and unfed:
        yield error(
            model.config_file,
            "must feed every input of the ONNX file",
            given=f"{graph.file} needs {names(unfed)} too; declared: {names(fed)}",
            remedy="Add it to input, or to batch_input when the server is to make it",
        )


def batch_input(repository: Repository) -> Iterator[Flaw]:
    """What the server adds to a batch is made from a ragged input and read by the graph."""
    for model in repository.executed():
        for index, made in enumerate(model.config.batch_input):
            for rule, given in _made_faults(model, made):
                yield error(
                    model.config_file,
                    rule,
                    given=f"batch_input {index}: {given}",
                    remedy="Correct the batch_input, or the input it is made from",
                )
        for index, split in enumerate(model.config.batch_output):
            for rule, given in _split_faults(model, split):
                yield error(
                    model.config_file,
                    rule,
                    given=f"batch_output {index}: {given}",
                    remedy="Correct the batch_output, or the input it follows",
                )
        yield from _unmarked_rows(model)


def _source_faults(model: Model, sources: list[str], kind: str) -> Iterator[tuple[str, str]]:
    declared = {tensor.name: tensor for tensor in model.config.input}
    if len(sources) != 1:
        yield f"must have one source_input for {kind}", names(sources)
    for name in sources:
        if name not in declared:
            rule = "must have an input of the config as source_input"
            yield rule, f"{name} is none; inputs: {names(declared)}"
        elif not declared[name].allow_ragged_batch:
            rule = f"must have a ragged input as source_input of {kind}"
            yield rule, f"{name} is without allow_ragged_batch: true"


def _made_faults(model: Model, made: Any) -> Iterator[tuple[str, str]]:
    kind, declared = enum_name(made, "kind"), {tensor.name for tensor in model.config.input}
    yield from _source_faults(model, list(made.source_input), kind)
    data_type = enum_name(made, "data_type")
    if data_type not in ("TYPE_INT32", "TYPE_FP32"):
        yield "must be TYPE_INT32 or TYPE_FP32 to be made by the server", data_type
    if not made.target_name:
        yield "must have a target_name", "none"
    both = declared & set(made.target_name)
    if both:
        yield "must not make an input that a request brings along", names(both)
    for graph in model.graphs:
        for name in made.target_name if not graph.problem else ():
            yield from _target_faults(name, graph.inputs.get(name), graph, data_type, kind)


def _target_faults(
    name: str, found: GraphTensor | None, graph: Graph, data_type: str, kind: str
) -> Iterator[tuple[str, str]]:
    if found is None:
        rule = "must make an input that the ONNX file has"
        yield rule, f"{name} is none; inputs: {names(graph.inputs)}"
        return
    if found.data_type != data_type:
        yield f"must have the ONNX file's dtype ({found.data_type})", f"{name} {data_type}"
    rank = _RANKS.get(kind, 1)
    if found.dims is not None and len(found.dims) != rank:
        rule = f"must have {rank} dims in the ONNX file for {kind}"
        yield rule, f"{name} {dims_text(found.dims)}"


def _split_faults(model: Model, split: Any) -> Iterator[tuple[str, str]]:
    outputs = {tensor.name for tensor in model.config.output}
    yield from _source_faults(model, list(split.source_input), enum_name(split, "kind"))
    unknown = set(split.target_name) - outputs
    if unknown or not split.target_name:
        rule = "must have an output of the config as target_name"
        yield rule, f"{names(unknown)}; outputs: {names(outputs)}"


def _unmarked_rows(model: Model) -> Iterator[Flaw]:
    """Joined rows need marks where one ends; the Python backend never joins them."""
    ragged = {tensor.name for tensor in model.config.input if tensor.allow_ragged_batch}
    marked = {name for made in model.config.batch_input for name in made.source_input}
    if ragged - marked and model.backend in ("onnxruntime", "tensorrt"):
        yield warning(
            model.config_file,
            "should tell the graph where each row of a ragged input ends",
            given=f"no batch_input made from {names(ragged - marked)}",
            remedy="Add a batch_input of kind BATCH_ITEM_SHAPE_FLATTEN with the ragged input as "
            "source_input",
        )
