"""The tasks' own metrics against values worked out by hand, and what no candidate may hide."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats  # type: ignore[import-untyped]

from decoded_cases import (
    EXAMPLES,
    PERFECT,
    Decoded,
    answer,
    encoded,
    entities,
    labels,
    relevances,
    tokens,
    vector,
    vectors,
    words,
)
from triptych.spec.tasks import TASKS
from triptych.spec.tasks.accuracy import METRICS, metrics_of, thresholds
from triptych.spec.tasks.compare import Comparison, compare_anything, rank_correlation, spearman
from triptych.spec.tasks.metrics_vectors import MAX_PAIRS, NEIGHBOR_TOLERANCE

NAN, INF = float("nan"), float("inf")


def against(task: str, got: list[Decoded], wanted: list[Decoded], queries: str = "") -> Comparison:
    rows = list(queries) if queries else ["q"] * len(got)
    if task == "custom":
        return compare_anything(got, wanted, rows)
    return TASKS[task].compare(got, wanted, rows)


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


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("task", sorted(set(TASKS) - {"token-classification"}))
def test_what_is_not_finite_never_passes(task: str, value: float) -> None:
    wanted = EXAMPLES[task]
    damaged = {
        name: np.full_like(array, value) if array.dtype == np.float32 else array
        for name, array in wanted[0].items()
    }
    found = against(task, [damaged, *wanted[1:]], wanted)
    assert not np.isnan(list(found.values.values())).any()
    assert found.badness[0] == max(found.badness) > 1
    limits = thresholds(TASKS[task], "int8", {})
    for name, reached in found.values.items():
        assert not METRICS[name].meets(reached, limits[name]), name


@pytest.mark.parametrize("task", EXAMPLES)
def test_missing_outputs_are_the_worst(task: str) -> None:
    wanted = EXAMPLES[task]
    found = against(task, [{}, *wanted[1:]], wanted)
    assert found.badness[0] == max(found.badness) > 1
    assert all(value != PERFECT[task][name] for name, value in found.values.items())


def test_not_as_many_of_one_as_of_the_other_is_refused() -> None:
    with pytest.raises(ValueError, match="1 candidates, 2 references and 1 queries"):
        TASKS["reranking"].compare(relevances([1]), relevances([1, 2]), ["q"])


# Vectors


def test_cosines_are_those_of_each_row() -> None:
    wanted = vectors(np.eye(4)[:2])
    found = against("text-embedding", [vector(3, 4, 0, 0), vector(0, 2, 0, 0)], wanted)
    assert found.values == pytest.approx({"min_cosine": 0.6, "mean_cosine": 0.8})
    assert found.badness == pytest.approx([0.4, 0.0])


def test_a_neighbor_as_near_as_the_references_agrees() -> None:
    # Rows 0 and 1 hold the same text: they tie as neighbors of row 2, and the candidate swaps.
    wanted = vectors(np.array([[1, 0, 0], [1, 0, 0], [0.8, 0.6, 0], [0, 0, 1]]))
    tied = vectors(np.array([[0.999, 0.001, 0], [1, 0.01, 0], [0.8, 0.6, 0], [0, 0, 1]]))
    found = against("text-embedding", tied, wanted)
    assert found.values["nearest_neighbor_agreement"] == 1.0
    moved = vectors(np.array([[1, 0, 0], [1, 0, 0], [0, 0.6, 0.8], [0, 0, 1]]))
    found = against("text-embedding", moved, wanted)
    assert found.values["nearest_neighbor_agreement"] == 0.75


@pytest.mark.parametrize(("lost", "agreement"), [(0.0015, 1.0), (0.01, 2 / 3)])
def test_a_changed_neighbor_counts_by_the_similarity_it_costs(
    lost: float, agreement: float
) -> None:
    # In the plane: the second and third row lie on both sides of the first, one a little nearer.
    near, far = (np.array([c, np.sqrt(1 - c * c)]) for c in (0.9, 0.9 - lost))
    wanted = vectors(np.array([[1, 0], near, far * [1, -1]]))
    changed = vectors(np.array([[1, 0], far, near * [1, -1]]))
    found = against("text-embedding", changed, wanted).values
    assert found["nearest_neighbor_agreement"] == pytest.approx(agreement)
    assert found["max_neighbor_loss"] == pytest.approx(lost, abs=1e-6)
    assert found["mean_neighbor_loss"] == pytest.approx(lost / 3, abs=1e-6)


def test_a_vector_that_is_not_finite_has_no_neighbor_and_is_none() -> None:
    wanted = vectors(np.array([[1, 0, 0], [0.8, 0.6, 0], [0, 0.6, 0.8], [0, 0, 1]]))
    found = against("text-embedding", [wanted[0], vector(NAN, 0, 0), *wanted[2:]], wanted)
    # The first row has lost its neighbor; the last two are each other's.
    assert found.values["nearest_neighbor_agreement"] == 0.5


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
    expected = stats.spearmanr(pairs[0], pairs[1]).statistic
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


def test_zeros_are_like_zeros_alone() -> None:
    wanted = [vector(0, 0), vector(0, 1), vector(0, 0)]
    found = against("text-embedding", [vector(0, 0), vector(0, 0), vector(1, 0)], wanted)
    assert found.badness == [0, 1, 1]


def test_int8_vectors_are_compared_as_vectors() -> None:
    wanted = [encoded(127, 0, 0), encoded(0, 127, 0), encoded(0, 100, 127)]
    found = against("text-embedding", [encoded(127, 127, 0), *wanted[1:]], wanted)
    assert found.values["min_cosine"] == pytest.approx(np.sqrt(0.5))
    # The second row is now nearer to the first than to the third.
    assert found.values["nearest_neighbor_agreement"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(("flips", "angle"), [(0, 0), (1, 0), (2, 1 / 16), (9, 1 / 2)])
def test_bits_are_compared_by_their_signs(flips: int, angle: float) -> None:
    bits = np.array([1, 0] * 8)
    changed = bits.copy()
    changed[:flips] ^= 1
    rows = [(np.packbits(row) ^ 0x80).view(np.int8).tolist() for row in (changed, bits)]
    found = against("text-embedding", [encoded(*rows[0])], [encoded(*rows[1])])
    assert found.values["min_cosine"] == pytest.approx(np.cos(np.pi * angle))


# Labels and tokens


def test_labels_are_compared_by_name() -> None:
    wanted = [labels(("a", 0.7), ("b", 0.2), ("c", 0.1)), labels(("a", 0.5), ("b", 0.4))]
    got = [labels(("a", 0.6), ("c", 0.3), ("b", 0.1)), labels(("b", 0.5), ("a", 0.4))]
    found = against("text-classification", got, wanted)
    assert found.values == pytest.approx(
        {"label_agreement": 0.5, "max_probability_difference": 0.2, "confidence_shift": 0.05}
    )
    assert found.badness == pytest.approx([0.2, 1.1])


def test_a_label_as_good_as_the_references_best_agrees() -> None:
    wanted = [labels(("a", 0.4), ("b", 0.4 - 5e-7), ("c", 0.2))]
    swapped = [labels(("b", 0.4), ("a", 0.4), ("c", 0.2))]
    assert against("image-classification", swapped, wanted).values["label_agreement"] == 1
    worse = [labels(("c", 0.4), ("a", 0.4), ("b", 0.2))]
    assert against("image-classification", worse, wanted).values["label_agreement"] == 0


@pytest.mark.parametrize(
    ("got", "difference"), [(("b", 0.6), 0.0), (("b", 0.8), 0.2), (("b", 0.35), 0.25)]
)
def test_what_a_short_list_leaves_out_is_judged_as_far_as_it_tells(
    got: tuple[str, float], difference: float
) -> None:
    found = against("text-classification", [labels(got)], [labels(("a", 0.6))])
    assert found.values["label_agreement"] == 0
    assert found.values["max_probability_difference"] == pytest.approx(difference, abs=1e-6)


def test_labels_of_the_same_name_stay_apart() -> None:
    wanted = [labels(("a", 0.6), ("a", 0.3), ("b", 0.1))]
    got = [labels(("a", 0.5), ("a", 0.3), ("b", 0.2))]
    found = against("text-classification", got, wanted)
    assert found.values["max_probability_difference"] == pytest.approx(0.1)


def test_shifts_of_confidence_cancel_out_where_they_are_noise() -> None:
    wanted = [labels(("a", 0.6)), labels(("a", 0.6))]
    noisy = [labels(("a", 0.7)), labels(("a", 0.5))]
    surer = [labels(("a", 0.7)), labels(("a", 0.8))]
    found = [against("text-classification", got, wanted).values for got in (noisy, surer)]
    assert found[0]["confidence_shift"] == pytest.approx(0, abs=1e-6)
    assert found[1]["confidence_shift"] == pytest.approx(0.15)


def test_differences_of_large_scores_are_relative() -> None:
    wanted = [labels(("stars", 4.0)), labels(("stars", -0.5))]
    got = [labels(("stars", 4.1)), labels(("stars", -0.6))]
    found = against("text-classification", got, wanted)
    assert found.values["max_probability_difference"] == pytest.approx(0.1 / 4)
    assert found.values["confidence_shift"] == pytest.approx(0, abs=1e-6)
    assert found.badness == pytest.approx([0.1 / 4, 0.1 / 4])


def test_tokens_overlap_whatever_their_order() -> None:
    wanted = [tokens(("a", 0.4), ("b", 0.3), ("c", 0.2), ("d", 0.1))]
    found = against("fill-mask", [tokens(("b", 0.4), ("a", 0.3), ("e", 0.2), ("f", 0.15))], wanted)
    assert found.values == {"top_k_overlap": 0.5, "label_agreement": 0.0}


def test_a_token_that_ties_with_the_last_one_counts_as_found() -> None:
    wanted = [tokens(("a", 0.8), ("b", 1e-3))]
    tied = [tokens(("a", 0.8), ("c", 1e-3 + 5e-7))]
    better = [tokens(("a", 0.8), ("c", 2e-3))]
    overlaps = [against("fill-mask", got, wanted).values["top_k_overlap"] for got in (tied, better)]
    assert overlaps == [1.0, 0.5]


# Entities and answers


def test_entities_count_by_label_and_place() -> None:
    wanted = [entities(("PER", 0, 4), ("LOC", 8, 12)), entities(("ORG", 1, 3))]
    got = [entities(("PER", 0, 4), ("ORG", 8, 12)), entities()]
    found = against("token-classification", got, wanted)
    assert found.values == {"entity_f1": pytest.approx(2 * 1 / (3 + 2))}
    assert found.badness == [2, 1]


def test_offsets_that_are_off_by_one_are_no_entities() -> None:
    found = against("token-classification", [entities(("PER", 1, 5))], [entities(("PER", 0, 4))])
    assert found.values == {"entity_f1": 0.0}


@pytest.mark.parametrize(
    "text", ["", "{", "7", '"PER"', "[7]", "[{}]", '[{"entity":1,"start":Infinity,"end":2}]']
)
def test_what_is_no_list_of_entities_is_wrong(text: str) -> None:
    found = against("token-classification", [{"entities": words(text)}], [entities()])
    assert found.values == {"entity_f1": 0.0}
    assert found.badness == [1]


def test_an_entity_without_a_score_is_wrong() -> None:
    wanted = [entities(("PER", 0, 4))]
    found = against("token-classification", [entities(("PER", 0, 4), score=None)], wanted)
    assert found.values == {"entity_f1": 0.0}


def test_answers_match_by_text_and_place() -> None:
    wanted = [answer("in the old town", 3), answer("Rome", 9), answer("", 0)]
    got = [answer("the old town", 6), answer("Rome", 10), answer("", 0)]
    found = against("question-answering", got, wanted)
    # Of the words in, old, town the first answer has two (articles do not count).
    assert found.values == pytest.approx({"exact_match": 1 / 3, "answer_f1": (0.8 + 1 + 1) / 3})
    assert found.badness == pytest.approx([1.2, 1, 0])


# Ranks


@pytest.mark.parametrize(
    ("got", "correlation"), [([3, 2, 1], 1.0), ([1, 2, 3], -1.0), ([2, 3, 1], 0.5), ([1, 1, 1], 0)]
)
def test_scores_are_compared_by_rank(got: list[float], correlation: float) -> None:
    found = against("reranking", relevances(got), relevances([9, 5, 4]))
    assert found.values["rank_correlation"] == pytest.approx(correlation)
    assert found.badness == pytest.approx(np.abs(np.subtract(got, [9, 5, 4])))


def test_the_first_passage_counts_by_query() -> None:
    wanted = relevances([3, 2, 1, 5, 7])
    got = relevances([2, 3, 1, 4, 8])
    found = against("reranking", got, wanted, "aabcc")
    assert found.values["top1_agreement"] == 0.5
    assert "top1_agreement" not in against("reranking", got, wanted, "abcde").values


def test_a_candidate_that_tells_nothing_apart_is_right_by_chance_alone() -> None:
    found = against("reranking", relevances([0, 0, 0, 0]), relevances([4, 3, 2, 1]))
    assert found.values == {"rank_correlation": 0.0, "top1_agreement": 0.25}


def test_passages_that_tie_may_swap() -> None:
    found = against("reranking", relevances([1, 1 + 5e-7, 0]), relevances([1 + 5e-7, 1, 0]))
    assert found.values == {"rank_correlation": 1.0, "top1_agreement": 1.0}


def test_a_reference_without_an_order_has_no_correlation() -> None:
    found = against("reranking", relevances([1, 2, 3]), relevances([2, 2, 2]), "abc")
    assert found.values == {}


@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_spearman_is_scipys(levels: int) -> None:
    rng = np.random.default_rng(levels)
    some, others = rng.integers(levels, size=(2, 200)).astype(np.float64)
    expected = stats.spearmanr(some, others).statistic
    assert spearman(some, others) == pytest.approx(expected)
    taken = rng.integers(4, size=(3, 200))
    resampled = [
        stats.spearmanr(np.repeat(some, times), np.repeat(others, times)).statistic
        for times in taken
    ]
    assert rank_correlation(some, others)(taken.astype(np.float64)) == pytest.approx(resampled)


# Outputs that only the pipeline understands


def test_custom_outputs_differ_by_their_largest_difference() -> None:
    wanted = [{"x": np.array([[1.0, 2.0]]), "y": words("a")}] * 3
    got = [
        {"x": np.array([[1.0, 2.5]]), "y": words("a")},
        {"x": np.array([[1.0, 2.0]]), "y": words("b")},
        {"x": np.array([[1.0, NAN]]), "y": words("a")},
    ]
    assert against("custom", got, wanted) == Comparison({}, [0.5, 1.0, INF])
    assert against("custom", [{"x": np.ones((1, 3)), "y": words("a")}], wanted[:1]).badness == [INF]
