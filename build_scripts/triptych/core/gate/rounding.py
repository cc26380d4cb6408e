"""PyTorch's own rounding: what the reference in fp32 makes of the same rows in fp64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from triptych.base.errors import Progress
from triptych.core.gate.reference_rows import reference_of
from triptych.core.inputs import PipelineInputs
from triptych.core.samples import Expected, rows_of

ROUNDING_ROWS = 32
"""Rows of the gate that are also run in fp64, evenly spaced: it takes twice the time of fp32."""


def measure_rounding(
    inputs: PipelineInputs, expected: Sequence[Expected], progress: Progress
) -> float | None:
    """Largest difference of fp32 from fp64, on the scale of `max_difference`.

    None where the model does not run in fp64, or a result is not finite.

    Args:
        inputs: of the pipeline.
        expected: what the reference made of all of the gate's rows in fp32.
        progress: told of damaged entries of the cache.
    """
    rows = rows_of(inputs.requests)
    step = -(-len(rows) // ROUNDING_ROWS)
    try:
        exact = reference_of(inputs, rows[::step], progress, double=True)
    except (RuntimeError, TypeError, ValueError, MemoryError):  # a model made for fp32 alone
        return None
    return _largest_difference(expected[::step], exact, expected)


def _largest_difference(
    rounded: Sequence[Expected], exact: Sequence[Expected], every: Sequence[Expected]
) -> float | None:
    largest = 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        for part in range(len(exact[0])):
            scale = np.max([1.0, *(np.abs(row[part]).max(initial=0) for row in every)])
            for own, right in zip(rounded, exact, strict=True):
                off = np.abs(np.subtract(own[part], right[part], dtype=np.float64))
                largest = float(np.maximum(largest, off.max(initial=0) / scale))
    return largest if np.isfinite(largest) else None
