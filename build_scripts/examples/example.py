"""What an example is: its data as rows, its head, its schedule and how its quality is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from examples.fitting import Row, Schedule

Record = Mapping[str, Any]
"""A line of the data: ``text`` and what the example's own file says of it."""


@dataclass(frozen=True)
class Example:
    """One of the example pipelines.

    Attributes:
        auto_class: the transformers class of its model.
        labels: of the model's outputs, in their order.
        encode: (tokenizer, records) -> tokenized, labeled rows.
        measure: (folder of the trained model, held-out records) -> figures, ready for JSON.
        schedule: of its training.
    """

    auto_class: str
    labels: tuple[str, ...]
    encode: Callable[[Any, Sequence[Record]], list[Row]]
    measure: Callable[[str, Sequence[Record]], dict[str, Any]]
    schedule: Schedule


def rounded_f1(hits: int, found: int, wanted: int) -> dict[str, float]:
    """Precision, recall and F1 of `hits` right ones among `found`, of `wanted` in all."""
    precision = hits / found if found else 0.0
    recall = hits / wanted if wanted else 0.0
    f1 = 2 * hits / (found + wanted) if found + wanted else 0.0
    return {
        "precision": round(precision, 4),
        "recall": round(recall, 4),
        "f1": round(f1, 4),
        "count": wanted,
    }
