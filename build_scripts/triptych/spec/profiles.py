"""What a TensorRT core needs besides: optimization profiles and CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.base.tensors import INPUT_IDS, LONGEST, ROW_SPAN, ROW_STRIDE, Tensor
from triptych.runtime.packed_rows import slots_of
from triptych.spec.engine_spec import Dims, EnginePlan, GraphSpec, ShapeRange
from triptych.spec.spec import PipelineSpec
from triptych.spec.traffic import Lengths


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
