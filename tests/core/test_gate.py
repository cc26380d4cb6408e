"""The accuracy gate and its probe: what is right passes, each way of being wrong is stopped."""

import hashlib
import json
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.gate_cases import (
    CHOOSING,
    CLASSES,
    EVERY,
    FLOATS,
    KEPT,
    SAMPLES,
    Case,
    answer,
    make,
    task_of,
)
from triptych.base.tensors import TokenRow
from triptych.core.gate.cached import GateFailure
from triptych.core.gate.check import OUTSIDE, check, describe_probe, judge_probe
from triptych.core.gate.differences import core_error
from triptych.core.gate.runs import BATCH_TOKENS, RunBatch
from triptych.core.gate_rows import Variety, measure_diversity, probe_texts
from triptych.core.requests import GateRequest, Sample
from triptych.repository.records import GateResult, ProbeResult, Verdict, plain_record, read_record
from triptych.spec.backends import Precision
from triptych.spec.spec import EncoderSpec
from triptych.tasks.accuracy import (
    METRICS,
    above_rounding,
    metrics_of,
    probe_limits,
    thresholds,
)
from triptych.tasks.catalog import TASKS
from triptych.tasks.metric import CORE_METRICS
from triptych.tasks.results import Expected, RowOutputs
from triptych.tasks.task import Returns

OF_CORE = [metric.name for metric in CORE_METRICS]

LIMITS = {"max_difference": 1e-5, "batch_sensitivity": 1e-5}
PER_TOKEN: tuple[Returns, ...] = ("token_choices", "token_scores", "spans")


def test_a_right_artifact_passes() -> None:
    for returns in EVERY:
        case = make(returns)
        result = case.check(case.right)
        assert result.passed, result.failures
        assert (result.rows, result.edge_case_rows, result.finite) == (10, 0, True)
        assert result.value("max_difference") == result.value("batch_sensitivity") == 0.0
        assert (result.value("min_cosine") is not None) == (returns == "vector")
        has_labels = returns in (*CHOOSING, "token_scores", "logits")
        assert result.value("label_agreement") == (1.0 if has_labels else None)
        assert json.loads(json.dumps(result.as_dict()))["failures"] == []


def add(amount: float) -> Callable[[Case, RowOutputs], None]:
    def damage(case: Case, outputs: RowOutputs) -> None:
        outputs[case.names[-1]].ravel()[0] += amount

    return damage


def put_id(value: int | None) -> Callable[[Case, RowOutputs], None]:
    """A class in second place; None for that of the first place once more."""

    def damage(case: Case, outputs: RowOutputs) -> None:
        ids = outputs[case.names[0]]
        ids[1] = ids[0] if value is None else value

    return damage


def put_unused(case: Case, outputs: RowOutputs) -> None:
    """Another class under the right score."""
    ids = outputs[case.names[0]]
    ids[0] = (set(range(CLASSES)) - set(ids.tolist())).pop()


def put_worst(case: Case, outputs: RowOutputs) -> None:
    """A class that is not among the best, under the score that the reference gives it."""
    every = case.expected[4][0].reshape(-1, CLASSES)[-1]
    worst = int(every.argmin())
    outputs[case.names[0]][-1], outputs[case.names[1]][-1] = worst, every[worst]


def each(change: Callable[[Any], Any]) -> Callable[[Case, RowOutputs], None]:
    return lambda case, outputs: outputs.update({n: change(outputs[n]) for n in case.names})


def exchange(case: Case, outputs: RowOutputs) -> None:
    first, last = case.names
    outputs.update({first: outputs[last], last: outputs[first]})


Damage = Callable[[Case, RowOutputs], object]
FAULTS: dict[str, tuple[Damage, str, Sequence[Returns]]] = {
    "a difference above the threshold": (add(1e-3), "1e-05", EVERY),
    "NaN": (add(np.nan), "results are not all finite", EVERY),
    "infinity": (add(np.inf), "results are not all finite", EVERY),
    "minus infinity": (add(-np.inf), "results are not all finite", EVERY),
    "an output is missing": (lambda c, out: out.pop(c.names[-1]), "{last} is missing", EVERY),
    "another class, right score": (put_unused, "of each {first}", CHOOSING),
    "another class, its own score": (put_worst, "best first", CHOOSING),
    "out of order": (each(lambda values: values[::-1].copy()), "best first", ("choices",)),
    "a class too high": (put_id(CLASSES), "there are 7 classes", ("choices",)),
    "a class below 0": (put_id(-1), "from -1", ("choices",)),
    "a class twice": (put_id(None), "twice", ("choices",)),
    "classes in floats": (
        lambda c, out: out.update({c.names[0]: out[c.names[0]] * 1.0}),
        "not a number of a class",
        CHOOSING,
    ),
    "tokens out of place": (each(lambda values: np.roll(values, 1, axis=0)), "", PER_TOKEN),
    "a token too few": (
        lambda c, out: out.update({c.names[-1]: out[c.names[-1]][:-1]}),
        "{last} has the shape",
        PER_TOKEN,
    ),
    "start and end exchanged": (exchange, "start_logit ", ("spans",)),
}
"""What damages the outputs of one row, words of a failure that follows, and kinds of outputs.

In the words, ``{first}`` and ``{last}`` are the names of the outputs."""


def test_a_damaged_row_fails_in_words() -> None:
    for what, (damage, words, kinds) in FAULTS.items():
        for returns in kinds:
            case = make(returns)
            result = case.broken(partial(damage, case))
            said = words.format(first=case.names[0], last=case.names[-1])
            assert not result.passed, (what, returns)
            assert any(said in failure for failure in result.failures), (what, returns)
            if words == "1e-05":
                assert result.failures[0].startswith(case.names[-1])
                assert result.value("max_difference") == pytest.approx(1e-3, rel=0.9)
                assert result.value("batch_sensitivity") == 0.0  # not blamed on neighbors
                assert "only 10 rows of traffic" in result.notes[0]
                assert (len(result.worst), result.worst[0].preview) == (10, "row 4")
                assert result.row_differences[4] == max(result.row_differences)
            if "finite" in words:  # the difference itself fails, too
                assert not result.finite, (what, returns)
                assert len(result.failures) >= 2, (what, returns)
            if "missing" in what:
                assert not any(verdict.passed for verdict in result.verdicts), returns
                assert json.loads(json.dumps(result.as_dict()))["verdicts"][0]["value"] is None


Places = Sequence[int]
WHEN: dict[str, Callable[[Places], bool]] = {
    "alone": lambda places: len(places) == 1,
    "together": lambda places: len(places) > 1,
    "reversed": lambda places: places[0] - places[-1] == len(places) - 1 > 0,
    "longest first": lambda places: len(places) > len({len(SAMPLES[p][0]) for p in places}) == 1,
}
"""Batches in which a row has another result than in others."""


def changed_when(
    case: Case, when: Callable[[Places], bool], damage: Callable[[RowOutputs, int], None]
) -> GateResult:
    """The verdict on an artifact that damages the first row of some batches."""

    def run(batch: Sequence[Sample]) -> list[RowOutputs]:
        rows, places = case.right(batch), [SAMPLES.index(sample) for sample in batch]
        if when(places):
            damage(rows[0], places[0])
        return rows

    return case.check(run)


def test_a_row_that_its_neighbors_change_fails() -> None:
    def shift(outputs: RowOutputs, _: int) -> None:
        name = next(iter(outputs))
        outputs[name] = outputs[name] + np.float32(1e-3)

    for when, batches in WHEN.items():
        for returns in FLOATS:
            result = changed_when(make(returns), batches, shift)
            assert any("neighbors" in failure for failure in result.failures), (when, returns)
            assert (result.value("batch_sensitivity") or 0) > 1e-5, (when, returns)


def second_best(case: Case, outputs: RowOutputs, place: int) -> None:
    """The second-best class under its own score: only the run alone shows it."""
    ids, scores = case.names
    every = case.expected[place][0]
    order = np.argsort(-every, axis=-1)
    second = order[1 : 1 + KEPT] if case.core.returns == "choices" else order[:, 1]
    axis = second if every.ndim == 1 else second[:, None]
    outputs[ids] = second.astype(np.int32)
    outputs[scores] = np.take_along_axis(every, axis, -1).reshape(second.shape)


def unused_class(case: Case, outputs: RowOutputs, _: int) -> None:
    put_unused(case, outputs)


def test_choices_that_neighbors_change_fail() -> None:
    for returns in CHOOSING:
        case = make(returns)
        unused = changed_when(case, WHEN["alone"], partial(unused_class, case))
        second = changed_when(case, WHEN["alone"], partial(second_best, case))
        for result in (unused, second):
            assert any("neighbors" in failure for failure in result.failures), returns
            assert result.value("max_difference") == 0.0
        assert second.value("label_agreement") == 1.0
        assert all("neighbors" in failure for failure in second.failures)


def test_neighbors_are_not_blamed_for_the_error_of_a_class_only_one_batch_chooses() -> None:
    """Two classes that the artifact scores the same, of which the reference prefers one."""
    case = make("choices")
    ids, scores = case.names
    every = np.array([0.5, 0.2, 0.15, 0.1, 0.03, 0.01, 0.01], dtype=np.float32)
    case.expected[:] = [(every,)] * len(SAMPLES)

    def run(batch: Sequence[Sample]) -> list[RowOutputs]:
        last = 2 if len(batch) == 1 else 3
        row = {ids: np.array([0, 1, last], np.int32), scores: np.array([0.5, 0.2, 0.12], "f4")}
        return [{name: values.copy() for name, values in row.items()} for _ in batch]

    result = case.check(run, {"batch_sensitivity": 2e-3})
    assert result.passed, result.failures
    assert result.value("batch_sensitivity") == pytest.approx(0.0, abs=1e-6)


def test_labels_swapped_at_close_scores_fail_only_above_the_threshold() -> None:
    case = make("choices")
    ids, _ = case.names

    def swap(outputs: RowOutputs) -> None:
        outputs[ids][:2] = outputs[ids][1::-1].copy()

    for gap, passed in ((0.0, True), (5e-6, True), (1e-3, False)):
        every = np.full(CLASSES, 0.1, dtype=np.float32)
        every[2], every[5] = 0.3, 0.3 - gap
        case.expected[4] = (every,)
        result = case.broken(swap)
        assert result.passed == passed, (gap, result.failures)
        assert result.value("label_agreement") == (1.0 if passed else 0.9)


def test_the_threshold_is_relative_to_large_elements() -> None:
    case = make("logits")
    step = np.float32(1e-3)
    large: list[Expected] = [(logits * np.float32(1000),) for (logits,) in case.expected]
    shifted = Case(case.core, [(logits + step,) for (logits,) in large])
    assert Case(case.core, large).check(shifted.right).passed
    small = Case(case.core, [(logits + step,) for (logits,) in case.expected])
    assert not case.check(small.right).passed


def test_a_reference_that_is_not_finite_or_of_another_shape_fails() -> None:
    for returns in EVERY:
        case = make(returns)
        case.expected[2][0].ravel()[0] = np.nan
        assert not case.check(case.right).passed
    case = make("logits")
    other = Case(case.core, [(logits[:1],) for (logits,) in case.expected])
    assert "another shape" in other.check(case.right).failures[0]


def test_an_artifact_that_gives_other_rows_or_does_not_run_fails() -> None:
    case = make("vector")

    def refuse_one(batch: Sequence[Sample]) -> list[RowOutputs]:
        if len(batch) == 1:
            raise RuntimeError("no kernel for one row")
        return case.right(batch)

    runs: dict[str, RunBatch] = {
        "gives 3 rows": lambda batch: case.right(batch)[: len(batch) - 1],
        "gives 8 rows": lambda batch: case.right(batch) * 2,
        "a batch of 1 does not run": refuse_one,
    }
    for words, run in runs.items():
        assert words in case.check(run).failures[0]
    empty = replace(case.gate_case(LIMITS), requests=[], expected=[])
    result = check(case.right, empty, "fp32", OF_CORE)
    assert result.failures == ("there are no rows to compare",)
    with pytest.raises(ValueError, match="10 core rows"):
        check(case.right, replace(case.gate_case(LIMITS), expected=[]), "fp32", OF_CORE)


def judged(
    case: Case, wrong: Case, limits: Any, precision: Precision, *, edges: int = 1
) -> GateResult:
    """The verdict on `wrong`, whose first rows are made up."""
    metrics = metrics_of(task_of(case.core.returns))
    return check(wrong.right, case.gate_case(limits, edges=edges), precision, metrics)


def test_made_up_rows_count_for_the_core_but_not_for_shares_and_means() -> None:
    kinds: tuple[tuple[Returns, str], ...] = (
        ("vector", "min_cosine"),
        ("token_choices", "label_agreement"),
    )
    for returns, metric in kinds:
        case = make(returns)
        wrong = Case(case.core, [tuple(-part for part in case.expected[0]), *case.expected[1:]])
        result = judged(case, wrong, {metric: 0.99}, "int8")
        assert (result.rows, result.edge_case_rows) == (9, 1)
        assert result.passed, result.failures
        assert (result.value("max_difference") or 0) > 0.1
        assert not judged(case, wrong, {metric: 0.99}, "int8", edges=0).passed


def test_a_made_up_row_like_no_other_fails_in_every_precision() -> None:
    for returns in EVERY:
        case = make(returns)
        if returns in CHOOSING:
            edge = tuple(np.full_like(part, 0.01) for part in case.expected[0])
            edge[0][..., 0] = 0.94
            flipped = tuple(part[..., ::-1] for part in edge)
        else:
            edge = tuple(np.full_like(part, 2) for part in case.expected[0])
            flipped = tuple(-part for part in edge)
        case.expected[0] = edge
        wrong = Case(case.core, [flipped, *case.expected[1:]])
        for precision in ("fp32", "fp16", "int8"):
            limits = thresholds(task_of(returns), precision, {})
            result = judged(case, wrong, limits, precision)
            (said, *_) = [fault for fault in result.failures if fault.startswith("edge_error is ")]
            assert said.endswith(f", above {limits['edge_error']}")
            assert judged(case, case, limits, precision).value("edge_error") == 0


def test_a_long_row_bounds_its_batch_and_still_has_a_neighbor() -> None:
    case = make("logits")
    long = TokenRow(tuple(range(BATCH_TOKENS)), 3)
    rows = [long, *SAMPLES[:5], TokenRow(tuple(range(BATCH_TOKENS - 2)), 3)]
    batches: list[int] = []

    def run(batch: Sequence[Sample]) -> list[RowOutputs]:
        batches.append(sum(len(row[0]) for row in batch))
        return [answer(case.core, case.expected[0]) for _ in batch]

    long_case = Case(case.core, [case.expected[0]] * len(rows)).gate_case({}, rows)
    assert check(run, replace(long_case, batch_size=32), "fp32", OF_CORE).passed
    assert BATCH_TOKENS < max(batches) < 2 * BATCH_TOKENS


def test_the_error_of_a_core_grows_with_what_is_wrong() -> None:
    def crash(batch: Sequence[Sample]) -> list[RowOutputs]:
        raise RuntimeError

    for returns in EVERY:
        case, errors = make(returns), []
        for amount in (0.0, 0.01, 0.1, np.nan):
            wrong = partial(add_to_all, case, amount)
            errors.append(core_error(wrong, SAMPLES, case.expected, case.core))
        assert errors[0] == 0 < errors[1] < errors[2] < errors[3] == np.inf
        assert core_error(crash, SAMPLES, case.expected, case.core) == np.inf


def add_to_all(case: Case, amount: float, batch: Sequence[Sample]) -> list[RowOutputs]:
    name = case.names[-1]
    return [{**row, name: row[name] + np.float32(amount)} for row in case.right(batch)]


def test_the_remedy_fits_what_was_asked_for() -> None:
    verdicts = (Verdict("min_cosine", 0.5, 0.9, passed=False), Verdict("mean_cosine", 1, 0, True))
    cases: tuple[tuple[Precision, dict[str, Any], str, str], ...] = (
        ("fp32", {}, "remove rows from traffic.jsonl", "core."),
        ("fp32", {"core": {"layout": "bucketed"}}, "--accept-failed-gate REASON", "layout"),
        ("fp32", {"core": {"precision": "auto"}}, "worst rows", "auto"),
        ("int8", {"core": {"precision": "int8"}}, "to fp16, which loses less, or fp32", "int8"),
        ("fp16", {"core": {"precision": "fp16"}}, "core.precision to fp32", "fp16"),
        ("int8", {"core": {"shared_from": "q"}}, "Remove core.shared_from", "fp16"),
        ("fp32", {"accuracy": {"min_cosine": 1}}, "Loosen accuracy.min_cosine", "traffic"),
        ("fp32", {"accuracy": {"mean_cosine": 1}}, "remove rows from traffic.jsonl", "Loosen"),
    )
    for precision, fields, words, other in cases:
        given = {"name": "p", "task": "text-embedding", "model": {"source": "m"}, **fields}
        plan: Any = SimpleNamespace(spec=EncoderSpec.model_validate(given))
        gate = GateResult(precision, 1, 0, True, verdicts, ("bad",), ())
        message = str(GateFailure("p", gate, plan))
        assert message.startswith("p failed the accuracy gate: bad. ")
        assert words in message, (precision, fields)
        assert other not in message, (precision, fields)


TEXTS_SHA256 = "dfd3e2c78165097d0ff6acd4d4203f5f8ac4fd3c011f122e42c972f44ca3cc4c"
"""Of all texts: the same on every Python, and changed only on purpose."""


def test_texts_are_many_and_varied_and_the_same_everywhere() -> None:
    found = hashlib.sha256(json.dumps(probe_texts()).encode()).hexdigest()
    assert found == TEXTS_SHA256
    assert all(row.question != row.other_question for row in probe_texts())
    texts = [row.text for row in probe_texts()]
    assert 380 <= len(texts) == len(set(texts)) <= 420
    words = sorted(len(text.split()) for text in texts)
    assert words[0] == 1
    assert 200 <= words[-1] <= 400
    assert sum(count >= 20 for count in words) >= 40
    scripts = {unicodedata.name(char, "?").split()[0] for text in texts for char in text}
    wanted = "LATIN CYRILLIC GREEK ARABIC HEBREW DEVANAGARI CJK HIRAGANA HANGUL THAI DIGIT TAMIL"
    assert scripts >= set(wanted.split())
    for part in ("def mean(", "SELECT ", "Traceback", "@example.com", "IBAN", "🔥", "\n"):
        assert any(part in text for text in texts), part
    variety = measure_diversity([text_request(text) for text in texts])
    assert variety is not None
    assert variety.vocabulary_share > 0.15
    assert variety.near_duplicates < 0.05


def text_request(text: str) -> GateRequest:
    return GateRequest({"text": text}, {"text": text}, {}, (), (), edge=False, preview=text)


def test_numbers_make_no_text_another_one() -> None:
    found = measure_diversity([text_request(f"order {number}") for number in range(70)])
    assert found == Variety(words=2, vocabulary_share=round(2 / 140, 4), near_duplicates=0.9857)
    edge = replace(text_request(""), edge=True)
    assert measure_diversity([edge]) is None
    assert measure_diversity([text_request("...")]) is None


def judge(
    case: Case, run: Callable[[Sequence[Sample]], list[RowOutputs]]
) -> tuple[ProbeResult, tuple[str, ...]]:
    limits = probe_limits(task_of(case.core.returns), "int8", {})
    return judge_probe(run, case.gate_case(limits))


@pytest.mark.parametrize("returns", EVERY)
def test_a_right_core_passes_and_a_wrong_one_never(returns: Returns) -> None:
    case = make(returns)
    found, failures = judge(case, case.right)
    assert not failures
    assert all(verdict.passed for verdict in found.verdicts)
    assert found.rows == len(SAMPLES)

    name = case.names[-1]
    for damage in (
        lambda row: row.pop(name),
        lambda row: row[name].ravel().put(0, np.nan),
        lambda row: row.update({name: np.full_like(row[name], 9)}),
    ):
        _, failures = judge(case, case.damaging(damage))
        assert failures
        assert all(failure.startswith(f"{OUTSIDE}: ") for failure in failures)
    found, failures = judge(case, lambda batch: case.right(batch)[:1])
    assert failures
    assert not any(verdict.passed for verdict in found.verdicts)


@pytest.mark.parametrize("task", TASKS)
def test_every_text_task_has_limits_on_the_probe(task: str) -> None:
    steps = [probe_limits(TASKS[task], precision, {}) for precision in ("fp16", "int8")]
    for tight, loose in pairwise(steps):
        assert (
            tight.keys()
            == loose.keys()
            == {"edge_error", *(metric.name for metric in TASKS[task].metrics)}
        )
        assert all(METRICS[name].meets(tight[name], loose[name]) for name in tight)


def test_limits_follow_the_users_overrides_and_pytorchs_own_rounding() -> None:
    plain = probe_limits(TASKS["text-embedding"], "int8", {})
    given = {"min_cosine": 0.5, "mean_cosine": 0.99999, "edge_error": 5.0}
    looser = {**plain, "min_cosine": 0.5, "edge_error": 5.0}
    assert probe_limits(TASKS["text-embedding"], "int8", given) == looser
    limits = {"max_difference": 1e-5, "batch_sensitivity": 1e-5, "min_cosine": 0.99999}
    assert above_rounding(limits, None, {}) == above_rounding(limits, 2e-7, {}) == limits
    raised = {**limits, "max_difference": 4.95e-5, "batch_sensitivity": 4.95e-5}
    assert above_rounding(limits, 1.65e-5, {}) == pytest.approx(raised)
    # A limit of the user's own is not raised.
    own = above_rounding(limits, 1.65e-5, {"max_difference": 1e-5})
    assert own == pytest.approx({**raised, "max_difference": 1e-5})


def test_the_result_is_told_in_a_line_and_kept_whole() -> None:
    verdicts = (Verdict("min_cosine", 0.888, 0.9, False), Verdict("edge_error", 0.1, 0.7, True))
    probe = ProbeResult(449, verdicts)
    assert describe_probe(probe) == (
        "outside your traffic: 449 varied texts: min_cosine 0.888 (FAILED: limit 0.9),"
        " edge_error 0.1"
    )
    gate = GateResult("int8", 1, 0, True, (), ("x",), rounding=2e-7, probe=probe)
    plain = json.loads(json.dumps(gate.as_dict()))
    assert read_record(GateResult, plain) == gate
    old = {name: value for name, value in plain.items() if name not in ("probe", "rounding")}
    assert read_record(GateResult, old) == replace(gate, probe=None, rounding=None)
    assert "probe" not in plain_record(replace(gate, probe=None))
