"""What a config says of plans, devices, profiles, copies and CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triptych.plan.engine_spec import GraphSpec
from triptych.server.stand_in.contract import ContractError

PLAN_FILE = "model.plan"


def device_of(config: Mapping[str, Any], *, kind: str, device_id: str) -> int:
    """The GPU of one instance.

    Args:
        config: a ModelConfig in JSON form.
        kind: of the instance, as Triton tells it to Python models: GPU, CPU, MODEL.
        device_id: of the instance.

    Returns:
        Its number. KIND_MODEL, by which a backend chooses for itself, means the first GPU: so the
        model loads where Triton itself sees none. The native backend refuses it.

    Raises:
        ContractError: the instance is to run on the processor.
    """
    if kind == "GPU":
        return int(device_id)
    if kind == "MODEL":
        return 0
    raise ContractError(
        f"unable to load model '{config['name']}', TensorRT backend supports only GPU device"
    )


def plan_file(version_folder: Path, config: Mapping[str, Any]) -> Path:
    """The plan of one model version: the config's file, or ``model.plan``.

    Raises:
        ContractError: there is none, or the config names one for each compute capability.
    """
    if config.get("cc_model_filenames"):
        raise ContractError(
            f"unable to load model '{config['name']}', cc_model_filenames is not supported by the "
            "local stand-in of the tensorrt backend; use default_model_filename"
        )
    path = version_folder / (config.get("default_model_filename") or PLAN_FILE)
    if not path.is_file():
        raise ContractError(f"unable to find '{path}' for model instance '{config['name']}'")
    return path


def profiles_of(config: Mapping[str, Any], instance: str) -> list[int]:
    """Places of the optimization profiles that an instance uses; the first where it names none.

    Args:
        config: a ModelConfig in JSON form.
        instance: its name, which Triton makes of its group's and a number.

    Raises:
        ContractError: a name that is no number.
    """
    groups = config.get("instance_group", [])
    own = [group for group in groups if instance.startswith(f"{group.get('name', '')}_")]
    chosen: Mapping[str, Any] = max(
        own or groups[:1], key=lambda group: len(group.get("name", "")), default={}
    )
    places = []
    for name in chosen.get("profile", []):
        if not name.strip().isdecimal():
            raise ContractError(f"unable to parse '{name}': a profile is named by its number")
        places.append(int(name))
    return places or [0]


def pinned(config: Mapping[str, Any], direction: str) -> bool:
    """Whether ``input`` or ``output`` copies use page-locked memory; Triton's default is yes."""
    setting = config.get("optimization", {}).get(f"{direction}_pinned_memory", {})
    return bool(setting.get("enable", True))


def graph_specs(config: Mapping[str, Any]) -> list[GraphSpec]:
    """The CUDA graphs to capture; none unless the config turns them on and lists them.

    Raises:
        ContractError: a graph for a model that does not batch, a batch size that it never has, or
            a lower bound that gives other dims than the graph.
    """
    cuda = config.get("optimization", {}).get("cuda", {})
    if not cuda.get("graphs"):
        return []
    return [_graph_spec(config, entry) for entry in cuda.get("graph_spec", [])]


def _graph_spec(config: Mapping[str, Any], entry: Mapping[str, Any]) -> GraphSpec:
    load = f"unable to load model '{config['name']}'"
    most, size = int(config["max_batch_size"]), int(entry.get("batch_size", 0))
    if not 1 <= size <= most:
        raise ContractError(
            f"{load}, a CUDA graph of the local stand-in has a batch size from 1 to "
            f"max_batch_size {most}, got {size}"
        )
    dims = _dims(entry)
    bound = entry.get("graph_lower_bound")
    lowest = int(bound.get("batch_size", 0)) if bound else size
    if bound and _dims(bound) != dims:
        raise ContractError(
            f"{load}, graph_lower_bound gives other dims than its graph: the local stand-in of the "
            "tensorrt backend pads the batch dimension only"
        )
    return GraphSpec(batch_size=size, lowest_batch_size=max(1, lowest), inputs=dims)


def _dims(entry: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(int(dim) for dim in shape.get("dim", []))
        for name, shape in entry.get("input", {}).items()
    }
