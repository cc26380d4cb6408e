"""Labeled rows: read with care, and judged so that noise is no loss and a loss is no noise."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decoded_cases import (
    Decoded,
    answer,
    entities,
    labels,
    relevance,
    relevances,
    tokens,
    vector,
)
from mistakes import check_refused, refusal
from triptych.spec.fields import Custom
from triptych.spec.tasks import TASKS
from triptych.spec.tasks.custom import custom_task
from triptych.spec.tasks.eval_file import first_rows, read_labels
from triptych.spec.tasks.labeled import (
    LABEL_ACCURACY,
    LOSSES_TO_SHOW,
    LabeledResult,
    LabeledRow,
    compare_labeled,
    difference_interval,
    ratio,
)

FIELDS = {
    "question-answering": ("text", "text_pair"),
    "reranking": ("text", "text_pair"),
    "image-classification": ("image",),
}
CUSTOM = custom_task(
    Custom.model_validate({"auto_class": "AutoModel", "outputs": [{"name": "x", "dtype": "FP32"}]})
)
LINES: dict[str, tuple[dict[str, Any], Any]] = {
    "text-classification": ({"text": "t", "label": "good"}, "good"),
    "zero-shot-classification": ({"text": "t", "label": " sport "}, "sport"),
    "image-classification": ({"image": "a.png", "label": "cat"}, "cat"),
    "fill-mask": ({"text": "[MASK] is red", "token": "blood"}, "blood"),
    "token-classification": (
        {"text": "In Rome", "entities": [{"entity": "LOC", "start": 3, "end": 7}]},
        Counter({("LOC", 3, 7): 1}),
    ),
    "question-answering": (
        {"text": "Where?", "text_pair": "In Rome", "answers": ["Rome", "in Rome"]},
        ("Rome", "in Rome"),
    ),
    "reranking": ({"text": "q", "text_pair": "p", "relevant": 1}, True),
    "text-embedding": ({"text": "a", "text_pair": "b", "score": 3}, 3.0),
}
OTHERS: dict[str, dict[str, Any]] = {"reranking": {"relevant": 0}, "text-embedding": {"score": 1}}


def write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path


def read(path: Path, task: str) -> list[LabeledRow]:
    return read_labels(path, CUSTOM if task == "custom" else TASKS[task])


def test_rows_are_read_with_their_truth(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    for task, (line, truth) in LINES.items():
        other = {**line, **OTHERS.get(task, {}), "parameters": {"top_k": 2}}
        first, second = read(write(path, line, other), task)
        assert (first.line, first.truth, first.parameters) == (1, truth, {}), task
        assert (second.line, second.parameters) == (2, {"top_k": 2}), task
        pair = ({"text": "b"},) if task == "text-embedding" else ()
        inputs = {name: line[name] for name in FIELDS.get(task, ("text",))}
        assert first.requests == (inputs, *pair), task
    # Blank lines count, a question may have no answer.
    path.write_text('\n{"text": "a\u2028b", "label": "x"}\n\n', encoding="utf-8")
    (row,) = read(path, "text-classification")
    assert (row.line, row.requests[0]["text"]) == (2, "a\u2028b")
    line = {**LINES["question-answering"][0], "answers": []}
    (row,) = read(write(path, line), "question-answering")
    assert row.truth == ("",)


FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("text-classification", {"label": 3}, "must have a label as `label`"),
    ("text-classification", {"label": " "}, "must have a label as `label`"),
    ("text-classification", {"text": None}, "must have a string as `text`"),
    ("text-classification", {"text": "\ud800"}, "must be a JSON object"),
    ("text-classification", {"parameters": []}, "must have an object as `parameters`"),
    ("text-classification", {"text_pair": "b"}, "must not have `text_pair`"),
    ("fill-mask", {"token": None}, "must have a token as `token`"),
    ("token-classification", {"entities": {}}, "must have a list of entities"),
    ("token-classification", {"entities": [3]}, "must have a list of entities"),
    ("token-classification", {"entities": [{"entity": "A", "start": 0}]}, "must have a list"),
    (
        "token-classification",
        {"entities": [{"entity": "A", "start": 0, "end": 8}]},
        "must have positions within the text's 7 characters",
    ),
    (
        "token-classification",
        {"entities": [{"entity": "A", "start": 4, "end": 4}]},
        "must have positions within the text's 7 characters",
    ),
    ("question-answering", {"answers": "Rome"}, "must have a list of right answers"),
    ("question-answering", {"text_pair": 3}, "must have a string as `text_pair`"),
    ("reranking", {"relevant": 2}, "must have 1 or 0 as `relevant`"),
    ("reranking", {"relevant": "yes"}, "must have 1 or 0 as `relevant`"),
    ("text-embedding", {"text_pair": None}, "must have a string as `text_pair`"),
    ("text-embedding", {"score": True}, "must have a number"),
    ("text-embedding", {"score": float("nan")}, "must have a number"),
    ("text-embedding", {"score": 10**400}, "must have a number"),
]
"""Task, change of its line of `LINES`, and the beginning of the rule that the line breaks."""
USELESS: list[tuple[str, list[object], str]] = [
    ("text-classification", [], "has no rows"),
    ("reranking", [LINES["reranking"][0]] * 2, "must have a query"),
    ("text-embedding", [LINES["text-embedding"][0]] * 2, "pairs with different scores"),
    ("token-classification", [{"text": "a", "entities": []}], "a row with an entity"),
    ("custom", [{"text": "a"}], "is not supported for task custom"),
]
"""Task and rows that cannot judge it, and words of the error."""


def test_each_fault_of_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    check_refused("eval.jsonl` does not exist", read, path, "reranking")
    for task, change, words in FAULTS:
        line, _ = LINES[task]
        error = refusal(read, write(path, line, {**line, **change}), task)
        assert error.field == f"{path}:2"
        assert error.rule.startswith(words), (task, change)
        assert error.remedy.startswith("Write {")
    for text in ("[1]", "{", "é", '"text"', "[" * 100_000):
        path.write_bytes(text.encode("latin-1"))
        check_refused("must be a JSON object", read, path, "text-classification")
    for task, rows, words in USELESS:
        check_refused(words, read, write(path, *rows), task)


def rows_of(*truths: Any, texts: Sequence[str] = ()) -> list[LabeledRow]:
    texts = texts or ["q"] * len(truths)
    pairs = zip(texts, truths, strict=True)
    return [LabeledRow(n, ({"text": text},), {}, truth) for n, (text, truth) in enumerate(pairs)]


def test_of_many_rows_the_first_count_and_of_passages_those_of_whole_queries() -> None:
    texts = ["a", "b", "a", "c", "b", "c"]
    rows = rows_of(1, 0, 0, 1, 1, 0, texts=texts)
    assert first_rows(rows, TASKS["text-classification"], 3) == rows[:3]

    def queries(most: int) -> str:
        return "".join(
            row.requests[0]["text"] for row in first_rows(rows, TASKS["reranking"], most)
        )

    assert [queries(most) for most in (1, 3, 4, 5, 6)] == ["aa", "aa", "abab", "abab", "abacbc"]


def judge_pair(
    task: str, rows: Sequence[LabeledRow], got: Sequence[Decoded], wanted: Sequence[Decoded]
) -> LabeledResult:
    metric = TASKS[task].labeled
    assert metric is not None
    return compare_labeled(metric, rows, got, wanted, max_drop=0.0)


def spans(*places: int) -> Counter[tuple[str, int, int]]:
    return Counter({("A", place, place + 1): 1 for place in places})


def found(*places: int) -> Decoded:
    return entities(*(("A", place, place + 1) for place in places))


def test_the_metric_is_what_a_hand_makes_it() -> None:
    cases: list[tuple[str, list[LabeledRow], list[Decoded], str, float]] = [
        (
            "text-classification",
            rows_of("a", "b", "a"),
            [labels(("a", 0.9)), labels(("a", 0.6), ("b", 0.4)), labels(("a", float("nan")))],
            "accuracy",
            1 / 3,
        ),
        ("fill-mask", rows_of("x", "y"), [tokens((" x", 0.5)), {}], "accuracy", 1 / 2),
        (
            "token-classification",
            rows_of(spans(1, 3), spans(), spans(4)),
            [found(1, 2), found(7), found(4)],
            "entity_f1",
            2 * 2 / (3 + 4),
        ),
        (
            "question-answering",
            rows_of(("old Rome", "Rome"), ("",), ("the sea",)),
            [answer("in Rome"), answer(""), answer("land")],
            "answer_f1",
            (2 / 3 + 1 + 0) / 3,
        ),
        (
            "reranking",
            rows_of(False, True, True, True, False, False, True, texts="aaabbcd"),
            relevances([3, 2, 1, 5, 5, 1, 2]),
            "mean_reciprocal_rank",
            (1 / 2 + 1 / 1.5) / 2,
        ),
    ]
    for task, rows, got, metric, value in cases:
        result = judge_pair(task, rows, got, got)
        assert (result.metric, result.rows) == (metric, len(rows))
        assert result.candidate == result.reference == pytest.approx(value), task
        assert (result.difference, result.low, result.high) == (0, 0, 0)
        assert result.failure == ""


def test_similarity_is_ranked_against_the_scores() -> None:
    rows = [LabeledRow(n, ({"text": "a"}, {"text": "b"}), {}, s) for n, s in enumerate((1, 5, 3))]
    angles = [0, 1.5, 0, 0.1, 0, 0.7]
    got = [vector(np.cos(angle), np.sin(angle)) for angle in angles]
    result = judge_pair("text-embedding", rows, got, got)
    assert result.metric == "similarity_correlation"
    assert result.reference == pytest.approx(1)
    worse = [*got[:2], *got[4:], *got[2:4]]
    assert judge_pair("text-embedding", rows, worse, got).candidate == pytest.approx(0.5)
    constant = [vector(1, 0)] * 6
    assert judge_pair("text-embedding", rows, constant, got).candidate == 0


def test_what_proves_nothing_is_told() -> None:
    got = [labels(("LABEL_1", 0.9))] * 3
    result = judge_pair("text-classification", rows_of("good", "bad", "good"), got, got)
    assert "Check that the labels match the model's" in result.failure
    for rows in ([], rows_of(True, True)):
        got = relevances([1.0] * len(rows))
        result = judge_pair("reranking", rows, got, got)
        assert result.failure == "no labeled row can show the mean_reciprocal_rank"
        assert result.smallest_visible_drop == 1


def choose(right: Sequence[bool]) -> list[Decoded]:
    return [labels(("yes" if each else "no", 0.9)) for each in right]


def accuracy(candidate: Any, reference: Any, max_drop: float = 0.0) -> LabeledResult:
    rows = rows_of(*["yes"] * len(reference))
    return compare_labeled(
        LABEL_ACCURACY, rows, choose(candidate), choose(reference), max_drop=max_drop
    )


def test_losses_count_from_about_as_many_as_a_sign_test_needs() -> None:
    for rows, needed in ((20, 5), (100, 6), (3000, 6)):
        right = np.ones(rows, dtype=bool)
        for lost, fails in ((needed - 1, False), (needed, True)):
            result = accuracy(np.arange(rows) >= lost, right)
            assert bool(result.failure) == fails, (rows, lost)
            assert result.difference == pytest.approx(-lost / rows)
        same = accuracy(right, right)
        assert same.smallest_visible_drop == LOSSES_TO_SHOW / rows
        assert same == accuracy(right, right)
    for rows in (1, 3):  # a handful cannot show a loss
        result = accuracy(np.zeros(rows, dtype=bool), np.ones(rows, dtype=bool))
        assert result.failure == ""
        assert result.low <= result.difference == -1 < 0 <= result.high
        assert result.smallest_visible_drop > 1


def test_a_real_loss_is_found_and_noise_is_seldom_called_one() -> None:
    for rows, drop in ((150, 0.15), (2000, 0.04)):
        rng = np.random.default_rng(rows)
        reference = rng.random(rows) < 0.9
        noisy = reference ^ (rng.random(rows) < 0.03)
        candidate = noisy & (rng.random(rows) >= drop)
        result = accuracy(candidate, reference)
        assert result.low < result.difference < result.high < 0
        assert -result.difference > result.smallest_visible_drop
        for part in ("accuracy", str(rows), f"{-result.difference:.4f}"):
            assert part in result.failure
        assert not accuracy(candidate, reference, max_drop=2 * drop).failure
    for rows, changed in ((30, 0.2), (200, 0.02)):
        rng = np.random.default_rng(7)
        ones, alarms = np.ones(rows), 0
        for _ in range(60):
            model = rng.random(rows) < 0.9
            some, others = (model ^ (rng.random(rows) < changed) for _ in range(2))
            _, high = difference_interval(
                ratio(some.astype(float), ones), ratio(others.astype(float), ones), rows
            )
            alarms += high < 0
        assert alarms <= 4  # of 60; at the nominal 2.5 % more would come up once in 60 such tests


@pytest.mark.parametrize("lost", [0, 40])
def test_losses_are_found_by_query_and_by_text(lost: int) -> None:
    queries = [f"q{n}" for n in range(80) for _ in range(2)]
    rows = rows_of(*[True, False] * 80, texts=queries)
    reference = [relevance(score) for _ in range(80) for score in (2, 1)]
    candidate = [relevance(1.0) if n < 2 * lost else row for n, row in enumerate(reference)]
    result = judge_pair("reranking", rows, candidate, reference)
    assert result.candidate == pytest.approx(1 - lost / 80 / 3)
    assert bool(result.failure) == bool(lost)
    assert result.smallest_visible_drop >= LOSSES_TO_SHOW / 80

    texts = rows_of(*[spans(1, 3)] * 80)
    right = [found(1, 3)] * 80
    shifted = [found(2, 3) if n < lost else found(1, 3) for n in range(80)]
    assert bool(judge_pair("token-classification", texts, shifted, right).failure) == bool(lost)
