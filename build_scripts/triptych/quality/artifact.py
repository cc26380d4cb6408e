"""Running a core artifact in process on rows as the server passes them: what the gate checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.tasks.task import Core
from triptych.tensors import ROW_STRIDE, Tensor, TokenRow

Sample = TokenRow | NDArray[np.uint8]
"""One row for the core: tokens, or the pixels of an image, UINT8 ``[height, width, channels]``."""

RowOutputs = dict[str, NDArray[Any]]
"""What the core returned for one row, by output; per-token outputs end with the row's tokens."""

RunBatch = Callable[[Sequence[Sample]], list[RowOutputs]]
"""Runs one batch of rows on the artifact."""


def open_onnx(
    path: Path, core: Core, inputs: tuple[Tensor, ...], *, packed: bool, pad_token_id: int
) -> RunBatch:
    """A function that runs one batch of rows through a ``model.onnx`` on the CPU.

    In the packed layout every second row is followed by pads, as rows of a request of several
    rows are.

    Args:
        path: of the graph.
        core: what it returns.
        inputs: of the graph, by the names of `triptych.tensors`; ``row_stride`` is added where
            the layout is packed. For a core that reads images: the one input.
        packed: the layout.
        pad_token_id: fills rows up.
    """
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [tensor.name for tensor in core.outputs]
    fed = {tensor.name for tensor in inputs} | ({ROW_STRIDE.name} if packed else set())

    def run_images(samples: Sequence[Sample]) -> list[RowOutputs]:
        results = session.run(names, {inputs[0].name: np.stack([np.asarray(s) for s in samples])})
        return [dict(zip(names, values, strict=True)) for values in zip(*results, strict=True)]

    def run_tokens(samples: Sequence[Sample]) -> list[RowOutputs]:
        rows = [sample for sample in samples if isinstance(sample, TokenRow)]
        strides = _strides(rows, packed=packed)
        feed = {
            "input_ids": _input_ids(rows, strides, pad_token_id, packed=packed),
            "row_length": np.array([[len(row.ids)] for row in rows], dtype=np.int32),
            "first_segment": np.array([[row.first_segment] for row in rows], dtype=np.int32),
            "row_stride": np.array(strides, dtype=np.int32),
        }
        results = session.run(names, {name: feed[name] for name in fed})
        starts = np.cumsum([0, *strides[:-1]])
        return [
            {
                name: _cut(values, index, int(starts[index]), row, core, packed=packed)
                for name, values in zip(names, results, strict=True)
            }
            for index, row in enumerate(rows)
        ]

    return run_images if core.reads == "image" else run_tokens


def _strides(rows: Sequence[TokenRow], *, packed: bool) -> list[int]:
    """Places each row takes, pads included."""
    if not packed:
        return [max(len(row.ids) for row in rows)] * len(rows)
    return [len(row.ids) + (index % 4 if index % 2 else 0) for index, row in enumerate(rows)]


def _input_ids(
    rows: Sequence[TokenRow], strides: Sequence[int], pad_token_id: int, *, packed: bool
) -> NDArray[np.int32]:
    """INT32 ``[places]`` where packed, ``[rows, places]`` else."""
    padded = [
        (*row.ids, *[pad_token_id] * (stride - len(row.ids)))
        for row, stride in zip(rows, strides, strict=True)
    ]
    if packed:
        return np.array([token for row in padded for token in row], dtype=np.int32)
    return np.array(padded, dtype=np.int32)


def _cut(
    values: NDArray[Any], index: int, start: int, row: TokenRow, core: Core, *, packed: bool
) -> NDArray[Any]:
    """What belongs to one row of an output of the whole batch."""
    places = slice(start, start + len(row.ids)) if packed else (index, slice(len(row.ids)))
    result: NDArray[Any] = values[places] if core.per_token else values[index]
    return result
