"""What the ensemble would answer: core outputs through the runtime's own decoder, in process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.core.gate.artifact import RowOutputs
from triptych.core.gate.runs import choices_of
from triptych.core.samples import Expected, GateRequest, by_request
from triptych.runtime import module_of
from triptych.runtime.carry import Arrays, unpack
from triptych.spec.tasks.metrics_ranks import TIE
from triptych.spec.tasks.task import Core, Parameters, Task

Decoded = Arrays
"""The outputs of the ensemble for one request of one row, by name, ``[1, …]`` each."""


def as_floats(parameters: Parameters) -> Parameters:
    """Request parameters for answers in full: making them smaller is not the model's doing."""
    return {**parameters, "encoding": "float"} if "encoding" in parameters else parameters


@dataclass(frozen=True)
class Decoding:
    """How core outputs become answers.

    Attributes:
        task: whose decoder it is.
        settings: of the task, as its postprocess step gets them.
        folder: with the ``tokenizer.json``, where the decoder reads one.
    """

    task: Task
    settings: Mapping[str, Any]
    folder: Path


def decode(
    decoding: Decoding, requests: Sequence[GateRequest], outputs: Sequence[RowOutputs]
) -> list[Decoded]:
    """The answer to each request, from what the core made of its rows.

    Args:
        decoding: how.
        requests: each of one row.
        outputs: one a core row; per-token ones have as many entries as the row has tokens.

    Raises:
        ValueError: not one output a core row.
    """
    if len(outputs) != sum(len(request.rows) for request in requests):
        raise ValueError(f"{len(outputs)} outputs are not one for each core row of the requests")
    decoder = module_of(decoding.task.decode).Decoder(decoding.settings, decoding.folder)
    answers: list[Decoded] = []
    for request, rows in zip(requests, by_request(requests, outputs), strict=True):
        columns = {name: _stack([row[name] for row in rows]) for name in rows[0]}
        carries = [unpack(carry) for carry in request.carries]
        answers.append(decoder.decode(columns, carries, as_floats(request.parameters)))
    return answers


def _stack(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Rows as one array; those of fewer tokens are filled up with zeros, as the server's are."""
    if len({array.shape for array in arrays}) == 1:
        return np.stack(arrays)
    width = max(len(array) for array in arrays)
    rest = [(0, 0)] * (arrays[0].ndim - 1)
    return np.stack([np.pad(array, [(0, width - len(array)), *rest]) for array in arrays])


def reference_row_outputs(
    core: Core, expected: Sequence[Expected], like: Sequence[RowOutputs] | None = None
) -> list[RowOutputs]:
    """The reference in the form of the artifact's outputs.

    Args:
        core: what the artifact returns.
        expected: what the reference computed, one a row.
        like: the artifact's outputs. Of classes that the reference scores equally up to rounding
            the one that the artifact chose is chosen, so that a tie is no disagreement.
    """
    names = [tensor.name for tensor in core.outputs]
    if not core.chooses:
        return [dict(zip(names, values, strict=True)) for values in expected]
    rows = []
    for place, (every,) in enumerate(expected):
        scores = every.reshape(-1, every.shape[-1])
        kept = 1 if core.returns == "token_choices" else int(core.outputs[0].dims[0])
        ids = np.argsort(-scores, axis=1, kind="stable")[:, :kept]
        if like is not None:
            ids = _with_ties(ids, choices_of(like[place], core)[0].astype(np.int64), scores)
        best = np.take_along_axis(scores, ids, axis=1)
        shape = (kept,) if core.returns == "choices" else (len(scores),)
        outputs = (ids.astype(np.int32).reshape(shape), best.reshape(shape))
        rows.append(dict(zip(names, outputs, strict=True)))
    return rows


def _with_ties(
    ids: NDArray[np.int64], other: NDArray[np.int64], scores: NDArray[np.float32]
) -> NDArray[np.int64]:
    """`ids`, but those of `other` as far as they score the same."""
    right, reached = (np.take_along_axis(scores, chosen, axis=1) for chosen in (ids, other))
    same = np.logical_and.accumulate(np.abs(right - reached) <= TIE, axis=1)
    result = ids.copy()
    for row in np.flatnonzero((ids != other).any(axis=1)):
        first = other[row, same[row]].tolist()
        rest = [chosen for chosen in ids[row].tolist() if chosen not in first]
        result[row] = [*first, *rest][: ids.shape[1]]
    return result
