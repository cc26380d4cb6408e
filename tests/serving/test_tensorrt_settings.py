"""What the local TensorRT backend reads out of a config, without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from triptych.serving.backends.contract import ContractError
from triptych.serving.backends.tensorrt import trt_settings
from triptych.spec.engine_plan import GraphSpec


def config(**fields: Any) -> Any:
    """A ModelConfig as Triton hands it to a backend: 64-bit numbers are texts."""
    return {"name": "core", "max_batch_size": 8, **fields}


def shapes(**dims: int) -> dict[str, Any]:
    return {name: {"dim": [str(dim)]} for name, dim in dims.items()}


def cuda(**fields: Any) -> Any:
    return config(optimization={"cuda": {"graphs": True, **fields}})


@pytest.mark.parametrize(
    ("instance", "places"),
    [("fast_0", [1]), ("fast_and_large_1", [2, 0]), ("core_0", [0])],
)
def test_an_instance_uses_the_profiles_of_its_own_group(instance: str, places: list[int]) -> None:
    groups = [
        {"name": "core"},
        {"name": "fast", "profile": ["1"]},
        {"name": "fast_and_large", "profile": ["2", "0"]},
    ]
    assert trt_settings.instance_profiles(config(instance_group=groups), instance) == places


def test_a_graph_with_a_lower_bound_takes_smaller_batches() -> None:
    entry = {"batch_size": 8, "input": shapes(input_ids=16)}
    bound = {"batch_size": 5, "input": shapes(input_ids=16)}
    specs = trt_settings.graph_specs(
        cuda(graph_spec=[entry, {**entry, "graph_lower_bound": bound}])
    )
    assert specs == [GraphSpec(8, 8, {"input_ids": (16,)}), GraphSpec(8, 5, {"input_ids": (16,)})]


@pytest.mark.parametrize("fields", [{}, {"graphs": False, "graph_spec": [{"batch_size": 1}]}])
def test_graphs_are_captured_only_where_listed_and_on(fields: dict[str, Any]) -> None:
    assert trt_settings.graph_specs(cuda(**fields)) == []


@pytest.mark.parametrize(
    ("optimization", "locked"),
    [
        ({}, (True, True)),
        ({"input_pinned_memory": {"enable": False}}, (False, True)),
        ({"output_pinned_memory": {"enable": False}}, (True, False)),
    ],
)
def test_memory_is_pinned_unless_turned_off(
    optimization: dict[str, Any], locked: tuple[bool, bool]
) -> None:
    assert trt_settings.pinned_memory(config(optimization=optimization)) == locked


@pytest.mark.parametrize(("kind", "device"), [("GPU", 3), ("MODEL", 0)])
def test_an_instance_runs_on_its_gpu(kind: str, device: int) -> None:
    assert trt_settings.instance_device(config(), kind=kind, device_id="3") == device


def test_the_plan_is_the_file_that_the_config_names(tmp_path: Path) -> None:
    for name in ("model.plan", "other.plan"):
        (tmp_path / name).touch()
    assert trt_settings.plan_file(tmp_path, config()).name == "model.plan"
    named = config(default_model_filename="other.plan")
    assert trt_settings.plan_file(tmp_path, named).name == "other.plan"
    with pytest.raises(ContractError, match="cc_model_filenames is not supported"):
        trt_settings.plan_file(tmp_path, config(cc_model_filenames={"9.0": "other.plan"}))
