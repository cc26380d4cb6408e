"""The task's own metrics: decoded outputs of a candidate against those of the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from triptych.tasks.metrics.choices import compare_labels, compare_tokens
from triptych.tasks.metrics.outputs import Outputs, numbers
from triptych.tasks.metrics.ranks import Floats, spearman, tie_of
from triptych.tasks.metrics.spans import compare_answers, compare_entities
from triptych.tasks.metrics.vectors import compare_vectors


@dataclass(frozen=True)
class Comparison:
    """A candidate against the reference.

    Attributes:
        values: metric to value, as `tasks.accuracy.METRICS` has them; never NaN. A metric that
            these requests cannot show (neighbours of a single text) is absent.
        badness: of each request, 0 where it is equal and higher the worse it is; infinite where
            an output is not finite or missing. Comparable within one task.
    """

    values: dict[str, float]
    badness: list[float]


def compare(
    task_name: str, got: Sequence[Outputs], wanted: Sequence[Outputs], queries: Sequence[str]
) -> Comparison:
    """Compare the decoded outputs of the same requests.

    What is not finite never passes: such a request disagrees, its difference is infinite, and a
    correlation over it is -1. Scores within `ranks.TIE` of the reference's best are as good.

    Args:
        task_name: of the task; ``custom`` for one of a pipeline's own, which has no metrics here.
        got: the candidate's outputs, one a request, each ``[1, ...]``.
        wanted: the reference's.
        queries: the input ``text`` of each request, by which passages are grouped.

    Raises:
        ValueError: not as many of one as of the other.
    """
    if not len(got) == len(wanted) == len(queries):
        raise ValueError(
            f"{len(got)} candidates, {len(wanted)} references and {len(queries)} queries"
        )
    if not got:
        return Comparison({}, [])
    if task_name == "reranking":
        return Comparison(*_compare_scores(got, wanted, queries))
    return Comparison(*_COMPARES[task_name](got, wanted))


def _compare_scores(
    got: Sequence[Outputs], wanted: Sequence[Outputs], queries: Sequence[str]
) -> tuple[dict[str, float], list[float]]:
    """The metrics of reranking; badness is the difference of the scores."""
    some, others = (
        np.array([scores[0] if len(scores) == 1 else np.nan for scores in read])
        for read in ([numbers(row, "score") for row in rows] for rows in (got, wanted))
    )
    values = {}
    correlation = spearman(some, others)
    if correlation is not None:
        values["rank_correlation"] = correlation
    agreements = []
    for places in group(queries):
        if len(places) > 1:
            agreements.append(_first_agrees(some[places], others[places]))
    if agreements:
        values["top1_agreement"] = float(np.mean(agreements))
    usable = np.isfinite(some) & np.isfinite(others)
    moved = np.abs(np.where(usable, some, np.inf) - np.where(usable, others, 0))
    return values, [float(difference) for difference in moved]


def group(queries: Sequence[str]) -> list[list[int]]:
    """Places of the rows of each query, in the order of their first."""
    places: dict[str, list[int]] = {}
    for place, query in enumerate(queries):
        places.setdefault(query, []).append(place)
    return list(places.values())


def _first_agrees(got: Floats, wanted: Floats) -> float:
    """Of the passages the candidate puts first, the share that the reference does, too."""
    if not (np.isfinite(got).all() and np.isfinite(wanted).all()):
        return 0.0
    first = got == got.max()
    return float((wanted[first] >= wanted.max() - tie_of(wanted)).mean())


def _compare_anything(
    got: Sequence[Outputs], wanted: Sequence[Outputs]
) -> tuple[dict[str, float], list[float]]:
    """No metrics: only the pipeline knows what its outputs mean. Badness is how far they differ."""
    return {}, [_unlikeness(mine, other) for mine, other in zip(got, wanted, strict=True)]


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


_COMPARES: dict[
    str,
    Callable[[Sequence[Outputs], Sequence[Outputs]], tuple[dict[str, float], list[float]]],
] = {
    "text-embedding": compare_vectors,
    "text-classification": compare_labels,
    "zero-shot-classification": compare_labels,
    "image-classification": compare_labels,
    "token-classification": compare_entities,
    "question-answering": compare_answers,
    "fill-mask": compare_tokens,
    "custom": _compare_anything,
}
