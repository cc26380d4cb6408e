"""Releases of TensorRT, and TensorRT for RTX, behind one interface.

Their differences were read from the bindings of 10.16.1 and 11.1.0. 10 needs a flag to keep the
types of the graph. 11 always keeps them and lacks the flag.

TensorRT for RTX builds without a GPU or driver. It has the parser, builder and strong typing of
TensorRT 11 (seen in 1.7.1). It differs in the name of its module, in its version numbers, in fewer
compute capabilities, one of which must be named without a GPU, and in missing settings
(`remove_unsupported`). It measures kernels where an engine runs, so its timing caches do nothing.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from triptych.base.errors import UserError
from triptych.base.extras import install_command
from triptych.container.machine import version_numbers
from triptych.spec.engine_plan import EnginePlan

if TYPE_CHECKING:
    import tensorrt as trt

_OLDEST_MAJOR = 10
"""Oldest major release in a supported Triton, and the first that keeps the types of the graph."""

_IN_CONTAINER = (
    "Run in the build container: `make engine-in-container NAME=…` in a clone of Triptych"
)


class Api:
    """An installed release of TensorRT.

    Attributes:
        trt: The module ``tensorrt``.
        version: Version such as ``10.16.1.11``.
        name: Product name with version.

    Raises:
        UserError: TensorRT is not installed, or is older than 10.
    """

    def __init__(self) -> None:
        try:
            self.trt: Any = importlib.import_module("tensorrt")
        except ImportError as error:
            rule = "is not installed, and engines cannot be built without it"
            raise UserError("tensorrt", rule, given=error, remedy=_IN_CONTAINER) from error
        self.version = str(self.trt.__version__)
        self.major = int(self.version.partition(".")[0])
        if self.major < _OLDEST_MAJOR:
            raise UserError(
                "tensorrt",
                f"is only supported in version {_OLDEST_MAJOR} or newer",
                given=self.version,
                remedy=_IN_CONTAINER,
            )
        self.name = f"TensorRT {self.version}"

    def network_flags(self) -> int:
        """Return the flags with which `Builder.create_network` keeps the types of the graph."""
        if self.major > _OLDEST_MAJOR:
            return 0
        return 1 << int(self.trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)

    def hardware_level(self, name: str) -> trt.HardwareCompatibilityLevel:
        """Return the member of `HardwareCompatibilityLevel`; raise a UserError if there is none."""
        try:
            return getattr(self.trt.HardwareCompatibilityLevel, name.upper())
        except AttributeError:
            raise UserError(
                "core.engine.hardware",
                f"has a value that {self.name} does not support",
                given=name,
                remedy="Set it to none or ampere_plus, or use TensorRT 10.9 or newer",
            ) from None

    def set_target(self, config: trt.IBuilderConfig) -> None:
        """Set the GPU to build for in a builder's config; the default is this machine's GPU."""


RTX_DISTRIBUTION = "tensorrt-rtx-cu12-bindings"
RTX_MODULE = "tensorrt_rtx_bindings"
COMPUTE_CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")
"""Compute capabilities that it builds for. The data center GPUs' 9.0 and 10.0 are not among them.
"""

USUAL_CAPABILITY = "8.9"
"""Compute capability if no GPU is known: L4 and L40S, and the nearest to H100 and H200."""

_LIKE_MAJOR = 11
"""Major release of TensorRT with the same Python interface."""


def installed_rtx_version() -> str:
    """Return the version of TensorRT for RTX, such as ``1.7.1.116``; empty if not installed."""
    try:
        return importlib.metadata.version(RTX_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return ""


def nearest_capability(compute_capability: str) -> str:
    """Return the newest known compute capability that is not newer than this; else the oldest."""
    wanted = version_numbers(compute_capability)
    older = [one for one in COMPUTE_CAPABILITIES if version_numbers(one) <= wanted]
    return older[-1] if older else COMPUTE_CAPABILITIES[0]


def remove_unsupported(plan: EnginePlan) -> EnginePlan:
    """Return the plan without settings that TensorRT for RTX cannot build without a GPU.

    A version-compatible plan contains the lean runtime, which its packages lack. A plan that can be
    refitted needs CUDA. Other hardware is a setting that it ignores with a warning.
    """
    left_out = {"version_compatible": False, "refit": False, "hardware": "none"}
    return replace(plan, options={**plan.options, **left_out})


class RtxApi(Api):
    """The installed TensorRT for RTX, building for one of `COMPUTE_CAPABILITIES`.

    Raises:
        UserError: It cannot be loaded.
    """

    def __init__(self, compute_capability: str) -> None:
        try:
            self.trt: Any = importlib.import_module(RTX_MODULE)
        except (ImportError, OSError) as error:  # OSError: a missing library of NVIDIA's
            raise UserError(
                RTX_MODULE,
                "cannot be loaded for a dry run",
                given=error,
                remedy=f"Install it again: {install_command('tensorrt')}",
            ) from error
        self.version = str(self.trt.__version__)
        self.name = f"TensorRT for RTX {self.version}"
        self.major = _LIKE_MAJOR
        self._target = compute_capability

    def set_target(self, config: trt.IBuilderConfig) -> None:
        """Set the given compute capability as target, instead of a GPU of this machine."""
        config.num_compute_capabilities = 1
        member = f"SM{self._target.replace('.', '')}"
        config.set_compute_capability(getattr(self.trt.ComputeCapability, member), 0)
