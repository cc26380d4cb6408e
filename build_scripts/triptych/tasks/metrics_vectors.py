"""Comparison of embeddings with the reference's: cosines, neighbors, similarities of pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.tasks.compare import Comparison, Floats, Outputs, finite, numbers, spearman
from triptych.tasks.metric import Metric

# MiniLM, converted completely on its own traffic, is about half as far from 1 (or from 0) on the
# probe: bf16 has a mean cosine of 0.99993 and all neighbors; int8 and int8_dynamic have mean
# cosines of 0.995 and 0.997, 0.948 and 0.957 of the neighbors, a mean loss of 5e-4 and 8e-4, and
# single texts as low as 0.94 and 0.90. Fitted to traffic of one phrase with a number, int8_dynamic
# has 0.987, 0.918, 2.3e-3 and 0.865; int8 0.921, 0.758, 1.2e-2 and 0.60. Labels, spans and ranks
# have about twice the tolerance of the traffic, because a model decides by smaller differences far
# from its training data.
COSINES = (
    Metric(
        "min_cosine",
        "higher",
        "lowest cosine of a vector with the reference's",
        limits=(0.99999, 0.999, 0.97),
        probe=(0.999, 0.85),
    ),
    Metric(
        "mean_cosine",
        "higher",
        "mean cosine of the vectors with the reference's",
        limits=(0.99999, 0.9995, 0.998),
        probe=(0.9995, 0.99),
    ),
)
NEIGHBORS = (
    Metric(
        "nearest_neighbor_agreement",
        "higher",
        "texts with the same nearest neighbor, or an equally near one",
        limits=(1.0, 0.98, 0.97),
        probe=(0.98, 0.93),
    ),
    Metric(
        "mean_neighbor_loss",
        "lower",
        "mean similarity lost by a different nearest neighbor",
        limits=(1e-05, 0.0002, 0.001),
        probe=(0.0001, 0.0015),
    ),
    Metric(
        "max_neighbor_loss",
        "lower",
        "largest similarity lost by a different nearest neighbor",
        limits=(0.0001, 0.02, 0.1),
        probe=(0.01, 0.2),
    ),
)
CORRELATION = "similarity_rank_correlation"
SIMILARITY_RANK_CORRELATION = Metric(
    CORRELATION,
    "higher",
    "Spearman of the similarities of pairs",
    limits=(0.9999, 0.999, 0.99),
    probe=(0.999, 0.985),
)
NEIGHBOR_TOLERANCE = 0.002
"""Similarity that a nearest neighbor may lose and still count as right. Among many texts, more are
that near, and it matters little which one is found.
"""

FARTHEST = 2.0
"""Loss of the neighbor of a vector that is not finite: the largest difference of two cosines."""

MAX_PAIRS = 200_000
"""Maximum number of pairs of rows whose similarities are ranked; random pairs beyond that."""

_ROWS, _PAIRS = 1024, 16_384
_SEED = 0


def compare_vectors(
    got: Sequence[Outputs], wanted: Sequence[Outputs], queries: Sequence[str]
) -> Comparison:
    """Return the metrics of text-embedding; badness is one minus the cosine.

    Neighbors and pairs are compared among three or more vectors of one size; without them their
    metrics are absent.
    """
    pairs = [(_vector(g), _vector(w)) for g, w in zip(got, wanted, strict=True)]
    cosines = np.array([_cosine(g, w) for g, w in pairs])
    values = {"min_cosine": float(cosines.min()), "mean_cosine": float(cosines.mean())}
    groups: dict[int, list[int]] = {}
    for place, (_, vector) in enumerate(pairs):
        groups.setdefault(len(vector), []).append(place)
    losses, seen, expected = [], [], []
    for width, places in groups.items():
        if len(places) < 3:
            continue
        rows = np.stack([_of_width(pairs[place][0], width) for place in places])
        reference = np.stack([pairs[place][1] for place in places])
        losses.append(_neighbor_losses(rows, reference))
        some, others = _pairs_of(len(places))
        seen.append(_similarities(unit_rows(rows), some, others))
        expected.append(_similarities(unit_rows(reference), some, others))
    if losses:
        lost = np.concatenate(losses)
        values["nearest_neighbor_agreement"] = float((lost <= NEIGHBOR_TOLERANCE).mean())
        values["mean_neighbor_loss"] = float(lost.mean())
        values["max_neighbor_loss"] = float(lost.max())
        correlation = spearman(np.concatenate(seen), np.concatenate(expected))
        if correlation is not None:
            values[CORRELATION] = correlation
    return Comparison(values, (1 - cosines).tolist())


def compare_across(rows: tuple[Floats, Floats], others: tuple[Floats, Floats]) -> dict[str, float]:
    """Return the metrics of the similarities of rows and others, such as texts and images.

    Args:
        rows: Vectors of the candidate and of the reference, ``[n, d]`` each.
        others: Vectors of both for the rows that are compared with them, ``[m, d]`` each.
    """
    got, wanted = (
        unit_rows(some) @ unit_rows(other).T for some, other in zip(rows, others, strict=True)
    )
    got = np.where(np.isfinite(got), got, -FARTHEST)
    # The loss is symmetrical: texts look for images, and images for texts.
    lost = np.concatenate(
        [
            right.max(1) - np.take_along_axis(right, near.argmax(1)[:, None], 1)[:, 0]
            for near, right in ((got, wanted), (got.T, wanted.T))
        ]
    )
    values = {
        "max_difference": float(np.abs(got - wanted).max()),
        "nearest_neighbor_agreement": float((lost <= NEIGHBOR_TOLERANCE).mean()),
        "mean_neighbor_loss": float(lost.mean()),
        "max_neighbor_loss": float(lost.max()),
    }
    correlation = spearman(got.ravel(), wanted.ravel())
    return values if correlation is None else {**values, CORRELATION: correlation}


def row_cosines(got: NDArray[np.floating[Any]], wanted: NDArray[np.floating[Any]]) -> Floats:
    """Return the cosine of each row with the reference's row, ``[n, d]`` both; 1 for equal rows.

    Two zero vectors have 1, a zero vector and another 0, and a row that is not finite -1.
    """
    some, others = unit_rows(got), unit_rows(wanted)
    cosines = 1 - ((some - others) ** 2).sum(axis=1) / 2
    cosines[some.any(axis=1) != others.any(axis=1)] = 0
    cosines[~np.isfinite(cosines)] = -1
    return np.asarray(np.clip(cosines, -1, 1), dtype=np.float64)


def unit_rows(rows: NDArray[np.floating[Any]]) -> Floats:
    """Return rows scaled to length 1; zeros stay zeros, and rows that are not finite become NaN."""
    rows = rows.astype(np.float64)
    rows[~np.isfinite(rows).all(axis=1)] = np.nan
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(length == 0, 1, length), dtype=np.float64)


def similarity(outputs: Sequence[Outputs], others: Sequence[Outputs]) -> Floats:
    """Return the cosine of the vectors of each two requests; -1 if they cannot be compared."""
    pairs = zip(outputs, others, strict=True)
    return np.array([_cosine(_vector(some), _vector(other)) for some, other in pairs])


def _vector(outputs: Outputs) -> Floats:
    return numbers(outputs, "embedding")


def _cosine(got: Floats, wanted: Floats) -> float:
    same = len(got) == len(wanted)
    return float(row_cosines(got[None], wanted[None])[0]) if same else -1.0


def _of_width(values: Floats, width: int) -> Floats:
    return values if len(values) == width else np.full(width, np.nan)


def _neighbor_losses(rows: Floats, reference: Floats) -> Floats:
    """Return the similarity that each row loses by a different nearest neighbor.

    Similarities are the reference's cosines; an equal or equally near neighbor loses 0.
    """
    some, others = unit_rows(rows), unit_rows(reference)
    losses = np.empty(len(rows))
    for start in range(0, len(rows), _ROWS):
        places = np.arange(start, min(start + _ROWS, len(rows)))
        block = np.arange(len(places))
        near, wanted = some[places] @ some.T, others[places] @ others.T
        for similarities in (near, wanted):
            similarities[~np.isfinite(similarities)] = -FARTHEST
            similarities[block, places] = -FARTHEST
        losses[places] = wanted.max(axis=1) - wanted[block, near.argmax(axis=1)]
    usable = [finite(row) and finite(other) for row, other in zip(rows, reference, strict=True)]
    return np.where(usable, losses, FARTHEST)


def _pairs_of(rows: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return indexes of both rows of each pair: all pairs, or `MAX_PAIRS` random ones."""
    if rows * (rows - 1) // 2 <= MAX_PAIRS:
        return np.triu_indices(rows, 1)
    rng = np.random.default_rng(_SEED)
    some = rng.integers(rows, size=MAX_PAIRS)
    return some, (some + rng.integers(1, rows, size=MAX_PAIRS)) % rows


def _similarities(units: Floats, some: NDArray[np.intp], others: NDArray[np.intp]) -> Floats:
    return np.concatenate(
        [
            np.einsum("pd,pd->p", units[some[p : p + _PAIRS]], units[others[p : p + _PAIRS]])
            for p in range(0, len(some), _PAIRS)
        ]
    )
