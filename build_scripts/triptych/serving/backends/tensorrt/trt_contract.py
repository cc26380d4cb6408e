"""Triton's checks of a config.pbtxt and its TensorRT engine at load.

The rules and the meaning of the messages are those of Triton's native backend (src/model_state.cc
and src/instance_state.cc in triton-inference-server/tensorrt_backend).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from triptych.core.engine.runner import EngineTensor
from triptych.serving.backends.contract import (
    BatchInputSpec,
    Contract,
    ContractError,
    InputSpec,
    OutputSpec,
    batch_input_rank,
    dims_error,
    find_tensor,
    shape_text,
)
from triptych.spec.engine_plan import ShapeRange

# TensorRT's name of a data type and Triton's.
TRITON_TYPES = {
    "FLOAT": "TYPE_FP32",
    "HALF": "TYPE_FP16",
    "BF16": "TYPE_BF16",
    "INT8": "TYPE_INT8",
    "INT32": "TYPE_INT32",
    "INT64": "TYPE_INT64",
    "UINT8": "TYPE_UINT8",
    "BOOL": "TYPE_BOOL",
}
Tensors = Mapping[str, EngineTensor]


def check_engine(
    contract: Contract,
    inputs: Sequence[EngineTensor],
    outputs: Sequence[EngineTensor],
    profiles: Sequence[Mapping[str, ShapeRange]],
    chosen: Sequence[int],
) -> None:
    """Reject a config that Triton's native backend rejects at load or could never run.

    `chosen` are the indices of the `profiles` of the engine that the instance uses.

    Raises:
        ContractError: The config and the engine do not match.
    """
    _check_profiles(contract, profiles, chosen)
    known_inputs = {tensor.name: tensor for tensor in inputs}
    known_outputs = {tensor.name: tensor for tensor in outputs}
    if len(inputs) < len(contract.inputs):
        raise ContractError(
            f"unable to load model '{contract.model}', configuration expects "
            f"{len(contract.inputs)} inputs, model provides at most {len(inputs)}"
        )
    for spec in contract.inputs:
        _check_input(contract, spec, known_inputs)
    for batch_input in contract.batch_inputs:
        _check_batch_input(contract, batch_input, known_inputs)
    for output in contract.outputs:
        _check_output(contract, output, known_outputs)
    described = {target for spec in contract.batch_inputs for target in spec.targets}
    described |= {spec.name for spec in contract.inputs}
    described |= {spec.name for spec in contract.outputs}
    for role, known in (("input", known_inputs), ("output", known_outputs)):
        for name in known:
            if name not in described:
                raise ContractError(
                    f"expected configuration for {role} '{name}' for {contract.model}"
                )


def _check_profiles(
    contract: Contract, profiles: Sequence[Mapping[str, ShapeRange]], chosen: Sequence[int]
) -> None:
    for place in chosen:
        if place >= len(profiles):
            raise ContractError(
                f"unable to autofill for '{contract.model}', configuration specified invalid "
                f"profile {place}. Number of profiles supported by TensorRT engine: {len(profiles)}"
            )
    supported = max(
        min(limits.maximum[0] if limits.maximum else 0 for limits in profiles[place].values())
        for place in chosen
    )
    if contract.max_batch_size > supported:
        raise ContractError(
            f"autofill failed for model '{contract.model}': configuration specified max-batch "
            f"{contract.max_batch_size} but TensorRT engine only supports max-batch {supported}"
        )


def _check_input(contract: Contract, spec: InputSpec, known: Tensors) -> None:
    if spec.optional:
        raise ContractError(
            f"'optional' is set to true for input '{spec.name}' while the backend model doesn't "
            "support optional input"
        )
    tensor = find_tensor("inference input", spec.name, known)
    _check_type(contract, "input", spec.data_type, tensor)
    if not spec.ragged:
        _check_dims(contract, spec.dims, tensor)
    elif tensor.dims != spec.dims[:1]:
        raise ContractError(
            f"model '{contract.model}', tensor '{spec.name}': for the model to support ragged "
            f"input, the engine shape is: {shape_text(tensor.dims)} while the model config shape "
            f"is: {shape_text(spec.dims)}"
        )


def _check_batch_input(contract: Contract, spec: BatchInputSpec, known: Tensors) -> None:
    rank = batch_input_rank(spec)
    for target in spec.targets:
        tensor = find_tensor("batch input", target, known)
        _check_type(contract, "input", spec.data_type, tensor)
        if len(tensor.dims) != rank:
            raise ContractError(
                f"model '{contract.model}', tensor '{target}': the model expects "
                f"{len(tensor.dims)} dimensions (shape {shape_text(tensor.dims)}) but a batch "
                f"input of kind {spec.kind} has {rank}"
            )


def _check_output(contract: Contract, spec: OutputSpec, known: Tensors) -> None:
    tensor = find_tensor("inference output", spec.name, known)
    _check_type(contract, "output", spec.data_type, tensor)
    if spec.scatter_source is None:
        _check_dims(contract, spec.dims, tensor)


def _check_type(contract: Contract, role: str, data_type: str, tensor: EngineTensor) -> None:
    if data_type not in TRITON_TYPES.values():
        raise ContractError(
            f"unsupported datatype {data_type} for {role} '{tensor.name}' for model "
            f"'{contract.model}'"
        )
    has = TRITON_TYPES.get(tensor.data_type, "TYPE_INVALID")
    if has != data_type:
        raise ContractError(
            f"unexpected datatype {has} for inference {role} '{tensor.name}', expecting "
            f"{data_type} for {contract.model}"
        )


def _check_dims(contract: Contract, dims: Sequence[int], tensor: EngineTensor) -> None:
    batched = contract.max_batch_size > 0
    wanted = (-1, *dims) if batched else tuple(dims)
    has = tensor.dims
    fits = len(has) == len(wanted) and all(
        -1 in pair or pair[0] == pair[1] for pair in zip(has, wanted, strict=True)
    )
    if not fits:
        raise dims_error(contract, tensor.name, has, wanted)
