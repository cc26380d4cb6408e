"""Verdicts of the gate: one for each metric, the worst rows, and the failures in words."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.core.samples import GateRequest, shorten
from triptych.repository.records import Verdict, WorstRow
from triptych.spec.tasks.accuracy import METRICS

WORST_ROWS = 10
MAX_ANSWER = 120
_FEW = 4


def judge_metrics(
    values: Mapping[str, float], limits: Mapping[str, float], *, complete: bool
) -> tuple[Verdict, ...]:
    """Return verdicts on the metrics that were measured or have a limit, ordered as `METRICS`.

    Args:
        values: Measured values, by metric.
        limits: Worst allowed values, by metric.
        complete: Whether all applicable metrics were measured. If not, a limit without a value
            fails; else it gets no verdict.
    """
    verdicts = []
    for name, metric in METRICS.items():
        limit = limits.get(name)
        if name not in values and (limit is None or complete):
            continue
        value = values.get(name, math.nan)
        verdicts.append(Verdict(name, value, limit, limit is None or metric.meets(value, limit)))
    return tuple(verdicts)


def say_failures(verdicts: Sequence[Verdict], said: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield the messages of `said` for each failed verdict, or a default sentence."""
    for verdict in verdicts:
        if verdict.passed:
            continue
        if said.get(verdict.metric):
            yield from said[verdict.metric]
        else:
            side = "above" if METRICS[verdict.metric].better == "lower" else "below"
            yield f"{verdict.metric} is {verdict.value:.6g}, {side} {verdict.limit}"


def worst_rows(
    requests: Sequence[GateRequest],
    badness: Sequence[float],
    differences: Sequence[float],
    wanted: Sequence[Mapping[str, NDArray[Any]]],
    got: Sequence[Mapping[str, NDArray[Any]]],
) -> tuple[WorstRow, ...]:
    """Return the `WORST_ROWS` rows with the largest errors, then differences; NaN is the worst.

    Every argument has one entry for each request; `wanted` and `got` are its outputs.
    """
    pairs = np.array([badness, differences])
    ranks = -np.where(np.isnan(pairs), np.inf, pairs)
    return tuple(
        WorstRow(
            requests[place].preview,
            float(badness[place]),
            float(differences[place]),
            describe_answer(wanted[place]),
            describe_answer(got[place]),
        )
        for place in np.lexsort(ranks[::-1])[:WORST_ROWS]
    )


def describe_answer(outputs: Mapping[str, NDArray[Any]]) -> str:
    """Return the outputs of one request in one line: entities, named scores, or values."""
    filled = {name: array.ravel() for name, array in outputs.items() if array.size}
    if "entities" in filled:
        text = _entities(json.loads(filled["entities"][0]))
    elif "score" in filled and (names := _names(filled, len(filled["score"]))) is not None:
        pairs = zip(names[:_FEW], filled["score"][:_FEW], strict=False)
        text = ", ".join(f"{name} {score:.4f}" for name, score in pairs)
    else:
        text = "; ".join(_values(array) for array in filled.values())
    return shorten(text, MAX_ANSWER)


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
