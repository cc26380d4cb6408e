"""Write the examples' ``eval.jsonl``: the held-out rows, as the accuracy gate reads them.

Usage: ``python build_scripts/examples/labeled.py`` rewrites ``pipelines/*/eval.jsonl``.
"""

from __future__ import annotations

import json
from typing import Any

from examples.example import Record
from examples.train import EXAMPLES, PIPELINES, read_records


def render(name: str) -> str:
    """Return ``eval.jsonl`` of an example: all rows of its ``data/test.jsonl``."""
    records = read_records(PIPELINES / name / "data" / "test.jsonl")
    rows = [{"text": record["text"], **_labels(record)} for record in records]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _labels(record: Record) -> dict[str, Any]:
    if "label" in record:
        return {"label": record["label"]}
    return {
        "entities": [
            {"entity": kind, "start": start, "end": end} for start, end, kind in record["spans"]
        ]
    }


def main() -> None:
    """Rewrite every example's file."""
    for name in EXAMPLES:
        (PIPELINES / name / "eval.jsonl").write_text(render(name), encoding="utf-8")


if __name__ == "__main__":
    main()
