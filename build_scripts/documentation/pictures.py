"""Pictures of README.md: the steps of an ensemble, and a chart of its table of figures.

Usage: ``python build_scripts/documentation/pictures.py`` draws both again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from triptych.base.files import write_files

FOLDER = Path(__file__).resolve().parent
OVERVIEW, CHART = FOLDER / "overview.svg", FOLDER / "figures.svg"
README = FOLDER.parents[1] / "README.md"
STEPS = (
    ("client", ("“my delivery is late”",)),
    ("NAME_preprocess", ("Python: checks and", "tokenizes each row")),
    ("NAME_core", ("ONNX Runtime, TensorRT", "or OpenVINO")),
    ("NAME_postprocess", ("Python: decodes and", "joins the rows")),
    ("client", ("[0.12, -0.05, …]",)),
)
"""Title and lines of each box, in the order of a request."""

WIDTH = 960
_STYLE = """
.back { fill: #fff; }
text { font: 14px system-ui, sans-serif; fill: #1f2933; text-anchor: middle; }
.title { font-weight: 600; } .left { text-anchor: start; } .small { font-size: 12px; }
.box, .frame { fill: #fff; stroke: #00897b; stroke-width: 1.5; rx: 8px; }
.frame { fill: none; stroke-dasharray: 6 4; } .arrow { stroke: #52606d; stroke-width: 2; }
.head { fill: #52606d; } .ours { fill: #00897b; } .others { fill: #9aa5b1; }
.range { opacity: .45; }
@media (prefers-color-scheme: dark) {
  .back { fill: #1e2429; } text { fill: #e4e7eb; }
  .box { fill: #263238; } .arrow { stroke: #9aa5b1; }
  .head { fill: #9aa5b1; } .others { fill: #7b8794; }
}
"""


class Rate(NamedTuple):
    """A row of the table of figures."""

    system: str
    low: float  # texts per second, or the lowest of several runs
    high: float  # the highest of several runs


def draw_overview() -> str:
    """Return the picture of a text that goes through an ensemble."""
    width, gap, top, height = 164, 26, 44, 84
    parts = ['<rect class="frame" x="203" y="8" width="554" height="136"/>']
    parts.append(_text("ensemble NAME, one model of Triton", 480, 30, "title"))
    left = (WIDTH - 5 * width - 4 * gap) // 2
    for index, (title, lines) in enumerate(STEPS):
        x = left + index * (width + gap)
        middle = x + width // 2
        parts.append(f'<rect class="box" x="{x}" y="{top}" width="{width}" height="{height}"/>')
        parts.append(_text(title, middle, top + 28, "title"))
        parts += [_text(line, middle, top + 50 + 18 * i, "small") for i, line in enumerate(lines)]
        if index:
            tip, y = x - 3, top + height // 2
            parts.append(f'<path class="arrow" d="M{x - gap + 3} {y}H{tip - 6}"/>')
            parts.append(f'<path class="head" d="M{tip} {y}l-9 -5v10z"/>')
    return _picture(
        parts, 152, "A text goes through the three steps of an ensemble; a vector returns"
    )


def read_rates(page: str) -> list[Rate]:
    """Return the rates of the table of figures of README.md."""
    table = page.split("| system | texts per second |")[1].split("\n\n")[0]
    rows = re.findall(r"(?m)^\| ([^|]+?) \| (\d+)(?: to (\d+))? \|", table)
    return [Rate(name, float(low), float(high or low)) for name, low, high in rows]


def draw_chart(rates: Sequence[Rate]) -> str:
    """Return a chart of rates, with bars to the lowest run and ranges to the highest."""
    scale = 500 / max(rate.high for rate in rates)
    parts = [_text("all-MiniLM-L6-v2, texts per second, 32 clients, 2 cores", 12, 22, "title left")]
    for index, rate in enumerate(rates):
        y = 40 + 34 * index
        kind = "ours" if "Triptych" in rate.system else "others"
        low, high = rate.low * scale, rate.high * scale
        parts.append(_text(rate.system, 12, y + 16, "left"))
        parts.append(f'<rect class="{kind}" x="350" y="{y}" width="{low:.0f}" height="22"/>')
        parts.append(
            f'<rect class="{kind} range" x="{350 + low:.0f}" y="{y}" width="{high - low:.0f}" '
            'height="22"/>'
        )
        said = f"{rate.low:.0f}" + (f" to {rate.high:.0f}" if rate.high > rate.low else "")
        parts.append(_text(said, 358 + high, y + 16, "left"))
    return _picture(parts, 46 + 34 * len(rates), "Texts per second of each system in the table")


def _text(text: str, x: float, y: float, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}">{escape(text)}</text>'


def _picture(parts: Sequence[str], height: int, about: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">\n'
        f"<title>{about}</title><style>{_STYLE}</style>\n"
        f'<rect class="back" width="{WIDTH}" height="{height}" rx="8"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def main() -> None:
    """Draw both pictures."""
    chart = draw_chart(read_rates(README.read_text(encoding="utf-8")))
    write_files(FOLDER, {OVERVIEW.name: draw_overview(), CHART.name: chart})


if __name__ == "__main__":
    main()
