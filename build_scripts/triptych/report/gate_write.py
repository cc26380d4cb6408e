"""The report of a gate: `report.html` to read and `gate.json` to compute with, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from triptych.files import write_files
from triptych.report.gate_page import page
from triptych.repository.plain import json_text, plain_data


def write_report(
    gate: Mapping[str, Any], target: Path, *, candidates: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Write ``report.html`` and ``gate.json`` into `target`; each appears whole or not at all.

    The page needs nothing beside itself: no network, no script, no font.

    Args:
        gate: `GateResult.as_dict()` with ``pipeline``, ``task``, ``architecture``, ``layout``,
            ``precision``, ``conversion`` (`Conversion.as_dict()` or None), ``accepted`` (why a
            failed gate does not stop the build, or None) and ``versions`` (name to version).
            Numbers that are not finite may be None.
        target: a folder; made where it is missing.
        candidates: what `precision: auto` tried, in its order: ``precision``, ``status``
            ("chosen", "passed", "failed", "not runnable"), ``failures``, ``verdicts`` (metric to
            value), ``throughput_per_s``, ``p99_ms``, ``size_bytes``, ``kept``, ``note``; any may
            be None. They go into ``gate.json`` as ``candidates``.
    """
    record = {**gate, **({"candidates": list(candidates)} if candidates else {})}
    clean = plain_data(record)
    files = {
        "gate.json": json_text(clean),
        "report.html": page(clean, clean.get("candidates", [])),
    }
    write_files(target, files)
