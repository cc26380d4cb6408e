"""The PII example: names, e-mails, phones, addresses and ids in a text, as BIO tags."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from examples.example import Example, Record, rounded_f1
from examples.fitting import Row, Schedule

TYPES = ("NAME", "EMAIL", "PHONE", "ADDRESS", "ID")
LABELS = ("O", *(f"{mark}-{kind}" for kind in TYPES for mark in "BI"))
AGGREGATION = "max"
"""Aggregation strategy, the same as in ``pipeline.yaml``."""

Span = tuple[int, int, str]


def encode(tokenizer: Any, records: Sequence[Record]) -> list[Row]:
    """Tag each token: B for the first token of a span, I for the others."""
    rows = []
    for record in records:
        encoding = tokenizer(record["text"], return_offsets_mapping=True)
        tags = [_tag(begin, end, record["spans"]) for begin, end in encoding["offset_mapping"]]
        starts = [None, *tags[:-1]]
        labels = [
            LABELS.index("O" if tag is None else f"{'I' if tag == before else 'B'}-{tag[2]}")
            for tag, before in zip(tags, starts, strict=True)
        ]
        rows.append({"input_ids": encoding["input_ids"], "labels": labels})
    return rows


def _tag(begin: int, end: int, spans: Iterable[Sequence[Any]]) -> Span | None:
    """Return the span that contains a token."""
    for start, stop, kind in spans:
        if begin < stop and end > start:
            return start, stop, kind
    return None


def measure(folder: str, records: Sequence[Record]) -> dict[str, Any]:
    """Return exact-match metrics of whole spans, measured with transformers' own pipeline."""
    from transformers import pipeline

    tag = pipeline(
        "token-classification", model=folder, aggregation_strategy=AGGREGATION, device="cpu"
    )
    answers = tag([record["text"] for record in records])
    found = {
        (row, entity["start"], entity["end"], entity["entity_group"])
        for row, entities in enumerate(answers)
        for entity in entities
    }
    wanted = {(row, *span) for row, record in enumerate(records) for span in record["spans"]}
    languages = {
        language: {row for row, record in enumerate(records) if record["language"] == language}
        for language in sorted({record["language"] for record in records})
    }
    return {
        "rows": len(records),
        "all": _score(found, wanted),
        "types": {
            kind: _score(*({s for s in spans if s[3] == kind} for spans in (found, wanted)))
            for kind in TYPES
        },
        "languages": {
            language: _score(*({s for s in spans if s[0] in rows} for spans in (found, wanted)))
            for language, rows in languages.items()
        },
    }


def _score(found: set[Any], wanted: set[Any]) -> dict[str, float]:
    return rounded_f1(len(found & wanted), len(found), len(wanted))


PII = Example(
    auto_class="AutoModelForTokenClassification",
    labels=LABELS,
    encode=encode,
    measure=measure,
    schedule=Schedule(
        epochs=3,
        batch_size=16,
        peak_rate=4e-4,
        head_rate=1e-3,
        frozen_layers=None,
        dropout=0.0,
    ),
)
