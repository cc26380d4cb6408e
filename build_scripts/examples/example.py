"""Definition of an example: encoding of its data, head, training schedule, quality."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from examples.fitting import Row, Schedule

Record = Mapping[str, Any]
"""A line of the data: ``text`` and the labels of the example."""


@dataclass(frozen=True)
class Example:
    """Training and data of an example pipeline.

    Attributes:
        auto_class: Name of the transformers class.
        labels: Labels of the model's outputs, in order.
        encode: Function from tokenizer and records to tokenized, labeled rows.
        measure: Function from the folder of the trained model and held-out records to metrics.
    """

    auto_class: str
    labels: tuple[str, ...]
    encode: Callable[[Any, Sequence[Record]], list[Row]]
    measure: Callable[[str, Sequence[Record]], dict[str, Any]]
    schedule: Schedule


def rounded_f1(hits: int, found: int, wanted: int) -> dict[str, float]:
    """Return precision, recall and F1 for `hits` correct results."""
    precision = hits / found if found else 0.0
    recall = hits / wanted if wanted else 0.0
    f1 = 2 * hits / (found + wanted) if found + wanted else 0.0
    return {
        "precision": round(precision, 4),
        "recall": round(recall, 4),
        "f1": round(f1, 4),
        "count": wanted,
    }
