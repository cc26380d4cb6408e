"""What a config.pbtxt demands of its graph: the part that all stand-ins read alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict, TypeVar

# Kinds whose tensor has one entry a request, not one a row: rows of a request must stay together.
PER_REQUEST_KINDS = frozenset(
    {
        "BATCH_ELEMENT_COUNT",
        "BATCH_ACCUMULATED_ELEMENT_COUNT",
        "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO",
        "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE",
    }
)
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


class ModelConfig(TypedDict, total=False):
    """What a stand-in reads of a ModelConfig in JSON form; 64-bit numbers may be texts in it."""

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
    """The config, the graph and this machine do not fit: the model must not load."""


class InputSpec(NamedTuple):
    """One entry of `input`; `dims` are those the graph sees, without the batch dimension."""

    name: str
    data_type: str
    dims: tuple[int, ...]
    ragged: bool
    optional: bool


class OutputSpec(NamedTuple):
    """One entry of `output`; `scatter_source` is the input that gives a batch output its shape."""

    name: str
    data_type: str
    dims: tuple[int, ...]
    scatter_source: str | None


class BatchInputSpec(NamedTuple):
    """One entry of `batch_input`: the graph input `targets` that describe `source`."""

    kind: str
    targets: tuple[str, ...]
    data_type: str
    source: str


class Contract(NamedTuple):
    """The part of a ModelConfig that says how requests become feeds and results responses."""

    model: str
    max_batch_size: int
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    batch_inputs: tuple[BatchInputSpec, ...]

    @property
    def rows_separable(self) -> bool:
        """Whether the rows of one request may run apart from each other."""
        return self.max_batch_size > 0 and not any(
            spec.kind in PER_REQUEST_KINDS for spec in self.batch_inputs
        )

    @property
    def measured_inputs(self) -> tuple[str, ...]:
        """The inputs whose elements are a row's cost: ragged ones, else variable ones, else all.

        An image by itself exceeds any budget of tokens: each is a micro-batch of its own, which is
        fastest on a CPU (ViT, 6 layers of 384, 2 cores: 34.7 images/s, in batches of 8 29.3).
        """
        ragged = tuple(spec.name for spec in self.inputs if spec.ragged)
        variable = tuple(spec.name for spec in self.inputs if -1 in spec.dims)
        return ragged or variable or tuple(spec.name for spec in self.inputs)


def parse_contract(config: ModelConfig, *, backend: str) -> Contract:
    """Read the ModelConfig that Triton hands to the stand-in of a backend.

    Raises:
        ContractError: a field that neither the native backend nor this one can serve.
    """
    model = config["name"]
    if "sequence_batching" in config:
        raise ContractError(
            f"unable to load model '{model}', sequence_batching is not supported by the local "
            f"stand-in of the {backend} backend; use dynamic_batching or the native backend"
        )
    sources = {
        target: entry["source_input"][0]
        for entry in config.get("batch_output", [])
        for target in entry["target_name"]
    }
    return Contract(
        model=model,
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


def model_file(version_folder: Path, config: ModelConfig, default: str) -> Path:
    """The file of one model version: the config's, or `default`; or that in a folder of the name.

    Raises:
        ContractError: there is none.
    """
    path = version_folder / (config.get("default_model_filename") or default)
    if path.is_dir():
        path = path / default
    if not path.is_file():
        raise ContractError(f"unable to find '{path}' for model instance '{config['name']}'")
    return path


def find_tensor(role: str, name: str, known: Mapping[str, Tensor], allowed: str) -> Tensor:
    """The tensor that a config names; a `ContractError` lists the `known` ones as `allowed`."""
    if name not in known:
        raise ContractError(f"unexpected {role} '{name}', {allowed}: {', '.join(sorted(known))}")
    return known[name]


def batch_input_rank(spec: BatchInputSpec) -> int:
    """Number of dimensions of the tensors that describe `source`."""
    return 2 if spec.kind == "BATCH_ITEM_SHAPE" else 1


def dims_error(
    contract: Contract, name: str, provided: Sequence[int], wanted: Sequence[int]
) -> ContractError:
    """A tensor's shape in the model is another than the config's, as both native backends say it.

    `wanted` has the batch dimension where there is one.
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
    """A shape as Triton prints it: ``[-1,384]``."""
    return "[" + ",".join(str(dim) for dim in dims) + "]"


def _graph_dims(entry: TensorEntry) -> tuple[int, ...]:
    shape = entry["reshape"].get("shape", []) if "reshape" in entry else entry["dims"]
    return tuple(int(dim) for dim in shape)
