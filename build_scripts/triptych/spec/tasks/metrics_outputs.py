"""Reading the decoded outputs of one request, whatever a candidate made; what comparing gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Outputs = Mapping[str, NDArray[Any]]
"""What the ensemble returns for one request, by name, each ``[1, ...]``."""


@dataclass(frozen=True)
class Comparison:
    """A candidate against the reference.

    Attributes:
        values: metric to value, as `tasks.accuracy.METRICS` has them; never NaN. A metric that
            these requests cannot show (neighbours of a single text) is absent.
        badness: of each request, 0 where it is equal and higher the worse it is; infinite where
            an output is not finite or missing. Comparable within one task.
    """

    values: Mapping[str, float]
    badness: Sequence[float]


Compare = Callable[[Sequence[Outputs], Sequence[Outputs], Sequence[str]], Comparison]
"""Compares a candidate's outputs with the reference's, one or more requests; last, the input
``text`` of each, by which passages are grouped.

What is not finite never passes: such a request disagrees, its difference is infinite, and a
correlation over it is -1. Scores within `ranks.TIE` of the reference's best are as good.
"""


def texts(outputs: Outputs, name: str) -> list[str]:
    """The elements of a BYTES output, none where it is missing."""
    values = outputs[name].ravel().tolist() if name in outputs else []
    return [v.decode("utf-8", "replace") if isinstance(v, bytes) else str(v) for v in values]


def numbers(outputs: Outputs, name: str) -> NDArray[np.float64]:
    """The elements of a numeric output, flat; none where it is missing."""
    values = outputs[name] if name in outputs else np.empty(0)
    return np.asarray(values, dtype=np.float64).ravel()


def finite(values: NDArray[Any]) -> bool:
    return bool(np.isfinite(values).all())
