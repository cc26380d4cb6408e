"""A task is one value: its metrics, limits and labeled rows follow from it alone."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gate_cases import SAMPLES, make, requests_of
from triptych.base.errors import UserError
from triptych.core.gate.check import GateLabels, check
from triptych.core.gate.runs import Decoding
from triptych.runtime.row_types import RowMaker, TextRowMaker
from triptych.runtime.rows_image import ImageRowMaker as ImageRowMaker
from triptych.runtime.rows_text import PlainTextRowMaker as PlainTextRowMaker
from triptych.spec.tasks.accuracy import metrics_of, thresholds
from triptych.spec.tasks.catalog import RERANKING
from triptych.spec.tasks.compare import Comparison, numbers
from triptych.spec.tasks.eval_file import first_rows, read_labels
from triptych.spec.tasks.labeled import LabeledMetric, Truth, ratio
from triptych.spec.tasks.task import Task


def _compare(got: Any, wanted: Any, queries: Any) -> Comparison:
    same = [
        abs(numbers(g, "score")[0] - numbers(w, "score")[0]) <= 1e-5
        for g, w in zip(got, wanted, strict=True)
    ]
    return Comparison({"exact_match": float(np.mean(same))}, [1.0 - each for each in same])


def _measure(rows: Any, outputs: Any) -> Any:
    right = [
        (numbers(o, "score")[0] > 0) == row.truth for o, row in zip(outputs, rows, strict=True)
    ]
    return ratio(np.array(right, dtype=np.float64), np.ones(len(rows))), len(rows)


def _read(value: Any, text: str) -> bool:
    if value not in ("+", "-"):
        raise ValueError
    return bool(value == "+")


SIGNS: Task = replace(
    RERANKING,
    name="signs",
    metrics=("exact_match",),
    compare_outputs=_compare,
    labeled=LabeledMetric("right_signs", _measure, Truth("sign", '"+"', "a sign", _read)),
)


def test_a_new_task_is_judged_by_what_its_value_says(tmp_path: Path) -> None:
    limits = thresholds(SIGNS, "fp16", {})
    assert limits.keys() == set(metrics_of(SIGNS))
    assert limits["exact_match"] == 0.98
    with pytest.raises(UserError, match="is not a metric of signs"):
        thresholds(SIGNS, "fp16", {"entity_f1": 1.0})

    case = make("scores")
    core = replace(case.core, outputs=(replace(case.core.outputs[0], name="relevance"),))
    case = replace(case, core=core)
    path = tmp_path / "eval.jsonl"
    signs = ["+" if expected[0][0] > 0 else "-" for expected in case.expected]
    lines = [{"text": "q", "text_pair": "p", "sign": sign} for sign in signs]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    rows = read_labels(path, SIGNS)
    assert [row.truth for row in rows] == [sign == "+" for sign in signs]
    assert first_rows(rows, SIGNS, 3) == rows[:3]

    requests = tuple(requests_of(SAMPLES))
    settings: Any = {
        "metrics": metrics_of(SIGNS),
        "precision": "fp16",
        "batch_size": 4,
        "decoding": Decoding(SIGNS, {}, tmp_path),
        "labeled": GateLabels(tuple(rows), requests, case.expected, 0.0),
    }
    right = check(case.right, requests, case.expected, core, limits, **settings)
    assert right.passed, right.failures
    assert right.value("exact_match") == 1
    assert right.labeled is not None
    assert (right.labeled.metric, right.labeled.candidate) == ("right_signs", 1)

    flipped = replace(case, expected=[(-scores,) for (scores,) in case.expected])
    wrong = check(flipped.right, requests, case.expected, core, limits, **settings)
    assert wrong.value("exact_match") == 0
    assert any("right_signs" in failure for failure in wrong.failures)


def test_labeled_rows_of_a_new_task_are_refused_in_its_words(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    path.write_text('{"text": "q", "text_pair": "p", "sign": "?"}', encoding="utf-8")
    with pytest.raises(UserError, match="must have a sign as `sign`"):
        read_labels(path, SIGNS)


def test_row_makers_are_of_the_protocol() -> None:
    """Checked by mypy: text and image makers fulfil it."""
    images: type[RowMaker] = ImageRowMaker
    tokens: type[TextRowMaker] = PlainTextRowMaker
    assert all(hasattr(maker, "make") for maker in (images, tokens))
