"""The options of an engine plan as they are without any setting."""

from __future__ import annotations

from typing import Any

OPTIONS: dict[str, Any] = {
    "workspace_mib": None,
    "optimization_level": None,
    "version_compatible": False,
    "hardware": "none",
    "refit": False,
    "weight_streaming": False,
    "tf32": False,
}
