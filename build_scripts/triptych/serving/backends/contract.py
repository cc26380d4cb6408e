"""Contract of an emulated backend: the fields of a config.pbtxt that define feeds and responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict


class ReshapeEntry(TypedDict, total=False):
    shape: Sequence[int | str]


class TensorEntry(TypedDict, total=False):
    name: str
    data_type: str
    dims: Sequence[int | str]
    reshape: ReshapeEntry
    allow_ragged_batch: bool
    optional: bool


class BatchEntry(TypedDict):
    kind: str
    target_name: list[str]
    data_type: str
    source_input: list[str]


class GroupEntry(TypedDict, total=False):
    name: str
    count: int | str
    profile: list[str]


class GraphBoundEntry(TypedDict, total=False):
    batch_size: int | str
    input: dict[str, dict[str, list[str]]]


class GraphEntry(GraphBoundEntry, total=False):
    graph_lower_bound: GraphBoundEntry


class CudaEntry(TypedDict, total=False):
    graphs: bool
    graph_spec: list[GraphEntry]


class OptimizationEntry(TypedDict, total=False):
    graph: dict[str, int | str]
    execution_accelerators: dict[str, list[dict[str, str]]]
    cuda: CudaEntry
    input_pinned_memory: dict[str, bool]
    output_pinned_memory: dict[str, bool]


class BackendConfig(TypedDict, total=False):
    """Fields of a ModelConfig in JSON form that a backend reads; 64-bit numbers may be strings."""

    name: str
    max_batch_size: int
    default_model_filename: str
    cc_model_filenames: dict[str, str]
    input: list[TensorEntry]
    output: list[TensorEntry]
    batch_input: list[BatchEntry]
    batch_output: list[BatchEntry]
    instance_group: list[GroupEntry]
    optimization: OptimizationEntry
    parameters: dict[str, dict[str, str]]
    model_operations: dict[str, list[str]]
    dynamic_batching: dict[str, object]
    sequence_batching: dict[str, object]


class ContractError(Exception):
    """Error of a model that must not load: config, graph and machine do not match."""


class InputSpec(NamedTuple):
    """Entry of `input`; `dims` are the dimensions in the graph, without the batch dimension."""

    name: str
    data_type: str
    dims: tuple[int, ...]
    ragged: bool
    optional: bool


class OutputSpec(NamedTuple):
    """Entry of `output`."""

    name: str
    data_type: str
    dims: tuple[int, ...]  # Dimensions in the graph, without the batch dimension
    scatter_source: str | None  # Input that gives a batch output its shape; None for other outputs
    # Whether responses contain the output. For a `batch_output` with several targets, Triton's
    # responder answers only the first.
    answered: bool


class BatchInputSpec(NamedTuple):
    """Entry of `batch_input`: the graph inputs `targets` that describe the input `source`."""

    kind: str
    targets: tuple[str, ...]
    data_type: str
    source: str


class Contract(NamedTuple):
    """Part of a ModelConfig that defines feeds and responses."""

    model: str
    backend: str  # ``onnxruntime``, ``tensorrt`` or ``openvino``
    max_batch_size: int
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    batch_inputs: tuple[BatchInputSpec, ...]


def parse_contract(config: BackendConfig, *, backend: str) -> Contract:
    """Return the contract of the ModelConfig that Triton passes to a `backend`.

    Raises:
        ContractError: The config has a field that the emulated backend does not support, or an
            output that no backend can answer.
    """
    model = config["name"]
    if "sequence_batching" in config:
        raise ContractError(
            f"unable to load model '{model}', sequence_batching is not supported by the local "
            f"emulation of the {backend} backend; use dynamic_batching or the native backend"
        )
    entries = config.get("batch_output", [])
    sources = {
        target: entry["source_input"][0] for entry in entries for target in entry["target_name"]
    }
    unanswered = {target for entry in entries for target in entry["target_name"][1:]}
    contract = Contract(
        model=model,
        backend=backend,
        max_batch_size=int(config["max_batch_size"]),
        inputs=tuple(
            InputSpec(
                name=entry["name"],
                data_type=entry["data_type"],
                dims=_graph_dims(entry),
                ragged=bool(entry.get("allow_ragged_batch")),
                optional=bool(entry.get("optional")),
            )
            for entry in config.get("input", [])
        ),
        outputs=tuple(
            OutputSpec(
                *(entry["name"], entry["data_type"], _graph_dims(entry)),
                scatter_source=sources.get(entry["name"]),
                answered=entry["name"] not in unanswered,
            )
            for entry in config.get("output", [])
        ),
        batch_inputs=tuple(
            BatchInputSpec(
                *(entry["kind"], tuple(entry["target_name"]), entry["data_type"]),
                source=entry["source_input"][0],
            )
            for entry in config.get("batch_input", [])
        ),
    )
    _check_scattered(contract)
    return contract


def model_file(version_folder: Path, config: BackendConfig, default: str) -> Path:
    """Return the file of one model version.

    It is the file that the config names, or `default`. In place of the file there may be a folder
    of its name that contains `default`.

    Raises:
        ContractError: The file does not exist.
    """
    path = version_folder / (config.get("default_model_filename") or default)
    if path.is_dir():
        path = path / default
    if not path.is_file():
        raise ContractError(f"unable to find '{path}' for model instance '{config['name']}'")
    return path


class ModelTensor(NamedTuple):
    """Input or output of an ONNX graph or an engine.

    `data_type` is Triton's name. `dims` have the batch dimension, and -1 for dynamic sizes.
    """

    name: str
    data_type: str
    dims: tuple[int, ...]


def check_model(
    contract: Contract,
    inputs: Sequence[ModelTensor],
    outputs: Sequence[ModelTensor],
    defaults: Sequence[ModelTensor] = (),
) -> None:
    """Reject a config whose tensors differ from those of the model.

    Triton checks configs before it starts a backend, but not against the model: its native backends
    do that. Everything that they reject is rejected here, in one form of words.

    Args:
        contract: Contract of the config.
        inputs: Inputs that the model needs.
        outputs: Outputs of the model.
        defaults: Inputs with a default value, which serve optional inputs of the config.

    Raises:
        ContractError: The config and the model do not match.
    """
    _check_names(contract, [t.name for t in inputs], [t.name for t in outputs])
    known = {tensor.name: tensor for tensor in (*inputs, *outputs)}
    batch = (-1,) if contract.max_batch_size > 0 else ()
    for spec in contract.inputs:
        if spec.optional:
            unsupported = contract.backend == "tensorrt" or batch or spec.ragged
            tensor = next((tensor for tensor in defaults if tensor.name == spec.name), None)
            if unsupported or tensor is None:
                raise _load_error(contract, f"input '{spec.name}' cannot be optional")
            known[spec.name] = tensor
        tensor = known[spec.name]
        if spec.ragged:
            _check_tensor(contract, tensor, spec.data_type, (-1,), _equals)
        else:
            fits = _overlaps if contract.backend == "tensorrt" else _accepts
            _check_tensor(contract, tensor, spec.data_type, (*batch, *spec.dims), fits)
    for batch_input in contract.batch_inputs:
        rank = 2 if batch_input.kind == "BATCH_ITEM_SHAPE" else 1
        for target in batch_input.targets:
            _check_tensor(contract, known[target], batch_input.data_type, [-1] * rank, _overlaps)
    for output in contract.outputs:
        tensor = known[output.name]
        dims = (*batch, *output.dims) if output.scatter_source is None else tensor.dims
        fits = {"tensorrt": _overlaps, "openvino": _accepts}.get(contract.backend, _equals)
        _check_tensor(contract, tensor, output.data_type, dims, fits)


def _check_names(contract: Contract, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    is_engine = contract.backend == "tensorrt"
    needed = [spec.name for spec in contract.inputs if not spec.optional]
    for batch_input in contract.batch_inputs:
        if not is_engine and len(batch_input.targets) != 1:
            # The native backend of ONNX Runtime counts several targets as one input.
            raise _load_error(contract, "each batch input must have one target")
        needed += batch_input.targets
    answered = [spec.name for spec in contract.outputs]
    # An engine writes all of its outputs, so its config must describe all of them.
    expected = outputs if is_engine else [name for name in answered if name in outputs]
    for role, described, provided, wanted in (
        ("inputs", needed, inputs, inputs),
        ("outputs", answered, outputs, expected),
    ):
        if sorted(described) != sorted(wanted):
            in_config, in_model = (", ".join(sorted(n)) or "none" for n in (described, provided))
            text = f"the config describes the {role} {in_config}, the model has {in_model}"
            raise _load_error(contract, text)


def _check_tensor(
    contract: Contract,
    tensor: ModelTensor,
    data_type: str,
    dims: Sequence[int],
    fits: Callable[[int, int], bool],
) -> None:
    """Check a tensor; `fits` compares a size of the model with a size of the config."""
    if not tensor.dims and contract.backend == "onnxruntime" and not contract.max_batch_size:
        same_shape = all(dim == 1 for dim in dims)  # a config describes a scalar as [1]
    else:
        same_shape = len(tensor.dims) == len(dims) and all(map(fits, tensor.dims, dims))
    if tensor.data_type != data_type or not same_shape:
        raise _load_error(
            contract,
            f"tensor '{tensor.name}' is {data_type} {shape_text(dims)} in the config and "
            f"{tensor.data_type} {shape_text(tensor.dims)} in the model",
        )


def _equals(provided: int, wanted: int) -> bool:
    return provided == wanted


def _accepts(provided: int, wanted: int) -> bool:
    return provided in (wanted, -1)


def _overlaps(provided: int, wanted: int) -> bool:
    return provided == wanted or -1 in (provided, wanted)


def _load_error(contract: Contract, text: str) -> ContractError:
    return ContractError(f"unable to load model '{contract.model}', {text}")


def shape_text(dims: Sequence[int]) -> str:
    """Return a shape as Triton prints it: ``[-1,384]``."""
    return "[" + ",".join(str(dim) for dim in dims) + "]"


def _graph_dims(entry: TensorEntry) -> tuple[int, ...]:
    shape = entry["reshape"].get("shape", []) if "reshape" in entry else entry["dims"]
    return tuple(int(dim) for dim in shape)


def _check_scattered(contract: Contract) -> None:
    """Reject an output whose source input cannot determine its shape.

    Triton's own responder would read past the end of the source's dimensions.
    """
    batch = (-1,) if contract.max_batch_size > 0 else ()
    sources = {spec.name: (*batch, *spec.dims) for spec in contract.inputs}
    for spec in contract.outputs:
        if spec.scatter_source is None:
            continue
        if spec.data_type == "TYPE_STRING":
            raise _load_error(contract, f"batch output '{spec.name}' cannot be TYPE_STRING")
        variable = [axis for axis, dim in enumerate((*batch, *spec.dims)) if dim == -1]
        if spec.answered and variable and variable[-1] >= len(sources[spec.scatter_source]):
            raise _load_error(
                contract,
                f"batch output '{spec.name}' has more variable dimensions than its source input "
                f"'{spec.scatter_source}'",
            )
