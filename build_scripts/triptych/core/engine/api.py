"""What differs between the releases of TensorRT, in this one place.

Taken from the bindings of 8.6.0, 10.16.1 and 11.1.0 themselves. 8.6 chooses types by flags of the
builder and must be told that the batch is a dimension; 10 is told to keep to the graph's types; 11
always does, and has neither those flags nor the members of enums that name them.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from typing import Any

from triptych.base.errors import UserError

FIRST_TYPED = 10
"""The first major release that keeps to the types of the graph, and the first with INT64."""

_IN_CONTAINER = "Run in the build container: `make engine-in-container NAME=…`"


class Api:
    """One installed release of TensorRT.

    Attributes:
        trt: the module ``tensorrt``.
        version: such as ``10.16.1.11``.
        name: of the product, with its version.
        typed: whether networks keep to the types of their graph.

    Raises:
        UserError: TensorRT is not installed, or is older than 8.6.
    """

    def __init__(self) -> None:
        try:
            self.trt: Any = importlib.import_module("tensorrt")
        except ImportError as error:
            rule = "must be installed where engines are built"
            raise UserError("tensorrt", rule, given=error, remedy=_IN_CONTAINER) from error
        self.version = str(self.trt.__version__)
        major, minor = (int(part) for part in self.version.split(".")[:2])
        if (major, minor) < (8, 6):
            raise UserError(
                "tensorrt", "must be 8.6 or newer", given=self.version, remedy=_IN_CONTAINER
            )
        self.major = major
        self.name = f"TensorRT {self.version}"
        self.typed = major >= FIRST_TYPED

    def network_flags(self) -> int:
        """For `Builder.create_network`. The numbers of flags differ between releases."""
        flags = self.trt.NetworkDefinitionCreationFlag
        if not self.typed:
            return 1 << int(flags.EXPLICIT_BATCH)
        return 1 << int(flags.STRONGLY_TYPED) if self.major == FIRST_TYPED else 0

    def type_flags(self, kinds: Collection[str]) -> list[Any]:
        """Flags of the builder for `core.precision` names; none where the graph says it all.

        Raises:
            UserError: this release does not know one of them.
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
                f"Take fp16, int8 or fp32, or TensorRT {FIRST_TYPED} or newer",
            )
        return [flag for kind in sorted(kinds) for flag in known[kind]]

    def hardware_level(self, name: str) -> Any:
        """The member of `HardwareCompatibilityLevel`; a UserError where there is none."""
        try:
            return getattr(self.trt.HardwareCompatibilityLevel, name.upper())
        except AttributeError:
            remedy = "Take none or ampere_plus, or TensorRT 10.9 or newer"
            raise self._unknown("core.engine.hardware", name, remedy) from None

    def weight_streaming_flag(self) -> Any:
        """The builder's flag; a UserError where there is none."""
        try:
            return self.trt.BuilderFlag.WEIGHT_STREAMING
        except AttributeError:
            raise UserError(
                "core.engine.weight_streaming",
                "must be off before TensorRT 10",
                given=self.name,
                remedy="Remove it, or build with TensorRT 10 or newer",
            ) from None

    def set_target(self, config: Any) -> None:
        """Say what to build for, to a builder's config: this machine's GPU, unless told."""

    def has_monitor(self) -> bool:
        """Whether a build can report its progress."""
        return hasattr(self.trt, "IProgressMonitor")

    def _unknown(self, field: str, given: str, remedy: str) -> UserError:
        rule = f"must be one that {self.name} has"
        return UserError(field, rule, given=given, remedy=remedy)
