"""Every report page and terminal table of made-up results: as on record, and fit to be shown."""

import difflib
import io
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tests.support.generation_load_cases import found, result
from tests.support.load_samples import (
    NASTY,
    NOTHING_ANSWERED,
    bench,
    hostile,
    outcome,
    point,
    subject,
    trial,
    tuned,
)
from tests.support.monitor_cases import look, replayed
from tests.support.project import ROOT
from tests.support.report_pages import (
    ABOUT,
    CANDIDATES,
    CONVERSION,
    LABELED,
    NOTHING_KNOWN,
    Page,
    assert_finite_drawing,
    assert_stands_alone,
    candidate,
    gate_of,
    page_body,
    probe_of,
    verdict,
)
from triptych.interface.cli.measured_tables import print_bench, print_comparison, print_tuned
from triptych.interface.cli.tables import print_built
from triptych.interface.report import bench as bench_report
from triptych.interface.report import gate as gate_report
from triptych.interface.report.gate import GateHeader
from triptych.interface.report.monitor import write_monitor_report, write_shadow_report
from triptych.interface.report.tune import tune_page
from triptych.operate.monitor.results import Timeline
from triptych.operate.monitor.shadow_verdict import format_comparison
from triptych.repository.records import Conversion, GateResult, WorstRow
from triptych.serving.bench.comparison import compare_results
from triptych.spec.slo import GenerationSlo, Slo


def assert_recorded(folder: str, texts: Mapping[str, str], *, rewrite: bool) -> None:
    """Compare texts with the files of the same names in `tests/data/FOLDER`.

    After an intended change, ``pytest FILE --rewrite`` writes these files again; the diff shows
    what changed.
    """
    recorded = ROOT / "tests/data" / folder
    texts = {name.replace(" ", "-"): text for name, text in texts.items()}
    if rewrite:
        shutil.rmtree(recorded, ignore_errors=True)
        recorded.mkdir(parents=True)
        for name, text in texts.items():
            (recorded / name).write_text(text, encoding="utf-8")
    known = {path.name: path.read_text(encoding="utf-8") for path in recorded.iterdir()}
    assert sorted(known) == sorted(texts)
    changed = [
        line
        for name, text in texts.items()
        for line in difflib.unified_diff(
            known[name].splitlines(), text.splitlines(), f"{folder}/{name}", "now", lineterm="", n=0
        )
    ]
    assert not changed, "\n".join(changed[:40])


NAN = math.nan
HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "</td></tr></table></main></svg><style>*{display:none}</style>",
    "\" onload=alert(1) x='",
    "\u202eexe.txt\u202c \u200f\u2066 \u05e9\u05dc\u05d5\u05dd",
    "\x00\x07\x1b[31m\r\n\t\x85 \ud800 \ufffe",
    "A" * 5000,
    "Z" + "\u0337\u0321" * 300,
    "&amp; ]]> -->",
)
GATES: Mapping[str, GateResult] = {
    "usual": gate_of(candidates=CANDIDATES),
    "failed": gate_of(
        failures=("mean_cosine 0.99799996 is below 0.998",),
        verdicts=(
            verdict("mean_cosine", 0.99799996, 0.998, passed=False),
            verdict("batch_sensitivity", 2e-7, 1e-5),
            verdict("max_difference", NAN, 0.05, passed=False),
            verdict("of_a_later_version", 0.5, 0.4),
        ),
        labeled=replace(LABELED, failure="fell by 0.03"),
        probe=probe_of(passed=False),
        conversion=None,
    ),
    "accepted": gate_of(
        failures=("a",),
        accepted="launch <b>freeze</b>",
        probe=probe_of(passed=True),
        rounding=2e-5,
        verdicts=(
            verdict("mean_cosine", 0.9981, 0.998),
            verdict("nearest_neighbor_agreement", 0.9775, 0.97),
        ),
        candidates=CANDIDATES,
    ),
    "nothing": gate_of(
        verdicts=(), row_differences=(), worst=(), notes=(), labeled=None, conversion=None
    ),
    "fp16": gate_of(
        precision="fp16",
        conversion=replace(CONVERSION, ranges={"a": 131e3, "b": 14e4}, excluded_layers=("a",)),
        row_differences=(1e-3, 0.01, 0.0501, 0.4),
        verdicts=(verdict("max_difference", 0.4, 0.05, passed=False),),
    ),
}
EQUAL = "1.03 times (0.94 to 1.13 with 95 % confidence) in 6 rounds"
SILENT: dict[str, Any] = {"points": (point(8, **NOTHING_ANSWERED),), "rate": None, "cost": None}
TUNED = {
    "usual": tuned(advice=("[red]more[/red]",)),
    "not met": tuned(met=False, slo_kind="not met", verdict="p99 <= 80 ms holds at no rate"),
    "nothing tried": tuned(trials=(), skipped={}, winner=outcome(0.9), advice=()),
    "no promise": tuned(slo=Slo()),
    "no points": tuned(baseline=outcome(1, points=()), winner=outcome(1, points=()), trials=()),
    "errors only": tuned(
        **{side: outcome(1, **SILENT) for side in ("baseline", "winner")},
        trials=(trial(1, "failed", points=(point(4, **NOTHING_ANSWERED),), score=None),),
    ),
    "no difference": tuned(
        trials=(trial(1, "cannot tell", score=112.0, against=100.0, says=EQUAL),),
        **{"met": False, "slo_kind": "cannot tell"},
        **{side: outcome(0.9) for side in ("baseline", "winner")},
    ),
    "zero scores": tuned(trials=(trial(1, "worse", score=0.0, against=0.0),)),
    "streamed": tuned(
        subject=subject(task="text-generation", layout="continuous batching"),
        slo=GenerationSlo(ttft_p99="200ms", itl_p99="25ms"),
        objective="goodput",
        unit="tokens/s",
        baseline=found(slow=2.0),
        winner=found(slow=1.0, overrides={"core.max_num_seqs": 8}),
        trials=(trial(1, "better", points=found(slow=1.0).points, score=8.0, against=2.0),),
    ),
}
DATA_PAGES = {
    "usual",
    "streamed",
    "errors only",
    "no details",
    "open only",
    "broken promise",
    "a GPU",
}
"""Loads whose whole pages are on record; of the others the text is."""


def gate_page(gate: GateResult) -> str:
    return gate_report.page(gate, ABOUT)


def built(gate: GateResult) -> Any:
    """As much of the result of a build as a terminal shows."""
    return SimpleNamespace(gate=gate, not_packed_reason="", attention="", findings=())


def printed(show: Callable[[Console, Any], None], result: Any) -> str:
    """Return what a terminal of 100 columns shows."""
    file = io.StringIO()
    show(Console(file=file, width=100), result)
    text = file.getvalue()
    assert max(map(len, text.splitlines()), default=0) <= 100
    return text


def test_pages_are_as_on_record_stand_alone_and_are_drawn_within_their_plots(
    tmp_path: Path, rewrite: bool
) -> None:
    loads = {"usual": bench(), "streamed": result(slow=1.0), **NASTY}
    first, last = (replace(look(), at=at_s) for at_s in (1e9, 1e9 + 3600))
    timeline = Timeline().after(first, ["f1"]).after(last, ["f2"])
    pages = {
        **{f"gate-{name}": gate_page(gate) for name, gate in GATES.items()},
        **{f"bench-{name}": bench_report.page(load) for name, load in loads.items()},
        **{f"tune-{name}": tune_page(result) for name, result in TUNED.items()},
        "shadow": write_shadow_report(replayed(), tmp_path).read_text(encoding="utf-8"),
        "monitor": write_monitor_report(last, timeline, tmp_path).read_text(encoding="utf-8"),
    }
    for name, source in pages.items():
        assert_stands_alone(source)
        page = Page(source)
        assert_finite_drawing(page)
        assert not re.search(r"\b(nan|inf|None)\b", page.text), name
    whole = {"shadow", "monitor", *(f"bench-{name}" for name in DATA_PAGES)}
    whole |= {"gate-usual", "gate-failed", "gate-fp16", "tune-usual", "tune-streamed"}
    bodies = {
        f"{name}.html": page_body(source, drawings=name in whole) for name, source in pages.items()
    }
    assert_recorded("reports", bodies, rewrite=rewrite)


def test_tables_are_as_on_record_and_fit_a_terminal(rewrite: bool) -> None:
    loads = {"usual": bench(), **NASTY, "markup": hostile("[red]x[/red]")}
    after = bench(drift=1.2, subject=subject(machine={"processor": "[bold]"}))
    layers = ("layer.0", "layer.1", "layer.2", "node_where_1")
    empty = partial(GateResult, "int8", 8, 0, finite=True, verdicts=(), failures=())
    gates = {
        "kept layers": empty(
            conversion=Conversion(
                layers,
                excluded_layers=("layer.1", "node_where_1", "layer.0"),
                layer_errors={"layer.0": 1e-3, "layer.1": 5e-3, "layer.2": 1e-6},
                batch_ms={"fp32": 20.0, "as kept": 12.5},
            )
        ),
        "nothing": empty(conversion=Conversion((), excluded_layers=("node_where_1",))),
        "failed": empty(
            candidates=(*CANDIDATES, candidate("[red]", "failed", note="[b]too slow[/b]")),
            accepted="a [bold]freeze",
            verdicts=(verdict("mean_cosine", NAN, 0.998, passed=False),),
            failures=("mean_cosine is not a number",),
            worst=(WorstRow("[i]a row[/i]", 0.25, NAN, "wanted", "got"),),
            probe=probe_of(passed=False),
        ),
    }
    texts = {
        **{f"build-{name}": printed(print_built, built(gate)) for name, gate in gates.items()},
        **{f"bench-{name}": printed(print_bench, load) for name, load in loads.items()},
        **{f"tune-{name}": printed(print_tuned, result) for name, result in TUNED.items()},
        "bench-diff": printed(print_comparison, compare_results(bench(), after)),
        "shadow": "".join(f"{line}\n" for line, _ in format_comparison(replayed())),
    }
    assert texts["build-nothing"] == ""
    assert "nan" not in "".join(text for name, text in texts.items() if "failed" not in name)
    files = {f"{name}.txt": text for name, text in texts.items()}
    assert_recorded("tables", files, rewrite=rewrite)


def hostile_gate(word: str) -> str:
    gate = gate_of(
        failures=(word,),
        notes=(word,),
        worst=(WorstRow(word, 1.0, 1.0, word, word),),
        accepted=word,
        conversion=Conversion((word,), (word,), {word: word}, {word: 2.0}),
        verdicts=(verdict(word, 1.0, 1.0),),
        candidates=(candidate(word, "chosen", note=word, failures=(word,), verdicts={word: 0.5}),),
    )
    return gate_report.page(gate, GateHeader(word, word, word, word, {word: word}))


def hostile_tuning(word: str) -> str:
    failed = trial(1, "failed", change={word: word}, before={}, reason=word, says=word)
    return tune_page(
        tuned(
            subject=subject(pipeline=word, overrides={word: word}),
            trials=(failed,),
            skipped={word: word},
            advice=(word,),
            **dict.fromkeys(("verdict", "stopped", "objective"), word),
        )
    )


@pytest.mark.parametrize(
    "page_of", [hostile_gate, hostile_tuning, lambda word: bench_report.page(hostile(word))]
)
def test_hostile_texts_are_inert(page_of: Callable[[str], str]) -> None:
    extra = {"span", "wbr"}  # spelled-out characters, what was left out, breaks of names
    calm = [tag for tag, _ in Page(page_of("calm")).tags if tag not in extra]
    for word in HOSTILE:
        source = page_of(word)
        page = Page(source)
        assert [tag for tag, _ in page.tags if tag not in extra] == calm, word
        assert_finite_drawing(page)
        hidden = "[\u202a-\u202e\u2066-\u2069\u200f\x00-\x09\x0b-\x1f\x7f-\x9f\ufffe]"
        assert not re.search(hidden, source), word


def test_only_a_gate_without_any_fault_reads_as_passed() -> None:
    labeled = replace(LABELED, failure="fell by 0.03")
    faults: tuple[dict[str, Any], ...] = (
        {"failures": ("mean_cosine 0.99 is below 0.998",)},
        {"finite": False},
        {"verdicts": ()},
        {"verdicts": (verdict("mean_cosine", NAN, 0.998, passed=False),)},
        {"verdicts": (verdict("max_difference", NAN, None, passed=False),)},
        {"labeled": labeled},
        {"probe": probe_of(passed=False)},
    )
    for changes in faults:
        page = Page(gate_page(gate_of(**changes)))
        assert (page.count("div", "failed"), page.count("div", "passed")) == (1, 0), changes
        again = Page(gate_page(gate_of(**changes, accepted="launch <b>freeze</b>")))
        assert again.count("div", "accepted") == 1, changes
        assert "launch <b>freeze</b>" in again.text, changes
    for failures in ((), ("fell by 0.03",)):  # the failure is listed once
        page = Page(gate_page(gate_of(failures=failures, labeled=labeled)))
        assert page.text.count("fell by 0.03") == 2  # in the verdict and beside its plot


def odd_gates() -> Iterator[GateResult]:
    """Gates with numbers of any size, and with nothing."""
    differences = (
        *((), (0.0,), (0.0,) * 5, (0.3,), (1e-320, 1e299), (NAN, NAN), (NAN, 0.1), (-1.0,)),
        (1e-7,) * 400,
    )
    for limit, values in product((None, 0.0, 1e-5, 1e280), differences):
        verdicts = (verdict("max_difference", 0.1, limit),)
        yield gate_of(row_differences=values, verdicts=verdicts)
    floats = [name for name, value in asdict(LABELED).items() if isinstance(value, float)]
    for changes in (
        {"difference": 0.0, "low": 0.0, "high": 0.0, "max_drop": 0.0},
        {"difference": 0.5, "low": 0.4, "high": 0.6, "max_drop": 0.0},
        {"difference": -1e-12, "low": -1.0, "high": 1.0},
        {"low": NAN},
        dict.fromkeys(floats, NAN),
    ):
        labeled: Any = changes
        yield gate_of(labeled=replace(LABELED, **labeled))
    odd: Any = (
        {},
        {"one": 0.0},
        {"one": 3.0},
        {"one": NAN, "two": 1e299},
        {"one": -7.0, "two": 7.0},
    )
    for ranges, precision in product(odd, ("fp16", "int8")):
        conversion = replace(CONVERSION, ranges=ranges, excluded_layers=("one",), reasons={})
        yield gate_of(precision=precision, conversion=conversion)
    for some in (
        (candidate("fp32", "chosen"),),
        (candidate("fp32", "chosen", throughput_per_s=0.0),),
        (NOTHING_KNOWN,),
        (NOTHING_KNOWN, candidate("int8", "chosen"), candidate("int8", "passed")),
        (candidate("int8", "chosen", verdicts={"batch_sensitivity": 0.0}),),
        (candidate("a", "failed", verdicts={"mean_cosine": -1.0}, throughput_per_s=1e299),),
    ):
        yield gate_of(candidates=some, conversion=None, labeled=None)


def test_any_gate_can_be_shown() -> None:
    for gate in odd_gates():
        page = Page(gate_page(gate))
        assert_finite_drawing(page)
        is_odd = any(math.isnan(value) for value in gate.row_differences)
        assert ("not finite" in page.text) >= is_odd, gate
        measured = sum(each.throughput_per_s is not None for each in gate.candidates)
        assert not gate.candidates or page.count("circle") == measured, gate
