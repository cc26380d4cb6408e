"""The operator set that quantised graphs of other types than fp32 need."""

from __future__ import annotations

from typing import Any

OPSET = 19
"""The first whose QuantizeLinear and DequantizeLinear know fp8, and scales of 16 bits."""


def at_opset(model: Any) -> Any:
    """The graph, which is at opset 18 at least, with the operators of `OPSET`; changed in place.

    From 18 to 19 operators gained types and settings, and what they had means the same, so that
    the number is all there is to change.
    """
    declared = next(one for one in model.opset_import if not one.domain)
    declared.version = max(declared.version, OPSET)
    return model
