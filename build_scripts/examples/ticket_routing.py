"""The ticket example: one of seven departments for a message to a shop's support."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from examples.example import Example, Record, rounded_f1
from examples.fitting import Row, Schedule

LABELS = ("account", "billing", "cancellation", "delivery", "feedback", "returns", "technical")


def encode(tokenizer: Any, records: Sequence[Record]) -> list[Row]:
    """Tokenize the texts; each row has one label."""
    ids = tokenizer([record["text"] for record in records])["input_ids"]
    return [
        {"input_ids": row, "labels": [LABELS.index(record["label"])]}
        for row, record in zip(ids, records, strict=True)
    ]


def measure(folder: str, records: Sequence[Record]) -> dict[str, Any]:
    """Return accuracy, macro F1 and metrics of every class, by transformers' own pipeline."""
    from transformers import pipeline

    classify = pipeline("text-classification", model=folder, device="cpu")
    found = [answer["label"] for answer in classify([record["text"] for record in records])]
    wanted = [record["label"] for record in records]
    classes = {
        label: rounded_f1(
            sum(f == w == label for f, w in zip(found, wanted, strict=True)),
            found.count(label),
            wanted.count(label),
        )
        for label in LABELS
    }
    right = sum(f == w for f, w in zip(found, wanted, strict=True))
    return {
        "rows": len(records),
        "accuracy": round(right / len(records), 4),
        "macro_f1": round(sum(c["f1"] for c in classes.values()) / len(classes), 4),
        "classes": classes,
    }


TICKET_ROUTING = Example(
    auto_class="AutoModelForSequenceClassification",
    labels=LABELS,
    encode=encode,
    measure=measure,
    schedule=Schedule(epochs=10, batch_size=16, peak_rate=2e-4, head_rate=1e-3, frozen_layers=2),
)
