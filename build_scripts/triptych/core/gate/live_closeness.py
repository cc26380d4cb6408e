"""How far two answers to the same request are from each other, in numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.spec.tasks.metrics_outputs import Outputs

SCORES = "score"
_SHOWN_ELEMENTS = 5
_SHOWN_CHARACTERS = 200


def shape_fault(got: Outputs, wanted: Outputs) -> str:
    """What of `got` has another form than `wanted`; empty where all can be compared."""
    for name, array in wanted.items():
        if name not in got:
            return f"{name} is missing"
        if got[name].shape != array.shape:
            return f"{name} has the shape {list(got[name].shape)}, not {list(array.shape)}"
    return ""


def is_finite(answer: Outputs, json_outputs: Sequence[str]) -> bool:
    """No NaN and no infinity among the numbers; a score in JSON is a number, too."""
    for name, array in answer.items():
        if np.issubdtype(array.dtype, np.floating) and not np.isfinite(array).all():
            return False
        if name in json_outputs and not all(map(_finite_json, _entries(array))):
            return False
    return True


def differences(one: Outputs, other: Outputs, json_outputs: Sequence[str]) -> dict[str, float]:
    """Largest difference of the numbers in each output that has any.

    Named scores are compared by name, so that two of equal score may stand in either order; a name
    that only one answer has is held against the last of the other's. Entries of JSON are compared
    where all but their numbers is the same.

    Args:
        one: an answer.
        other: one without a `shape_fault` against it.
        json_outputs: names of the outputs whose elements are JSON texts.
    """
    found = {}
    for name, array in one.items():
        if name in json_outputs:
            found[name] = _largest(_json_differences(_entries(array), _entries(other[name])))
        elif name == SCORES and (names := _names(one)) and names == _names(other):
            found[name] = _largest(_named_differences(one, other, names))
        elif np.issubdtype(array.dtype, np.floating) and array.size:
            with np.errstate(invalid="ignore", over="ignore"):  # infinities give NaN
                found[name] = float(np.abs(array - other[name]).max())
    return found


def same(one: Outputs, other: Outputs) -> bool:
    return all(
        np.issubdtype(array.dtype, np.floating) or bool(np.array_equal(array, other[name]))
        for name, array in one.items()
    )


def show_answer(answer: Outputs) -> str:
    parts = []
    for name, array in answer.items():
        if array.size:
            first = ", ".join(map(_show, array.flat[:_SHOWN_ELEMENTS]))
            parts.append(f"{name}: {first}{', …' if array.size > _SHOWN_ELEMENTS else ''}")
    return "; ".join(parts)


def _show(element: Any) -> str:
    if isinstance(element, bytes):
        text = element.decode("utf-8", "backslashreplace")
        return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"
    return f"{element:.5g}"


def _largest(values: Iterator[float]) -> float:
    return float(np.max([0.0, *values]))  # NaN where anything is: Python's maximum may lose it


def _names(answer: Outputs) -> str:
    """The output that names the scores, each once; empty where there is none."""
    scores = answer[SCORES]
    for name, array in answer.items():
        if array.dtype == np.object_ and array.shape == scores.shape:
            return name if len(set(array.flat)) == array.size else ""
    return ""


def _named_differences(one: Outputs, other: Outputs, names: str) -> Iterator[float]:
    here, there = (dict(zip(a[names].flat, a[SCORES].flat, strict=True)) for a in (one, other))
    for mine, others in ((here, there), (there, here)):
        last = min(others.values(), default=0.0)
        for name, score in mine.items():
            yield abs(float(score) - float(others.get(name, last)))


def _entries(array: NDArray[Any]) -> list[Any]:
    """What the JSON texts of one output hold, lists one entry after the other."""
    values = [_loaded(text) for text in array.flat]
    return [entry for value in values for entry in (value if isinstance(value, list) else [value])]


def _loaded(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:  # a wrong model may answer anything
        return text.decode("utf-8", "backslashreplace")


def _json_differences(one: Sequence[Any], other: Sequence[Any]) -> Iterator[float]:
    matches = {_known(entry): entry for entry in other}
    for entry in one:
        match = matches.get(_known(entry))
        if isinstance(entry, dict) and match is not None:
            for key, value in entry.items():
                if isinstance(value, float) and isinstance(match.get(key), float):
                    yield abs(value - match[key])


def _known(entry: Any) -> str:
    """All of an entry but its numbers with a fraction: what makes it the same in another answer."""
    if isinstance(entry, dict):
        entry = {key: value for key, value in entry.items() if not isinstance(value, float)}
    return json.dumps(entry, sort_keys=True)


def _finite_json(entry: Any) -> bool:
    # A decoder writes a score that is no number as null.
    if isinstance(entry, dict):
        missing = SCORES in entry and entry[SCORES] is None
        return not missing and all(map(_finite_json, entry.values()))
    if isinstance(entry, list):
        return all(map(_finite_json, entry))
    return not isinstance(entry, float) or bool(np.isfinite(entry))
