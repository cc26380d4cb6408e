"""Lint: warm-ups and CUDA graphs ask for requests that the model takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from triptych.repository.lint.flaw import Flaw, dims_text, error, names, warning
from triptych.repository.lint.snapshot import Model, enum_name, fits, is_file

_ELEMENT_BYTES = {
    **dict.fromkeys(("TYPE_BOOL", "TYPE_UINT8", "TYPE_INT8"), 1),
    **dict.fromkeys(("TYPE_UINT16", "TYPE_INT16", "TYPE_FP16", "TYPE_BF16"), 2),
    **dict.fromkeys(("TYPE_UINT32", "TYPE_INT32", "TYPE_FP32"), 4),
    **dict.fromkeys(("TYPE_UINT64", "TYPE_INT64", "TYPE_FP64"), 8),
}


def warmup(model: Model) -> Iterator[Flaw]:
    """Every warm-up covers the model's inputs with data of the right dtype, dims and size."""
    for index, sample in enumerate(model.config.model_warmup):
        label = f"model_warmup {sample.name or index}"
        for rule, given in sample_faults(model, sample):
            yield error(
                rule, f"{label}: {given}", "Correct the warm-up, or the model does not load"
            )
        yield from _doubtful(model, sample, label)


def sample_faults(model: Model, sample: Any) -> Iterator[tuple[str, str]]:
    """What keeps `model` from taking a warm-up: a rule, and what was given."""
    limit = max(model.config.max_batch_size, 1)
    if sample.batch_size > limit:
        yield f"must warm up at most max_batch_size rows ({limit})", f"{sample.batch_size} rows"
    missing = {n for n, tensor in model.inputs.items() if not tensor.optional} - set(sample.inputs)
    if missing:
        yield "must give every required input data", f"no data for {names(missing)}"
    for name in sorted(set(sample.inputs) & set(model.inputs)):
        tensor, data = model.inputs[name], sample.inputs[name]
        place = f"input {name}"
        wanted, got = enum_name(tensor, "data_type"), enum_name(data, "data_type")
        if got != wanted:
            yield f"must have the input's data_type ({wanted})", f"{place} {got}"
        dims = f"dims that fit the input's, without the batch: {dims_text(tensor.dims)}"
        if any(dim < 1 for dim in data.dims):
            yield "must have concrete dims", f"{place} {dims_text(data.dims)}"
        elif not fits(data.dims, tensor.dims):
            yield f"must have {dims}", f"{place} {dims_text(data.dims)}"
        source = data.WhichOneof("input_data_type")
        if source is None:
            yield "must have one of zero_data, random_data and input_data_file", f"{place} has none"
        elif source == "input_data_file":
            yield from _file_faults(model, data, place)


def _file_faults(model: Model, data: Any, place: str) -> Iterator[tuple[str, str]]:
    path = model.folder / "warmup" / data.input_data_file
    relative = f"{model.name}/warmup/{data.input_data_file}"
    if not is_file(path):
        yield "must have its input_data_file in the model's folder warmup", f"no {relative}"
        return
    needed = prod(data.dims) * _ELEMENT_BYTES.get(enum_name(data, "data_type"), 0)
    if path.stat().st_size < needed:
        yield (
            "must have as many bytes in its input_data_file as dims ask for",
            f"{place}: {relative} has {path.stat().st_size} bytes, {needed} needed",
        )


def _doubtful(model: Model, sample: Any, label: str) -> Iterator[Flaw]:
    if sample.batch_size == 0:
        yield warning(
            "should give every warm-up a batch_size, 0 is skipped",
            f"{label}: no batch_size",
            "Write batch_size: 1 or more",
        )
    controls = {control.name for control in model.config.sequence_batching.control_input}
    unknown = set(sample.inputs) - set(model.inputs) - controls
    if model.inputs and unknown:
        yield warning(
            "should warm up only inputs that exist",
            f"{label}: unknown input {names(unknown)}; inputs: {names(model.inputs)}",
            "Correct the name, or remove it",
        )
    # Random bytes make ids beyond the vocabulary, and lookups out of range.
    random_ids = [
        name
        for name, data in sample.inputs.items()
        if data.random_data and "INT" in enum_name(data, "data_type")
    ]
    if random_ids and model.backend != "python":
        yield warning(
            "should not warm up integer inputs with random_data: ids are out of range",
            f"{label}: {names(random_ids)}",
            "Use zero_data: true, or an input_data_file with real ids",
        )


def graph_spec(model: Model) -> Iterator[Flaw]:
    """CUDA graphs are captured for batch sizes and shapes that the model takes."""
    for index, spec in enumerate(model.config.optimization.cuda.graph_spec):
        for rule, given in spec_faults(model, spec):
            yield error(
                rule, f"graph_spec {index}: {given}", "Correct the graph_spec, or remove it"
            )


def spec_faults(model: Model, spec: Any) -> Iterator[tuple[str, str]]:
    """What keeps a `graph_spec` from being captured: a rule, and what was given."""
    limit = model.config.max_batch_size
    if not min(limit, 1) <= spec.batch_size <= limit:
        span = f"from 1 to {limit}" if limit else "0"
        yield f"must capture a CUDA graph for batch_size {span}", f"batch_size {spec.batch_size}"
    yield from _shape_faults(model, spec.input)
    if spec.HasField("graph_lower_bound"):
        yield from _shape_faults(model, spec.graph_lower_bound.input)


def _shape_faults(model: Model, shapes: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    known = {*model.inputs, *model.added}
    unknown = set(shapes) - known
    if model.inputs and unknown:
        given = f"unknown input {names(unknown)}; inputs: {names(known)}"
        yield "must name inputs that exist in a graph_spec", given
    for name, shape in sorted(shapes.items()):
        given = f"input {name} {dims_text(shape.dim)}"
        tensor = model.inputs.get(name)
        if any(dim < 1 for dim in shape.dim):
            yield "must have concrete dims in a graph_spec", given
        # Ragged and batch inputs are given as they are after joining: nothing to compare with.
        elif tensor and not tensor.allow_ragged_batch and not fits(shape.dim, tensor.dims):
            rule = f"must fit the input's dims, without the batch: {dims_text(tensor.dims)}"
            yield rule, given
