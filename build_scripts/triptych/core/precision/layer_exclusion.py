"""Search for the layers that a core of lower precision must leave unconverted to pass the gate.

The whole fp32 graph is converted first. If the gate fails, the layers are ranked by the error that
converting each one alone causes; of more than `MAX_RANKED` layers, neighbors are ranked together.
The ranking uses calibration rows, which the gate does not use. Then the layers with the largest
errors are excluded, more at each try, until the gate passes. The numbers of conversions and of
tries have limits, so that the search ends.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from triptych.base.cache import Stage, cached_stage, code_hash, key_of, versions_of
from triptych.base.errors import Progress, counted
from triptych.base.files import scratch_folder
from triptych.base.onnx_graph import (
    MODEL_FILE,
    hashes_of_graph,
    open_session,
    read_model,
    write_model,
)
from triptych.base.tensors import TokenRow
from triptych.core.gate.differences import core_error
from triptych.core.gate.reference import reference_of
from triptych.core.gate.runs import open_core
from triptych.core.inputs import PipelineInputs
from triptych.core.precision import float16, quantize
from triptych.core.precision.calibrate import quiet_options
from triptych.core.precision.convolutions import ConvolutionQuantizer, is_convolutional
from triptych.core.precision.linear import Recipe
from triptych.core.requests import Feed, Sample, core_feed, hash_rows
from triptych.repository.records import Conversion, GateResult, plain_record, read_record
from triptych.spec.backends import Precision
from triptych.tasks.results import Expected

LIBRARIES = ("onnx", "onnxruntime", "numpy")
CODE = (
    "core/precision/*.py",
    "base/onnx_*.py",
    "core/requests.py",
    "core/gate/runs.py",
    "core/gate/differences.py",
    "tasks/results.py",
)
CONVERSION_FILE = "conversion.json"
RANKING_ROWS = 64
RANKING_ARRAYS = 8
"""Maximum number of rows of a ranking if they are images or rows of the user's own model."""
MAX_RANKED = 24
"""Maximum number of layers, or of groups of neighbors, that a ranking converts alone."""
TIMED_TOKENS = 128
TIMED_IMAGES = 4
TIMED_RUNS = 15

Write = Callable[[Sequence[str], Path], Conversion]
"""Function that writes a converted graph into a folder and leaves the named layers unconverted."""


class CoreConverter:
    """Converts one fp32 graph; all tries share one calibration.

    Attributes:
        inputs: Everything that decides a conversion, except the excluded layers.
    """

    def __init__(
        self,
        inputs: PipelineInputs,
        source: Path,
        key: str,
        precision: Precision,
        progress: Progress,
    ) -> None:
        """Create a converter for the fp32 graph at `source`; `key` is its cache key."""
        self._precision = precision
        self._progress = progress
        self._plan = inputs.plan
        self._source = source
        self._calibration = inputs.calibration
        core = self._plan.spec.core
        self._recipe = Recipe(precision, backend=core.backend, device=core.device)
        self.inputs: Mapping[str, object] = {
            "source": key,
            "precision": precision,
            "backend": core.backend,
            "calibration": hash_rows(self._calibration),
            "versions": versions_of(*LIBRARIES),
            "code": code_hash(*CODE),
        }
        self._write: Write | None = None

    def converted(self, kept: Sequence[str]) -> tuple[Stage, str, Conversion]:
        """Return the cached stage of the graph that excludes `kept`, its key and its record."""
        inputs = {**self.inputs, "kept": sorted(kept)}

        def work(target: Path) -> None:
            conversion = plain_record(self._writer()(kept, target))
            text = json.dumps(conversion, ensure_ascii=False)
            (target / CONVERSION_FILE).write_text(text, encoding="utf-8")

        stage = cached_stage("convert", inputs, work, self._progress)
        text = (stage.folder / CONVERSION_FILE).read_text(encoding="utf-8")
        conversion = read_record(Conversion, json.loads(text))
        size = sum(path.stat().st_size for path in stage.folder.glob(f"{MODEL_FILE}*")) / 1e6
        of = f", {len(kept)} of {len(conversion.layers)} layers excluded" if kept else ""
        note = " (cached)" if stage.cached else ""
        self._progress("convert", f"{self._precision}{of}, {size:.1f} MB{note}")
        return stage, key_of("convert", inputs), conversion

    def ranking(
        self,
        groups: Sequence[Sequence[str]],
        reference: Callable[[Sequence[Sample]], Sequence[Expected]],
    ) -> dict[str, float]:
        """Return the error of the core's outputs if each group alone is converted, by layer."""
        is_text = all(isinstance(row, TokenRow) for row in self._calibration[:1])
        rows = self._calibration[: RANKING_ROWS if is_text else RANKING_ARRAYS]

        def work(target: Path) -> None:
            expected = reference(rows)
            layer_errors: dict[str, float] = {}
            self._progress("layers", f"errors of {len(groups)} layers or groups, each alone ...")
            for group in counted(groups, "layers", len(groups)):
                others = [name for one in groups for name in one if name not in group]
                layer_errors |= dict.fromkeys(group, self._error(others, rows, expected))
            (target / "layer_errors.json").write_text(json.dumps(layer_errors), encoding="utf-8")

        inputs = {**self.inputs, "rows": hash_rows(rows), "groups": [*map(list, groups)]}
        folder = cached_stage("layers", inputs, work, self._progress).folder
        layer_errors: dict[str, float] = json.loads(
            (folder / "layer_errors.json").read_text(encoding="utf-8")
        )
        return layer_errors

    def times(self, file: Path) -> dict[str, float]:
        """Return the median milliseconds of a batch for three graphs, by name.

        The graphs are the fp32 core, the core with every layer converted, and `file`. They run in
        turn on this machine's CPU, with one thread.
        """
        everything = self.converted(())[0].folder / MODEL_FILE
        files = {"fp32": self._source, "nothing kept": everything, "as kept": file}
        sessions = {name: open_session(path, _one_thread()) for name, path in files.items()}
        feed = self._feed(self._typical())
        taken: dict[str, list[float]] = {name: [] for name in files}
        for _ in range(TIMED_RUNS):
            for name, session in sessions.items():
                started = time.perf_counter()
                session.run(None, feed)
                taken[name].append((time.perf_counter() - started) * 1e3)
        return {name: round(median(times), 3) for name, times in taken.items()}

    def _typical(self) -> list[Sample]:
        """Return calibration rows of `TIMED_TOKENS` tokens, or `TIMED_IMAGES` images."""
        rows: list[Sample] = []
        tokens = 0
        for row in self._calibration:
            rows.append(row)
            tokens += len(row.ids) if isinstance(row, TokenRow) else TIMED_TOKENS // TIMED_IMAGES
            if tokens >= TIMED_TOKENS:
                break
        return rows

    def _error(
        self, kept: Sequence[str], rows: Sequence[Sample], expected: Sequence[Expected]
    ) -> float:
        with scratch_folder("triptych-layers-") as scratch:
            self._writer()(kept, scratch)
            run = open_core(scratch / MODEL_FILE, self._plan, self._precision)
            return core_error(run, rows, expected, self._plan.core)

    def _writer(self) -> Write:
        if self._write is None:
            self._progress("convert", f"{self._precision}: {len(self._calibration)} rows ...")
            # Feeds have one row each, because padding would distort the calibration.
            feeds = [self._feed([row]) for row in self._calibration]
            self._write = _writer(self._source, self._recipe, feeds)
        return self._write

    def _feed(self, rows: Sequence[Sample]) -> Feed:
        plan = self._plan
        pad = plan.info.pad_token_id
        return core_feed(rows, plan.core_inputs, pad_token_id=pad)


def _one_thread() -> object:
    options = quiet_options()
    options.intra_op_num_threads = 1
    return options


def _writer(source: Path, recipe: Recipe, feeds: Sequence[Mapping[str, Any]]) -> Write:
    if recipe.precision in ("int8", "int8_dynamic"):
        model = read_model(source)
        quantizer: quantize.Quantizer | ConvolutionQuantizer
        on_cpu = recipe.backend != "tensorrt" and recipe.device == "cpu"
        if recipe.precision == "int8" and on_cpu and is_convolutional(model.graph):
            quantizer = ConvolutionQuantizer(source, recipe, feeds)
        else:
            quantizer = quantize.Quantizer(model, recipe, feeds)

        def write(kept: Sequence[str], target: Path) -> Conversion:
            graph, conversion = quantizer.converted(kept)
            write_model(graph, target)
            return conversion

        return write
    convert = quantize.convert_fp8 if recipe.precision == "fp8" else float16.convert
    return lambda kept, target: convert(source, target, replace(recipe, kept=tuple(kept)), feeds)


CHOICE_FILE = "choice.json"
MAX_KEPT_SHARE = 0.5
"""Maximum share of layers that may stay unconverted."""


class GateRunner(Protocol):
    """Accuracy gate of one precision; `Gate` implements it."""

    precision: Precision
    judged_by: str

    def run(self, artifact: Path, files: Mapping[str, str]) -> GateResult:
        """Return the gate's result for an artifact; `files` are hashes of what it is made of."""


@dataclass(frozen=True)
class ConvertedCore:
    """Core of lower precision with the results of its conversion and of its gate.

    `key` is the hash of everything that decided the graph; `files` are the SHA-256 hashes of the
    graph's files, by name.
    """

    file: Path
    key: str
    gate: GateResult
    conversion: Conversion
    files: Mapping[str, str]


@dataclass(frozen=True)
class LayerSelection:
    """Layers to exclude, and the measurements that selected them; see `Conversion`."""

    kept: tuple[str, ...] = ()
    layer_errors: Mapping[str, float] = field(default_factory=dict)
    batch_ms: Mapping[str, float] = field(default_factory=dict)

    def with_search_results(self, lowered: ConvertedCore) -> ConvertedCore:
        """Return the core with the search's measurements in the record of its conversion."""
        conversion = replace(
            lowered.conversion, layer_errors=self.layer_errors, batch_ms=self.batch_ms
        )
        return replace(lowered, conversion=conversion)


def convert_with_exclusions(
    inputs: PipelineInputs, source: Path, key: str, gate: GateRunner, progress: Progress
) -> ConvertedCore:
    """Convert the fp32 core, excluding as few layers as the gate allows.

    Args:
        source: Graph of the fp32 core.
        key: Hash of everything that decided `source`.
        gate: Gate of the target precision, which is not fp32.

    Returns:
        The first core that passes; else the last core that was tried, with its failures.

    Raises:
        UserError: The graph cannot be converted.
    """
    converter = CoreConverter(inputs, source, key, gate.precision, progress)
    searched: list[ConvertedCore] = []

    def work(target: Path) -> None:
        lowered, choice = _search(inputs, converter, gate, progress)
        searched.append(choice.with_search_results(lowered))
        if not lowered.gate.passed:
            raise _NothingPasses
        text = json.dumps(plain_record(choice), ensure_ascii=False)
        (target / CHOICE_FILE).write_text(text, encoding="utf-8")

    try:
        search = code_hash("core/precision/layer_exclusion.py")
        stage = {**converter.inputs, "judged_by": gate.judged_by, "search": search}
        folder = cached_stage("kept", stage, work, progress).folder
    except _NothingPasses:
        return searched[0]
    if searched:
        return searched[0]
    text = (folder / CHOICE_FILE).read_text(encoding="utf-8")
    choice = read_record(LayerSelection, json.loads(text))
    return choice.with_search_results(_try(converter, choice.kept, gate))


class _NothingPasses(Exception):
    """Raised when no core passed, so that the cache stores no result."""


def _search(
    inputs: PipelineInputs, converter: CoreConverter, gate: GateRunner, progress: Progress
) -> tuple[ConvertedCore, LayerSelection]:
    """Return the last core that was tried, and its excluded layers."""
    choice = LayerSelection()
    lowered = _try(converter, choice.kept, gate)
    if lowered.gate.passed:
        return lowered, choice
    groups = _neighbors(lowered.conversion.layers)
    errors = converter.ranking(groups, lambda rows: reference_of(inputs, rows, progress))
    worst_first = sorted(groups, key=lambda group: -errors[group[0]])
    for count in _counts(len(worst_first)):
        choice = LayerSelection(tuple(chain.from_iterable(worst_first[:count])), errors)
        lowered = _try(converter, choice.kept, gate)
        if lowered.gate.passed:
            return lowered, replace(choice, batch_ms=converter.times(lowered.file))
    return lowered, replace(choice, layer_errors=errors)


def _try(converter: CoreConverter, kept: Sequence[str], gate: GateRunner) -> ConvertedCore:
    stage, key, conversion = converter.converted(kept)
    file, files = stage.folder / MODEL_FILE, hashes_of_graph(stage.files)
    return ConvertedCore(file, key, gate.run(file, files), conversion, files)


def _neighbors(layers: Sequence[str]) -> list[Sequence[str]]:
    """Return the layers in at most `MAX_RANKED` groups of neighbors; single layers if few."""
    size = -(-len(layers) // MAX_RANKED) or 1
    return [layers[start : start + size] for start in range(0, len(layers), size)]


def _counts(groups: int) -> list[int]:
    """Return the number of groups to exclude at each try: few steps, small ones first."""
    counts, count = [], 1
    while count <= groups * MAX_KEPT_SHARE:
        counts.append(count)
        count += max(1, count // 2)
    return counts
