"""ONNX Runtime sessions as a config's parameters ask for them, and the threads that run them."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from triptych.server.stand_in.contract import ContractError, ModelConfig

TOKEN_BUDGET_VARIABLE = "TRIPTYCH_TOKEN_BUDGET"
DEFAULT_TOKEN_BUDGET = 128
MODEL_FILE = "model.onnx"
_ALIGNMENT_BYTES = 64
# Sizes from which on initializers go to the file; those of odd sizes are rarely large.
_SMALLEST_PACKED_BYTES = (1024, 1 << 20)


def instance_cores(config: ModelConfig) -> int:
    """Cores one instance may keep busy: this machine's, shared out among the model's instances."""
    instances = sum(int(group.get("count", 1)) for group in config.get("instance_group", []))
    return max(1, len(os.sched_getaffinity(0)) // max(1, instances))


def token_budget(config: ModelConfig) -> int:
    """Most elements in a micro-batch; 0 for no splitting.

    The config's `token_budget` counts before the environment's, and that before the default.

    Raises:
        ContractError: either is something else than a number.
    """
    if _parameter(config, "token_budget") is not None:
        return max(0, _int_parameter(config, "token_budget"))
    text = os.environ.get(TOKEN_BUDGET_VARIABLE, "")
    if not text:
        return DEFAULT_TOKEN_BUDGET
    if not text.isdecimal():
        raise ContractError(
            f"{TOKEN_BUDGET_VARIABLE} must be a number of tokens, 0 for no splitting. Given: {text}"
        )
    return int(text)


def intra_op_threads(config: ModelConfig) -> int:
    """`intra_op_thread_count` of the config; 0 if it leaves the choice to the backend."""
    return max(0, _int_parameter(config, "intra_op_thread_count"))


def check_settings(config: ModelConfig, *, kind: str) -> None:
    """Refuse a GPU instance, and an accelerator this machine's ONNX Runtime lacks."""
    if kind == "GPU":
        raise ContractError(
            f"unable to load model '{config['name']}', the local stand-in of the onnxruntime "
            "backend runs on the CPU only; use KIND_CPU or the native backend"
        )
    accelerators = config.get("optimization", {}).get("execution_accelerators", {})
    for accelerator in accelerators.get("cpu_execution_accelerator", []):
        raise ContractError(
            f"unknown Execution Accelerator '{accelerator['name']}' is requested: the local "
            "stand-in of the onnxruntime backend has none"
        )
    _bool_parameter(config, "share_session_between_instances")


def open_session(path: Path, config: ModelConfig, *, threads: int) -> Any:
    """An `onnxruntime.InferenceSession` on the CPU, set up as the config's parameters say.

    `threads` share the work of one operator.

    Raises:
        ContractError: a parameter has a value its type does not allow.
    """
    import onnxruntime

    options = _session_options(config, threads=threads)
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def open_sessions(path: Path, config: ModelConfig, *, threads: Sequence[int]) -> list[Any]:
    """One session for each number of threads, all on one copy of the weights.

    ONNX Runtime repacks weights for its matrix kernels, once a session. Written to a file first,
    the repacked weights are mapped into memory and so shared (MiniLM-L6, two sessions: 67 MB of
    private memory instead of 232 MB, and no slower to load). The file is gone when this returns.

    Raises:
        ContractError: a parameter has a value its type does not allow.
    """
    for smallest in _SMALLEST_PACKED_BYTES:
        try:
            with tempfile.TemporaryDirectory(prefix="triptych-onnxruntime-") as folder:
                packed = Path(folder) / MODEL_FILE
                _write_packed(path, packed, config, smallest_bytes=smallest)
                if _is_aligned(packed):
                    return [open_session(packed, config, threads=count) for count in threads]
        except Exception:  # no room for the file, or a graph that cannot be written: do without
            break
    return [open_session(path, config, threads=count) for count in threads]


def run_options(config: ModelConfig) -> Any:
    """`onnxruntime.RunOptions` with the config's one run parameter, or None."""
    import onnxruntime

    shrinkage = "memory.enable_memory_arena_shrinkage"
    value = _parameter(config, shrinkage)
    if value is None:
        return None
    options = onnxruntime.RunOptions()
    options.add_run_config_entry(shrinkage, value)
    return options


def _is_aligned(packed: Path) -> bool:
    """Whether the kernels can read the repacked weights where they lie in the file.

    ONNX Runtime 1.31 writes initializers end to end: after one whose size is no multiple of 64
    bytes (the bias over a vocabulary, say) its own AVX-512 kernels die of a segmentation fault.
    """
    places = re.findall(rb"\|(\d+);\d+;", packed.read_bytes())
    return all(int(place) % _ALIGNMENT_BYTES == 0 for place in places)


def _write_packed(path: Path, packed: Path, config: ModelConfig, *, smallest_bytes: int) -> None:
    import onnxruntime

    options = _session_options(config, threads=1)
    options.optimized_model_filepath = str(packed)
    options.log_severity_level = 3  # a warning that such a file is for this machine only
    external = "session.optimized_model_external_initializers"
    options.add_session_config_entry(f"{external}_file_name", "weights.bin")
    options.add_session_config_entry(f"{external}_min_size_in_bytes", str(smallest_bytes))
    options.add_session_config_entry("session.save_external_prepacked_constant_initializers", "1")
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _session_options(config: ModelConfig, *, threads: int) -> Any:
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
            "Invalid configuration value provided. Expected values for execution_mode are 0 or 1 "
            f"but got {mode}."
        )
    modes = onnxruntime.ExecutionMode
    options.execution_mode = modes.ORT_PARALLEL if mode else modes.ORT_SEQUENTIAL
    # As where the gate ran: see `triptych.graph.session`.
    options.add_session_config_entry("session.x64quantprecision", "1")
    options.intra_op_num_threads = threads
    # Threads that go on spinning after a run take the cores from the steps around this one
    # (MiniLM-L6, 2 cores, 4 clients: 155-175 texts/s instead of 153-157).
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.inter_op_num_threads = max(0, _int_parameter(config, "inter_op_thread_count"))
    if (arena := _bool_parameter(config, "enable_mem_arena")) is not None:
        options.enable_cpu_mem_arena = arena
    if (pattern := _bool_parameter(config, "enable_mem_pattern")) is not None:
        options.enable_mem_pattern = pattern
    device_allocator = "session.use_device_allocator_for_initializers"
    if (value := _parameter(config, device_allocator)) is not None:
        options.add_session_config_entry(device_allocator, value)
    for library in config.get("model_operations", {}).get("op_library_filename", []):
        options.register_custom_ops_library(library)
    return options


def _parameter(config: ModelConfig, key: str) -> str | None:
    entry = config.get("parameters", {}).get(key)
    return None if entry is None else entry["string_value"]


def _int_parameter(config: ModelConfig, key: str) -> int:
    text = _parameter(config, key)
    if text is None:
        return 0
    number = re.match(r"\s*[+-]?\d+", text)
    if number is None:
        raise ContractError(f"failed to convert '{text}' to integral number (parameter '{key}')")
    return int(number[0])


def _bool_parameter(config: ModelConfig, key: str) -> bool | None:
    text = _parameter(config, key)
    if text is None:
        return None
    words = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}
    if text.lower() not in words:
        raise ContractError(f"failed to convert '{text}' to boolean (parameter '{key}')")
    return words[text.lower()]
