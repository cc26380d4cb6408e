"""What a row is expected to cost on the traffic, in either layout: an estimate to choose by.

Arithmetic only: products of the encoder's layers, attention between tokens, and what starting a
run costs. Measuring is `bench`'s and `tune`'s job; this is for where nothing can be measured yet.

What a TensorRT engine is built from: shapes of its profiles, CUDA graphs, precision, options.

Pure data, derived by `plan` and kept in the lock, so that the engine can be built where neither
the model, the traffic nor the spec is: in the image that will serve it.

What a TensorRT core needs besides: optimization profiles and CUDA graphs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from triptych.base.tensors import INPUT_IDS, LONGEST, ROW_SPAN, ROW_STRIDE, Tensor
from triptych.runtime.packed_rows import slots_of
from triptych.spec.model_facts import ModelFacts
from triptych.spec.spec import PipelineSpec
from triptych.spec.traffic import Lengths

USUAL_LAYERS = 12
USUAL_HEAD_SIZE = 64
USUAL_WIDENING = 4
"""Feed-forward size over hidden size, of nearly every encoder."""


@dataclass(frozen=True)
class Device:
    """What computes, in round numbers.

    Attributes:
        flops: operations a second that large products reach.
        pair_weight: what attention between two tokens costs beside its operations: its scores
            are written and read, and memory is slower than arithmetic.
        run_us: starting one run, a microsecond a kernel and more where no CUDA graph holds them.
        graph_us: the same where one does.
    """

    flops: float
    pair_weight: float
    run_us: float
    graph_us: float


CPU = Device(flops=1e11, pair_weight=1.0, run_us=90.0, graph_us=90.0)
"""Two cores with AVX-512, fp32. A row of 4 tokens took 184 us through 2 layers of size 128."""

GPU = Device(flops=1e14, pair_weight=6.0, run_us=60.0, graph_us=10.0)
"""Of the middle class (an A10 to an A100, half precision); `run_us` and `graph_us` are a layer's:
about 20 kernels of 3 us each to launch, or a graph's node of half a microsecond."""


@dataclass(frozen=True)
class RowCost:
    """Microseconds of the device that a row of the traffic takes, in full batches.

    Attributes:
        packed: rows end to end: a token is compared with as many as the batch's longest row has.
        bucketed: rows padded to the planned lengths: a batch has rows of one length only.
    """

    packed: float
    bucketed: float

    @property
    def cheaper(self) -> Literal["packed", "bucketed"]:
        return "packed" if self.packed <= self.bucketed else "bucketed"


def row_cost(
    facts: ModelFacts,
    lengths: Lengths,
    edges: Sequence[int],
    *,
    on_gpu: bool,
    rows: int,
    longest: float,
    graphs: bool,
) -> RowCost:
    """The estimate for both layouts.

    A full batch has `rows` rows, the longest of `longest` tokens. In the bucketed layout rows are
    padded to `edges`, and CUDA graphs may be captured for a batch.
    """
    device = GPU if on_gpu else CPU
    layers = facts.layers or USUAL_LAYERS
    packed = _row_us(facts, device, lengths.mean, longest)
    packed += device.run_us * layers / rows
    shares = [
        (edge, sum(rows for n, rows in lengths.counts.items() if low < n <= edge) / lengths.rows)
        for low, edge in pairwise((0, *edges))
    ]
    bucketed = sum(share * _row_us(facts, device, edge, edge) for edge, share in shares)
    # Rows of one length share a run: a batch makes as many runs as it has lengths.
    runs = sum(1 - (1 - share) ** rows for _, share in shares)
    each = device.graph_us if graphs else device.run_us
    return RowCost(packed, bucketed + each * layers * runs / rows)


def _row_us(facts: ModelFacts, device: Device, tokens: float, attended: float) -> float:
    """Microseconds for one row of `tokens`, each of which attends to `attended` tokens."""
    hidden = facts.hidden_size
    widened = facts.intermediate_size or USUAL_WIDENING * hidden
    # Two operations a weight: four square products of attention, two of the feed-forward part.
    products = 2 * (4 * hidden * hidden + 2 * hidden * widened)
    attention = 4 * hidden * attended * device.pair_weight
    layers = facts.layers or USUAL_LAYERS
    return tokens * (products + attention) * layers / device.flops * 1e6


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


def engine_plan(
    spec: PipelineSpec,
    inputs: Sequence[Tensor],
    packed: Lengths | None,
    edges: Sequence[int],
    max_length: int,
    most: int,
) -> EnginePlan:
    """What the engine of a core is built from, whose batches have at most `most` rows.

    `inputs` are without what the server adds; `packed` are the lengths of the traffic's rows where
    rows come end to end, `edges` the padded lengths where they are padded.
    """
    options = spec.core.engine
    best = min(options.opt_batch_size or most, most)
    profiles = [
        {
            tensor.name: ShapeRange(*((rows, *dims) for rows in (1, best, most)))
            for tensor, dims in _shapes(inputs, edge)
        }
        for edge in (edges or (0,))
    ]
    if packed is not None:
        profiles = [_packed_profile(inputs, best, most, packed, max_length)]
    graphs = packed is None and options.cuda_graphs
    # What else the spec says of an engine is in its profiles and the config.
    elsewhere = {"cuda_graphs", "opt_batch_size", "context_memory"}
    return EnginePlan(
        precision=spec.core.precision,
        profiles=tuple(profiles),
        graph_specs=tuple(_graphs(inputs, edges, most)) if graphs else (),
        options=options.model_dump(exclude=elsewhere),
    )


def _packed_profile(
    inputs: Sequence[Tensor], best: int, most: int, lengths: Lengths, max_length: int
) -> dict[str, ShapeRange]:
    """The one profile that spans all packed batches: tokens and rows vary, each by itself."""
    typical = max(1, round(best * lengths.mean))
    tokens = ShapeRange((1,), (min(typical, most * max_length),), (most * max_length,))
    profile = {
        tensor.name: ShapeRange(*((rows, *tensor.config_dims) for rows in (1, best, most)))
        for tensor in inputs
    }
    usual, longest = (slots_of(n) for n in (lengths.quantile(0.99), max_length))
    return {
        **profile,
        INPUT_IDS.name: tokens,
        ROW_SPAN.name: ShapeRange((1,), (best * usual,), (most * longest,)),
        ROW_STRIDE.name: ShapeRange((1,), (best,), (most,)),
        # A request of n rows may exceed its longest one by n - 1.
        LONGEST.name: ShapeRange((1,), (usual,), (longest + most - 1,)),
    }


def _graphs(inputs: Sequence[Tensor], edges: Sequence[int], most: int) -> list[GraphSpec]:
    """One for each length and power of two: it also takes the batches down to the last one's."""
    sizes = [1 << power for power in range(most.bit_length()) if 1 << power < most] + [most]
    return [
        GraphSpec(
            batch_size=size,
            lowest_batch_size=below + 1,
            inputs={tensor.name: dims for tensor, dims in _shapes(inputs, edge)},
        )
        for edge in (edges or (0,))
        for below, size in zip([0, *sizes], sizes, strict=False)
    ]


def _shapes(inputs: Sequence[Tensor], edge: int) -> list[tuple[Tensor, Dims]]:
    """Each input's dims, the axis that varies being `edge`."""
    return [
        (tensor, tuple(edge if dim == -1 else dim for dim in tensor.config_dims))
        for tensor in inputs
    ]
