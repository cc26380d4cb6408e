"""Outputs and parameters of rows as plain values, which JSON can hold."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from triptych.client.tasks import COUNT, TERMS, TOKEN_VECTORS
from triptych.client.wire import Parameter, PipelineConfig


def plain_outputs(
    config: PipelineConfig, outputs: Mapping[str, NDArray[Any]]
) -> dict[str, list[Any]]:
    """Return every output, [rows, …], as plain values per row, in the order of the config.

    Rows that end with zeros, because another one of the response has more tokens or terms, are
    returned without them.
    """
    in_json = _outputs_in_json()
    plain = {
        name: _plain(outputs[name], single=dims == (1,), as_json=name in in_json)
        for name, (_, dims) in config.outputs.items()
        if name in outputs
    }
    for names, counts in _counts(outputs):
        for name in names:
            rows = zip(plain[name], counts, strict=True)
            plain[name] = [row[:count] for row, count in rows]
    return plain


def without_padding(outputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the outputs of one row without the zeros of a longer row of its response."""
    found = dict(outputs)
    for names, (count,) in _counts(outputs):
        found |= {name: outputs[name][:, :count] for name in names}
    return found


def _counts(outputs: Mapping[str, NDArray[Any]]) -> list[tuple[Sequence[str], list[int]]]:
    """Return names of outputs with rows of many sizes, and the size of each of their rows."""
    found: list[tuple[Sequence[str], list[int]]] = []
    if COUNT in outputs:
        names = [name for name in TOKEN_VECTORS if name in outputs][:1]
        found.append((names, outputs[COUNT][:, 0].tolist()))
    if outputs.keys() >= set(TERMS):
        found.append((TERMS, (outputs[TERMS[1]] != 0).sum(axis=1).tolist()))
    return found


@functools.cache
def _outputs_in_json() -> frozenset[str]:
    from triptych.tasks.catalog import TASKS

    tensors = (tensor for task in TASKS.values() for tensor in task.outputs)
    return frozenset(tensor.name for tensor in tensors if tensor.content == "json")


def request_parameter(value: object) -> Parameter | None:
    """Return `value` in a type that a request supports; None if there is none."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return json.dumps(value, ensure_ascii=False)
    return value if isinstance(value, bool | int | float | str) else None


def _plain(values: Any, *, single: bool, as_json: bool) -> list[Any]:
    rows: list[Any] = values.tolist()
    if single:
        rows = [row[0] for row in rows]
    return [_parsed(row) for row in rows] if single and as_json else rows


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:  # a custom task's output of the same name
        return text
