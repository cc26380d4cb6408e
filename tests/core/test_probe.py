"""The general probe: its texts, the verdict on a core that runs on them, how varied traffic is."""

import hashlib
import json
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from conftest import ROOT
from gate_cases import EVERY, SAMPLES, Case, make, requests_of, task_of
from triptych.core.gate.check import OUTSIDE, describe_probe, judge_probe
from triptych.core.gate.runs import RowOutputs
from triptych.core.gate_rows import Variety, measure_diversity, probe_texts
from triptych.core.requests import GateRequest, Sample
from triptych.repository.records import (
    GateResult,
    ProbeResult,
    Verdict,
    plain_record,
    read_record,
)
from triptych.spec.tasks import TASKS
from triptych.spec.tasks.accuracy import METRICS, above_rounding, probe_limits
from triptych.spec.tasks.task import Returns

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


@pytest.mark.parametrize("pipeline", ["minilm", "pii", "ticket_routing"])
def test_the_shipped_traffic_is_not_narrow(pipeline: str) -> None:
    lines = (ROOT / f"pipelines/{pipeline}/traffic.jsonl").read_text(encoding="utf-8").splitlines()
    found = measure_diversity([text_request(json.loads(line)["text"]) for line in lines])
    assert found is not None
    assert found.vocabulary_share > 0.05
    assert found.near_duplicates < 0.1


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
    return judge_probe(
        run, requests_of(SAMPLES), case.expected, case.core, limits, batch_size=4, decoding=None
    )


@pytest.mark.parametrize("returns", EVERY)
def test_a_right_core_passes_and_a_wrong_one_never(returns: Returns) -> None:
    case = make(returns)
    found, failures = judge(case, case.right)
    assert not failures
    assert all(verdict.passed for verdict in found.verdicts)
    assert found.rows == len(SAMPLES)

    def damaged(damage: Callable[[RowOutputs], object]) -> tuple[str, ...]:
        def run(batch: Sequence[Sample]) -> list[RowOutputs]:
            rows = case.right(batch)
            for row in rows:
                damage(row)
            return rows

        return judge(case, run)[1]

    name = case.names[-1]
    for damage in (
        lambda row: row.pop(name),
        lambda row: row[name].ravel().put(0, np.nan),
        lambda row: row.update({name: np.full_like(row[name], 9)}),
    ):
        failures = damaged(damage)
        assert failures
        assert all(failure.startswith(f"{OUTSIDE}: ") for failure in failures)
    found, failures = judge(case, lambda batch: case.right(batch)[:1])
    assert failures
    assert not any(verdict.passed for verdict in found.verdicts)


@pytest.mark.parametrize("task", TASKS)
def test_every_text_task_has_limits_on_the_probe(task: str) -> None:
    steps = [probe_limits(TASKS[task], precision, {}) for precision in ("fp16", "int8")]
    for tight, loose in pairwise(steps):
        assert tight.keys() == loose.keys() == {"edge_error", *TASKS[task].metrics}
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
