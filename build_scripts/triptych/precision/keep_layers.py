"""A core of lower precision that still passes the gate: which layers must stay as they are.

The whole graph is converted; where the gate fails, the layers with the largest errors (found one
at a time, on calibration rows, which the gate never sees) stay in higher precision, more of them
at each try, until the gate passes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from triptych.cache import cached_stage, code_hash
from triptych.errors import Progress
from triptych.gate.reference_rows import reference_of
from triptych.graph.files import MODEL_FILE
from triptych.pipeline.precisions import Precision
from triptych.precision.converter import Converter
from triptych.requests.prepare import Prepared

CHOICE_FILE = "choice.json"
LARGEST_KEPT_SHARE = 0.5
"""A core with more of its layers kept is hardly of the precision any more."""


class Judge(Protocol):
    """The gate of a precision, as `Gate` is."""

    precision: Precision
    judged_by: str

    def run(self, artifact: Path, key: str) -> dict[str, Any]:
        """The result, whose ``failures`` is empty if the artifact passes."""


@dataclass(frozen=True)
class Lowered:
    """A core of lower precision.

    Attributes:
        file: the graph.
        key: hash of all that decided it.
        gate: the gate's result.
        conversion: as `Conversion.as_dict`; where layers are kept also ``layer_errors``, what each
            layer alone would cost in accuracy, and ``batch_ms``, what keeping them costs in time.
    """

    file: Path
    key: str
    gate: dict[str, Any]
    conversion: dict[str, Any]


def lower(prepared: Prepared, source: Path, key: str, gate: Judge, progress: Progress) -> Lowered:
    """Convert the fp32 core, keeping as few layers as the gate allows.

    Args:
        prepared: the pipeline.
        source: its fp32 core.
        key: hash of all that decided `source`.
        gate: of the precision wanted, not fp32.
        progress: told what becomes of each try.

    Returns:
        The first that passes, else the last that was tried, with its failures.

    Raises:
        UserError: the graph cannot be converted.
    """
    converter = Converter(prepared, source, key, gate.precision, progress)
    searched: list[Lowered] = []

    def work(target: Path) -> None:
        lowered, kept, found = _search(prepared, converter, gate)
        searched.append(replace(lowered, conversion={**lowered.conversion, **found}))
        if lowered.gate["failures"]:
            raise _NothingPasses
        # What was asked for: a converter may keep more by itself.
        choice = {"kept": list(kept), "found": found}
        (target / CHOICE_FILE).write_text(json.dumps(choice, ensure_ascii=False), encoding="utf-8")

    try:
        search = code_hash("precision/keep_layers.py")
        inputs = {**converter.inputs, "judged_by": gate.judged_by, "search": search}
        folder, _ = cached_stage("kept", inputs, work)
    except _NothingPasses:
        return searched[0]
    if searched:
        return searched[0]
    choice = json.loads((folder / CHOICE_FILE).read_text(encoding="utf-8"))
    lowered = _try(converter, choice["kept"], gate)
    return replace(lowered, conversion={**lowered.conversion, **choice["found"]})


class _NothingPasses(Exception):
    """The search ended without a core that passes: nothing to remember."""


def _search(
    prepared: Prepared, converter: Converter, gate: Judge
) -> tuple[Lowered, Sequence[str], dict[str, Any]]:
    """The last core tried, the layers it was to keep, and what was found out on the way."""
    kept: Sequence[str] = ()
    lowered = _try(converter, kept, gate)
    if not lowered.gate["failures"]:
        return lowered, kept, {}
    layer_errors = converter.ranking(
        lowered.conversion["layers"], lambda rows: reference_of(prepared, rows)
    )
    worst_first = sorted(layer_errors, key=lambda name: -layer_errors[name])
    for count in _counts(len(worst_first)):
        kept = worst_first[:count]
        lowered = _try(converter, kept, gate)
        if not lowered.gate["failures"]:
            return (
                lowered,
                kept,
                {"layer_errors": layer_errors, "batch_ms": converter.times(lowered.file)},
            )
    return lowered, kept, {"layer_errors": layer_errors}


def _try(converter: Converter, kept: Sequence[str], gate: Judge) -> Lowered:
    folder, key, conversion = converter.converted(kept)
    return Lowered(folder / MODEL_FILE, key, gate.run(folder / MODEL_FILE, key), conversion)


def _counts(layers: int) -> list[int]:
    """How many layers to keep at each try: few steps, small ones first."""
    counts, count = [], 1
    while count <= layers * LARGEST_KEPT_SHARE:
        counts.append(count)
        count += max(1, count // 2)
    return counts
