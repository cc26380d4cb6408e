"""ONNX Runtime sessions with the options that Triton's native backend sets, and no others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from triptych.serving.backends.contract import BackendConfig, ContractError

MODEL_FILE = "model.onnx"


def check_settings(config: BackendConfig, *, kind: str) -> None:
    """Reject GPU instances, and accelerators that ONNX Runtime lacks on this machine."""
    if kind == "GPU":
        raise ContractError(
            f"unable to load model '{config['name']}', the local emulation of the onnxruntime "
            "backend runs on the CPU only; use KIND_CPU or the native backend"
        )
    accelerators = config.get("optimization", {}).get("execution_accelerators", {})
    for accelerator in accelerators.get("cpu_execution_accelerator", []):
        raise ContractError(
            f"unknown Execution Accelerator '{accelerator['name']}' is requested: the local "
            "emulation of the onnxruntime backend has none"
        )


def open_session(path: Path, config: BackendConfig) -> Any:
    """Return an `onnxruntime.InferenceSession` on the CPU with the options of the config.

    Raises:
        ContractError: A parameter has a value that its type does not allow.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    levels = onnxruntime.GraphOptimizationLevel
    level = int(config.get("optimization", {}).get("graph", {}).get("level", 0))
    options.graph_optimization_level = {
        -1: levels.ORT_ENABLE_BASIC,
        1: levels.ORT_ENABLE_EXTENDED,
        2: levels.ORT_DISABLE_ALL,
    }.get(level, levels.ORT_ENABLE_ALL)
    mode = _int_parameter(config, "execution_mode")
    if mode not in (0, 1):
        raise ContractError(
            "Invalid configuration value provided. Expected values for  execution_mode are 0 or 1 "
            f"but got {mode} ."
        )
    modes = onnxruntime.ExecutionMode
    options.execution_mode = modes.ORT_PARALLEL if mode else modes.ORT_SEQUENTIAL
    if (threads := _int_parameter(config, "intra_op_thread_count")) > 0:
        options.intra_op_num_threads = threads
    if (threads := _int_parameter(config, "inter_op_thread_count")) > 0:
        options.inter_op_num_threads = threads
    if (arena := _bool_parameter(config, "enable_mem_arena")) is not None:
        options.enable_cpu_mem_arena = arena
    if (pattern := _bool_parameter(config, "enable_mem_pattern")) is not None:
        options.enable_mem_pattern = pattern
    device_allocator = "session.use_device_allocator_for_initializers"  # native from 25.02
    if (value := _parameter(config, device_allocator)) is not None:
        options.add_session_config_entry(device_allocator, value)
    for library in config.get("model_operations", {}).get("op_library_filename", []):
        options.register_custom_ops_library(library)
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def run_options(config: BackendConfig) -> Any:
    """Return `onnxruntime.RunOptions` with the config's only run parameter, or None."""
    import onnxruntime

    shrinkage = "memory.enable_memory_arena_shrinkage"
    value = _parameter(config, shrinkage)
    if value is None:
        return None
    options = onnxruntime.RunOptions()
    options.add_run_config_entry(shrinkage, value)
    return options


def _parameter(config: BackendConfig, key: str) -> str | None:
    entry = config.get("parameters", {}).get(key)
    return None if entry is None else entry["string_value"]


def _int_parameter(config: BackendConfig, key: str) -> int:
    text = _parameter(config, key)
    if text is None:
        return 0
    number = re.match(r"\s*[+-]?\d+", text)
    if number is None or not -(2**31) <= int(number[0]) < 2**31:
        raise ContractError(f"failed to convert '{text}' to integral number (parameter '{key}')")
    return int(number[0])


def _bool_parameter(config: BackendConfig, key: str) -> bool | None:
    text = _parameter(config, key)
    if text is None:
        return None
    words = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}
    if text.lower() not in words:
        raise ContractError(f"failed to convert '{text}' to boolean (parameter '{key}')")
    return words[text.lower()]
