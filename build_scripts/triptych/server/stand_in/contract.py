"""What a config.pbtxt demands of its graph: the part that all stand-ins read alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Kinds whose tensor has one entry a request, not one a row: rows of a request must stay together.
PER_REQUEST_KINDS = frozenset(
    {
        "BATCH_ELEMENT_COUNT",
        "BATCH_ACCUMULATED_ELEMENT_COUNT",
        "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO",
        "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE",
    }
)


class ContractError(Exception):
    """The config and the graph do not fit: the model must not load."""


@dataclass(frozen=True)
class InputSpec:
    """One entry of `input`; `dims` are those the graph sees, without the batch dimension."""

    name: str
    data_type: str
    dims: tuple[int, ...]
    ragged: bool
    optional: bool


@dataclass(frozen=True)
class OutputSpec:
    """One entry of `output`; `scatter_source` is the input that gives a batch output its shape."""

    name: str
    data_type: str
    dims: tuple[int, ...]
    scatter_source: str | None


@dataclass(frozen=True)
class BatchInputSpec:
    """One entry of `batch_input`: the graph input `targets` that describe `source`."""

    kind: str
    targets: tuple[str, ...]
    data_type: str
    source: str


@dataclass(frozen=True)
class Contract:
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


def parse_contract(config: Mapping[str, Any], *, backend: str) -> Contract:
    """Read a ModelConfig in the JSON form Triton hands to a backend.

    Args:
        config: the ModelConfig.
        backend: whose stand-in reads it, by Triton's name.

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
                name=entry["name"],
                data_type=entry["data_type"],
                dims=_graph_dims(entry),
                scatter_source=sources.get(entry["name"]),
            )
            for entry in config.get("output", [])
        ),
        batch_inputs=tuple(
            BatchInputSpec(
                kind=entry["kind"],
                targets=tuple(entry["target_name"]),
                data_type=entry["data_type"],
                source=entry["source_input"][0],
            )
            for entry in config.get("batch_input", [])
        ),
    )


def dims_error(
    contract: Contract, name: str, provided: Sequence[int], wanted: Sequence[int]
) -> ContractError:
    """A tensor's shape in the model is another than the config's, as both native backends say it.

    Args:
        contract: of the config.
        name: of the tensor.
        provided: the model's shape.
        wanted: the config's, with the batch dimension where there is one.
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


def _graph_dims(entry: Mapping[str, Any]) -> tuple[int, ...]:
    shape = entry["reshape"].get("shape", []) if "reshape" in entry else entry["dims"]
    return tuple(int(dim) for dim in shape)
