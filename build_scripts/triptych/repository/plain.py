"""Results as plain data, for JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def json_text(value: Any) -> str:
    """The content of a file with `value` as plain data."""
    return json.dumps(plain_data(value), indent=2, allow_nan=False) + "\n"


def plain_data(value: Any) -> Any:
    """`value` with dicts and lists for all mappings and sequences; what is no number is None."""
    if isinstance(value, Mapping):
        return {str(name): plain_data(held) for name, held in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(held) for held in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
