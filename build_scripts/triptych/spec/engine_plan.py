"""Expected cost of a row in both layouts, and the plan of a TensorRT engine.

The cost is an estimate from arithmetic: products of the encoder's layers, attention between
tokens, and the start of a run. `bench` and `tune` measure; the estimate serves where nothing can be
measured yet. The plan of an engine is plain data in the build manifest, so that the engine can be
built without the model, the traffic and the spec.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from triptych.base.tensors import INPUT_IDS, LONGEST, ROW_SPAN, ROW_STRIDE, Tensor
from triptych.models.info import ModelInfo
from triptych.runtime.packing_spans import count_slots
from triptych.spec.model_fields import CompiledSpec
from triptych.spec.traffic import Lengths

USUAL_LAYERS = 12
USUAL_HEAD_SIZE = 64
USUAL_WIDENING = 4
"""Ratio of feed-forward size to hidden size in nearly every encoder."""


@dataclass(frozen=True)
class Device:
    """Cost model of a device, in round numbers.

    Attributes:
        flops: Operations per second in large products.
        pair_weight: Cost of attention between two tokens relative to its operations. It includes
            writing and reading the scores, because memory is slower than arithmetic.
        run_us: Time in µs to start a layer without a CUDA graph.
        graph_us: Time in µs to start a layer within a CUDA graph.
    """

    flops: float
    pair_weight: float
    run_us: float
    graph_us: float


CPU = Device(flops=1e11, pair_weight=1.0, run_us=90.0, graph_us=90.0)
"""Two cores with AVX-512 in fp32. A row of 4 tokens took 184 µs in 2 layers of size 128."""

GPU = Device(flops=1e14, pair_weight=6.0, run_us=60.0, graph_us=10.0)
"""GPU of the middle class (A10 to A100) in half precision. Without a graph a layer launches about
20 kernels of 3 µs each; a node of a graph takes half a microsecond.
"""


@dataclass(frozen=True)
class RowCost:
    """Expected time in µs that the device needs for a row of the traffic, in full batches.

    Attributes:
        packed: Rows end to end: each token attends to as many tokens as the longest row has.
        bucketed: Rows padded to planned lengths: the rows of a batch have one length.
    """

    packed: float
    bucketed: float

    @property
    def cheaper(self) -> Literal["packed", "bucketed"]:
        return "packed" if self.packed <= self.bucketed else "bucketed"


def row_cost(
    info: ModelInfo,
    lengths: Lengths,
    edges: Sequence[int],
    *,
    on_gpu: bool,
    rows: int,
    longest: float,
    graphs: bool,
) -> RowCost:
    """Return the estimate for both layouts.

    Args:
        edges: Padded lengths of the bucketed layout.
        rows: Number of rows in a full batch.
        longest: Length of the longest row of a full batch in tokens.
        graphs: Whether CUDA graphs are captured.
    """
    device = GPU if on_gpu else CPU
    layers = info.layers or USUAL_LAYERS
    packed = row_us(info, device, lengths.mean, longest)
    packed += device.run_us * layers / rows
    shares = _shares(lengths, edges)
    bucketed = sum(share * row_us(info, device, edge, edge) for edge, share in shares.items())
    # A batch has one run per padded length among its rows.
    runs = sum(1 - (1 - share) ** rows for share in shares.values())
    each = device.graph_us if graphs else device.run_us
    return RowCost(packed, bucketed + each * layers * runs / rows)


def _shares(lengths: Lengths, edges: Sequence[int]) -> dict[int, float]:
    """Return the fraction of the traffic's rows that is padded to each length."""
    return {
        edge: sum(rows for n, rows in lengths.counts.items() if low < n <= edge) / lengths.rows
        for low, edge in pairwise((0, *edges))
    }


def row_us(info: ModelInfo, device: Device, tokens: float, attended: float) -> float:
    """Return the time in µs for a row of `tokens`, each of which attends to `attended` tokens."""
    hidden = info.hidden_size
    widened = info.intermediate_size or USUAL_WIDENING * hidden
    # Two operations per weight: four square products of attention, two feed-forward products.
    products = 2 * (4 * hidden * hidden + 2 * hidden * widened)
    attention = 4 * hidden * attended * device.pair_weight
    layers = info.layers or USUAL_LAYERS
    return tokens * (products + attention) * layers / device.flops * 1e6


MAX_GRAPHS = 24
"""Maximum number of CUDA graphs of a core. Each takes memory and time at load, in every instance,
and 14 lines of ``config.pbtxt``."""

Dims = tuple[int, ...]


@dataclass(frozen=True)
class ShapeRange:
    """Shapes of an input within a profile, with the batch dimension.

    Kernels are chosen for the optimum.
    """

    minimum: Dims
    optimum: Dims
    maximum: Dims


@dataclass(frozen=True)
class GraphSpec:
    """CUDA graph captured for one shape and used for smaller batches too.

    Attributes:
        batch_size: Number of rows that the graph computes.
        lowest_batch_size: Smallest batch that uses the graph; the other rows are computed in vain.
        inputs: Dims of each input without the batch dimension.
    """

    batch_size: int
    lowest_batch_size: int
    inputs: Mapping[str, Dims]


@dataclass(frozen=True)
class EnginePlan:
    """Inputs of an engine build besides the ONNX file, the TensorRT release and the GPU.

    Attributes:
        precision: Precision of matrix multiplications, as in `core.precision`.
        profiles: Optimization profiles, each a shape range by input. The index of a profile is its
            name in ``instance_group.profile``.
        graph_specs: CUDA graphs; empty for none.
        options: `core.engine` of the spec as plain data.
    """

    precision: str
    profiles: tuple[Mapping[str, ShapeRange], ...]
    graph_specs: tuple[GraphSpec, ...]
    options: Mapping[str, Any]

    def as_dict(self) -> dict[str, object]:
        """Return data for the build manifest that `from_dict` reads."""
        from pydantic import TypeAdapter  # imported late: running an engine does not need pydantic

        plain: dict[str, object] = TypeAdapter(EnginePlan).dump_python(self, mode="json")
        return plain

    @staticmethod
    def from_dict(data: object) -> EnginePlan:
        """Read the plan in a build manifest.

        Raises:
            TypeError: A field is missing or has the wrong type.
        """
        from pydantic import TypeAdapter

        try:
            return TypeAdapter(EnginePlan).validate_json(json.dumps(data), strict=True)
        except ValueError as error:
            raise TypeError(str(error)) from error


def engine_plan(
    spec: CompiledSpec,
    inputs: Sequence[Tensor],
    lengths: Lengths | None,
    edges: Sequence[int],
    max_length: int,
    most: int,
) -> EnginePlan:
    """Return the plan of the engine for a core.

    Args:
        inputs: Inputs of the core, without those that the server adds.
        lengths: Token lengths of the traffic; None for images.
        edges: Padded lengths of the bucketed layout; empty for other layouts.
        max_length: Maximum number of tokens in a row.
        most: Maximum number of rows in a batch.
    """
    options = spec.core.engine
    best = min(options.opt_batch_size or most, most)
    graphs: list[GraphSpec] = []
    if lengths is not None and not edges:
        profiles = [_packed_profile(inputs, best, most, lengths, max_length)]
    else:
        profiles = [
            {
                tensor.name: ShapeRange(*((rows, *dims) for rows in (1, best, most)))
                for tensor, dims in _shapes(inputs, edge)
            }
            for edge in (edges or (0,))
        ]
        if options.cuda_graphs:
            shares = {0: 1.0} if lengths is None else _shares(lengths, edges)
            graphs = _graphs(inputs, shares, most)
    # These options are part of the profiles and of config.pbtxt.
    elsewhere = {"cuda_graphs", "opt_batch_size", "context_memory"}
    return EnginePlan(
        precision=spec.core.precision,
        profiles=tuple(profiles),
        graph_specs=tuple(graphs),
        options=options.model_dump(exclude=elsewhere),
    )


def _packed_profile(
    inputs: Sequence[Tensor], best: int, most: int, lengths: Lengths, max_length: int
) -> dict[str, ShapeRange]:
    """Return the profile of all packed batches; numbers of tokens and rows vary independently."""
    typical = max(1, round(best * lengths.mean))
    tokens = ShapeRange((1,), (min(typical, most * max_length),), (most * max_length,))
    profile = {
        tensor.name: ShapeRange(*((rows, *tensor.config_dims) for rows in (1, best, most)))
        for tensor in inputs
    }
    usual, longest = (count_slots(n) for n in (lengths.quantile(0.99), max_length))
    return {
        **profile,
        INPUT_IDS.name: tokens,
        ROW_SPAN.name: ShapeRange((1,), (best * usual,), (most * longest,)),
        ROW_STRIDE.name: ShapeRange((1,), (best,), (most,)),
        # The span of a request of n rows may exceed its longest row by n - 1.
        LONGEST.name: ShapeRange((1,), (usual,), (longest + most - 1,)),
    }


def graph_sizes(most: int) -> list[int]:
    """Return the numbers of rows that can have a CUDA graph: powers of two, and a full batch."""
    return [1 << power for power in range(most.bit_length()) if 1 << power < most] + [most]


def _graphs(inputs: Sequence[Tensor], shares: Mapping[int, float], most: int) -> list[GraphSpec]:
    """Return the CUDA graphs that save most time per row of the traffic, at most `MAX_GRAPHS`.

    A graph saves the same time in every batch, whatever its shape. So few rows in a batch and a
    frequent length come first.

    Args:
        inputs: Inputs of the core, without those that the server adds.
        shares: Fraction of rows by padded length; 0 is the length of images.
        most: Maximum number of rows in a batch.
    """
    sizes = graph_sizes(most)
    shapes = [(edge, rows) for edge in shares for rows in sizes]
    shapes.sort(key=lambda shape: shares[shape[0]] / shape[1], reverse=True)
    below = dict(zip(sizes, [0, *sizes], strict=False))
    return [
        GraphSpec(
            batch_size=rows,
            lowest_batch_size=below[rows] + 1,
            inputs={tensor.name: dims for tensor, dims in _shapes(inputs, edge)},
        )
        for edge, rows in sorted(shapes[:MAX_GRAPHS])
    ]


def _shapes(inputs: Sequence[Tensor], edge: int) -> list[tuple[Tensor, Dims]]:
    """Return each input with its dims; `edge` replaces the variable axis."""
    return [
        (tensor, tuple(edge if dim == -1 else dim for dim in tensor.config_dims))
        for tensor in inputs
    ]
