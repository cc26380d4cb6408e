"""Checks of a config.pbtxt and its ONNX graph at load, and completion of the config.

The rules and the meaning of the messages are those of Triton's native backend (src/onnxruntime.cc
in triton-inference-server/onnxruntime_backend), so a model that loads here also loads there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from triptych.serving.backends.contract import (
    BackendConfig,
    BatchInputSpec,
    Contract,
    ContractError,
    InputSpec,
    OutputSpec,
    TensorEntry,
    batch_input_rank,
    dims_error,
    find_tensor,
    shape_text,
)

# ONNX Runtime's name of each of Triton's data types. Triton 24.10 lacks TYPE_BF16, too.
GRAPH_TYPES = {
    "TYPE_BOOL": "tensor(bool)",
    "TYPE_UINT8": "tensor(uint8)",
    "TYPE_UINT16": "tensor(uint16)",
    "TYPE_UINT32": "tensor(uint32)",
    "TYPE_UINT64": "tensor(uint64)",
    "TYPE_INT8": "tensor(int8)",
    "TYPE_INT16": "tensor(int16)",
    "TYPE_INT32": "tensor(int32)",
    "TYPE_INT64": "tensor(int64)",
    "TYPE_FP16": "tensor(float16)",
    "TYPE_FP32": "tensor(float)",
    "TYPE_FP64": "tensor(double)",
    "TYPE_STRING": "tensor(string)",
}
TRITON_TYPES = {graph_type: name for name, graph_type in GRAPH_TYPES.items()}

# `default-max-batch-size` of Triton's command line, which no backend written in Python can read.
DEFAULT_MAX_BATCH_SIZE = 4


class OrtTensor(NamedTuple):
    """Input or output of the ONNX graph.

    `type` is ONNX Runtime's name, such as ``tensor(float)``; `dims` have the batch dimension, and
    -1 for dynamic sizes.
    """

    name: str
    type: str
    dims: tuple[int, ...]


def check_contract(
    contract: Contract,
    inputs: Sequence[OrtTensor],
    outputs: Sequence[OrtTensor],
    initializers: Sequence[OrtTensor] = (),
) -> None:
    """Reject a config that the native backend rejects at load or could never run.

    The graph's overridable `initializers` serve optional inputs.

    Raises:
        ContractError: The config and the graph do not match.
    """
    for tensor in (*inputs, *outputs, *initializers):
        if not tensor.type.startswith("tensor("):
            raise ContractError(
                f"Unsupported ONNX Type '{tensor.type}' for I/O '{tensor.name}', expected a tensor"
            )
    expected = sum(not spec.optional for spec in contract.inputs) + len(contract.batch_inputs)
    if len(inputs) != expected:
        raise ContractError(
            f"unable to load model '{contract.model}', configuration expects {expected} inputs, "
            f"model provides {len(inputs)}"
        )
    known_inputs = {tensor.name: tensor for tensor in (*inputs, *initializers)}
    known_outputs = {tensor.name: tensor for tensor in outputs}
    for spec in contract.inputs:
        _check_input(contract, spec, known_inputs)
    for batch_input in contract.batch_inputs:
        _check_batch_input(contract, batch_input, known_inputs)
    for output in contract.outputs:
        _check_output(contract, output, known_outputs)


def complete_config(
    config: BackendConfig, inputs: Sequence[OrtTensor], outputs: Sequence[OrtTensor]
) -> None:
    """Add missing inputs, outputs and batching to the config as the native backend does.

    Raises:
        ContractError: `max_batch_size` is set for a graph that cannot batch.
    """
    batches = all(tensor.dims[:1] == (-1,) for tensor in (*inputs, *outputs))
    if not batches and config["max_batch_size"] != 0:
        raise ContractError(
            f"autofill failed for model '{config['name']}': model does not support batching while "
            "non-zero max_batch_size is specified"
        )
    if batches and config["max_batch_size"] == 0:
        config["max_batch_size"] = DEFAULT_MAX_BATCH_SIZE
    batched = config["max_batch_size"] > 0
    if config["max_batch_size"] > 1 and "sequence_batching" not in config:
        config.setdefault("dynamic_batching", {})
    if needs_inputs(config):
        config["input"] = [_completed_entry(tensor, batched=batched) for tensor in sorted(inputs)]
    if not config.get("output"):
        config["output"] = [_completed_entry(tensor, batched=batched) for tensor in sorted(outputs)]


def needs_inputs(config: BackendConfig) -> bool:
    """Return whether the config names no input, so that those of the graph must be added."""
    return not config.get("input") and not config.get("batch_input")


def _completed_entry(tensor: OrtTensor, *, batched: bool) -> TensorEntry:
    dims = list(tensor.dims[1:] if batched else tensor.dims)
    entry: TensorEntry = {
        "name": tensor.name,
        "data_type": TRITON_TYPES.get(tensor.type, "TYPE_INVALID"),
        "dims": dims or [1],
    }
    if batched and not dims:
        entry["reshape"] = {"shape": []}
    return entry


def _check_input(contract: Contract, spec: InputSpec, known: Mapping[str, OrtTensor]) -> None:
    load = f"unable to load model '{contract.model}'"
    if spec.optional and contract.max_batch_size > 0:
        raise ContractError(
            f"{load}, optional input '{spec.name}' is not supported for models that support "
            "batching"
        )
    tensor = find_tensor("inference input", spec.name, known)
    _check_type(contract, "input", spec.data_type, tensor)
    if not spec.ragged:
        _check_dims(contract, spec.dims, tensor, exact=False)
        return
    wanted = f"{load}, configuration expects model provides input with shape [-1] for ragged input"
    if spec.optional:
        raise ContractError(f"{wanted} '{spec.name}', which is not supported for optional input")
    if tensor.dims != (-1,):
        raise ContractError(f"{wanted} '{spec.name}', model provides {shape_text(tensor.dims)}")


def _check_batch_input(
    contract: Contract, spec: BatchInputSpec, known: Mapping[str, OrtTensor]
) -> None:
    # The native backend only counts these at load and would fail every request afterwards.
    rank = batch_input_rank(spec)
    for target in spec.targets:
        tensor = find_tensor("batch input", target, known)
        _check_type(contract, "input", spec.data_type, tensor)
        if len(tensor.dims) != rank:
            raise ContractError(
                f"unable to load model '{contract.model}', batch input '{target}' of kind "
                f"{spec.kind} has {rank} dimension(s), model provides {shape_text(tensor.dims)}"
            )


def _check_output(contract: Contract, spec: OutputSpec, known: Mapping[str, OrtTensor]) -> None:
    tensor = find_tensor("inference output", spec.name, known)
    _check_type(contract, "output", spec.data_type, tensor)
    if spec.scatter_source is None:
        _check_dims(contract, spec.dims, tensor, exact=True)
    elif spec.data_type == "TYPE_STRING":
        raise ContractError(
            f"unable to load model '{contract.model}', batch output '{spec.name}' must have "
            "elements of a fixed size, not TYPE_STRING"
        )


def _check_type(contract: Contract, role: str, data_type: str, tensor: OrtTensor) -> None:
    name = tensor.name
    if data_type not in GRAPH_TYPES:
        raise ContractError(
            f"unsupported datatype {data_type} for {role} '{name}' for model '{contract.model}'"
        )
    if GRAPH_TYPES[data_type] != tensor.type:
        provided = TRITON_TYPES.get(tensor.type, tensor.type)
        raise ContractError(
            f"unable to load model '{contract.model}', configuration expects datatype {data_type} "
            f"for {role} '{name}', model provides {provided}"
        )


def _check_dims(
    contract: Contract, dims: tuple[int, ...], tensor: OrtTensor, *, exact: bool
) -> None:
    batched = contract.max_batch_size > 0
    name, provided = tensor.name, tensor.dims
    if not provided and not batched:
        if any(dim != 1 for dim in dims):
            raise ContractError(
                f"unable to load model '{contract.model}', scalar tensor '{name}', should only "
                "provide 1 in the model configuration when the model doesn't support batching. "
                f"Model configuration provided: {shape_text(dims)}."
            )
        return
    if batched and provided[:1] != (-1,):
        raise ContractError(
            f"model '{contract.model}', tensor '{name}': for the model to support batching the "
            "shape should have at least 1 dimension and the first dimension must be -1; but shape "
            f"expected by the model is {shape_text(provided)}"
        )
    wanted = (-1, *dims) if batched else dims
    fits = len(provided) == len(wanted) and all(
        has == wants or (has == -1 and not exact)
        for has, wants in zip(provided, wanted, strict=True)
    )
    if not fits:
        raise dims_error(contract, name, provided, wanted)
