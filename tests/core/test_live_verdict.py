"""Responses of a served pipeline held to the reference: what fails, what passes, what is said."""

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
from triptych.spec.backends import Precision
from triptych.tasks.accuracy import thresholds
from triptych.tasks.catalog import TASKS

Answer = Mapping[str, NDArray[Any]]


def labels(**scores: float) -> Answer:
    """Labels and scores as the ensemble returns them, in the order given."""
    names = np.array([[name.encode() for name in scores]], dtype=object)
    return {"label": names, "score": np.array([list(scores.values())], dtype=np.float32)}


def entities(*found: Mapping[str, Any]) -> Answer:
    return {"entities": np.array([[json.dumps(found).encode()]], dtype=object)}


def entity(kind: str, start: int, score: float | None) -> Mapping[str, Any]:
    return {"entity": kind, "text": "x", "start": start, "end": start + 1, "score": score}


RIGHT = [labels(a=0.6 + i / 100, b=0.3 - i / 100, c=0.1) for i in range(20)]


def judge(
    given: Sequence[Answer | LiveResponse],
    wanted: Sequence[Answer] = RIGHT,
    task: str = "text-classification",
    *,
    precision: Precision = "fp32",
    hooked: bool = False,
    edges: int = 0,
    refusal: str = "",
    mean_batch: float = 8.0,
    backwards: Sequence[Answer] = (),
) -> tuple[GateResult, LiveRun]:
    """The verdict on what a pipeline responds, `backwards` in reversed order.

    The first `edges` rows are made up; `refusal` is the message that the first row must meet.
    """
    expected = [
        ExpectedAnswer(f"text {i}", f"text {i}", i < edges, answer, "" if i else refusal)
        for i, answer in enumerate(wanted)
    ]
    every = dict.fromkeys(WAYS, given) | ({"reversed": backwards} if backwards else {})
    responses = {
        way: [one if isinstance(one, LiveResponse) else LiveResponse(one) for one in some]
        for way, some in every.items()
    }
    limits = thresholds(TASKS[task], precision, {})
    rules = AnswerRules(TASKS[task], precision, limits, hooked)
    found = judge_live(expected, LiveRuns(responses, mean_batch), rules)
    assert found.live is not None
    return found, found.live


def error(kind: type[Exception], words: str) -> LiveResponse:
    return LiveResponse(error=kind(words))  # type: ignore[arg-type]


def value(found: GateResult, metric: str) -> float:
    return next(verdict.value for verdict in found.verdicts if verdict.metric == metric)


def failed(found: GateResult) -> set[str]:
    return {verdict.metric for verdict in found.verdicts if not verdict.passed}


def test_equal_answers_pass() -> None:
    found, live = judge(RIGHT)
    assert found.failures == ()
    assert value(found, "label_agreement") == 1.0
    assert value(found, "max_difference") == value(found, "batch_sensitivity") == 0.0
    assert live.counts == {"answered": 60}
    assert found.notes == ("only 20 rows of traffic decide: 200 or more are better",)
    # Two labels of equal score may stand in either order.
    wanted = [labels(a=0.4, b=0.4, c=0.2)] * 3
    assert judge([labels(b=0.4000001, a=0.4, c=0.2)] * 3, wanted)[0].failures == ()
    found, _ = judge(RIGHT, mean_batch=1.0)
    assert any("1.0 rows at a time" in note for note in found.notes)


def test_a_wrong_label_fails_by_name_and_shows_its_row() -> None:
    found, _ = judge([*RIGHT[:7], labels(b=0.67, a=0.23, c=0.1), *RIGHT[8:]])
    assert {"label_agreement", "max_difference"} <= failed(found)
    assert any("label_agreement is 0.95, below 1" in failure for failure in found.failures)
    assert found.worst[0].preview == "text 7"
    assert found.worst[0].expected == "a 0.6700, b 0.2300, c 0.1000"
    assert found.worst[0].actual == "b 0.6700, a 0.2300, c 0.1000"


def test_the_worst_way_of_sending_counts() -> None:
    found, live = judge(RIGHT, backwards=[*RIGHT[1:], RIGHT[0]])
    assert "batch_sensitivity" in failed(found)
    assert value(found, "batch_sensitivity") == pytest.approx(0.19, abs=1e-6)
    assert live.by_way["alone"]["max_probability_difference"] == 0.0
    assert live.by_way["reversed"]["max_probability_difference"] > 0.1


def test_what_is_not_finite_fails() -> None:
    for bad in (math.nan, math.inf):
        found, _ = judge([*RIGHT[:-1], labels(a=bad, b=0.2, c=0.1)], precision="int8")
        assert not found.finite
        assert any("NaN or infinity; the first: 'text 19'" in f for f in found.failures), bad
    wanted = [entities(entity("PER", 0, 0.9))] * 3
    null = entities(entity("PER", 0, None))
    found, _ = judge([*wanted[:2], null], wanted, "token-classification")
    assert not found.finite
    assert "entity_f1" in failed(found)


def test_edge_rows_count_for_differences_but_not_for_the_task() -> None:
    wrong = [labels(b=0.6, a=0.3, c=0.1), *RIGHT[1:]]
    found, live = judge(wrong, edges=1)
    assert failed(found) == {"max_difference"}
    assert live.edge_values["label_agreement"] == 0.0
    assert judge(wrong, edges=1, precision="int8")[0].failures == ()


def test_what_the_spec_refuses_must_be_refused_in_its_words() -> None:
    for response, words in (
        (LiveResponse(RIGHT[0]), "answered, though the spec refuses them"),
        (error(InvalidRequestError, "`text` must have at most 9 tokens"), "in other words than"),
        (error(DeadlineExceededError, "too late"), "not answered (DeadlineExceededError)"),
        (error(InvalidRequestError, "`text` must have at most 5 tokens. Given: 6."), ""),
    ):
        refusal = "`text` must have at most 5 tokens"
        found, _ = judge([response, *RIGHT[1:]], edges=1, refusal=refusal)
        assert bool(found.failures) == bool(words), response
        assert all(words in failure for failure in found.failures), response


def test_a_row_without_an_answer_fails() -> None:
    for response, kind in (
        (error(InvalidRequestError, "`text` must be shorter"), "refused"),
        (error(PipelineFailedError, "a step broke"), "PipelineFailedError"),
    ):
        found, live = judge([response, *RIGHT[1:]])
        assert live.counts[kind] == 3
        words = "`text` must be shorter" if kind == "refused" else "a step broke"
        assert [words in failure for failure in found.failures] == [True] * 3
    found, _ = judge([error(PipelineFailedError, "broken")] * 20)
    assert {"label_agreement", "max_difference", "batch_sensitivity"} <= failed(found)
    assert math.isnan(value(found, "label_agreement"))


def test_a_vector_of_another_size_fails_in_figures() -> None:
    rng = np.random.default_rng(0)
    wanted = [{"embedding": rng.random((1, 8), dtype=np.float32)} for _ in range(5)]
    given = [{"embedding": row["embedding"][:, :4]} for row in wanted]
    found, _ = judge(given, wanted, "text-embedding")
    assert value(found, "min_cosine") == -1.0
    assert any("embedding has the shape [1, 4], not [1, 8]" in f for f in found.failures)


def terms(**weights: float) -> Answer:
    """A sparse vector as the ensemble returns it; the names are hexadecimal ids."""
    ids = np.array([[int(name, 16) for name in weights]], dtype=np.int32)
    return {"token_id": ids, "weight": np.array([[*weights.values()]], dtype=np.float32)}


def test_a_term_of_little_weight_may_come_and_go() -> None:
    wanted = [terms(a=2.0, b=1.0 + place / 10, c=0.5, d=0.01) for place in range(20)]
    given = [terms(a=2.0, b=1.0 + place / 10, c=0.5) for place in range(20)]
    task = "sparse-embedding"
    found, live = judge(given, wanted, task, precision="int8")
    assert (found.failures, live.counts) == ((), {"answered": 60})
    assert judge(wanted, given, task, precision="int8")[0].failures == ()
    assert differences(given[0], wanted[0], []) == {"weight": pytest.approx(0.01)}
    found, _ = judge([terms(e=2.0, b=1.0)] * 20, wanted, task, precision="int8")
    assert {"term_overlap", "product_error"} <= failed(found)
    broken = {**given[0], "token_id": given[0]["token_id"][:, :2]}
    found, _ = judge([broken, *given[1:]], wanted, task, precision="int8")
    assert any("another form" in failure for failure in found.failures)


def test_answers_of_hooks_are_compared_as_a_whole() -> None:
    wanted, wrong = (
        [entities({"kind": kind, "at": i}) for i in range(20)] for kind in ("PER", "LOC")
    )
    found, _ = judge(wanted, wanted, "token-classification", hooked=True)
    assert found.failures == ()
    assert value(found, ANSWER_AGREEMENT) == 1.0
    assert any("entity_f1" in note and "not measured" in note for note in found.notes)
    found, _ = judge(wrong, wanted, "token-classification", hooked=True)
    assert failed(found) == {ANSWER_AGREEMENT}
    assert "only 0.0% of the answers are like the reference's" in found.failures
    # Their numbers have no limit of their own.
    wanted = [labels(a=round(0.6 + i / 100, 2), b=0.1) for i in range(20)]
    given = [labels(a=0.61, b=0.1), *wanted[1:]]
    found, _ = judge(given, wanted, precision="int8", hooked=True)
    assert found.failures == ()
    assert value(found, "max_difference") == pytest.approx(0.01, abs=1e-6)
    assert any("no limit on" in note for note in found.notes)


def test_answers_are_compared_by_name_and_span_and_shown_in_short() -> None:
    one = entities(entity("PER", 0, 0.9), entity("LOC", 5, 0.8))
    other = entities(entity("LOC", 5, 0.7))
    assert differences(one, other, ["entities"]) == {"entities": pytest.approx(0.1)}
    assert differences(one, other, []) == {}
    # A name that only one answer has is compared with the last.
    one, other = labels(a=0.6, b=0.3), labels(a=0.6, c=0.25)
    assert differences(one, other, [])["score"] == pytest.approx(0.05, abs=1e-6)
    vector: Answer = {"embedding": np.arange(9, dtype=np.float32)[None], "none": np.empty((1, 0))}
    assert describe_outputs(vector) == "0 1 2 3 … (9 numbers)"
    assert len(describe_outputs({"reason": np.array([[b"\xff" + b"x" * 500]], object)})) == 120
    for content in (b"no JSON", b"[1]", b'[{"text": "a"}]'):
        assert describe_outputs({"entities": np.array([content], object)}) == repr(content)
