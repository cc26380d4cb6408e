"""Differences between the releases of TensorRT, in one place.

They were read from the bindings of 8.6.0, 10.16.1 and 11.1.0. 8.6 chooses types by builder flags
and needs a flag for the batch dimension. 10 has a flag that makes it keep the graph's types. 11
always keeps them, and lacks those flags and the enum members that name them. No Triton since 24.05
has 8.6; it is still supported because it is the newest TensorRT whose wheels need no other package
index (see the benchmarks on a GPU).
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from typing import Any

from triptych.base.errors import UserError

FIRST_TYPED = 10
"""First major release that keeps the types of the graph, and the first with INT64."""

_IN_CONTAINER = "Run in the build container: `make engine-in-container NAME=…`"


class Api:
    """An installed release of TensorRT.

    Attributes:
        trt: The module ``tensorrt``.
        version: Version such as ``10.16.1.11``.
        name: Product name with version.
        typed: Whether networks keep the types of their graph.

    Raises:
        UserError: TensorRT is not installed, or is older than 8.6.
    """

    def __init__(self) -> None:
        try:
            self.trt: Any = importlib.import_module("tensorrt")
        except ImportError as error:
            rule = "is not installed, and engines cannot be built without it"
            raise UserError("tensorrt", rule, given=error, remedy=_IN_CONTAINER) from error
        self.version = str(self.trt.__version__)
        major, minor = (int(part) for part in self.version.split(".")[:2])
        if (major, minor) < (8, 6):
            raise UserError(
                "tensorrt",
                "is only supported in version 8.6 or newer",
                given=self.version,
                remedy=_IN_CONTAINER,
            )
        self.major = major
        self.name = f"TensorRT {self.version}"
        self.typed = major >= FIRST_TYPED

    def network_flags(self) -> int:
        """Return the flags for `Builder.create_network`.

        The numbers of the flags differ between releases.
        """
        flags = self.trt.NetworkDefinitionCreationFlag
        if not self.typed:
            return 1 << int(flags.EXPLICIT_BATCH)
        return 1 << int(flags.STRONGLY_TYPED) if self.major == FIRST_TYPED else 0

    def type_flags(self, kinds: Collection[str]) -> list[Any]:
        """Return the builder flags for `core.precision` names; none if the graph decides the types.

        Raises:
            UserError: This release does not support one of the names.
        """
        if self.typed:
            return []
        flags = self.trt.BuilderFlag
        known = {
            "fp32": [],
            "fp16": [flags.FP16, flags.OBEY_PRECISION_CONSTRAINTS],
            "int8": [flags.INT8],
        }
        unknown = sorted(set(kinds) - set(known))
        if unknown:
            raise self._unknown(
                "core.precision",
                unknown[0],
                f"Set it to fp16, int8 or fp32, or use TensorRT {FIRST_TYPED} or newer",
            )
        return [flag for kind in sorted(kinds) for flag in known[kind]]

    def hardware_level(self, name: str) -> Any:
        """Return the member of `HardwareCompatibilityLevel`; raise a UserError if there is none."""
        try:
            return getattr(self.trt.HardwareCompatibilityLevel, name.upper())
        except AttributeError:
            remedy = "Set it to none or ampere_plus, or use TensorRT 10.9 or newer"
            raise self._unknown("core.engine.hardware", name, remedy) from None

    def weight_streaming_flag(self) -> Any:
        """Return the builder's flag; raise a UserError if it does not exist."""
        try:
            return self.trt.BuilderFlag.WEIGHT_STREAMING
        except AttributeError:
            raise UserError(
                "core.engine.weight_streaming",
                "is only supported by TensorRT 10 or newer",
                given=self.name,
                remedy="Remove it, or build with TensorRT 10 or newer",
            ) from None

    def set_target(self, config: Any) -> None:
        """Set the GPU to build for in a builder's config; the default is this machine's GPU."""

    def has_monitor(self) -> bool:
        """Return whether a build can report its progress."""
        return hasattr(self.trt, "IProgressMonitor")

    def _unknown(self, field: str, given: str, remedy: str) -> UserError:
        rule = f"has a value that {self.name} does not support"
        return UserError(field, rule, given=given, remedy=remedy)
