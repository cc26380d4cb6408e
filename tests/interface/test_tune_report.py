"""The report of a tuning: every trial with its evidence, the front, what it was worth."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from load_samples import NOTHING_ANSWERED, measurement, outcome, point, subject, trial, tuned
from report_pages import Page, assert_finite_drawing, assert_stands_alone, typed
from triptych.interface.cli.measured_tables import print_tuned
from triptych.interface.report.tune import tune_page, write_tune_report
from triptych.operate.tune.results import TuneResult, pareto_front
from triptych.serving.bench.results import LoadPoint, OfferedLoad, from_json
from triptych.spec.slo import Slo

SAME = outcome(0.9)
ODD: dict[str, dict[str, Any]] = {
    "nothing tried": {"trials": (), "skipped": {}, "winner": SAME, "advice": ()},
    "not met": {"met": False, "verdict": "p99 <= 80 ms holds at no rate"},
    "no promise": {"slo": Slo()},
    "no points": {"baseline": outcome(1, points=()), "winner": outcome(1, points=()), "trials": ()},
    "errors only": {
        "baseline": outcome(1, points=(point(8, **NOTHING_ANSWERED),), rate=None, cost=None),
        "winner": outcome(1, points=(point(8, **NOTHING_ANSWERED),), rate=None, cost=None),
        "trials": (trial(1, "failed", points=(point(4, **NOTHING_ANSWERED),), score=None),),
    },
    "many trials": {"trials": tuple(trial(n, "better") for n in range(1, 31))},
    "zero scores": {"trials": (trial(1, "worse", score=0.0, against=0.0),)},
}


def test_every_trial_is_shown() -> None:
    source = tune_page(tuned())
    assert_stands_alone(source)
    read = Page(source)
    assert_finite_drawing(read)
    for wanted in (
        "SLO met",
        "p99 ≤ 80 ms holds up to 162/s, 20 % more than before",
        "core.instances: 1 → 2",
        "core.max_batch_size: 32 → 64",
        "preprocess.instances: 4",
        "the server did not become ready",
        "busy 93 % of the time",
        "within the rounds' spread",
        "postprocess.instances",
        "it is busy 4 % of the time",
        "precision int8 would halve",
        "no knob is left",
        "412 s",
        "4, 1 better",
        "+20 %",  # the score
        "-17 %",  # the price
        "Price of a million, USD",
    ):
        assert wanted in read.text, wanted
    words = ["better", "no difference", "worse", "failed"]
    rows = re.findall(r"<span class=\"(?:good|bad|quiet)\"><bdi>([a-z ]+)</bdi>", source)
    assert rows == words
    assert read.count("polyline", "front") == 1


@pytest.mark.parametrize("name", ODD)
def test_any_tuning_can_be_reported(name: str) -> None:
    result = tuned(**ODD[name])
    source = tune_page(result)
    assert_stands_alone(source)
    read = Page(source)
    assert_finite_drawing(read)
    assert not re.search(r"\b(nan|inf|None)\b", read.text)
    console = Console(file=io.StringIO(), width=100)
    print_tuned(console, result)
    assert_fits(console)


def assert_fits(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 100
    return typed(text)


def test_a_promise_that_is_not_held_is_said() -> None:
    read = Page(tune_page(tuned(**ODD["not met"])))
    assert "SLO NOT MET" in read.text
    assert read.count("div", "failed") == 1
    assert "Further advice" in read.text
    nothing = Page(tune_page(tuned(**ODD["nothing tried"])))
    assert "No trial was better" in nothing.text
    assert "Trials" in nothing.text  # their number
    assert nothing.count("table", "trials") == 0


def test_hostile_names_are_inert() -> None:
    def result(word: str) -> TuneResult:
        return tuned(
            subject=subject(pipeline=word, overrides={word: word}),
            trials=(trial(1, "failed", change={word: word}, before={}, reason=word, says=word),),
            skipped={word: word},
            advice=(word,),
            verdict=word,
            stopped=word,
            objective=word,
        )

    calm, wild = (Page(tune_page(result(word))) for word in ("calm", "<script>x</script></td>"))
    extra = {"span", "wbr"}
    assert [tag for tag, _ in wild.tags if tag not in extra] == [
        tag for tag, _ in calm.tags if tag not in extra
    ]


def test_the_record_is_the_result(tmp_path: Path) -> None:
    assert write_tune_report(tuned(), tmp_path) == tmp_path / "report.html"
    document = json.loads((tmp_path / "tune.json").read_text(encoding="utf-8"))
    assert from_json(TuneResult, document) == tuned()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "tune.json"]


def test_a_tuning_is_printed() -> None:
    console = Console(file=io.StringIO(), width=100)
    print_tuned(console, tuned(advice=("[red]more[/red]",)))
    text = assert_fits(console)
    for wanted in (
        "minilm: SLO met",
        "core.max_batch_size=64",
        "no difference: 233/s",
        "Settings: core.instances=2",
        "[red]more[/red]",
        "Price of a million, USD",
        "no knob is left",
    ):
        assert wanted in text, wanted


def test_what_is_no_difference_is_no_gain() -> None:
    one = trial(1, "no difference", score=112.0, against=100.0, says="+3.0% ± 9.0% in 5 rounds")
    result = tuned(trials=(one,), baseline=SAME, winner=SAME)
    console = Console(file=io.StringIO(), width=100)
    print_tuned(console, result)
    for text in (assert_fits(console), tune_page(result)):
        assert "+12" not in text
        assert "no difference" in text


def at(rate: float, p99: float, **changes: Any) -> LoadPoint:
    one = measurement(4, throughput_per_s=rate, p99_us=p99, **changes)
    return LoadPoint("p", OfferedLoad("concurrency", rate), (one,))


def test_the_front_is_what_nothing_beats() -> None:
    points = [at(100, 10), at(200, 30), at(150, 40), at(90, 10), at(200, 35), at(50, 5)]
    assert pareto_front(points) == (points[5], points[0], points[1])
    assert pareto_front([]) == ()
    twice = [at(100, 10), at(100, 10)]
    assert pareto_front(twice) == (twice[0],)
    assert pareto_front(twice)[0] is twice[0]


def test_what_failed_is_not_on_the_front() -> None:
    failing = at(900, 1, errors={"deadline": 1})
    silent = replace(at(0, 0), rounds=(measurement(1, **NOTHING_ANSWERED),))
    assert pareto_front([failing, silent]) == ()
    assert pareto_front([failing, silent, at(10, 10)])[0].load.value == 10


def test_the_front_of_all_points_is_beaten_by_none_and_beats_the_rest() -> None:
    points = [at(rate, p99) for rate in range(10, 60, 7) for p99 in range(rate // 2, 90, 11)]
    front = pareto_front(points)

    def figures(one: LoadPoint) -> tuple[float, float]:
        return one.median("throughput_per_s"), one.median("p99_us")

    def beats(one: LoadPoint, other: LoadPoint) -> bool:
        (a, b), (c, d) = figures(one), figures(other)
        return a >= c and b <= d and (a, b) != (c, d)

    assert not any(beats(one, other) for one in points for other in front)
    held = {figures(one) for one in front}
    rest = [one for one in points if figures(one) not in held]
    assert all(any(beats(other, one) for other in front) for one in rest)
