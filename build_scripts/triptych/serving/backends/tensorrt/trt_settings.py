"""Read a model's config for TensorRT: plan, device, profiles, pinned memory and CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from triptych.core.engine.runner import EngineTensor
from triptych.serving.backends.contract import (
    BackendConfig,
    Contract,
    ContractError,
    GraphBoundEntry,
    GraphEntry,
    GroupEntry,
    ModelTensor,
    model_file,
)
from triptych.spec.engine_plan import GraphSpec, ShapeRange

PLAN_FILE = "model.plan"

# Triton's name of each type of TensorRT.
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


def instance_device(config: BackendConfig, *, kind: str, device_id: str) -> int:
    """Return the number of an instance's GPU; `kind` is GPU, CPU or MODEL.

    KIND_MODEL selects the first GPU, so that the model also loads if Triton itself finds no GPU.
    The native backend rejects KIND_MODEL.

    Raises:
        ContractError: The instance must run on the CPU.
    """
    if kind == "GPU":
        return int(device_id)
    if kind == "MODEL":
        return 0
    raise ContractError(
        f"unable to load model '{config['name']}', TensorRT backend supports only GPU device"
    )


def plan_file(version_folder: Path, config: BackendConfig) -> Path:
    """Return the plan of a model version: the file that the config names, or ``model.plan``.

    Raises:
        ContractError: The file is missing, or the config has `cc_model_filenames`.
    """
    if config.get("cc_model_filenames"):
        raise ContractError(
            f"unable to load model '{config['name']}', cc_model_filenames is not supported by the "
            "local emulation of the tensorrt backend; use default_model_filename"
        )
    return model_file(version_folder, config, PLAN_FILE)


def instance_profiles(config: BackendConfig, instance: str) -> list[int]:
    """Return the indices of an instance's optimization profiles, by default the first profile.

    Triton names an `instance` by the name of its group and a number.

    Raises:
        ContractError: A profile's name is not a number.
    """
    groups = config.get("instance_group", [])
    own = [group for group in groups if instance.startswith(f"{group.get('name', '')}_")]
    chosen = max(
        own or groups[:1], key=lambda group: len(group.get("name", "")), default=GroupEntry()
    )
    indices = []
    for name in chosen.get("profile", []):
        if not name.strip().isdecimal():
            raise ContractError(f"unable to parse '{name}': a profile is named by its number")
        indices.append(int(name))
    return indices or [0]


def check_profiles(
    contract: Contract, profiles: Sequence[Mapping[str, ShapeRange]], chosen: Sequence[int]
) -> None:
    """Check that the engine has the `chosen` profiles, and that one allows the config's batches.

    Raises:
        ContractError: A profile is missing, or the largest batch is too large for all of them.
    """
    for index in chosen:
        if index >= len(profiles):
            raise ContractError(
                f"unable to autofill for '{contract.model}', configuration specified invalid "
                f"profile {index}. Number of profiles supported by TensorRT engine: {len(profiles)}"
            )
    supported = max(
        min(limits.maximum[0] if limits.maximum else 0 for limits in profiles[index].values())
        for index in chosen
    )
    if contract.max_batch_size > supported:
        raise ContractError(
            f"autofill failed for model '{contract.model}': configuration specified max-batch "
            f"{contract.max_batch_size} but TensorRT engine only supports max-batch {supported}"
        )


def read_tensors(tensors: Sequence[EngineTensor]) -> list[ModelTensor]:
    """Return the inputs or outputs of an engine with Triton's names of their types."""
    return [
        ModelTensor(tensor.name, TRITON_TYPES.get(tensor.data_type, tensor.data_type), tensor.dims)
        for tensor in tensors
    ]


def pinned_memory(config: BackendConfig) -> tuple[bool, bool]:
    """Return whether input and output copies use pinned memory; by default both, as in Triton."""
    optimization = config.get("optimization", {})
    inputs = optimization.get("input_pinned_memory", {})
    outputs = optimization.get("output_pinned_memory", {})
    return inputs.get("enable", True), outputs.get("enable", True)


def graph_specs(config: BackendConfig) -> list[GraphSpec]:
    """Return the CUDA graphs to capture; none unless the config enables and lists them.

    Raises:
        ContractError: A graph's batch size is not between 1 and the model's maximum, or its lower
            bound has other dims than the graph.
    """
    cuda = config.get("optimization", {}).get("cuda", {})
    if not cuda.get("graphs"):
        return []
    return [_graph_spec(config, entry) for entry in cuda.get("graph_spec", [])]


def _graph_spec(config: BackendConfig, entry: GraphEntry) -> GraphSpec:
    load = f"unable to load model '{config['name']}'"
    max_rows, size = int(config["max_batch_size"]), int(entry.get("batch_size", 0))
    if not 1 <= size <= max_rows:
        raise ContractError(
            f"{load}, a CUDA graph of the local emulation has a batch size from 1 to "
            f"max_batch_size {max_rows}, got {size}"
        )
    dims = _dims(entry)
    bound = entry.get("graph_lower_bound")
    lowest = int(bound.get("batch_size", 0)) if bound else size
    if bound and _dims(bound) != dims:
        raise ContractError(
            f"{load}, graph_lower_bound gives other dims than its graph: the emulation of the "
            "tensorrt backend pads the batch dimension only"
        )
    return GraphSpec(batch_size=size, lowest_batch_size=max(1, lowest), inputs=dims)


def _dims(entry: GraphBoundEntry) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(int(dim) for dim in shape.get("dim", []))
        for name, shape in entry.get("input", {}).items()
    }
