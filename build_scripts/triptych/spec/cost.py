"""What a row is expected to cost on the traffic, in either layout: an estimate to choose by.

Arithmetic only: products of the encoder's layers, attention between tokens, and what starting a
run costs. Measuring is `bench`'s and `tune`'s job; this is for where nothing can be measured yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from triptych.spec.model_facts import ModelFacts
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
