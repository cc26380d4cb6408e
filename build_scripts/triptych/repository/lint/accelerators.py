"""Checks of execution accelerators of the ONNX Runtime backend (src/onnxruntime.cc, 24.10 to main).

An unknown accelerator or parameter, or a value of another type, stops the load of the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from triptych.repository.lint.snapshot import Flaw, Model, enum_name, error, names, warning

if TYPE_CHECKING:
    from tritonclient.grpc.model_config_pb2 import ModelOptimizationPolicy

_BOOLEANS = ("true", "on", "1", "false", "off", "0")
_ORT_FALSE, _ORT_TRUE = ("0", "False", "false"), ("1", "True", "true")
_MODES = ("FP32", "FP16", "BF16", "INT8")


def _is_bool(text: str) -> bool:
    return text.lower() in _BOOLEANS


def _is_int(text: str) -> bool:
    return re.fullmatch(r"[+-]?\d+", text) is not None


def _is_size(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _is_any(_: str) -> bool:
    return True


_OF_TYPE: Mapping[str, tuple[Callable[[str], bool], str]] = {
    "mode": (lambda text: text in _MODES, names(_MODES)),
    "size": (_is_size, "a number of bytes"),
    "int": (_is_int, "an integer"),
    "bool": (_is_bool, "true or false"),
    "text": (_is_any, "text"),
}
_TENSORRT: Mapping[str, str] = {
    "precision_mode": "mode",
    "max_workspace_size_bytes": "size",
    **dict.fromkeys(
        (
            *("trt_max_partition_iterations", "trt_min_subgraph_size", "trt_dla_core"),
            *("trt_builder_optimization_level", "trt_auxiliary_streams"),
            "trt_ep_context_embed_mode",
        ),
        "int",
    ),
    **dict.fromkeys(
        (
            *("int8_use_native_calibration_table", "trt_dla_enable", "trt_engine_cache_enable"),
            *("trt_dump_subgraphs", "trt_force_sequential_engine_build"),
            *("trt_context_memory_sharing_enable", "trt_layer_norm_fp32_fallback"),
            *("trt_timing_cache_enable", "trt_force_timing_cache", "trt_detailed_build_log"),
            *("trt_build_heuristics_enable", "trt_sparsity_enable", "trt_cuda_graph_enable"),
            "trt_dump_ep_context_model",
        ),
        "bool",
    ),
    **dict.fromkeys(
        (
            *("int8_calibration_table_name", "trt_engine_cache_path", "trt_engine_cache_prefix"),
            *("trt_timing_cache_path", "trt_tactic_sources", "trt_extra_plugin_lib_paths"),
            *("trt_profile_min_shapes", "trt_profile_max_shapes", "trt_profile_opt_shapes"),
            "trt_ep_context_file_path",
        ),
        "text",
    ),
}
"""Parameters of the TensorRT accelerator with their types."""

_OVERWRITTEN = (
    *("cudnn_conv_algo_search", "gpu_mem_limit", "arena_extend_strategy"),
    "do_copy_in_default_stream",
)
"""Options of the CUDA accelerator that the backend replaces by `parameters`, or by its defaults."""


def execution_accelerators(model: Model) -> Iterator[Flaw]:
    """Check that the ONNX Runtime backend knows the accelerators and their parameters."""
    if model.backend != "onnxruntime":
        return
    accelerators = model.config.optimization.execution_accelerators
    on_gpu = accelerators.gpu_execution_accelerator
    for kind, listed, known in (
        ("gpu", on_gpu, ("tensorrt", "cuda")),
        ("cpu", accelerators.cpu_execution_accelerator, ("openvino",)),
    ):
        unknown = [each.name for each in listed if each.name not in known]
        if unknown:
            yield error(
                f"must have {kind}_execution_accelerators that the ONNX Runtime backend knows",
                names(unknown),
                f"Use {names(known)}",
            )
    kinds = {enum_name(group, "kind") for group in model.config.instance_group}
    if on_gpu and kinds and not kinds & {"KIND_GPU", "KIND_AUTO"}:
        yield warning(
            "should have instances on a GPU for gpu_execution_accelerator to do anything",
            f"{names(each.name for each in on_gpu)}, {names(kinds)}",
            "Write kind: KIND_GPU, or remove the accelerator",
        )
    for each in on_gpu:
        yield from _parameters(each)
    cuda, tensorrt = (
        {key: text for each in on_gpu if each.name == name for key, text in each.parameters.items()}
        for name in ("cuda", "tensorrt")
    )
    in_fp32 = tensorrt.get("precision_mode", "FP32") == "FP32"
    if cuda.get("use_tf32") in _ORT_FALSE and in_fp32 and "tensorrt" in {e.name for e in on_gpu}:
        # The backend of no release forwards an option for it, and ONNX Runtime has none.
        yield warning(
            "should not run fp32 on the TensorRT accelerator, which rounds the inputs of products "
            "to TF32 in every release",
            f"use_tf32 {cuda['use_tf32']} of the cuda accelerator, which TensorRT ignores",
            "Set NVIDIA_TF32_OVERRIDE=0 in the server's environment, which turns TF32 off for all "
            "of its models, or use core.accelerator: cuda, or allow TF32 with "
            "core.accelerator_options.tf32: true",
        )


def _parameters(
    accelerator: ModelOptimizationPolicy.ExecutionAccelerators.Accelerator,
) -> Iterator[Flaw]:
    given = dict(accelerator.parameters)
    if accelerator.name == "cuda":
        tf32 = given.get("use_tf32", "0")
        if tf32 not in (*_ORT_FALSE, *_ORT_TRUE):
            yield error(
                "must be 0 or 1 for the cuda accelerator", f"use_tf32 {tf32}", "Correct the value"
            )
        lost = [name for name in _OVERWRITTEN if name in given]
        if lost:
            yield warning(
                "should not set options of the cuda accelerator that the backend replaces by those "
                "of parameters, or by its defaults",
                names(lost),
                "Set them in parameters of the config",
            )
        return
    if accelerator.name != "tensorrt":
        return
    for name, text in sorted(given.items()):
        if name not in _TENSORRT:
            yield error(
                "must have parameters that the TensorRT accelerator knows",
                name,
                f"Use one of {names(_TENSORRT)}",
            )
            continue
        holds, values = _OF_TYPE[_TENSORRT[name]]
        if not holds(text):
            yield error(
                f"must be {values} for the TensorRT accelerator",
                f"{name} {text}",
                "Correct the parameter",
            )
