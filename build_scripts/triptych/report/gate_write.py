"""The report of a gate: `report.html` to read and `gate.json` to compute with, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from triptych.files import write_files
from triptych.report.gate_page import page
from triptych.repository.plain import json_text, plain_data
from triptych.repository.records import GateResult


@dataclass(frozen=True)
class About:
    """Whose gate it is; `versions` is name of a library to its version."""

    pipeline: str
    task: str
    architecture: str
    layout: str
    versions: Mapping[str, str]


def write_report(gate: GateResult, about: About, target: Path) -> None:
    """Write both."""
    record = {"conversion": None, "accepted": None, **gate.as_dict(), **asdict(about)}
    clean = plain_data(record)
    files = {
        "gate.json": json_text(clean),
        "report.html": page(clean, clean.get("candidates", [])),
    }
    write_files(target, files)
