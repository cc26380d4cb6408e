"""Running a core artifact in process on rows of token ids: what the gate compares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Rows = Sequence[Sequence[int]]


def open_onnx(
    path: Path, *, packed: bool, pad_token_id: int
) -> Callable[[Rows], NDArray[np.float32]]:
    """A function that runs one batch of rows through ``model.onnx``: FP32 ``[rows, dim]``."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(rows: Rows) -> NDArray[np.float32]:
        lengths = np.array([[len(row)] for row in rows], dtype=np.int32)
        if packed:
            feed = {
                "input_ids": np.concatenate([np.asarray(row, dtype=np.int32) for row in rows]),
                "row_length": lengths,
                "row_stride": lengths[:, 0],
            }
        else:
            ids = np.full((len(rows), int(lengths.max())), pad_token_id, dtype=np.int32)
            for target, row in zip(ids, rows, strict=True):
                target[: len(row)] = row
            feed = {"input_ids": ids, "row_length": lengths}
        result: NDArray[np.float32] = session.run(None, feed)[0]
        return result

    return run
