"""Read plans, devices, profiles, pinned memory and CUDA graphs from a model's config."""

from __future__ import annotations

from pathlib import Path

from triptych.serving.backends.contract import (
    BackendConfig,
    ContractError,
    GraphBoundEntry,
    GraphEntry,
    GroupEntry,
    model_file,
)
from triptych.spec.engine_plan import GraphSpec

PLAN_FILE = "model.plan"


def device_of(config: BackendConfig, *, kind: str, device_id: str) -> int:
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


def profiles_of(config: BackendConfig, instance: str) -> list[int]:
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
    places = []
    for name in chosen.get("profile", []):
        if not name.strip().isdecimal():
            raise ContractError(f"unable to parse '{name}': a profile is named by its number")
        places.append(int(name))
    return places or [0]


def pinned(config: BackendConfig) -> tuple[bool, bool]:
    """Whether input and output copies use page-locked memory, by default both, as in Triton."""
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
    most, size = int(config["max_batch_size"]), int(entry.get("batch_size", 0))
    if not 1 <= size <= most:
        raise ContractError(
            f"{load}, a CUDA graph of the local emulation has a batch size from 1 to "
            f"max_batch_size {most}, got {size}"
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
