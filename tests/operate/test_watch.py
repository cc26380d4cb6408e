"""Monitoring and replay without a server: evidence, mixes, timelines, and verdicts under noise."""

import base64
import json
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import exp
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.load_samples import measurement
from tests.support.monitor_cases import NEEDED, RIGHT, WRONG, answers, look, replayed, rounds
from tests.support.project import quiet
from triptych.base.errors import UserError
from triptych.interface.report.monitor import write_shadow_report
from triptych.operate.monitor.findings import (
    compare_distributions,
    compare_lengths,
    find_drifts,
    main_script,
)
from triptych.operate.monitor.metrics import metrics_text
from triptych.operate.monitor.results import (
    TIMELINE_FILE,
    LargeErrorRow,
    MonitorRun,
    Timeline,
    format_run,
    read_timeline,
)
from triptych.operate.monitor.sample import read_sample
from triptych.operate.monitor.scores import MeanTest, SequentialEvidence
from triptych.operate.monitor.shadow import FIRST_ROUNDS, measure_in_turns
from triptych.operate.monitor.shadow_verdict import compare_speeds, judge
from triptych.runtime.sampling import write_file
from triptych.serving.bench.results import Measurement
from triptych.spec.traffic import Lengths

RUNS = 60
MAX_ERRORS = 6
"""Number of wrong verdicts among `RUNS` that 1 of 20 exceeds with a probability below 5 %."""
Losses = NDArray[np.float64]
SECRET = "4711-SECRET"


def test_looks_at_what_is_right_raise_no_alarm() -> None:
    """100 builds with as much loss as is allowed: 0.1 alarms are expected at most."""
    rng = np.random.default_rng(11)
    draws: tuple[tuple[float, Callable[[], Losses]], ...] = (
        (0.02, lambda: (rng.random(2000) < 0.02).astype(np.float64)),
        (0.002, lambda: np.clip(rng.gamma(2.0, 0.001, 2000), 0, 1)),
    )
    for allowed, draw in draws:
        alarms = 0
        for _ in range(50):
            evidence, losses = SequentialEvidence(allowed, NEEDED), draw()
            for start in range(0, len(losses), 100):
                evidence = evidence.add(losses[start : start + 100])
            alarms += evidence.alarm_row is not None
        assert alarms <= 1, allowed


def test_what_is_wrong_is_found_in_few_rows_whatever_its_kind() -> None:
    rng = np.random.default_rng(12)
    cases: tuple[tuple[float, Losses, int], ...] = (
        (0.02, np.ones(50), 4),
        (0.02, (rng.random(2000) < 0.1).astype(np.float64), 400),
        (0.002, rng.gamma(2.0, 0.004, 2000), 60),
        (1e-5, np.full(2000, 1e-4), 60),
        (0.02, (rng.random(2000) < 0.05).astype(np.float64), 2000),
    )
    for allowed, losses, most in cases:
        once = SequentialEvidence(allowed, NEEDED).add(losses)
        assert once.alarm_row is not None
        assert once.alarm_row <= most, (allowed, once.alarm_row)
        parts = SequentialEvidence(allowed, NEEDED)
        for part in np.array_split(losses, 7):
            parts = parts.add(part)
        assert (parts.alarm_row, parts.rows) == (once.alarm_row, len(losses))
        assert parts.log_wealth == pytest.approx(once.log_wealth)
        assert parts.mean == pytest.approx(losses.mean())
    with pytest.raises(ValueError, match="0 to 1"):
        SequentialEvidence(0.1, NEEDED).add([math.nan])


def test_a_mix_has_moved_where_chance_cannot_explain_it() -> None:
    rng = np.random.default_rng(13)
    names = ["a", "b", "c", "rare"]
    usual, other = [0.5, 0.3, 0.19, 0.01], [0.3, 0.5, 0.19, 0.01]

    def draw(shares: list[float], rows: int) -> list[str]:
        return [names[place] for place in rng.choice(4, size=rows, p=shares)]

    for shares, rows in [(usual, 60)] * 300 + [(other, 1000)]:
        mix = compare_distributions("labels", draw(usual, 300), draw(shares, rows))
        assert mix is not None
        assert mix.drifted == (shares is other)
        assert not mix.drifted or mix.largest.split()[0] in ("a", "b")
    assert compare_distributions("labels", [], ["a"]) is None
    assert compare_distributions("labels", ["a"] * 9, ["a"]) is not None
    for text, script in (("wo ist es", "LATIN"), ("где это", "CYRILLIC"), ("12", "(none)")):
        assert main_script({"text": text}) == script


def draw_lengths(mean: float, rows: int, seed: int) -> Lengths:
    """Lengths as texts have them: many short ones, a long tail."""
    chance = random.Random(seed)
    lengths = [min(256, 3 + int(chance.expovariate(1 / mean))) for _ in range(rows)]
    return Lengths.of(lengths, max_length=256)


def test_lengths_have_moved_where_chance_cannot_explain_it() -> None:
    def plan_for(lengths: Lengths | None, edges: tuple[int, ...] = ()) -> Any:
        return SimpleNamespace(lengths=lengths, bucket_edges=edges, max_length=256)

    plan = plan_for(draw_lengths(30, 400, 0))
    for rows, seed in product((1, 3, 20, 200, 5000), range(1, 9)):
        same = compare_lengths(plan, draw_lengths(30, rows, seed))
        assert same is not None
        assert not same.drifted, (rows, seed)
        assert not [*find_drifts(same, ())]
    for mean in (12, 80):
        found = compare_lengths(plan, draw_lengths(mean, 300, 1))
        assert found is not None
        assert found.drifted
        assert found.computed == pytest.approx(found.now.mean / found.before.mean)
        (told,) = find_drifts(found, ())
        assert f"{found.computed:.2f} times as many" in told
    # Rows of 15 tokens are padded to 20 and those of 25 to 40.
    old, new = (Lengths.of(each, max_length=256) for each in ([10, 20] * 9, [15, 25] * 9))
    padded = compare_lengths(plan_for(old, (10, 20, 40, 256)), new)
    assert padded is not None
    assert (padded.computed, padded.distance, padded.drifted) == (2.0, 0.5, False)
    cut = compare_lengths(plan, Lengths.of([900] * 40, max_length=256))
    assert cut is not None
    assert (cut.now.at_limit, cut.now.p99) == (1.0, 256)
    assert compare_lengths(plan_for(None), new) is None  # images


def record(**fields: Any) -> bytes:
    scores = np.array([[0.75, 0.25]], np.float32)
    row = {
        "at": 1.5,
        "inputs": {"text": SECRET, "image": {"base64": base64.b64encode(b"\0\1").decode()}},
        "parameters": {"top_k": 2, "triton_header": 1, "x-forwarded": "y"},
        "answer": {
            "label": {"shape": [1, 2], "texts": ["ä", "b"]},
            "score": {
                "shape": [1, 2],
                "dtype": "float32",
                "base64": base64.b64encode(scores.tobytes()).decode(),
            },
        },
        "redacted": False,
        **fields,
    }
    return json.dumps(row).encode() + b"\n"


def test_rows_come_back_as_they_were_and_damage_is_counted(tmp_path: Path) -> None:
    head = json.dumps({"build": "b1"}).encode() + b"\n"
    lines = [head, record(), b"{not JSON\n", record(answer=5)]
    write_file(tmp_path / "p", "p", lines, rows=3, max_rows=99, max_bytes=9999)
    write_file(tmp_path / "p", "p", [b"nothing\n"], rows=1, max_rows=99, max_bytes=9999)
    sample = read_sample(tmp_path, "p", quiet, keep_hours=1)
    (row,) = sample.rows
    assert (sample.damaged, len(sample.known)) == (3, 2)
    assert (row.build, row.inputs) == ("b1", {"text": SECRET, "image": b"\0\1"})
    assert row.parameters == {"top_k": 2}
    assert row.answer["label"].tolist() == [["ä".encode(), b"b"]]
    assert row.answer["score"].tolist() == [[0.75, 0.25]]
    again = read_sample(tmp_path, "p", quiet, keep_hours=1, known=frozenset(sample.known))
    assert (again.rows, again.known) == ((), sample.known)
    with pytest.raises(UserError, match="does not exist, so there are no samples"):
        read_sample(tmp_path, "q", quiet, keep_hours=1)
    assert not read_sample(tmp_path, "p", quiet, keep_hours=0).known
    assert not list((tmp_path / "p").iterdir())


def test_timeline_is_read_back_and_a_new_build_starts_without_evidence(tmp_path: Path) -> None:
    timeline = Timeline().after(look(), ["f1"]).after(look(), ["f2"])
    (tmp_path / TIMELINE_FILE).write_text(timeline.as_text(), encoding="utf-8")
    found = read_timeline(tmp_path)
    assert found == timeline
    assert (len(found.runs), found.files, found.last) == (2, ("f2",), ("f2",))
    quiet = found.after(look(), ["f2"])  # nothing new: what the last rows told still holds
    assert (quiet.files, quiet.last) == (("f2",), ("f2",))
    assert quiet.after(look(), []).last == ()
    row = LargeErrorRow("f1:3", 12, math.inf, 0.25, "secret", "yes", "no")
    kept = found.after(replace(look(), rows=1, worst=(row,)), [])
    empty = kept.after(replace(look(), rows=0, worst=()), [])
    assert empty.worst == (LargeErrorRow("f1:3", 12, math.inf, 0.25),)  # no texts are kept
    (tmp_path / TIMELINE_FILE).write_text(empty.as_text(), encoding="utf-8")
    assert read_timeline(tmp_path) == empty
    assert kept.after(replace(look(), rows=0, worst=(), build="b2"), []).worst == ()
    assert found.evidence_about("b1") == look().evidence
    assert found.evidence_about("b2") == {}
    assert read_timeline(tmp_path / "nothing") == Timeline()
    (tmp_path / TIMELINE_FILE).write_text("{}{")
    with pytest.raises(UserError, match="is not a timeline"):
        read_timeline(tmp_path)


def test_metrics_are_in_prometheus_text_format() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(metrics_text(look()))
        for sample in family.samples
    }
    assert samples["triptych_monitor_alarms", "p"] == 1
    evidence = samples["triptych_monitor_alarm_evidence_ratio", "label_agreement", "p"]
    assert evidence == pytest.approx(3.5 / 3)
    assert samples["triptych_monitor_metric", "label_agreement", "p"] == 0
    assert samples["triptych_monitor_last_run_timestamp_seconds", "p"] > 1e9


def test_verdict_on_a_candidate(tmp_path: Path) -> None:
    better = replace(WRONG, active=0.3, more_low=-0.3, more_high=-0.1)
    near = replace(WRONG, candidate=0.02, low=0.01, high=0.03, more_low=0.01, more_high=0.03)
    same, slow = rounds(0.99, 1.0, 1.01), rounds(0.79, 0.8, 0.81)
    little, steady = rounds(0.979, 0.98, 0.981), rounds(0.999, 1.0, 1.001)
    noisy = rounds(0.99, 0.6, 1.01)
    refused = [measurement(8, errors={"queue is full": 2})]
    for found, speeds, word, reason in (
        (answers(), (same, same), "promote", "no difference in the answers"),
        (answers(), (slow, same), "promote", "p50 ms"),
        (answers(better), (same, same), "promote", "or better"),
        (answers(), (same, slow), "reject", "more than 10\xa0% higher"),
        (answers(), (steady, little), "promote", "10\xa0% higher, with 95 % confidence"),
        (answers(), (noisy, slow), "inconclusive", "rounds (9 minutes) are needed"),
        (answers(), (same, noisy), "inconclusive", "may be more than 10\xa0% higher"),
        (answers(), (refused, same), "inconclusive", "the active build failed under load"),
        (answers(WRONG), ([], []), "reject", "worse than the active build"),
        (answers(WRONG, 9), ([], []), "reject", "worse than the active build"),
        (answers(replace(WRONG, more_low=-0.01)), ([], []), "reject", "no better"),
        (answers(lost=3), ([], []), "reject", "3 of 500 requests failed"),
        (answers(), (same, refused), "reject", "queue is full"),
        (answers(RIGHT, 199), (same, same), "inconclusive", "199 rows are too few"),
        (answers(near), (same, same), "inconclusive", "more rows are needed"),
        (answers(WRONG, reference=False), (same, same), "inconclusive", "the models differ"),
        (answers(reference=False), (same, same), "promote", "compared with the active build"),
        (answers(), (same[:1], same[:1]), "inconclusive", "one round"),
    ):
        errors = [[kind for one in side for kind in one.errors] for side in speeds]
        said, reasons = judge(found, compare_speeds(*speeds), (errors[0], errors[1]), 1.0)
        assert said == word, (reasons, word)
        assert reason in "; ".join(reasons)
    told = replayed()
    write_shadow_report(told, tmp_path)
    assert json.loads((tmp_path / "shadow.json").read_text()) == told.as_dict()
    assert told.as_dict()["answers"]["tests"][0]["state"] == "worse"
    cost = next(one for one in compare_speeds(same, slow) if one.name == "core ms per request")
    assert cost.medians[0] == pytest.approx(1e3 * 1.82 / same[1].throughput_per_s)


def test_a_run_says_how_much_its_rows_prove() -> None:
    def run(rows: int, mean: float | None, total: int) -> MonitorRun:
        test = MeanTest("label_agreement", 0.02, mean, total, 0.0, 3.0, None)
        return replace(look(), rows=rows, alarms=(), tests=(test,))

    for found, says in (
        (run(0, None, 0), "nothing was compared in this run"),
        (run(0, 0.0, 5000), "nothing was compared in this run"),
        (run(10, 0.0, 10), "not proven yet that the limits are met: about 149 rows"),
        (run(148, 0.0, 148), "not proven yet"),
        (run(149, 0.0, 149), "the limits are met with 95 % confidence"),
        (run(400, 0.015, 400), "about 4,"),  # near the limit many rows are needed
        (run(400, 0.03, 400), "not proven yet that the limits are met"),
    ):
        assert found.passed
        lines = [line for line, _ in format_run(found)]
        assert says in lines[-1], lines[-1]
        assert ("no alarms" in lines[-1]) == (found.rows > 0)
    assert run(149, 0.0, 149).as_dict()["tests"][0]["is_proven"] is True
    assert 0.98**149 < 0.05 < 0.98**148  # so many rows without a loss are improbable over it
    rng = random.Random(2)  # a mean over its limit is seldom proven to be within
    for rows, rate in ((149, 0.021), (1000, 0.025), (3000, 0.021)):
        proven = 0
        for _ in range(300):
            mean = sum(rng.random() < rate for _ in range(rows)) / rows
            proven += MeanTest("x", 0.02, mean, rows, 0.0, 3.0, None).is_proven
        assert proven <= 23, (rows, rate, proven)  # 5 % and two standard errors


def replay(
    rng: random.Random, *, slower: float, noise: float, bursts: float = 0.0, max_rounds: int = 30
) -> tuple[str, int]:
    """Return the verdict on a candidate that is `slower` times, and the number of rounds."""

    def draw() -> float:
        burst = rng.uniform(0.3, 1) if rng.random() < bursts else 0
        return exp(rng.gauss(0, noise) + burst)

    def measure_side(side: int, _number: int) -> Measurement:
        p50, p99, rate = (draw() * (slower if side else 1) for _ in range(3))
        return measurement(
            8, p50_us=35e3 * p50, p99_us=65e3 * p99, throughput_per_s=180 / rate, steps=()
        )

    sides = measure_in_turns(measure_side, max_rounds)
    decision, _ = judge(answers(), compare_speeds(*sides), ((), ()))
    return decision, len(sides[0])


@pytest.mark.parametrize(
    ("slower", "noise", "bursts", "wrong", "right"),
    [
        (1.0, 0.05, 0.0, "reject", "promote"),
        (1.0, 0.03, 0.1, "reject", "promote"),  # one round of ten is noisy
        (1.1, 0.03, 0.0, "promote", ""),  # just the difference that must be found
        (1.1, 0.15, 0.0, "promote", ""),
        (1.1, 0.03, 0.1, "promote", ""),
        (1.25, 0.03, 0.0, "promote", "reject"),
        (1.69, 0.1, 0.0, "promote", "reject"),
        (0.7, 0.05, 0.0, "reject", "promote"),
    ],
)
def test_noise_seldom_misleads_the_verdict(
    slower: float, noise: float, bursts: float, wrong: str, right: str
) -> None:
    rng, found = random.Random(11), Counter[str]()
    for _ in range(RUNS):
        decision, rounds = replay(rng, slower=slower, noise=noise, bursts=bursts)
        assert FIRST_ROUNDS <= rounds <= 30
        found[decision] += 1
    assert found[wrong] <= MAX_ERRORS, found
    if right:
        assert found[right] > RUNS / 2, found


def test_noise_makes_no_verdict_and_quiet_takes_few_rounds() -> None:
    rng = random.Random(12)
    noisy = [replay(rng, slower=1.0, noise=0.6) for _ in range(RUNS)]
    assert Counter(decision for decision, _ in noisy)["inconclusive"] > 0.9 * RUNS
    assert sum(rounds == 30 for _, rounds in noisy) > 0.9 * RUNS
    quiet = [replay(rng, slower=1.0, noise=0.01) for _ in range(RUNS)]
    assert {decision for decision, _ in quiet} == {"promote"}
    assert {rounds for _, rounds in quiet} == {FIRST_ROUNDS}
    assert replay(rng, slower=2.0, noise=0.01) == ("reject", FIRST_ROUNDS)
    assert replay(rng, slower=1.0, noise=0.01, max_rounds=1) == ("inconclusive", 1)
    assert replay(rng, slower=1.0, noise=0.01, max_rounds=0) == ("promote", 0)


def test_one_noisy_round_of_the_active_build_hides_no_regression() -> None:
    """The replay of a report: p50 up 69 %, p99 up 73 %, and one noisy round of the active build."""
    for most, wanted in ((5, "inconclusive"), (30, "reject")):
        factors = iter((1.0, 1.1, 2.1, 0.95, 1.0, *[1.0] * 25))

        def measure_side(side: int, _number: int) -> Measurement:
            factor = 1.69 if side else next(factors)  # noqa: B023
            return measurement(8, p50_us=20e3 * factor, p99_us=40e3 * factor, resources=None)

        before, after = measure_in_turns(measure_side, most)
        decision, reasons = judge(answers(), compare_speeds(before, after), ((), ()), 8.0)
        assert decision == wanted, reasons
        if wanted == "inconclusive":
            assert "p50 ms 1.44 times" in reasons[0]
            assert "rounds (" in reasons[0]
