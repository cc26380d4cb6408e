"""Gates and candidates to report on, and a reader that takes a report's page apart."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

from triptych.base.formatting import MINUS, TIMES
from triptych.interface.report.gate import GateHeader
from triptych.interface.report.svg import WIDTH
from triptych.repository.records import (
    Conversion,
    GateResult,
    PrecisionTrial,
    ProbeResult,
    Verdict,
    WorstRow,
)
from triptych.tasks.labeled import LabeledResult

VOID = {"meta", "br", "wbr"}
LAYERS = tuple(f"encoder.layer.{index}.{name}" for index in range(20) for name in ("query", "out"))


def typed(text: str) -> str:
    """`text` with single blanks and with the signs that a keyboard has."""
    return " ".join(text.split()).replace(TIMES, "x").replace(MINUS, "-")


class Page(HTMLParser):
    """A page taken apart; balanced, or it raises."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, f"{tag} closes another"

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return typed("".join(self.words))

    def count(self, tag: str, kind: str = "") -> int:
        return sum(
            name == tag and (not kind or kind in str(attrs.get("class", "")).split())
            for name, attrs in self.tags
        )


DRAWING = re.compile(r"<(line|rect|circle|polyline|path)\b[^>]*>(</\1>)?")


def page_body(source: str, *, drawings: bool) -> str:
    """Return the page for a file on record, without its style sheet, an element a line.

    Without `drawings`, lines, bars and points of plots are left out; their texts are not.
    """
    body = source[source.index("</style>") :]
    if not drawings:
        body = DRAWING.sub("", re.sub(r' (x|y)="[-\d.]+"', "", body))
    return re.sub(r"(?<=>)(?=<(?!/))", "\n", body)


def assert_stands_alone(source: str) -> None:
    """Nothing runs, nothing is loaded, nothing links anywhere, and every plot has words."""
    page = Page(source)
    names = {name for _, attrs in page.tags for name in attrs}
    assert not names & {"src", "href", "srcset", "data", "action", "style"}
    assert not any(name.startswith("on") for name in names)
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "img", "object", "base"}
    style = source[source.index("<style>") : source.index("</style>")]
    assert not re.search(r"url\(|@import|@font-face|//", style)
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for attrs in (attrs for tag, attrs in page.tags if tag == "svg"):
        assert attrs["role"] == "img"
        assert {*str(attrs["aria-labelledby"]).split()} <= {*ids}


ABOUT = GateHeader("minilm", "text-embedding", "BertModel", "packed", {"onnxruntime": "1.22.0"})


def verdict(metric: str, value: float, limit: float | None, *, passed: bool = True) -> Verdict:
    return Verdict(metric, value, limit, passed)


LABELED = LabeledResult(
    metric="similarity_correlation",
    rows=300,
    reference=0.8214,
    candidate=0.8197,
    difference=-0.0017,
    low=-0.0049,
    high=0.0012,
    max_drop=0.005,
    smallest_visible_drop=0.0031,
    failure="",
)
CONVERSION = Conversion(
    layers=LAYERS,
    excluded_layers=(LAYERS[3],),
    reasons={LAYERS[3]: "most sensitive"},
    ranges={name: 1.5 + index for index, name in enumerate(LAYERS)},
    notes=("of the conversion",),
)


def probe_of(*, passed: bool) -> ProbeResult:
    """What the core does outside its traffic."""
    found = verdict("mean_neighbor_loss", 0.0004 if passed else 0.0023, 0.0015, passed=passed)
    return ProbeResult(394, (found,), (WorstRow("a text of the probe", 0.75, 0.5, "w", "g"),))


def gate_of(**changes: Any) -> GateResult:
    """A gate that an int8 embedding passed, but for `changes`."""
    gate = GateResult(
        precision="int8",
        rows=267,
        edge_case_rows=9,
        finite=True,
        verdicts=(
            verdict("max_difference", 0.0834, None),
            verdict("mean_cosine", 0.99861, 0.998),
            verdict("nearest_neighbor_agreement", 0.9775, 0.97),
        ),
        failures=(),
        worst=(WorstRow("a text", 0.25, 0.5, "w", "g"),),
        notes=("a note",),
        row_differences=(0.0, 1e-3, 0.01, 0.0834),
        labeled=LABELED,
        conversion=CONVERSION,
    )
    return replace(gate, **changes)


def candidate(precision: Any, status: Any, **changes: Any) -> PrecisionTrial:
    found = PrecisionTrial(
        precision=precision,
        status=status,
        verdicts={"mean_cosine": 0.9987, "nearest_neighbor_agreement": 0.9775},
        throughput_per_s=231.94,
        p99_ms=196.4,
        size_bytes=24_100_000,
    )
    return replace(found, **changes)


NOTHING_KNOWN = PrecisionTrial("int8", "failed")
CANDIDATES = (
    candidate("fp32", "passed", throughput_per_s=162.3),
    candidate("bf16", "not runnable", verdicts=None, throughput_per_s=None),
    candidate("int8", "chosen"),
    candidate("int8_dynamic", "failed", failures=("0.88 is below 0.97",), throughput_per_s=218.0),
)


LENGTHS = ("r", "width", "height")
ACROSS = ("x", "x1", "x2", "cx")


def assert_finite_drawing(page: Page) -> None:
    """Every coordinate is a finite number within the drawing, and no length is negative."""
    for tag, attrs in page.tags:
        if tag in ("rect", "line", "circle", "text"):
            for name in attrs.keys() & {*LENGTHS, *ACROSS, "y", "y1", "y2", "cy"}:
                value = float(str(attrs[name]))
                least = 0 if name in LENGTHS else -50
                assert least <= value < (WIDTH + 1 if name in ACROSS else 1000), (name, attrs)
        elif tag == "polyline":
            places = [float(at) for at in str(attrs["points"]).replace(",", " ").split()]
            assert all(-50 < at < 1000 for at in places)
