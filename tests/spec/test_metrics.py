"""Metrics against values worked out by hand, what no candidate may hide, and their limits."""

import math
from itertools import pairwise, product
from typing import Any, get_args

import numpy as np
import pytest
import yaml

from conftest import ROOT
from decoded_cases import (
    EXAMPLES,
    PERFECT,
    Decoded,
    answer,
    entities,
    labels,
    relevance,
    tokens,
    vector,
    vectors,
    words,
)
from mistakes import refusal
from triptych.spec.backends import Precision
from triptych.spec.fields import Custom
from triptych.spec.tasks import TASKS
from triptych.spec.tasks.accuracy import METRICS, TOLERANCES, metrics_of, thresholds
from triptych.spec.tasks.compare import Comparison, compare_anything, rank_correlation, spearman
from triptych.spec.tasks.custom import custom_task
from triptych.spec.tasks.metrics_vectors import MAX_PAIRS, NEIGHBOR_TOLERANCE

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


def test_neighbors_and_ranks_are_those_of_a_plain_computation() -> None:
    rng = np.random.default_rng(3)
    reference = rng.normal(size=(60, 16)).astype(np.float32)
    rows = (reference + rng.normal(size=(60, 16)) * 0.3).astype(np.float32)
    similarities = []
    for each in (reference, rows):
        units = each / np.linalg.norm(each, axis=1, keepdims=True)
        similarities.append(units @ units.T - 2 * np.eye(60))
    nearest = [each.argmax(1) for each in similarities]
    pairs = [each[np.triu_indices(60, 1)] for each in similarities]
    found = against("text-embedding", vectors(rows), vectors(reference)).values
    wanted = similarities[0]
    lost = wanted.max(1) - wanted[np.arange(60), nearest[1]]
    assert found["nearest_neighbor_agreement"] == np.mean(lost <= NEIGHBOR_TOLERANCE) < 1
    assert found["mean_neighbor_loss"] == pytest.approx(lost.mean(), abs=1e-6)
    assert found["max_neighbor_loss"] == pytest.approx(lost.max(), abs=1e-6)
    expected = spearman(pairs[0], pairs[1])
    assert found["similarity_rank_correlation"] == pytest.approx(expected, abs=1e-6)


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
    from scipy import stats  # type: ignore[import-untyped]  # takes a second

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


def test_every_task_has_limits_in_every_precision() -> None:
    for task, precision in product(TASKS.values(), get_args(Precision)):
        limits = thresholds(task, precision, {})
        unlimited = {"max_difference"} if TOLERANCES[precision] == "quantized" else set()
        assert limits.keys() == set(metrics_of(task)) - unlimited, (task.name, precision)
        assert limits.keys() <= METRICS.keys()


def test_limits_never_tighten_with_fewer_bits() -> None:
    for task in TASKS.values():
        steps = [thresholds(task, precision, {}) for precision in ("fp32", "fp16", "int8")]
        for tight, loose in pairwise(steps):
            for name in loose:
                assert METRICS[name].meets(tight[name], loose[name]), (task.name, name)


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
