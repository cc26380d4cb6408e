"""Running a core artifact in process on rows as the server passes them: what the gate checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from triptych.base.onnx_session import open_session
from triptych.base.tensors import ROW_OFFSET, Tensor, TokenRow
from triptych.core.feeds import Feed, Sample, core_feed, row_starts
from triptych.spec.plan import Plan
from triptych.spec.tasks.task import Core

RowOutputs = dict[str, NDArray[Any]]
"""What the core returned for one row, by output; per-token outputs end with the row's tokens."""

RunBatch = Callable[[Sequence[Sample]], list[RowOutputs]]
"""Runs one batch of rows on the artifact."""

RunFeed = Callable[[Feed], Mapping[str, NDArray[Any]]]
"""Runs one batch as the graph takes it; the outputs by name."""


def open_onnx(path: Path, core: Core, inputs: tuple[Tensor, ...], *, pad_token_id: int) -> RunBatch:
    """A function that runs one batch of rows through a ``model.onnx`` of any precision on the CPU.

    The other arguments are those of `by_rows`.
    """
    session = open_session(path)
    names = [tensor.name for tensor in core.outputs]

    def run(feed: Feed) -> Mapping[str, NDArray[Any]]:
        return dict(zip(names, session.run(names, feed), strict=True))

    return by_rows(run, core, inputs, pad_token_id=pad_token_id)


def by_rows(
    run_feed: RunFeed, core: Core, inputs: tuple[Tensor, ...], *, pad_token_id: int
) -> RunBatch:
    """A function that runs one batch of rows by whatever runs a feed.

    Args:
        run_feed: gives the outputs for a feed, by name.
        core: what it returns.
        inputs: of a feed, as `core_feed` takes them.
        pad_token_id: fills rows up.
    """
    names = [tensor.name for tensor in core.outputs]

    def run(samples: Sequence[Sample]) -> list[RowOutputs]:
        outputs = run_feed(core_feed(samples, inputs, pad_token_id=pad_token_id))
        results = [outputs[name] for name in names]
        rows = [sample for sample in samples if isinstance(sample, TokenRow)]
        if not rows:
            return [dict(zip(names, values, strict=True)) for values in zip(*results, strict=True)]
        starts, packed = row_starts(rows, inputs), ROW_OFFSET in inputs
        return [
            {
                name: _cut(values, index, starts[index], row, core, packed=packed)
                for name, values in zip(names, results, strict=True)
            }
            for index, row in enumerate(rows)
        ]

    return run


def open_core(path: Path, plan: Plan) -> RunBatch:
    """`open_onnx` for the core of a plan."""
    pad = plan.facts.pad_token_id
    return open_onnx(path, plan.core, plan.core_inputs, pad_token_id=pad)


def _cut(
    values: NDArray[Any], index: int, start: int, row: TokenRow, core: Core, *, packed: bool
) -> NDArray[Any]:
    places = slice(start, start + len(row.ids)) if packed else (index, slice(len(row.ids)))
    result: NDArray[Any] = values[places] if core.per_token else values[index]
    return result
