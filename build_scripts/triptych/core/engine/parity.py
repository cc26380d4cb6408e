"""An engine against the ONNX graph it was built of: does the compiler compute what the graph says?

A compiler can be wrong in silence, so every engine is run on real rows before it is written: in
batches, alone, reversed and by length, as the gate runs a core; the reference is what ONNX Runtime
makes of the same graph on a CPU. Answers are not decoded: whether the graph itself is right, the
gate has said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from triptych.base.tensors import (
    FIRST_SEGMENT,
    INPUT_IDS,
    LONGEST,
    ROW_LENGTH,
    ROW_OFFSET,
    ROW_SPAN,
    ROW_STRIDE,
    Tensor,
    TokenRow,
)
from triptych.core.feeds import Feed, Sample, core_feed
from triptych.core.gate.artifact import RowOutputs, RunBatch, RunFeed, by_rows, open_onnx
from triptych.core.gate.check import check
from triptych.core.gate.runs import choices_of, run_rows
from triptych.core.samples import Expected, GateRequest
from triptych.repository.records import GateResult
from triptych.spec.engine_spec import ShapeRange
from triptych.spec.precisions import Precision
from triptych.spec.tasks.accuracy import default_limits
from triptych.spec.tasks.metrics_ranks import TIE
from triptych.spec.tasks.metrics_vectors import COSINES
from triptych.spec.tasks.task import Core

PAD = 0
"""Any token id: what pads hold changes no result."""

Profiles = Sequence[Mapping[str, ShapeRange]]


def check_engine(
    run_feed: RunFeed,
    onnx: Path,
    rows: Sequence[Sample],
    core: Core,
    *,
    inputs: Sequence[str],
    profiles: Profiles,
    precision: str,
    tf32: bool,
) -> GateResult:
    """Run engine and graph on the same rows and compare, fail-closed.

    Args:
        run_feed: runs one batch on the engine.
        onnx: the graph.
        rows: of the traffic, and made up.
        core: what graph and engine return.
        inputs: names of the graph's inputs.
        profiles: of the engine.
        precision: of the engine, which decides the limits.
        tf32: whether fp32 products may be rounded: then they are as close as fp16 is.
    """
    made = {ROW_STRIDE.name, LONGEST.name}
    tensors = tuple(_tensor(name) for name in inputs if name not in made)
    packed = ROW_OFFSET in tensors
    batch_size = min(_most_rows(profile) for profile in profiles)
    graph = open_onnx(onnx, core, tensors, pad_token_id=PAD)
    wanted = run_rows(graph, rows, range(len(rows)), batch_size)
    fitted = run_feed if packed else _padded(run_feed, profiles)
    engine = by_rows(fitted, core, tensors, pad_token_id=PAD)
    if packed:
        most = max(profile[INPUT_IDS.name].maximum[0] for profile in profiles)
        engine = _dealt(engine, tensors, most)
    closeness = "fp16" if tf32 and precision == "fp32" else precision
    metrics = _metrics_of(core)
    return check(
        engine,
        [_request(place, row) for place, row in enumerate(rows)],
        _expected([wanted[place] for place in range(len(rows))], core),
        core,
        default_limits(metrics, closeness),
        metrics=metrics,
        precision=cast(Precision, precision),
        batch_size=batch_size,
    )


def _metrics_of(core: Core) -> tuple[str, ...]:
    own: tuple[str, ...] = ()
    if core.returns == "vector":
        own = COSINES
    elif core.returns != "spans" and core.outputs[0].dims != (1,):  # classes to choose from
        own = ("label_agreement",)
    return ("max_difference", "neighbour_effect", *own)


def _tensor(name: str) -> Tensor:
    texts = (INPUT_IDS, ROW_LENGTH, ROW_OFFSET, ROW_SPAN, FIRST_SEGMENT)
    known = {tensor.name: tensor for tensor in texts}
    return known.get(name, Tensor(name, "UINT8", ()))


def _most_rows(profile: Mapping[str, ShapeRange]) -> int:
    """Rows that a batch of a profile may have; packed ids have no axis of rows."""
    name = ROW_STRIDE.name if ROW_STRIDE.name in profile else next(iter(profile))
    return profile[name].maximum[0]


def _padded(run_feed: RunFeed, profiles: Profiles) -> RunFeed:
    """`run_feed` with rows of tokens padded to the smallest profile that holds them."""
    edges = sorted(
        profile[INPUT_IDS.name].maximum[1] for profile in profiles if INPUT_IDS.name in profile
    )

    def run(feed: Feed) -> Any:
        ids = feed.get(INPUT_IDS.name)
        if ids is None:
            return run_feed(feed)
        width = next((edge for edge in edges if edge >= ids.shape[1]), ids.shape[1])
        padded = np.pad(ids, [(0, 0), (0, width - ids.shape[1])], constant_values=PAD)
        return run_feed({**feed, INPUT_IDS.name: padded})

    return run


def _dealt(run: RunBatch, inputs: tuple[Tensor, ...], most_tokens: int) -> RunBatch:
    """Return `run` with each batch of more tokens than the engine takes cut into halves."""

    def halves(samples: Sequence[Sample]) -> list[RowOutputs]:
        tokens = [row for row in samples if isinstance(row, TokenRow)]
        if len(tokens) < 2:
            return run(samples)
        if core_feed(tokens, inputs, pad_token_id=PAD)[INPUT_IDS.name].size <= most_tokens:
            return run(samples)
        half = len(samples) // 2
        return [*halves(samples[:half]), *halves(samples[half:])]

    return halves


def _request(place: int, row: Sample) -> GateRequest:
    size = f"{len(row.ids)} tokens" if isinstance(row, TokenRow) else f"image {list(row.shape)}"
    return GateRequest({}, {}, {}, (row,), (), edge=False, shown=f"row {place}: {size}")


def _expected(rows: Sequence[RowOutputs], core: Core) -> list[Expected]:
    """The graph's outputs as a reference gives them.

    Of choices, the graph returns the best classes only. The others get hardly less than the least
    score chosen, which none is above: one that the engine chooses in a tie with the last differs
    little, and yet is no class that the graph put first, so that the share of equal first classes
    stays strict.
    """
    if not core.chooses:
        return [
            tuple(np.asarray(row[tensor.name], np.float32) for tensor in core.outputs)
            for row in rows
        ]
    largest = max((int(choices_of(row, core)[0].max(initial=0)) for row in rows), default=0)
    # Some room above: which classes there are, the graph's outputs do not say.
    classes = 2 << largest.bit_length()
    expected: list[Expected] = []
    for row in rows:
        ids, scores = choices_of(row, core)
        least = scores.min(axis=1, keepdims=True).astype(np.float32) - 2 * TIE
        every = np.repeat(least, classes, axis=1).astype(np.float32)
        np.put_along_axis(every, ids.astype(np.int64), scores.astype(np.float32), axis=1)
        expected.append((every[0] if core.returns == "choices" else every,))
    return expected
