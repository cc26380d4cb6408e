"""Fields of a config.pbtxt that the emulated backends read in the same way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict, TypeVar

Tensor = TypeVar("Tensor")


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
    """Entry of `output`.

    Attributes:
        dims: Dimensions in the graph, without the batch dimension.
        scatter_source: Input that gives a batch output its shape; None for other outputs.
        answered: Whether responses contain the output. For a `batch_output` with several targets,
            Triton's responder answers only the first.
    """

    name: str
    data_type: str
    dims: tuple[int, ...]
    scatter_source: str | None
    answered: bool


class BatchInputSpec(NamedTuple):
    """Entry of `batch_input`: the graph inputs `targets` that describe the input `source`."""

    kind: str
    targets: tuple[str, ...]
    data_type: str
    source: str


class Contract(NamedTuple):
    """Part of a ModelConfig that defines feeds and responses.

    Attributes:
        backend: ``onnxruntime`` or ``tensorrt``.
    """

    model: str
    backend: str
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


def find_tensor(role: str, name: str, known: Mapping[str, Tensor]) -> Tensor:
    """Return the tensor `name` among the `known` tensors of the model.

    The `role` of the tensor, such as ``inference input``, is for the error text.

    Raises:
        ContractError: The model has no such tensor; the message lists the `known` names.
    """
    if name not in known:
        raise ContractError(
            f"unexpected {role} '{name}', allowed {role.split()[-1]}s are: "
            f"{', '.join(sorted(known))}"
        )
    return known[name]


def batch_input_rank(spec: BatchInputSpec) -> int:
    """Return the number of dimensions of the tensors that describe `source`."""
    return 2 if spec.kind == "BATCH_ITEM_SHAPE" else 1


def dims_error(
    contract: Contract, name: str, provided: Sequence[int], wanted: Sequence[int]
) -> ContractError:
    """Return the error of a tensor whose dimensions differ between model and config.

    The text is that of Triton's own backends. The model has the dimensions `provided`. The config
    has the dimensions `wanted`, which include the batch dimension if there is one.
    """
    note = (
        " (an initial batch dimension because max_batch_size > 0 followed by the explicit "
        f"tensor shape, making complete shape {shape_text(wanted)})"
        if contract.max_batch_size > 0
        else f" (shape {shape_text(wanted)})"
    )
    return ContractError(
        f"model '{contract.model}', tensor '{name}': the model expects {len(provided)} "
        f"dimensions (shape {shape_text(provided)}) but the model configuration specifies "
        f"{len(wanted)} dimensions{note}"
    )


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
        if spec.scatter_source is None or not spec.answered:
            continue
        variable = [axis for axis, dim in enumerate((*batch, *spec.dims)) if dim == -1]
        if variable and variable[-1] >= len(sources[spec.scatter_source]):
            raise ContractError(
                f"unable to load model '{contract.model}', batch output '{spec.name}' has more "
                f"variable dimensions than its source input '{spec.scatter_source}'"
            )
