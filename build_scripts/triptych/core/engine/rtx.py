"""TensorRT for RTX, which builds without a GPU or driver, behind the interface of `Api`.

It has the parser, builder and strong typing of TensorRT 11 (seen of 1.7.1). What differs, and is
dealt with here: the name of its module, versions of its own, a compute capability that must be
named where there is no GPU, fewer of those, and settings that it has not (`buildable`). It has no
use for times of kernels, which it measures where an engine runs: its timing caches do nothing.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from dataclasses import replace
from typing import Any

from triptych.base.errors import UserError
from triptych.core.engine.api import Api
from triptych.spec.engine_plan import EnginePlan

DISTRIBUTION = "tensorrt-rtx-cu12-bindings"
MODULE = "tensorrt_rtx_bindings"
COMPUTE_CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")
"""That it builds for; 9.0 and 10.0, of data centers, are not among them."""

USUAL = "8.9"
"""Where nothing names a GPU: L4 and L40S, and the nearest to H100 and H200."""

_LIKE_MAJOR = 11
"""The TensorRT whose Python interface it has."""


def installed_version() -> str:
    """Of TensorRT for RTX, such as ``1.7.1.116``; empty where it is not installed."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return ""


def nearest(compute_capability: str) -> str:
    """The newest compute capability it knows that is not newer than this one, else its oldest."""
    wanted = _numbers(compute_capability)
    older = [one for one in COMPUTE_CAPABILITIES if _numbers(one) <= wanted]
    return older[-1] if older else COMPUTE_CAPABILITIES[0]


def buildable(plan: EnginePlan) -> EnginePlan:
    """The plan without what TensorRT for RTX cannot build where there is no GPU.

    A version-compatible plan holds the lean runtime, which its packages lack; for one that can be
    refitted it asks CUDA; other hardware is a setting that it warns of and ignores.
    """
    left_out = {"version_compatible": False, "refit": False, "hardware": "none"}
    return replace(plan, options={**plan.options, **left_out})


class RtxApi(Api):
    """The installed TensorRT for RTX, building for one of `COMPUTE_CAPABILITIES`.

    Raises:
        UserError: it does not load.
    """

    def __init__(self, compute_capability: str) -> None:
        try:
            self.trt: Any = importlib.import_module(MODULE)
        except (ImportError, OSError) as error:  # OSError: a library of NVIDIA's that is missing
            raise UserError(
                MODULE,
                "must load for a rehearsal",
                given=error,
                remedy="Install it again: pip install -e .[tensorrt]",
            ) from error
        self.version = str(self.trt.__version__)
        self.name = f"TensorRT for RTX {self.version}"
        self.major, self.typed = _LIKE_MAJOR, True
        self._target = compute_capability

    def set_target(self, config: Any) -> None:
        """Build for the compute capability given, not for a GPU of this machine."""
        config.num_compute_capabilities = 1
        member = f"SM{self._target.replace('.', '')}"
        config.set_compute_capability(getattr(self.trt.ComputeCapability, member), 0)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
