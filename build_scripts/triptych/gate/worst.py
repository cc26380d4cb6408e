"""The rows with the worst answers, in words short enough for a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.repository.records import WorstRow
from triptych.requests.samples import GateRequest, shorten

WORST_ROWS = 10
LONGEST_ANSWER = 120
_FEW = 4


def worst_rows(
    requests: Sequence[GateRequest],
    badness: Sequence[float],
    differences: Sequence[float],
    wanted: Sequence[Mapping[str, NDArray[Any]]],
    got: Sequence[Mapping[str, NDArray[Any]]],
) -> tuple[WorstRow, ...]:
    """The `WORST_ROWS` with the most badness, then the largest difference; NaN is the worst.

    Args:
        requests: all of them.
        badness: one a request.
        differences: one a request.
        wanted: the reference's outputs, one a request.
        got: the artifact's.
    """

    def rank(place: int) -> tuple[float, float]:
        pair = (badness[place], differences[place])
        return tuple(-value if value == value else -np.inf for value in pair)  # type: ignore[return-value]

    return tuple(
        WorstRow(
            requests[place].shown,
            float(badness[place]),
            float(differences[place]),
            describe_answer(wanted[place]),
            describe_answer(got[place]),
        )
        for place in sorted(range(len(requests)), key=rank)[:WORST_ROWS]
    )


def describe_answer(outputs: Mapping[str, NDArray[Any]]) -> str:
    """Outputs of one request in a line: names with their scores, entities, text, numbers."""
    filled = {name: array.ravel() for name, array in outputs.items() if array.size}
    if "entities" in filled:
        text = _entities(json.loads(filled["entities"][0]))
    elif "score" in filled and (names := _names(filled, len(filled["score"]))) is not None:
        pairs = zip(names[:_FEW], filled["score"][:_FEW], strict=False)
        text = ", ".join(f"{name} {score:.4f}" for name, score in pairs)
    else:
        text = "; ".join(_values(array) for array in filled.values())
    return shorten(text, LONGEST_ANSWER)


def _names(filled: Mapping[str, NDArray[Any]], count: int) -> list[str] | None:
    for array in filled.values():
        if array.dtype == object and len(array) == count:
            return [item.decode("utf-8", "replace") or "(nothing)" for item in array]
    return None


def _entities(found: Sequence[Mapping[str, Any]]) -> str:
    said = [f"{e['entity']} {e['text']!r} {e['start']}-{e['end']}" for e in found]
    return ", ".join(said) or "(nothing)"


def _values(array: NDArray[Any]) -> str:
    if array.dtype == object:
        return ", ".join(str(item.decode("utf-8", "replace")) for item in array[:_FEW])
    shown = " ".join(f"{value:.4g}" for value in array[:_FEW].tolist())
    return shown if len(array) <= _FEW else f"{shown} … ({len(array)} numbers)"
