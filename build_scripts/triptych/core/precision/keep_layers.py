"""A core of lower precision that still passes the gate: which layers must stay as they are.

The whole graph is converted; where the gate fails, the layers with the largest errors (found one
at a time, on calibration rows, which the gate never sees) stay in higher precision, more of them
at each try, until the gate passes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from triptych.base.cache import cached_stage, code_hash
from triptych.base.errors import Progress
from triptych.base.onnx_files import MODEL_FILE, hashes_of_graph
from triptych.core.gate.reference_rows import reference_of
from triptych.core.inputs import PipelineInputs
from triptych.core.precision.converter import Converter
from triptych.repository.records import Conversion, GateResult, plain_record, read_record
from triptych.spec.precisions import Precision

CHOICE_FILE = "choice.json"
LARGEST_KEPT_SHARE = 0.5
"""A core with more of its layers kept is hardly of the precision any more."""


class Judge(Protocol):
    """The gate of a precision, as `Gate` is."""

    precision: Precision
    judged_by: str

    def run(self, artifact: Path, files: Mapping[str, str]) -> GateResult:
        """The gate's result for an artifact; `files` are hashes of what it is made of."""


@dataclass(frozen=True)
class Lowered:
    """A core of lower precision: the graph, the hash of all that decided it, and both results.

    `files` are hashes of the graph's files, by name.
    """

    file: Path
    key: str
    gate: GateResult
    conversion: Conversion
    files: Mapping[str, str]


@dataclass(frozen=True)
class Choice:
    """Which layers to keep, and what finding them showed; see `Conversion`."""

    kept: tuple[str, ...] = ()
    layer_errors: Mapping[str, float] = field(default_factory=dict)
    batch_ms: Mapping[str, float] = field(default_factory=dict)

    def on_record(self, lowered: Lowered) -> Lowered:
        """The core with what the search showed in the record of its conversion."""
        conversion = replace(
            lowered.conversion, layer_errors=self.layer_errors, batch_ms=self.batch_ms
        )
        return replace(lowered, conversion=conversion)


def lower(
    inputs: PipelineInputs, source: Path, key: str, gate: Judge, progress: Progress
) -> Lowered:
    """Convert the fp32 core, keeping as few layers as the gate allows.

    Args:
        inputs: of the pipeline.
        source: its fp32 core.
        key: hash of all that decided `source`.
        gate: of the precision wanted, not fp32.
        progress: told what becomes of each try.

    Returns:
        The first that passes, else the last that was tried, with its failures.

    Raises:
        UserError: the graph cannot be converted.
    """
    converter = Converter(inputs, source, key, gate.precision, progress)
    searched: list[Lowered] = []

    def work(target: Path) -> None:
        lowered, choice = _search(inputs, converter, gate, progress)
        searched.append(choice.on_record(lowered))
        if not lowered.gate.passed:
            raise _NothingPasses
        text = json.dumps(plain_record(choice), ensure_ascii=False)
        (target / CHOICE_FILE).write_text(text, encoding="utf-8")

    try:
        search = code_hash("core/precision/keep_layers.py")
        stage = {**converter.inputs, "judged_by": gate.judged_by, "search": search}
        folder = cached_stage("kept", stage, work, progress).folder
    except _NothingPasses:
        return searched[0]
    if searched:
        return searched[0]
    text = (folder / CHOICE_FILE).read_text(encoding="utf-8")
    choice = read_record(Choice, json.loads(text))
    return choice.on_record(_try(converter, choice.kept, gate))


class _NothingPasses(Exception):
    """The search ended without a core that passes: nothing to remember."""


def _search(
    inputs: PipelineInputs, converter: Converter, gate: Judge, progress: Progress
) -> tuple[Lowered, Choice]:
    """The last core tried, and the layers it was to keep."""
    choice = Choice()
    lowered = _try(converter, choice.kept, gate)
    if lowered.gate.passed:
        return lowered, choice
    errors = converter.ranking(
        lowered.conversion.layers, lambda rows: reference_of(inputs, rows, progress)
    )
    worst_first = sorted(errors, key=lambda name: -errors[name])
    for count in _counts(len(worst_first)):
        choice = Choice(tuple(worst_first[:count]), errors)
        lowered = _try(converter, choice.kept, gate)
        if lowered.gate.passed:
            return lowered, replace(choice, batch_ms=converter.times(lowered.file))
    return lowered, replace(choice, layer_errors=errors)


def _try(converter: Converter, kept: Sequence[str], gate: Judge) -> Lowered:
    stage, key, conversion = converter.converted(kept)
    file, files = stage.folder / MODEL_FILE, hashes_of_graph(stage.files)
    return Lowered(file, key, gate.run(file, files), conversion, files)


def _counts(layers: int) -> list[int]:
    """How many layers to keep at each try: few steps, small ones first."""
    counts, count = [], 1
    while count <= layers * LARGEST_KEPT_SHARE:
        counts.append(count)
        count += max(1, count // 2)
    return counts
