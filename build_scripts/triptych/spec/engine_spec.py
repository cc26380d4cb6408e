"""What a TensorRT engine is built from: shapes of its profiles, CUDA graphs, precision, options.

Pure data, derived by `plan` and kept in the lock, so that the engine can be built where neither
the model, the traffic nor the spec is: in the image that will serve it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Dims = tuple[int, ...]


@dataclass(frozen=True)
class ShapeRange:
    """Shapes that one input may have within a profile, batch dimension included.

    Kernels are chosen for the optimum.
    """

    minimum: Dims
    optimum: Dims
    maximum: Dims


@dataclass(frozen=True)
class GraphSpec:
    """One CUDA graph: captured for one shape, used for all batches down to a lower bound.

    Attributes:
        batch_size: rows it computes.
        lowest_batch_size: fewest rows it is used for; the others are computed for nothing.
        inputs: by input: its dims without the batch dimension.
    """

    batch_size: int
    lowest_batch_size: int
    inputs: Mapping[str, Dims]


@dataclass(frozen=True)
class EnginePlan:
    """All that decides an engine besides the ONNX file, the TensorRT release and the GPU.

    Attributes:
        precision: of the matrix multiplications, as `core.precision` names it.
        profiles: optimization profiles in order, each by input name; a profile's place is its name
            in ``instance_group.profile``.
        graph_specs: CUDA graphs; none to capture none.
        options: `core.engine` of the spec, as plain data.
    """

    precision: str
    profiles: tuple[Mapping[str, ShapeRange], ...]
    graph_specs: tuple[GraphSpec, ...]
    options: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """For the lock: data that JSON gives back as it is, and that `from_dict` reads."""
        from pydantic import TypeAdapter  # not where an engine only runs

        plain: dict[str, Any] = TypeAdapter(EnginePlan).dump_python(self, mode="json")
        return plain

    @staticmethod
    def from_dict(data: object) -> EnginePlan:
        """The plan that a lock holds.

        Raises:
            TypeError: a field is missing, or of another kind.
        """
        from pydantic import TypeAdapter

        try:
            return TypeAdapter(EnginePlan).validate_json(json.dumps(data), strict=True)
        except ValueError as error:
            raise TypeError(str(error)) from error
