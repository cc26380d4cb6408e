"""Triton backends that run a compiled core: devices, layouts, batching and precisions of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Precision = Literal["fp32", "fp16", "bf16", "int8", "int8_dynamic", "fp8"]
"""Precision of the core's weights and activations. ``int8`` has activation ranges fixed by
calibration rows at build; ``int8_dynamic`` computes a range for each token while serving."""

BackendName = Literal["onnxruntime", "tensorrt", "openvino"]
DeviceName = Literal["cpu", "gpu"]


@dataclass(frozen=True)
class CoreBackend:
    """Properties of a backend.

    Attributes:
        devices: Devices that it supports; the first is the default.
        layouts: Values of `core.layout` that it supports; the first is the default.
        batches: Whether it runs several requests as one batch. Otherwise the rows of one request
            are a batch, and the config has the batch dimension in `dims`.
        bucket_count: Default of `core.bucket_count`. More lengths are less padding, but fewer rows
            of one length, which only matters to a backend that joins them.
        refused: Precisions that it cannot compute correctly on a device, each with the reason.
        tried: Precisions that ``precision: auto`` measures on a device.
        rounded: Precisions in which it computes the fp32 graph as it is; others need a converted
            graph.
        runs_gate: Whether the accuracy gate runs a core with the library of the backend itself,
            after ONNX Runtime has shown that the fp32 graph is right.
    """

    devices: tuple[DeviceName, ...]
    layouts: tuple[str, ...] = ("packed", "bucketed", "auto")
    batches: bool = True
    bucket_count: int = 6
    refused: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    tried: Mapping[str, tuple[Precision, ...]] = field(default_factory=dict)
    rounded: tuple[Precision, ...] = ("fp32",)
    runs_gate: bool = False


BACKENDS: Mapping[str, CoreBackend] = {
    "onnxruntime": CoreBackend(
        devices=("cpu", "gpu"),
        refused={
            "cpu": {
                "bf16": "ONNX Runtime has no bf16 kernels for a CPU; int8 is the fast one there",
                "fp8": "no CPU computes in fp8, and ONNX Runtime takes it for int8; int8 is the "
                "fast one",
            },
            "gpu": {
                "fp8": "ONNX Runtime takes fp8 for int8 where it fuses; fp16 is the fast one there",
            },
        },
        # ONNX Runtime computes fp16 in fp32 on a CPU. Some models are still faster in fp16, because
        # they are smaller.
        tried={"cpu": ("fp32", "int8", "int8_dynamic", "fp16")},
    ),
    "tensorrt": CoreBackend(
        devices=("gpu",),
        refused={
            "gpu": {
                "int8_dynamic": "TensorRT has ranges fixed when it builds; int8 finds them by "
                "calibration",
            },
        },
        tried={"gpu": ("fp32", "fp16", "bf16", "int8", "fp8")},
    ),
    # src/openvino.cc of triton-inference-server/openvino_backend: with max_batch_size the batch
    # dimension becomes static, and a request of fewer rows is refused or padded to it.
    "openvino": CoreBackend(
        devices=("cpu",),
        layouts=("bucketed",),
        batches=False,
        bucket_count=32,
        refused={
            "cpu": {
                "fp16": "OpenVINO computes fp16 in fp32 or bf16 on a CPU; bf16 is the fast one",
                "fp8": "no CPU computes in fp8; bf16 is the fast one",
                "int8_dynamic": "OpenVINO computes layers with a range for each token in fp32; "
                "int8 is the fast one",
            },
        },
        tried={"cpu": ("fp32", "bf16", "int8")},
        rounded=("fp32", "bf16"),
        runs_gate=True,
    ),
}
