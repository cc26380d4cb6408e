"""Plots that stand by themselves: a notebook shows them, a file of one is an image."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.base.formatting import number
from triptych.interface.report import plots
from triptych.interface.report.drawing import WIDTH
from triptych.repository.records import GateResult
from triptych.spec.traffic import Lengths

_RULES = {
    "text": "font:13px system-ui,sans-serif;fill:#333",
    ".tick": "font-size:12px;fill:#666",
    ".axis": "stroke:#666",
    ".grid": "stroke:#e4e4e4",
    ".bar": "fill:#3c6eb4",
    ".bad": "fill:#c0392b",
    ".limit": "stroke:#c0392b",
    "text.limit": "fill:#c0392b;stroke:none",
}
# In a notebook the rules would hold for all of its page.
_STYLE = "".join(f".triptych {name}{{{rule}}}" for name, rule in _RULES.items())


@dataclass(frozen=True)
class Figure:
    """One plot; `svg` is a whole SVG document."""

    svg: str

    def _repr_svg_(self) -> str:
        """What a notebook shows."""
        return self.svg


def differences_of(gate: GateResult) -> Figure:
    """Rows of the gate by how far they are from the reference."""
    values = [v for each in gate.row_differences if (v := number(each)) is not None]
    limits = [each.limit for each in gate.verdicts if each.metric == "max_difference"]
    return _figure(plots.differences(values, limits[0] if limits else None) if values else "")


def lengths_of(lengths: Lengths | None) -> Figure:
    """Rows of the traffic by their tokens."""
    counts = {} if lengths is None else lengths.counts
    return _figure(
        plots.histogram("lengths", "Lengths of the traffic", counts, axes=("tokens", "rows"))
    )


def _figure(drawing: str) -> Figure:
    head = '<svg xmlns="http://www.w3.org/2000/svg" class="triptych" '
    if not drawing:
        return Figure(f'{head}width="1" height="1"/>')
    inner = drawing.removeprefix("<svg ")
    tag, _, marks = inner.partition(">")
    return Figure(f'{head}width="{WIDTH}" {tag}><style>{_STYLE}</style>{marks}')
