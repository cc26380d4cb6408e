"""OpenVINO as Triton's OpenVINO backend configures it, for the accuracy gate and local servers.

The backend is src/openvino.cc of triton-inference-server/openvino_backend, releases 24.10 to 26.08.
Without a hint OpenVINO computes fp32 graphs in bf16 on processors that have bf16 instructions, and
the backend has no parameter against it: see `container.processor.FP32_LIMIT`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def compile_model(path: Path, properties: Mapping[str, str]) -> tuple[Any, Any]:
    """Return the `openvino.Model` of an ONNX file or an IR, and its `CompiledModel` on the CPU.

    The backend compares a config with the first: compiling adds names to inputs and outputs.

    Raises:
        RuntimeError: OpenVINO refuses the graph or a property.
    """
    import openvino

    core = openvino.Core()
    model = core.read_model(path)
    return model, core.compile_model(model, "CPU", dict(properties))
