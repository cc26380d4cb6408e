"""Differences between the releases of TensorRT, in one place.

They were read from the bindings of 10.16.1 and 11.1.0. 10 needs a flag to keep the types of the
graph. 11 always keeps them and lacks the flag.
"""

from __future__ import annotations

import importlib
from typing import Any

from triptych.base.errors import UserError

_OLDEST_MAJOR = 10
"""Oldest major release in a supported Triton, and the first that keeps the types of the graph."""

_IN_CONTAINER = "Run in the build container: `make engine-in-container NAME=…`"


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

    def hardware_level(self, name: str) -> Any:
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

    def set_target(self, config: Any) -> None:
        """Set the GPU to build for in a builder's config; the default is this machine's GPU."""
