"""Forms of a core's results: how a row is checked, and held against that of the reference.

A row has ``[1 or tokens, ...]`` results: one of the row, or one of each token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from triptych.base.arrays import Array
from triptych.base.tensors import Tensor
from triptych.tasks.compare import LABEL_AGREEMENT, TIE
from triptych.tasks.metric import Metric
from triptych.tasks.metrics_vectors import COSINES

RowOutputs = dict[str, Array]
"""Outputs of the core for one row, by name; per-token outputs are without padding."""

Expected = tuple[NDArray[np.float32], ...]
"""The reference's result for one row, as `Results` takes it.

It is a vector, logits or scores. If the core returns choices or all scores, it has the scores of
all classes, ``[classes]`` or ``[tokens, classes]``. For spans it has the logits of start and end,
``[tokens]`` each.
"""

Pair = tuple[Array, Array]
"""A view of a row, and the same view of the reference."""


@dataclass(frozen=True)
class Results(ABC):
    """Results of one form."""

    outputs: tuple[Tensor, ...]  # Output tensors without the batch dimension

    @property
    @abstractmethod
    def metrics(self) -> tuple[Metric, ...]:
        """Metrics of undecoded results, besides differences."""

    @property
    @abstractmethod
    def views(self) -> tuple[str, ...]:
        """Name of each view in `pairs`, for messages."""

    @abstractmethod
    def fault(self, row: RowOutputs, expected: Expected) -> str:
        """Return why a row cannot be compared with the reference; empty if it can."""

    @abstractmethod
    def pairs(self, row: RowOutputs, expected: Expected) -> list[Pair]:
        """Return each view of a row with that of the reference, to compare by element."""

    @abstractmethod
    def effects(
        self, row: RowOutputs, changed: RowOutputs, expected: Expected, error: float
    ) -> list[float]:
        """Return the largest change of each view of a row by other rows in the batch.

        Args:
            row: Outputs of the row.
            changed: Outputs of the row among other rows.
            expected: Outputs of the reference.
            error: The artifact's largest error.
        """

    @abstractmethod
    def best(self, row: RowOutputs) -> NDArray[np.int64] | None:
        """Return the best class of each result, ``[1 or tokens, 1]``; None without classes."""

    @abstractmethod
    def as_outputs(self, expected: Expected, like: RowOutputs | None = None) -> RowOutputs:
        """Return the reference's result in the form of the core's outputs.

        With the outputs of an artifact in `like`, classes that the reference scores equally up to
        rounding are those that the artifact chose, so that a tie is not a difference.
        """

    @abstractmethod
    def as_expected(self, rows: Sequence[RowOutputs]) -> list[Expected]:
        """Return the outputs of a graph in the form of a reference."""

    def whole(self, row: RowOutputs, expected: Expected) -> list[Pair]:
        """Return the views that together have each number of the reference once."""
        return self.pairs(row, expected)

    def squares(self, row: RowOutputs, expected: Expected) -> tuple[float, float]:
        """Return the squared norms of a row's error and of its reference."""
        pairs = self.whole(row, expected)
        with np.errstate(invalid="ignore", over="ignore"):
            off = sum(float(np.square(a.astype(np.float64) - b).sum()) for a, b in pairs)
            return off, sum(float(np.square(b.astype(np.float64)).sum()) for _, b in pairs)

    def agrees(self, row: RowOutputs, expected: Expected) -> NDArray[np.bool_] | None:
        """Return for each result whether its best class is the reference's or ties with it.

        None if the results have no classes.
        """
        best = self.best(row)
        if best is None:
            return None
        every = expected[0].reshape(len(best), -1)
        reached = np.take_along_axis(every, best, axis=1)[:, 0]
        agree: NDArray[np.bool_] = reached >= every.max(1) - TIE
        return agree


@dataclass(frozen=True)
class Elements(Results):
    """Results that are compared element by element."""

    # Meaning of the last axis: a vector, numbers of classes, or neither.
    meaning: Literal["vector", "classes", "values"] = "values"

    @property
    def metrics(self) -> tuple[Metric, ...]:
        if self.meaning == "vector":
            return COSINES
        several = self.meaning == "classes" and self.outputs[0].dims != (1,)
        return (LABEL_AGREEMENT,) if several else ()

    @property
    def views(self) -> tuple[str, ...]:
        return tuple(tensor.name for tensor in self.outputs)

    def fault(self, row: RowOutputs, expected: Expected) -> str:
        for name, wanted in zip(self.views, expected, strict=True):
            if row[name].shape != wanted.shape:
                return f"{name} has another shape than the reference, {list(wanted.shape)}"
        return ""

    def pairs(self, row: RowOutputs, expected: Expected) -> list[Pair]:
        return [(row[name], right) for name, right in zip(self.views, expected, strict=True)]

    def effects(
        self, row: RowOutputs, changed: RowOutputs, expected: Expected, error: float
    ) -> list[float]:
        return [distance(row[name], changed[name]) for name in self.views]

    def best(self, row: RowOutputs) -> NDArray[np.int64] | None:
        if self.meaning != "classes":
            return None
        values = row[self.outputs[0].name]
        best: NDArray[np.int64] = values.reshape(-1, values.shape[-1]).argmax(-1)[:, None]
        return best

    def as_outputs(self, expected: Expected, like: RowOutputs | None = None) -> RowOutputs:
        return dict(zip(self.views, expected, strict=True))

    def as_expected(self, rows: Sequence[RowOutputs]) -> list[Expected]:
        return [tuple(np.asarray(row[name], np.float32) for name in self.views) for row in rows]


@dataclass(frozen=True)
class BestClasses(Results):
    """The best classes of a row, or the best class of each token, with their scores.

    The reference has the scores of all classes. A row has two views: the scores that it returns,
    best first, and the scores of all classes, where those that were not chosen have the reference's
    scores. Neither view depends on the order of classes with equal scores. Together they detect a
    wrong class, whatever score it has.
    """

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (LABEL_AGREEMENT,)

    @property
    def views(self) -> tuple[str, ...]:
        classes, scores = (tensor.name for tensor in self.outputs)
        return f"{scores}, best first,", f"{scores} of each {classes}"

    @property
    def per_token(self) -> bool:
        """Whether each token has one class; else a row has several."""
        return "tokens" in self.outputs[0].dims

    def chosen(self, row: RowOutputs) -> Pair:
        """Return ids and scores of the chosen classes, each ``[1 or tokens, choices]``."""
        ids, scores = (row[tensor.name] for tensor in self.outputs)
        shape = (-1, 1) if self.per_token else (1, -1)
        return ids.reshape(shape), scores.reshape(shape)

    def fault(self, row: RowOutputs, expected: Expected) -> str:
        name, classes = self.outputs[0].name, expected[0].shape[-1]
        ids, _ = self.chosen(row)
        if not np.issubdtype(ids.dtype, np.integer):
            return f"{name} is {ids.dtype}, not a number of a class"
        if ids.min() < 0 or ids.max() >= classes:
            lowest, highest = ids.min(), ids.max()
            return f"{name} has ids from {lowest} to {highest}, but there are {classes} classes"
        if any(len(set(chosen)) < len(chosen) for chosen in ids.tolist()):
            return f"{name} names a class twice"
        return ""

    def pairs(self, row: RowOutputs, expected: Expected) -> list[Pair]:
        scores = self.chosen(row)[1]
        ((every, right),) = self.whole(row, expected)
        return [(scores, -np.sort(-right, axis=1)[:, : scores.shape[1]]), (every, right)]

    def whole(self, row: RowOutputs, expected: Expected) -> list[Pair]:
        every = self._every(row, expected)
        return [(every, expected[0].reshape(every.shape))]

    def effects(
        self, row: RowOutputs, changed: RowOutputs, expected: Expected, error: float
    ) -> list[float]:
        """Return the changes; see `Results.effects`.

        A class that only one of the two runs chose has no known score in the other run. Its score
        is compared with the reference's, and `error` is subtracted.
        """
        every, others = self._every(row, expected), self._every(changed, expected)
        differs = self._is_chosen(row, every) != self._is_chosen(changed, others)
        change = np.abs(every - others) - np.where(differs, error, 0.0)
        scores, other = self.chosen(row)[1], self.chosen(changed)[1]
        return [distance(scores, other), float(change.max(initial=0))]

    def best(self, row: RowOutputs) -> NDArray[np.int64]:
        return self.chosen(row)[0][:, :1].astype(np.int64)

    def as_outputs(self, expected: Expected, like: RowOutputs | None = None) -> RowOutputs:
        scores = expected[0].reshape(-1, expected[0].shape[-1])
        kept = 1 if self.per_token else int(self.outputs[0].dims[0])
        ids = np.argsort(-scores, axis=1, kind="stable")[:, :kept]
        if like is not None:
            ids = _with_ties(ids, self.chosen(like)[0].astype(np.int64), scores)
        best = np.take_along_axis(scores, ids, axis=1)
        shape = (len(scores),) if self.per_token else (kept,)
        classes, chosen = (tensor.name for tensor in self.outputs)
        return {classes: ids.astype(np.int32).reshape(shape), chosen: best.reshape(shape)}

    def as_expected(self, rows: Sequence[RowOutputs]) -> list[Expected]:
        """Return the outputs of a graph in the form of a reference.

        The graph has scores of the best classes only. All other classes get a score slightly below
        the lowest one. If an engine then chooses another class in a tie with the last one, the
        difference is small, but the class does not equal the graph's first one, so the share of
        equal first classes stays strict.
        """
        largest = max((int(self.chosen(row)[0].max(initial=0)) for row in rows), default=0)
        # The graph's outputs do not show how many classes there are, so leave a margin.
        classes = 2 << largest.bit_length()
        expected: list[Expected] = []
        for row in rows:
            ids, scores = self.chosen(row)
            least = scores.min(axis=1, keepdims=True).astype(np.float32) - 2 * TIE
            every = np.repeat(least, classes, axis=1).astype(np.float32)
            np.put_along_axis(every, ids.astype(np.int64), scores.astype(np.float32), axis=1)
            expected.append((every if self.per_token else every[0],))
        return expected

    def _every(self, row: RowOutputs, expected: Expected) -> NDArray[np.float32]:
        ids, scores = self.chosen(row)
        every = expected[0].reshape(len(ids), -1).copy()
        np.put_along_axis(every, ids.astype(np.int64), scores.astype(every.dtype), axis=1)
        return every

    def _is_chosen(self, row: RowOutputs, every: NDArray[np.float32]) -> NDArray[np.bool_]:
        is_chosen = np.zeros(every.shape, dtype=bool)
        ids = self.chosen(row)[0].astype(np.int64)
        np.put_along_axis(is_chosen, ids, values=True, axis=1)
        return is_chosen


def distance(one: Array, other: Array) -> float:
    """Return the largest difference of an element; for Booleans 1 if any differs."""
    if one.dtype == np.bool_:
        return float((one != other).any())
    return float(np.abs(one - other).max(initial=0))


def _with_ties(
    ids: NDArray[np.int64], other: NDArray[np.int64], scores: NDArray[np.float32]
) -> NDArray[np.int64]:
    """Return `ids` with the leading classes of `other` as long as their scores tie."""
    right, reached = (np.take_along_axis(scores, chosen, axis=1) for chosen in (ids, other))
    same = np.logical_and.accumulate(np.abs(right - reached) <= TIE, axis=1)
    result = ids.copy()
    for row in np.flatnonzero((ids != other).any(axis=1)):
        first = other[row, same[row]].tolist()
        rest = [chosen for chosen in ids[row].tolist() if chosen not in first]
        result[row] = [*first, *rest][: ids.shape[1]]
    return result
