"""Arrays whose element type is known only when a model or a request is read."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]
"""Array with elements of any type, such as an input or output that a graph declares."""
