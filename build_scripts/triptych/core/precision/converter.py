"""One fp32 graph and what is tried on it: conversions, what each layer costs, how fast it is."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from triptych.base.cache import Stage, cached_stage, code_hash, key_of, versions_of
from triptych.base.errors import Progress
from triptych.base.files import scratch_folder
from triptych.base.onnx_files import MODEL_FILE, read_model, write_model
from triptych.base.onnx_session import open_session
from triptych.base.tensors import TokenRow
from triptych.core.feeds import Feed, Sample, core_feed
from triptych.core.inputs import PipelineInputs
from triptych.core.precision import float16, fp8, int8
from triptych.core.precision.activations import quiet_options
from triptych.core.precision.recipe import Recipe
from triptych.core.samples import Expected, hash_rows
from triptych.repository.records import Conversion, plain_record, read_record
from triptych.spec.precisions import Precision

LIBRARIES = ("onnx", "onnxruntime", "numpy")
CODE = (
    "core/precision/*.py",
    "base/onnx_*.py",
    "core/feeds.py",
    "core/gate/artifact.py",
    "core/gate/differences.py",
)
CONVERSION_FILE = "conversion.json"
RANKING_ROWS = 64
TIMED_TOKENS = 128
TIMED_IMAGES = 4
TIMED_RUNS = 15
TELL_EVERY_S = 3.0

Write = Callable[[Sequence[str], Path], Conversion]
"""Writes a converted graph into a folder, the named layers kept."""


class Converter:
    """Converts one graph; what its calibration found serves every try.

    Attributes:
        inputs: all that decides a conversion, but for the layers kept.
    """

    def __init__(
        self,
        inputs: PipelineInputs,
        source: Path,
        key: str,
        precision: Precision,
        progress: Progress,
    ) -> None:
        """Take the fp32 core `source` of a pipeline, which `key` stands for."""
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
        """The stage of the graph with `kept`, its key, and what the conversion did."""
        inputs = {**self.inputs, "kept": sorted(kept)}

        def work(target: Path) -> None:
            conversion = plain_record(self._writer()(kept, target))
            text = json.dumps(conversion, ensure_ascii=False)
            (target / CONVERSION_FILE).write_text(text, encoding="utf-8")

        stage = cached_stage("convert", inputs, work, self._progress)
        text = (stage.folder / CONVERSION_FILE).read_text(encoding="utf-8")
        conversion = read_record(Conversion, json.loads(text))
        size = sum(path.stat().st_size for path in stage.folder.glob(f"{MODEL_FILE}*")) / 1e6
        of = f", {len(kept)} of {len(conversion.layers)} layers kept" if kept else ""
        note = " (cached)" if stage.cached else ""
        self._progress("convert", f"{self._precision}{of}, {size:.1f} MB{note}")
        return stage, key_of("convert", inputs), conversion

    def ranking(
        self,
        layers: Sequence[str],
        reference: Callable[[Sequence[Sample]], Sequence[Expected]],
    ) -> dict[str, float]:
        """What the conversion of each layer alone costs: the error of the core's outputs."""
        rows = self._calibration[:RANKING_ROWS]

        def work(target: Path) -> None:
            expected = reference(rows)
            layer_errors: dict[str, float] = {}
            told = -TELL_EVERY_S
            for number, layer in enumerate(layers, start=1):
                if time.monotonic() - told > TELL_EVERY_S:
                    told = time.monotonic()
                    self._progress("layers", f"{number}/{len(layers)}: what {layer} costs alone")
                others = [name for name in layers if name != layer]
                layer_errors[layer] = self._error(others, rows, expected)
            (target / "layer_errors.json").write_text(json.dumps(layer_errors), encoding="utf-8")

        inputs = {**self.inputs, "rows": hash_rows(rows)}
        folder = cached_stage("layers", inputs, work, self._progress).folder
        layer_errors: dict[str, float] = json.loads(
            (folder / "layer_errors.json").read_text(encoding="utf-8")
        )
        return layer_errors

    def times(self, file: Path) -> dict[str, float]:
        """Milliseconds of a batch: in fp32, with every layer converted, and of `file`; medians.

        On this machine's CPU, with one thread; the three take turns.
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
        """Calibration rows that make a batch: of so many tokens, or images."""
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
        from triptych.core.gate.artifact import open_core
        from triptych.core.gate.differences import core_error

        with scratch_folder("triptych-layers-") as scratch:
            self._writer()(kept, scratch)
            run = open_core(scratch / MODEL_FILE, self._plan)
            return core_error(run, rows, expected, self._plan.core)

    def _writer(self) -> Write:
        if self._write is None:
            self._progress("convert", f"{self._precision}: {len(self._calibration)} rows ...")
            # One row each: alone, a row has no pads, which are nothing to calibrate on.
            feeds = [self._feed([row]) for row in self._calibration]
            self._write = _writer(self._source, self._recipe, feeds)
        return self._write

    def _feed(self, rows: Sequence[Sample]) -> Feed:
        plan = self._plan
        pad = plan.facts.pad_token_id
        return core_feed(rows, plan.core_inputs, pad_token_id=pad)


def _one_thread() -> Any:
    options = quiet_options()
    options.intra_op_num_threads = 1
    return options


def _writer(source: Path, recipe: Recipe, feeds: Sequence[Mapping[str, Any]]) -> Write:
    if recipe.precision in ("int8", "int8_dynamic"):
        quantiser = int8.Quantiser(read_model(source), recipe, feeds)

        def write(kept: Sequence[str], target: Path) -> Conversion:
            graph, conversion = quantiser.converted(kept)
            write_model(graph, target)
            return conversion

        return write
    converter = fp8 if recipe.precision == "fp8" else float16
    return partial(_convert, converter.convert, source, recipe, feeds)


def _convert(
    convert: Callable[..., Conversion],
    source: Path,
    recipe: Recipe,
    feeds: Sequence[Mapping[str, Any]],
    kept: Sequence[str],
    target: Path,
) -> Conversion:
    return convert(source, target, replace(recipe, kept=tuple(kept)), feeds)
