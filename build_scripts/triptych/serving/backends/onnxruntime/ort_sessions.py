"""ONNX Runtime sessions with the options that Triton's native backend sets, and no others.

The completion of a config is also that of the native backend (src/onnxruntime.cc in
triton-inference-server/onnxruntime_backend).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from triptych.serving.backends.contract import (
    BackendConfig,
    ContractError,
    ModelTensor,
    TensorEntry,
)

if TYPE_CHECKING:
    import onnxruntime

MODEL_FILE = "model.onnx"
# Triton's name of each type of ONNX Runtime. Triton 24.10 lacks TYPE_BF16, too.
TRITON_TYPES = {
    "tensor(bool)": "TYPE_BOOL",
    "tensor(uint8)": "TYPE_UINT8",
    "tensor(uint16)": "TYPE_UINT16",
    "tensor(uint32)": "TYPE_UINT32",
    "tensor(uint64)": "TYPE_UINT64",
    "tensor(int8)": "TYPE_INT8",
    "tensor(int16)": "TYPE_INT16",
    "tensor(int32)": "TYPE_INT32",
    "tensor(int64)": "TYPE_INT64",
    "tensor(float16)": "TYPE_FP16",
    "tensor(float)": "TYPE_FP32",
    "tensor(double)": "TYPE_FP64",
    "tensor(string)": "TYPE_STRING",
}

# `default-max-batch-size` of Triton's command line, which no backend written in Python can read.
DEFAULT_MAX_BATCH_SIZE = 4


def read_tensors(nodes: Sequence[onnxruntime.NodeArg]) -> list[ModelTensor]:
    """Return the inputs or outputs of a session.

    Raises:
        ContractError: The graph has an input or output of a type that Triton lacks.
    """
    for node in nodes:
        if node.type not in TRITON_TYPES:
            raise ContractError(f"'{node.name}' has the unsupported ONNX type {node.type}")
    return [
        ModelTensor(
            node.name,
            TRITON_TYPES[node.type],
            tuple(dim if isinstance(dim, int) else -1 for dim in node.shape or ()),
        )
        for node in nodes
    ]


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


def open_session(path: Path, config: BackendConfig) -> onnxruntime.InferenceSession:
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


def run_options(config: BackendConfig) -> object:
    """Return `onnxruntime.RunOptions` with the config's only run parameter, or None."""
    import onnxruntime

    shrinkage = "memory.enable_memory_arena_shrinkage"
    value = _parameter(config, shrinkage)
    if value is None:
        return None
    options = onnxruntime.RunOptions()
    options.add_run_config_entry(shrinkage, value)
    return options


def complete_config(
    config: BackendConfig, inputs: Sequence[ModelTensor], outputs: Sequence[ModelTensor]
) -> None:
    """Add missing inputs, outputs and batching to the config as the native backend does.

    Raises:
        ContractError: `max_batch_size` is set for a graph that cannot batch.
    """
    batches = all(tensor.dims[:1] == (-1,) for tensor in (*inputs, *outputs))
    if not batches and config["max_batch_size"] != 0:
        raise ContractError(
            f"autofill failed for model '{config['name']}': model does not support batching while "
            "non-zero max_batch_size is specified"
        )
    if batches and config["max_batch_size"] == 0:
        config["max_batch_size"] = DEFAULT_MAX_BATCH_SIZE
    batched = config["max_batch_size"] > 0
    if config["max_batch_size"] > 1 and "sequence_batching" not in config:
        config.setdefault("dynamic_batching", {})
    if needs_inputs(config):
        config["input"] = [_completed_entry(tensor, batched=batched) for tensor in sorted(inputs)]
    if not config.get("output"):
        config["output"] = [_completed_entry(tensor, batched=batched) for tensor in sorted(outputs)]


def needs_inputs(config: BackendConfig) -> bool:
    """Return whether the config names no input, so that those of the graph must be added."""
    return not config.get("input") and not config.get("batch_input")


def _completed_entry(tensor: ModelTensor, *, batched: bool) -> TensorEntry:
    dims = list(tensor.dims[1:] if batched else tensor.dims)
    entry: TensorEntry = {
        "name": tensor.name,
        "data_type": tensor.data_type,
        "dims": dims or [1],
    }
    if batched and not dims:
        entry["reshape"] = {"shape": []}
    return entry


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
