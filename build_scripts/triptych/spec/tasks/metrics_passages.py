"""Passages with a score each, ranked by query; and outputs of which nothing is known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from triptych.spec.tasks.metrics_outputs import Comparison, Outputs, numbers
from triptych.spec.tasks.metrics_ranks import Floats, spearman, tie_of


def compare_scores(
    got: Sequence[Outputs], wanted: Sequence[Outputs], queries: Sequence[str]
) -> Comparison:
    """The metrics of reranking; badness is the difference of the scores."""
    some, others = (np.array([_score(row) for row in rows]) for rows in (got, wanted))
    values = {}
    correlation = spearman(some, others)
    if correlation is not None:
        values["rank_correlation"] = correlation
    agreements = [
        _first_agrees(some[places], others[places]) for places in group(queries) if len(places) > 1
    ]
    if agreements:
        values["top1_agreement"] = float(np.mean(agreements))
    usable = np.isfinite(some) & np.isfinite(others)
    moved = np.abs(np.where(usable, some, np.inf) - np.where(usable, others, 0))
    return Comparison(values, moved.tolist())


def group(queries: Sequence[str]) -> list[list[int]]:
    """Places of the rows of each query, in the order of their first."""
    places: dict[str, list[int]] = {}
    for place, query in enumerate(queries):
        places.setdefault(query, []).append(place)
    return list(places.values())


def _score(outputs: Outputs) -> float:
    scores = numbers(outputs, "score")
    return float(scores[0]) if len(scores) == 1 else np.nan


def _first_agrees(got: Floats, wanted: Floats) -> float:
    """Of the passages the candidate puts first, the share that the reference does, too."""
    if not (np.isfinite(got).all() and np.isfinite(wanted).all()):
        return 0.0
    first = got == got.max()
    return float((wanted[first] >= wanted.max() - tie_of(wanted)).mean())


def compare_anything(
    got: Sequence[Outputs], wanted: Sequence[Outputs], queries: Sequence[str]
) -> Comparison:
    """No metrics: only the pipeline knows what its outputs mean. Badness is how far they differ."""
    return Comparison({}, [_unlikeness(*pair) for pair in zip(got, wanted, strict=True)])


def _unlikeness(got: Outputs, wanted: Outputs) -> float:
    if got.keys() != wanted.keys():
        return np.inf
    worst = 0.0
    for name, other in wanted.items():
        mine = got[name]
        if mine.shape != other.shape:
            return np.inf
        if other.dtype == object:
            differences = (mine != other).astype(np.float64)
        else:
            with np.errstate(invalid="ignore"):  # infinity from infinity
                differences = np.abs(np.subtract(mine, other, dtype=np.float64))
            differences[mine == other] = 0
            differences[~np.isfinite(differences)] = np.inf
        worst = max(worst, float(differences.max(initial=0.0)))
    return worst
