"""Metrics and labeled rows against values worked out by hand, and what no candidate may hide."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import yaml

from tests.support.decoded_cases import (
    EXAMPLES,
    PERFECT,
    Decoded,
    answer,
    entities,
    labels,
    relevance,
    relevances,
    terms,
    token_vectors,
    tokens,
    vector,
    vectors,
    words,
)
from tests.support.mistakes import check_refused, refusal
from tests.support.project import ROOT
from triptych.spec.backends import Precision
from triptych.spec.custom_task import custom_task
from triptych.spec.eval_file import first_rows, read_labels
from triptych.spec.fields import Custom
from triptych.spec.model_fields import ModelSpec
from triptych.spec.own_task import own_task
from triptych.tasks.accuracy import METRICS, TOLERANCES, metrics_of, thresholds
from triptych.tasks.catalog import TASKS
from triptych.tasks.compare import (
    Comparison,
    compare_anything,
    compare_labels,
    rank_correlation,
    spearman,
)
from triptych.tasks.labeled import (
    LABEL_ACCURACY,
    LOSSES_TO_SHOW,
    LabeledResult,
    LabeledRow,
    compare_labeled,
    difference_interval,
    ratio,
)
from triptych.tasks.metrics_vectors import MAX_PAIRS

NAN, INF = float("nan"), float("inf")


def against(task: str, got: list[Decoded], wanted: list[Decoded], queries: str = "") -> Comparison:
    rows = list(queries) if queries else ["q"] * len(got)
    if task == "custom":
        return compare_anything(got, wanted, rows)
    return TASKS[task].compare(got, wanted, rows)


def decoded(task: str, values: Any) -> Decoded:
    """Return the output of a request as tests/data/metrics.yaml has it."""
    match task:
        case "text-embedding":
            return vector(*values)
        case "fill-mask":
            return tokens(*values)
        case "token-classification":
            return entities(*values)
        case "question-answering":
            return answer(*values)
        case "reranking":
            return relevance(values)
    return labels(*values)


def test_values_and_errors_are_those_worked_out_by_hand() -> None:
    cases = yaml.safe_load((ROOT / "tests/data/metrics.yaml").read_text(encoding="utf-8"))
    for name, case in cases.items():
        task = case["task"]
        got, wanted = (
            [decoded(task, values) for values in case[side]] for side in ("got", "wanted")
        )
        found = against(task, got, wanted, case.get("queries", ""))
        values = {metric: found.values[metric] for metric in case.get("values", {})}
        assert values == pytest.approx(case.get("values", {}), abs=1e-6), name
        assert not found.values.keys() & {*case.get("without", [])}, name
        if "errors" in case:
            assert found.badness == pytest.approx(case["errors"]), name


def test_equal_outputs_are_perfect() -> None:
    assert set(TASKS) | {"custom"} == EXAMPLES.keys()
    for task, rows in EXAMPLES.items():
        found = against(task, rows, rows)
        assert found == Comparison(PERFECT[task], [0.0] * len(rows)), task
        assert PERFECT[task].keys() <= set(metrics_of(TASKS[task]) if task in TASKS else ()), task
        # Nothing to compare and a single row are no trouble.
        assert against(task, [], []) == Comparison({}, []), task
        one = against(task, rows[:1], rows[:1])
        assert one.values.items() <= PERFECT[task].items(), task
        assert one.badness == [0.0], task


def test_what_is_missing_or_not_finite_never_passes() -> None:
    for task, value in product(EXAMPLES, (NAN, INF, -INF)):
        wanted = EXAMPLES[task]
        damaged = {
            name: np.full_like(array, value) if array.dtype == np.float32 else array
            for name, array in wanted[0].items()
        }
        if task not in ("token-classification", "custom"):
            found = against(task, [damaged, *wanted[1:]], wanted)
            assert not np.isnan(list(found.values.values())).any()
            assert found.badness[0] == max(found.badness) > 1
            limits = thresholds(TASKS[task], "int8", {})
            for name, reached in found.values.items():
                assert not METRICS[name].meets(reached, limits[name]), (task, name)
        found = against(task, [{}, *wanted[1:]], wanted)
        assert found.badness[0] == max(found.badness) > 1
        assert all(value != PERFECT[task][name] for name, value in found.values.items())


def test_a_changed_neighbor_counts_by_the_similarity_it_costs() -> None:
    """The second and third vector lie on both sides of the first, one slightly nearer."""
    for lost, agreement in ((0.0015, 1.0), (0.01, 2 / 3)):
        near, far = (np.array([c, np.sqrt(1 - c * c)]) for c in (0.9, 0.9 - lost))
        wanted = vectors(np.array([[1, 0], near, far * [1, -1]]))
        changed = vectors(np.array([[1, 0], far, near * [1, -1]]))
        found = against("text-embedding", changed, wanted).values
        assert found["nearest_neighbor_agreement"] == pytest.approx(agreement)
        assert found["max_neighbor_loss"] == pytest.approx(lost, abs=1e-6)
        assert found["mean_neighbor_loss"] == pytest.approx(lost / 3, abs=1e-6)


def test_many_rows_are_compared_by_a_sample_of_pairs() -> None:
    rng = np.random.default_rng(4)
    count = 1100
    assert count * (count - 1) // 2 > MAX_PAIRS
    reference = rng.normal(size=(count, 4))
    found = [
        against("text-embedding", vectors(reference + 0.05), vectors(reference)) for _ in range(2)
    ]
    assert found[0] == found[1]
    assert 0.98 < found[0].values["similarity_rank_correlation"] < 1
    assert 0.5 < found[0].values["nearest_neighbor_agreement"] < 1


def test_vectors_of_other_sizes_have_neighbors_of_their_own() -> None:
    small, large = np.eye(3), np.eye(5)[:2]
    wanted = [*vectors(small), *vectors(large)]
    found = against("text-embedding", wanted, wanted)
    assert found.values == PERFECT["text-embedding"]
    short = [vector(1, 0), *wanted[1:]]
    found = against("text-embedding", short, wanted)
    assert (found.values["min_cosine"], found.badness[0]) == (-1, 2)
    assert found.values["nearest_neighbor_agreement"] == pytest.approx(2 / 3)
    assert found.values["similarity_rank_correlation"] == -1


def test_what_is_no_list_of_entities_is_wrong() -> None:
    for text in ("", "{", "7", '"PER"', "[7]", "[{}]", '[{"entity":1,"start":Infinity,"end":2}]'):
        found = against("token-classification", [{"entities": words(text)}], [entities()])
        assert found == Comparison({"entity_f1": 0.0}, [1])
    one = ("PER", 0, 4)
    found = against("token-classification", [entities(one, score=None)], [entities(one)])
    assert found.values == {"entity_f1": 0.0}


def test_spearman_is_scipys() -> None:
    from scipy import stats  # takes a second

    for levels in (2, 5, 1000):
        rng = np.random.default_rng(levels)
        some, others = rng.integers(levels, size=(2, 200)).astype(np.float64)
        expected = stats.spearmanr(some, others).statistic
        assert spearman(some, others) == pytest.approx(expected)
        taken = rng.integers(4, size=(3, 200))
        resampled = [
            stats.spearmanr(np.repeat(some, times), np.repeat(others, times)).statistic
            for times in taken
        ]
        found = rank_correlation(some, others)(taken.astype(np.float64))
        assert found == pytest.approx(resampled)


def test_custom_outputs_differ_by_their_largest_difference() -> None:
    wanted = [{"x": np.array([[1.0, 2.0]]), "y": words("a")}] * 3
    got = [
        {"x": np.array([[1.0, 2.5]]), "y": words("a")},
        {"x": np.array([[1.0, 2.0]]), "y": words("b")},
        {"x": np.array([[1.0, NAN]]), "y": words("a")},
    ]
    assert against("custom", got, wanted) == Comparison({}, [0.5, 1.0, INF])
    assert against("custom", [{"x": np.ones((1, 3)), "y": words("a")}], wanted[:1]).badness == [INF]


def test_sets_of_labels_differ_by_their_distance_from_the_threshold() -> None:
    def outputs(**scores: float) -> dict[str, Any]:
        names = [name.strip("_").encode() for name in scores]
        return {"label": np.array([names], object), "score": np.array([[*scores.values()]])}

    none = outputs(_=0.0)  # an empty label: none passes
    cases = [
        (outputs(a=0.9, b=0.7), outputs(a=0.9, b=0.7), True, 0.0),
        (outputs(a=0.8, b=0.7), outputs(a=0.9, b=0.7), True, 0.1),
        (outputs(a=0.9), outputs(a=0.9, b=0.7), False, 0.2),
        (outputs(a=0.9, b=0.7), outputs(a=0.9, _=0.0), False, 0.2),
        (outputs(a=0.9), outputs(a=0.9, b=0.5 + 1e-6), True, 1e-6),
        (none, none, True, 0.0),
        (none, outputs(a=0.6), False, 0.1),
        (outputs(a=0.9), outputs(b=0.9), False, 0.4),
        (outputs(a=np.nan), outputs(a=0.9), False, np.inf),
        ({}, outputs(a=0.9), False, np.inf),
    ]
    for got, wanted, agrees, difference in cases:
        found = compare_labels([got], [wanted], ["x"], threshold=0.5)
        assert found.values["label_agreement"] == agrees, (got, wanted)
        values = [found.values["max_probability_difference"], found.badness[0] - (not agrees)]
        assert values == pytest.approx([difference, difference]), (got, wanted)
    found = compare_labels([none, outputs(a=0.9)], [outputs(a=0.6)] * 2, ["x"] * 2, threshold=0.5)
    assert found.values["confidence_shift"] == pytest.approx(0.1)


def test_every_task_has_limits_in_every_precision() -> None:
    for task, precision in product(TASKS.values(), get_args(Precision)):
        limits = thresholds(task, precision, {})
        unlimited = {"max_difference"} if TOLERANCES[precision] == "quantized" else set()
        assert limits.keys() == set(metrics_of(task)) - unlimited, (task.name, precision)
        assert limits.keys() <= METRICS.keys()


def test_a_custom_task_is_judged_by_what_its_core_returns() -> None:
    common = {"max_difference", "batch_sensitivity", "edge_error"}
    outputs = [{"name": "x", "dtype": "FP32", "dims": [1]}]
    for reads, returns, own in (
        ("pooled", "vector", {"min_cosine", "mean_cosine"}),
        ("row", "scores", {"label_agreement"}),
        ("tokens", "token_scores", {"label_agreement"}),
        ("row", "logits", set()),
    ):
        core = {"auto_class": "AutoModel", "head_input": reads, "core_output": returns}
        task = custom_task(Custom.model_validate({**core, "outputs": outputs}))
        assert thresholds(task, "fp32", {}).keys() == common | own, (reads, returns)


def test_a_function_that_cannot_compare_an_output_is_named(tmp_path: Path) -> None:
    output = {"type": "float", "metric": "function", "limit": 0.5}
    model, inputs = {"onnx": "x.onnx"}, {"x": {"type": "float"}}
    fields = {"task": "model", "model": model, "inputs": inputs, "outputs": {"risk": output}}
    task = own_task(ModelSpec.model_validate({**fields, "name": "own", "folder": tmp_path}))
    rows = [{"risk": np.zeros((1, 1), np.float32)}]
    for body in ("", "actual.nothing", "'high'"):
        text = f"def compare_risk(actual, expected):\n    return {body}\n" * bool(body)
        (tmp_path / "hooks.py").write_text(text)
        check_refused("must have a function `compare_risk`", task.compare, rows, rows, [""])


def test_an_override_replaces_or_adds_a_limit_of_what_the_task_measures() -> None:
    limits = thresholds(TASKS["text-embedding"], "int8", {"max_difference": 0.1, "min_cosine": 0.9})
    assert (limits["max_difference"], limits["min_cosine"]) == (0.1, 0.9)
    for name in ("entity_f1", "nonsense"):
        error = refusal(thresholds, TASKS["text-embedding"], "fp32", {name: 0.5})
        assert error.field == f"accuracy.{name}"
        assert "nearest_neighbor_agreement" in error.remedy


def test_a_metric_meets_its_limit_from_the_better_side_alone() -> None:
    for name, metric in METRICS.items():
        better = 0.1 if metric.better == "higher" else -0.1
        met = [metric.meets(value, 0.5) for value in (0.5, 0.5 + better, 0.5 - better, math.nan)]
        assert met == [True, True, False, False], name


FIELDS = {
    "question-answering": ("text", "text_pair"),
    "reranking": ("text", "text_pair"),
    "late-interaction-reranking": ("text", "text_pair"),
    "image-classification": ("image",),
    "image-embedding": ("image",),
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
    "late-interaction-reranking": ({"text": "q", "text_pair": "p", "relevant": 1}, True),
    "text-embedding": ({"text": "a", "text_pair": "b", "score": 3}, 3.0),
    "image-embedding": ({"image": "a.png", "image_pair": "b", "score": 3}, 3.0),
    "multi-vector-embedding": ({"text": "a", "text_pair": "b", "score": 3}, 3.0),
    "sparse-embedding": ({"text": "a", "text_pair": "b", "score": 3}, 3.0),
    "hybrid-embedding": ({"text": "a", "text_pair": "b", "score": 3}, 3.0),
}
OTHERS: dict[str, dict[str, Any]] = {
    "reranking": {"relevant": 0},
    "late-interaction-reranking": {"relevant": 0},
    "multi-vector-embedding": {"score": 1},
    "text-embedding": {"score": 1},
    "image-embedding": {"score": 1},
    "sparse-embedding": {"score": 1},
    "hybrid-embedding": {"score": 1},
}


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
        fields = FIELDS.get(task, ("text",))
        pair = ({fields[0]: "b"},) if task.endswith("-embedding") else ()
        inputs = {name: line[name] for name in fields}
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
    for task, change, rule in FAULTS:
        line, _ = LINES[task]
        error = refusal(read, write(path, line, {**line, **change}), task)
        assert error.field == f"{path}:2"
        assert error.rule.startswith(rule), (task, change)
        assert error.remedy.startswith("Write {")
    for text in ("[1]", "{", "é", '"text"', "[" * 100_000):
        path.write_bytes(text.encode("latin-1"))
        check_refused("must be a JSON object", read, path, "text-classification")
    for task, rows, rule in USELESS:
        check_refused(rule, read, write(path, *rows), task)


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


def test_scores_of_token_vectors_are_compared_and_ranked_against_labels() -> None:
    wanted = EXAMPLES["multi-vector-embedding"]
    other = token_vectors((0, 1), (-0.6, 0.8))
    found = against("multi-vector-embedding", [other, *wanted[1:]], wanted)
    # The first text as a query has the scores 0.4 and 0.8 with the others, and then 0.9 and 0.9.
    assert found.values["score_error"] == pytest.approx(0.5)
    assert found.values["min_cosine"] == pytest.approx(0.0, abs=1e-6)
    fewer = against("multi-vector-embedding", [token_vectors((1, 0)), *wanted[1:]], wanted)
    assert (fewer.values["min_cosine"], fewer.badness[0]) == (-1.0, 2.0)
    rows = [LabeledRow(n, ({"text": "a"}, {"text": "b"}), {}, s) for n, s in enumerate((3, 1))]
    pairs = [wanted[0], wanted[0], wanted[1], token_vectors((1, 0))]
    assert judge_pair("multi-vector-embedding", rows, pairs, pairs).candidate == 1.0
    broken = [token_vectors((NAN, 0)), *pairs[1:]]
    assert judge_pair("multi-vector-embedding", rows, broken, pairs).candidate < 0


def test_dot_products_of_sparse_rows_are_ranked_against_the_scores() -> None:
    rows = [LabeledRow(n, ({"text": "a"}, {"text": "b"}), {}, s) for n, s in enumerate((1, 5, 3))]
    # Cosines would rank the last pair first.
    got = [terms({1: 1.0}), terms({2: 9.0}), terms({3: 2.0, 4: 2.0}), terms({3: 4.0}),
           terms({7: 1.0, 0: 0.5}), terms({7: 1.0, 0: 0.5})]  # fmt: skip
    result = judge_pair("sparse-embedding", rows, got, got)
    assert result.metric == "similarity_correlation"
    assert result.reference == pytest.approx(1)
    broken = [*got[:3], terms({3: np.nan}), *got[4:]]
    assert judge_pair("sparse-embedding", rows, broken, got).candidate == pytest.approx(-0.5)


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
