"""Parameters of Triton's OpenVINO backend, as `ParseParameters` of src/openvino.cc reads them."""

from __future__ import annotations

from collections.abc import Mapping

NUMBERS = ("INFERENCE_NUM_THREADS", "COMPILATION_NUM_THREADS")
HINTS = ("LATENCY", "THROUGHPUT", "CUMULATIVE_THROUGHPUT")
SWITCHES = ("SKIP_OV_DYNAMIC_BATCHSIZE", "ENABLE_BATCH_PADDING", "RESHAPE_IO_LAYERS")
"""Parameters that are on for ``YES`` and off for any other value."""

KNOWN = (
    *(*NUMBERS, *SWITCHES, "HINT_BF16", "NUM_STREAMS", "PERFORMANCE_HINT"),
    *("CPU_EXTENSION_PATH", "TARGET_DEVICE"),
)
"""Parameters that the backend reads; it ignores others."""


def properties_of(parameters: Mapping[str, str]) -> dict[str, str]:
    """Return OpenVINO's properties for the `parameters` of a config, as the backend sets them.

    Raises:
        ValueError: The backend refuses a value, and does not load the model.
    """
    properties = {}
    for key in NUMBERS:
        if text := parameters.get(key, ""):
            _check(_is_number(text), key, "a non-negative number", text)
            properties[key] = text
    if text := parameters.get("HINT_BF16", ""):
        _check(text.lower() == "yes", "HINT_BF16", "YES", text)
        properties["INFERENCE_PRECISION_HINT"] = "bf16"
    if text := parameters.get("NUM_STREAMS", ""):
        is_known = text.upper() in ("AUTO", "NUMA") or _is_number(text)
        _check(is_known, "NUM_STREAMS", "either AUTO/NUMA/<int_value>", text)
        properties["NUM_STREAMS"] = text.upper()
    if text := parameters.get("PERFORMANCE_HINT", ""):
        _check(text.upper() in HINTS, "PERFORMANCE_HINT", "/".join(HINTS), text)
        properties["PERFORMANCE_HINT"] = text.upper()
    return properties


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _check(holds: bool, key: str, values: str, given: str) -> None:
    if not holds:
        raise ValueError(f"expected the parameter '{key}' to be {values}, got {given}")
