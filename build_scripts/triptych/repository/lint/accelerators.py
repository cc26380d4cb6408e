"""Checks of execution accelerators of the ONNX Runtime backend (src/onnxruntime.cc, 24.10 to main).

They are of settings without an effect. An unknown accelerator or parameter stops the load of the
model with a message that names it.
"""

from __future__ import annotations

from collections.abc import Iterator

from triptych.repository.lint.snapshot import Flaw, Model, enum_name, names, warning

_OVERWRITTEN = (
    *("cudnn_conv_algo_search", "gpu_mem_limit", "arena_extend_strategy"),
    "do_copy_in_default_stream",
)
"""Options of the CUDA accelerator that the backend replaces by `parameters`, or by its defaults."""


def execution_accelerators(model: Model) -> Iterator[Flaw]:
    """Check that the accelerators of the ONNX Runtime backend and their settings have an effect."""
    if model.backend != "onnxruntime":
        return
    accelerators = model.config.optimization.execution_accelerators
    on_gpu = accelerators.gpu_execution_accelerator
    kinds = {enum_name(group, "kind") for group in model.config.instance_group}
    if on_gpu and kinds and not kinds & {"KIND_GPU", "KIND_AUTO"}:
        yield warning(
            "should have instances on a GPU for gpu_execution_accelerator to do anything",
            f"{names(each.name for each in on_gpu)}, {names(kinds)}",
            "Write kind: KIND_GPU, or remove the accelerator",
        )
    cuda, tensorrt = (
        {key: text for each in on_gpu if each.name == name for key, text in each.parameters.items()}
        for name in ("cuda", "tensorrt")
    )
    lost = [name for name in _OVERWRITTEN if name in cuda]
    if lost:
        yield warning(
            "should not set options of the cuda accelerator that the backend replaces by those of "
            "parameters, or by its defaults",
            names(lost),
            "Set them in parameters of the config",
        )
    in_fp32 = tensorrt.get("precision_mode", "FP32") == "FP32"
    if (
        cuda.get("use_tf32") in ("0", "False", "false")
        and in_fp32
        and "tensorrt" in {e.name for e in on_gpu}
    ):
        # The backend of no release forwards an option for it, and ONNX Runtime has none.
        yield warning(
            "should not run fp32 on the TensorRT accelerator, which rounds the inputs of products "
            "to TF32 in every release",
            f"use_tf32 {cuda['use_tf32']} of the cuda accelerator, which TensorRT ignores",
            "Set NVIDIA_TF32_OVERRIDE=0 in the server's environment, which turns TF32 off for all "
            "of its models, or use core.accelerator: cuda, or allow TF32 with "
            "core.accelerator_options.tf32: true",
        )
