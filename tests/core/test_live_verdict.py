"""Responses of a served pipeline held to the reference: what fails, what passes, what is said."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from triptych.client import DeadlineExceededError, InvalidRequestError, PipelineFailedError
from triptych.core.gate.check import describe_outputs
from triptych.core.gate.live import (
    WAYS,
    AnswerRules,
    ExpectedAnswer,
    LiveResponse,
    LiveRuns,
    differences,
)
from triptych.core.gate.verify import ANSWER_AGREEMENT, judge_live
from triptych.repository.records import GateResult, LiveRun
from triptych.spec.fields import Precision
from triptych.spec.tasks import TASKS
from triptych.spec.tasks.accuracy import thresholds

Answer = Mapping[str, NDArray[Any]]


def labels(**scores: float) -> Answer:
    """Labels and scores as the ensemble returns them, in the order given."""
    names = np.array([[name.encode() for name in scores]], dtype=object)
    return {"label": names, "score": np.array([list(scores.values())], dtype=np.float32)}


def entities(*found: Mapping[str, Any]) -> Answer:
    return {"entities": np.array([[json.dumps(found).encode()]], dtype=object)}


def entity(kind: str, start: int, score: float | None) -> Mapping[str, Any]:
    return {"entity": kind, "text": "x", "start": start, "end": start + 1, "score": score}


def rules(
    task: str = "text-classification", precision: Precision = "fp32", *, hooked: bool = False
) -> AnswerRules:
    limits = thresholds(TASKS[task], precision, {})
    return AnswerRules(TASKS[task], precision, limits, hooked)


RIGHT = [labels(a=0.6 + i / 100, b=0.3 - i / 100, c=0.1) for i in range(20)]


def cases(
    wanted: Sequence[Answer], *, edges: int = 0, refusals: Mapping[int, str] | None = None
) -> list[ExpectedAnswer]:
    refused = refusals or {}
    return [
        ExpectedAnswer(f"text {i}", f"text {i}", i < edges, answer, refused.get(i, ""))
        for i, answer in enumerate(wanted)
    ]


def runs(
    responses: Sequence[LiveResponse], mean_batch: float | None = 8.0, **other: Any
) -> LiveRuns:
    return LiveRuns({way: other.get(way, responses) for way in WAYS}, mean_batch)


def answered(answers: Sequence[Answer]) -> list[LiveResponse]:
    return [LiveResponse(answer) for answer in answers]


def live(found: GateResult) -> LiveRun:
    assert found.live is not None
    return found.live


def value(found: GateResult, metric: str) -> float:
    return next(verdict.value for verdict in found.verdicts if verdict.metric == metric)


def failed(found: GateResult) -> set[str]:
    return {verdict.metric for verdict in found.verdicts if not verdict.passed}


def test_equal_answers_pass() -> None:
    found = judge_live(cases(RIGHT), runs(answered(RIGHT)), rules())
    assert found.failures == ()
    assert value(found, "label_agreement") == 1.0
    assert value(found, "max_difference") == value(found, "batch_sensitivity") == 0.0
    assert live(found).counts == {"answered": 60}
    assert found.notes == ("only 20 rows of traffic decide: 200 or more are better",)


def test_a_wrong_label_fails_by_name_and_shows_its_row() -> None:
    wrong = [*RIGHT[:7], labels(b=0.67, a=0.23, c=0.1), *RIGHT[8:]]
    found = judge_live(cases(RIGHT), runs(answered(wrong)), rules())
    assert {"label_agreement", "max_difference"} <= failed(found)
    assert any("label_agreement is 0.95, below 1" in failure for failure in found.failures)
    assert found.worst[0].preview == "text 7"
    assert found.worst[0].expected == "a 0.6700, b 0.2300, c 0.1000"
    assert found.worst[0].actual == "b 0.6700, a 0.2300, c 0.1000"


def test_the_worst_way_of_sending_counts() -> None:
    mixed = [*RIGHT[1:], RIGHT[0]]
    found = judge_live(cases(RIGHT), runs(answered(RIGHT), reversed=answered(mixed)), rules())
    assert "batch_sensitivity" in failed(found)
    assert value(found, "batch_sensitivity") == pytest.approx(0.19, abs=1e-6)
    assert live(found).by_way["alone"]["max_probability_difference"] == 0.0
    assert live(found).by_way["reversed"]["max_probability_difference"] > 0.1


def test_two_labels_of_equal_score_may_stand_in_either_order() -> None:
    wanted = [labels(a=0.4, b=0.4, c=0.2)] * 3
    got = [labels(b=0.4000001, a=0.4, c=0.2)] * 3
    assert judge_live(cases(wanted), runs(answered(got)), rules()).failures == ()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_fails(bad: float) -> None:
    wrong = [*RIGHT[:-1], labels(a=bad, b=0.2, c=0.1)]
    found = judge_live(cases(RIGHT), runs(answered(wrong)), rules(precision="int8"))
    assert not found.finite
    assert any("NaN or infinity; the first: 'text 19'" in failure for failure in found.failures)


def test_a_null_score_in_json_is_not_finite() -> None:
    wanted = [entities(entity("PER", 0, 0.9))] * 3
    got = [*wanted[:2], entities(entity("PER", 0, None))]
    found = judge_live(cases(wanted), runs(answered(got)), rules("token-classification"))
    assert not found.finite
    assert "entity_f1" in failed(found)


def test_edge_rows_count_for_differences_but_not_for_the_task() -> None:
    wrong = [labels(b=0.6, a=0.3, c=0.1), *RIGHT[1:]]
    found = judge_live(cases(RIGHT, edges=1), runs(answered(wrong)), rules())
    assert failed(found) == {"max_difference"}
    assert live(found).edge_values["label_agreement"] == 0.0
    loose = judge_live(cases(RIGHT, edges=1), runs(answered(wrong)), rules(precision="int8"))
    assert loose.failures == ()


def error(kind: type[Exception], words: str) -> LiveResponse:
    return LiveResponse(error=kind(words))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("response", "words"),
    [
        (LiveResponse(RIGHT[0]), "answered, though the spec refuses them"),
        (error(InvalidRequestError, "`text` must have at most 9 tokens"), "in other words than"),
        (error(DeadlineExceededError, "too late"), "not answered (DeadlineExceededError)"),
        (error(InvalidRequestError, "`text` must have at most 5 tokens. Given: 6."), ""),
    ],
)
def test_what_the_spec_refuses_must_be_refused_in_its_words(
    response: LiveResponse, words: str
) -> None:
    refusals = {0: "`text` must have at most 5 tokens"}
    responses = [response, *answered(RIGHT[1:])]
    found = judge_live(cases(RIGHT, edges=1, refusals=refusals), runs(responses), rules())
    assert bool(found.failures) == bool(words)
    assert all(words in failure for failure in found.failures)


@pytest.mark.parametrize(
    ("response", "kind", "words"),
    [
        (error(InvalidRequestError, "`text` must be shorter"), "refused", "`text` must be shorter"),
        (error(PipelineFailedError, "a step broke"), "PipelineFailedError", "a step broke"),
    ],
)
def test_a_row_without_an_answer_fails(response: LiveResponse, kind: str, words: str) -> None:
    found = judge_live(cases(RIGHT), runs([response, *answered(RIGHT[1:])]), rules())
    assert live(found).counts[kind] == 3
    assert [words in failure for failure in found.failures] == [True] * 3


def test_no_answer_at_all_fails_without_a_crash() -> None:
    found = judge_live(cases(RIGHT), runs([error(PipelineFailedError, "broken")] * 20), rules())
    assert {"label_agreement", "max_difference", "batch_sensitivity"} <= failed(found)
    assert math.isnan(value(found, "label_agreement"))


def test_a_vector_of_another_size_fails_in_figures() -> None:
    rng = np.random.default_rng(0)
    wanted = [{"embedding": rng.random((1, 8), dtype=np.float32)} for _ in range(5)]
    got = [{"embedding": row["embedding"][:, :4]} for row in wanted]
    found = judge_live(cases(wanted), runs(answered(got)), rules("text-embedding"))
    assert value(found, "min_cosine") == -1.0
    assert any("embedding has the shape [1, 4], not [1, 8]" in f for f in found.failures)


def test_metrics_that_hooks_take_away_are_named_and_the_answers_still_compared() -> None:
    wanted = [entities({"kind": "PER", "at": i}) for i in range(20)]
    hooked = rules("token-classification", hooked=True)
    found = judge_live(cases(wanted), runs(answered(wanted)), hooked)
    assert found.failures == ()
    assert value(found, ANSWER_AGREEMENT) == 1.0
    assert any("entity_f1" in note and "not measured" in note for note in found.notes)
    wrong = [entities({"kind": "LOC", "at": i}) for i in range(20)]
    found = judge_live(cases(wanted), runs(answered(wrong)), hooked)
    assert failed(found) == {ANSWER_AGREEMENT}
    assert "only 0.0% of the answers are like the reference's" in found.failures


def test_numbers_of_hooked_answers_have_no_limit_of_their_own() -> None:
    wanted = [labels(a=round(0.6 + i / 100, 2), b=0.1) for i in range(20)]
    got = [labels(a=0.61, b=0.1), *wanted[1:]]
    found = judge_live(cases(wanted), runs(answered(got)), rules(precision="int8", hooked=True))
    assert found.failures == ()
    assert value(found, "max_difference") == pytest.approx(0.01, abs=1e-6)
    assert any("no limit on" in note for note in found.notes)


def test_batches_of_one_are_said() -> None:
    found = judge_live(cases(RIGHT), runs(answered(RIGHT), mean_batch=1.0), rules())
    assert any("1.0 rows at a time" in note for note in found.notes)


def test_entities_are_compared_span_by_span() -> None:
    one = entities(entity("PER", 0, 0.9), entity("LOC", 5, 0.8))
    other = entities(entity("LOC", 5, 0.7))
    assert differences(one, other, ["entities"]) == {"entities": pytest.approx(0.1)}
    assert differences(one, other, []) == {}


def test_a_name_that_only_one_answer_has_is_held_against_the_last() -> None:
    one, other = labels(a=0.6, b=0.3), labels(a=0.6, c=0.25)
    assert differences(one, other, [])["score"] == pytest.approx(0.05, abs=1e-6)


def test_answers_are_shown_in_short() -> None:
    vector: Answer = {"embedding": np.arange(9, dtype=np.float32)[None], "none": np.empty((1, 0))}
    assert describe_outputs(vector) == "0 1 2 3 … (9 numbers)"
    assert len(describe_outputs({"reason": np.array([[b"\xff" + b"x" * 500]], object)})) == 120
    for content in (b"no JSON", b"[1]", b'[{"text": "a"}]'):
        assert describe_outputs({"entities": np.array([content], object)}) == repr(content)
