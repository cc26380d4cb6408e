"""The precisions a core can have, and which backend computes in which."""

from __future__ import annotations

from typing import Literal

from triptych.base.errors import UserError

Precision = Literal["fp32", "fp16", "bf16", "int8", "int8_dynamic", "fp8"]
"""Of the core's weights and activations. ``int8``: activation ranges are fixed at build, by
calibration rows; ``int8_dynamic``: each token has a range of its own, found while serving."""


_REFUSED: dict[tuple[str, str], dict[str, str]] = {
    ("onnxruntime", "cpu"): {
        "bf16": "ONNX Runtime has no bf16 kernels for a CPU; int8 is the fast one there",
        "fp8": "no CPU computes in fp8, and ONNX Runtime takes it for int8; int8 is the fast one",
    },
    ("tensorrt", "gpu"): {
        "int8_dynamic": "TensorRT has ranges fixed when it builds; int8 finds them by calibration",
    },
    ("onnxruntime", "gpu"): {
        "fp8": "ONNX Runtime takes fp8 for int8 where it fuses; fp16 is the fast one there",
    },
}
"""Backend and device to the precisions that would not be served right there, and why."""


def check_runs(precision: str, backend: str, device: str) -> None:
    """The backend computes in `precision` on the device.

    Raises:
        UserError: it does not.
    """
    reason = _REFUSED.get((backend, device), {}).get(precision)
    if reason is not None:
        raise UserError(
            "core.precision",
            f"must be one that {backend} runs on a {device}",
            given=precision,
            remedy=reason[0].upper() + reason[1:],
        )
