"""Reading the decoded outputs of one request: texts and numbers, whatever a candidate made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Outputs = Mapping[str, NDArray[Any]]
"""What the ensemble returns for one request, by name, each ``[1, ...]``."""


def texts(outputs: Outputs, name: str) -> list[str]:
    """The elements of a BYTES output, none where it is missing."""
    values = outputs[name].ravel().tolist() if name in outputs else []
    return [v.decode("utf-8", "replace") if isinstance(v, bytes) else str(v) for v in values]


def numbers(outputs: Outputs, name: str) -> NDArray[np.float64]:
    """The elements of a numeric output, flat; none where it is missing."""
    values = outputs[name] if name in outputs else np.empty(0)
    return np.asarray(values, dtype=np.float64).ravel()


def finite(values: NDArray[Any]) -> bool:
    """Whether there is neither NaN nor infinity."""
    return bool(np.isfinite(values).all())
