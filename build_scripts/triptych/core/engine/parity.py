"""Compare an engine with its ONNX graph on the same rows.

A compiler can be wrong without an error, so every engine is run on real rows before it is written:
in batches, alone, reversed and sorted by length, as the gate runs a core. The reference is ONNX
Runtime with the same graph on a CPU. Results are not decoded, because the gate has already checked
the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from triptych.base.tensors import (
    ATTENDED_LENGTH,
    FIRST_SEGMENT,
    INPUT_IDS,
    LONGEST,
    PROMPT_LENGTH,
    ROW_LENGTH,
    ROW_OFFSET,
    ROW_SPAN,
    ROW_STRIDE,
    Tensor,
    TokenRow,
)
from triptych.core.gate.check import GateCase, check
from triptych.core.gate.runs import RunBatch, RunFeed, by_rows, open_onnx, run_rows
from triptych.core.requests import Feed, GateRequest, Sample, core_feed
from triptych.repository.records import (
    GateResult,
)
from triptych.spec.backends import Precision
from triptych.spec.engine_plan import ShapeRange
from triptych.tasks.accuracy import default_limits
from triptych.tasks.metric import BATCH_SENSITIVITY, MAX_DIFFERENCE
from triptych.tasks.results import RowOutputs
from triptych.tasks.task import Core

PAD = 0
"""Token id of padding. Every id works, because padding does not change results."""

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
    """Compare engine and graph on the same rows; fails if anything is not comparable.

    Args:
        run_feed: Function that runs one batch on the engine.
        rows: Rows of the traffic and edge cases.
        core: Description of the results of graph and engine.
        inputs: Names of the graph's inputs.
        precision: Precision of the engine, which decides the limits.
        tf32: Whether fp32 products may be rounded to TF32. The limits are then those of fp16.
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
    metrics = (MAX_DIFFERENCE, BATCH_SENSITIVITY, *core.results.metrics)
    case = GateCase(
        requests=[_request(index, row) for index, row in enumerate(rows)],
        expected=core.results.as_expected([wanted[index] for index in range(len(rows))]),
        core=core,
        limits=default_limits(metrics, closeness),
        batch_size=batch_size,
    )
    return check(engine, case, cast(Precision, precision), [metric.name for metric in metrics])


def _tensor(name: str) -> Tensor:
    texts = (INPUT_IDS, ROW_LENGTH, ROW_OFFSET, ROW_SPAN)
    known = {t.name: t for t in (*texts, FIRST_SEGMENT, PROMPT_LENGTH, ATTENDED_LENGTH)}
    return known.get(name, Tensor(name, "UINT8", ()))


def _most_rows(profile: Mapping[str, ShapeRange]) -> int:
    """Return the maximum number of rows in a batch of a profile.

    Packed ids have no axis of rows.
    """
    name = ROW_STRIDE.name if ROW_STRIDE.name in profile else next(iter(profile))
    return profile[name].maximum[0]


def _padded(run_feed: RunFeed, profiles: Profiles) -> RunFeed:
    """Return `run_feed` with rows of tokens padded to the smallest profile that fits."""
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
    """Return `run` such that batches with more tokens than the engine allows are halved."""

    def halves(samples: Sequence[Sample]) -> list[RowOutputs]:
        tokens = [row for row in samples if isinstance(row, TokenRow)]
        if len(tokens) < 2:
            return run(samples)
        if core_feed(tokens, inputs, pad_token_id=PAD)[INPUT_IDS.name].size <= most_tokens:
            return run(samples)
        half = len(samples) // 2
        return [*halves(samples[:half]), *halves(samples[half:])]

    return halves


def _request(index: int, row: Sample) -> GateRequest:
    size = f"{len(row.ids)} tokens" if isinstance(row, TokenRow) else f"image {list(row.shape)}"
    return GateRequest({}, {}, {}, (row,), (), edge=False, preview=f"row {index}: {size}")
