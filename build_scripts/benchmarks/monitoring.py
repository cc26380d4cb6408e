"""Measure what `monitor` detects: faults and the rows until the alarm, false alarms, drift.

A small classifier, MiniLM's embeddings and first layer with a random head, is built once for each
fault. The fault is put into its repository, and a real server samples every row. ``--drift`` sends
other traffic, puts it into the pipeline's traffic, and measures both builds.

Usage: ``python build_scripts/benchmarks/monitoring.py [--drift] [--rows 400] [--looks 200]``.
"""

from __future__ import annotations

import argparse
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cost import measure_cost, server_core_ms
from benchmarks.harness import Series, Turn, finish, make_parser, quiet, run_rounds, say, tabulate
from benchmarks.model import CACHE, PIPELINE, model_folder, traffic_texts
from benchmarks.results import Table
from benchmarks.test_models import write_spec
from triptych.base.errors import UserError
from triptych.building.build import build
from triptych.building.compiled import CompiledStages
from triptych.building.stages import BuildOptions
from triptych.client import Client
from triptych.core.inputs import PipelineInputs, read_inputs
from triptych.operate.monitor.results import MonitorRun
from triptych.operate.monitor.run import run_monitor
from triptych.operate.monitor.sample import TrafficSample, read_sample
from triptych.operate.monitor.scores import SequentialEvidence
from triptych.operate.monitor.traffic import take_rows
from triptych.runtime.sampling import FOLDER_VARIABLE, list_files
from triptych.serving.server import Server
from triptych.spec.spec import load_spec
from triptych.spec.traffic import TRAFFIC_FILE

_FOLDER = CACHE / "monitoring"
_REPOSITORY, _SAMPLES = _FOLDER / "repository", _FOLDER / "samples"
_LABELS = ("billing", "delivery", "returns", "technical", "account")
_TRAFFIC_ROWS = 150
_RUN_ROWS = 10
"""Number of rows of each run of the monitoring that looks for false alarms."""
_DRIFT_ROWS = 400
_DRIFTING = "drifting"
_CYRILLIC = str.maketrans("abcdefghiklmnoprstuvz", "абцдефгхиклмнопрстувз")
_HOOKS = "def before(rows):\n    return rows\n"
_DROP_LAST_WORD = (
    "def before(rows):\n"
    "    return [{**row, 'text': row['text'].rpartition(' ')[0] or row['text']} for row in rows]\n"
)


def main() -> int:
    """Measure the faults and false alarms, or with ``--drift`` a build for other traffic."""
    title = "Faults that monitoring detects"
    parser = make_parser(__doc__, "monitoring", title, rounds=7, seconds=3.0)
    parser.add_argument("--rows", type=int, default=400, help="sampled rows for each fault")
    parser.add_argument("--looks", type=int, default=200, help="runs on a correct build")
    parser.add_argument("--drift", action="store_true", help="send other traffic, build with it")
    parser.add_argument("--fp32", action="store_true", help="leave out int8, which takes longest")
    if parser.parse_known_args()[0].drift:
        title = "Drift of traffic"
        parser.set_defaults(output=CACHE / "drift.json", name="drift", title=title)
    options = parser.parse_args()
    shutil.rmtree(_FOLDER, ignore_errors=True)
    _write_model(_FOLDER / "model")
    if options.drift:
        tables, notes = _measure_drift(options)
    else:
        precisions = ("fp32",) if options.fp32 else ("fp32", "int8")
        tables, notes = _measure_faults(options.rows, options.looks, precisions)
    finish(options, tables, [vars(table) for table in tables], notes)
    return 0


def _scale(name: str, factor: float, is_wanted: Callable[[str, Any], bool]) -> None:
    """Multiply initializers of the core's graph."""
    import onnx
    from onnx import numpy_helper

    file = _REPOSITORY / f"{name}_core/1/model.onnx"
    graph = onnx.load(file)
    changed = 0
    for tensor in graph.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.dtype.kind == "f" and is_wanted(tensor.name, values):
            scaled = (values * factor).astype(values.dtype)
            tensor.CopyFrom(numpy_helper.from_array(scaled, tensor.name))
            changed += 1
    if not changed:
        raise SystemExit(f"{file} has no initializer to scale.")
    file.unlink()  # several builds may share the file
    onnx.save(graph, file)


def _replace(file: str, *changes: tuple[str, str]) -> None:
    path = _REPOSITORY / file
    text = path.read_text(encoding="utf-8")
    for old, new in changes:
        if old not in text:
            raise SystemExit(f"{path} does not contain {old!r}.")
        text = text.replace(old, new)
    path.unlink()
    path.write_text(text, encoding="utf-8")


_FAULTS: dict[str, tuple[str, str, Callable[[str], None] | None]] = {
    "weights": (
        "weights x 1.03",
        "fp32",
        lambda name: _scale(name, 1.03, lambda _, values: bool(values.ndim == 2)),
    ),
    "tokenizer": (
        "tokenizer of another revision (cased)",
        "fp32",
        lambda name: _replace(
            f"{name}_preprocess/1/tokenizer.json", ('"lowercase":true', '"lowercase":false')
        ),
    ),
    "labels": (
        "stale label map: two swapped",
        "fp32",
        lambda name: _replace(
            f"{name}_postprocess/1/settings.json",
            *(("billing", "???"), ("delivery", "billing"), ("???", "delivery")),
        ),
    ),
    "hook": (
        "`before` drops the last word",
        "fp32",
        lambda name: _replace(f"{name}_preprocess/1/hooks.py", (_HOOKS, _DROP_LAST_WORD)),
    ),
    "calibration_int8": (
        "int8, activation scales x 0.25",  # as from other rows: larger activations are clipped
        "int8",
        lambda name: _scale(
            name, 0.25, lambda tensor, values: "scale" in tensor and values.ndim == 0
        ),
    ),
    "right": ("none, fp32", "fp32", None),
    "right_int8": ("none, int8", "int8", None),
}
"""Title, precision and function of each fault by the name of its pipeline."""


def _measure_faults(
    rows: int, looks: int, precisions: Sequence[str]
) -> tuple[list[Table], list[str]]:
    inputs, notes = {}, []
    for name, (title, precision, break_build) in _FAULTS.items():
        if precision not in precisions:
            continue
        try:
            inputs[name] = _build(name, precision)
        except UserError as error:
            notes.append(f"{title} was left out: {error}")
            continue
        if break_build is not None:
            break_build(name)
    texts, rng = traffic_texts()[:_TRAFFIC_ROWS], random.Random(18)
    correct: dict[str, TrafficSample] = {}
    cells = []
    with _serve(_REPOSITORY) as url:
        for name, one in inputs.items():
            is_correct = _FAULTS[name][2] is None
            count = _RUN_ROWS * looks if is_correct else rows
            sample = _send(url, name, [rng.choice(texts) for _ in range(count)])
            if is_correct:
                correct[name] = sample
            cells.append(_make_row(_FAULTS[name][0], _monitor(one, sample)))
            say(" | ".join(cells[-1]))
    for name, sample in correct.items():
        alarms = 0
        evidence: Mapping[str, SequentialEvidence] = {}
        for start in range(0, _RUN_ROWS * looks, _RUN_ROWS):
            part = replace(sample, rows=sample.rows[start : start + _RUN_ROWS])
            found = _monitor(inputs[name], part, evidence)
            evidence, alarms = found.evidence, alarms + (not found.passed)
        notes.append(f"{_FAULTS[name][0]}: {alarms} of {looks} runs of {_RUN_ROWS} rows alarmed")
    head = ("fault", "rows", "row of the alarm", "tests", "named as")
    return [Table(f"{_TRAFFIC_ROWS} rows of traffic", head, cells)], notes


def _make_row(fault: str, run: MonitorRun) -> tuple[str, ...]:
    found = sorted((test.alarm_row, test.name) for test in run.tests if test.alarm_row is not None)
    tests = ", ".join(f"{name} at {row}" for row, name in found)
    known = {test.name for test in run.tests}
    named = [one for one in (*run.alarms, *run.drifts) if one.partition(":")[0] not in known]
    first = str(found[0][0]) if found else "never"
    return fault, str(run.rows), first, tests, "; ".join(named)


def _measure_drift(options: argparse.Namespace) -> tuple[list[Table], list[str]]:
    """Send three other kinds of traffic; build with the long texts and measure that build."""
    inputs = _build(_DRIFTING, "fp32", layout="bucketed")
    texts, rng = traffic_texts()[:_TRAFFIC_ROWS], random.Random(5)
    long = [" ".join(rng.choices(texts, k=5)) for _ in range(_DRIFT_ROWS)]
    other = [rng.choice(texts).lower().translate(_CYRILLIC) for _ in range(_DRIFT_ROWS)]
    with _serve(_REPOSITORY) as url:
        with Client(_DRIFTING, url) as client:
            labels = [result[0].label for result in client.classify(texts, top_k=1)]
        label = max(set(labels), key=labels.count)
        alike = [text for text, each in zip(texts, labels, strict=True) if each == label]
        usual = _send(url, _DRIFTING, [rng.choice(texts) for _ in range(_DRIFT_ROWS)])
        known = set(usual.known)
        rows = [("as built for", "; ".join(_monitor(inputs, usual).drifts) or "none")]
        for kind, sent in (
            ("another language (Cyrillic)", other),
            (f"one label ({label})", [rng.choice(alike) for _ in range(_DRIFT_ROWS)]),
            ("five times longer", long),
        ):
            sample = _send(url, _DRIFTING, sent, known)
            known |= set(sample.known)
            rows.append((kind, "; ".join(_monitor(inputs, sample).drifts) or "none"))
    take_rows(inputs, sample, replace=True, max_rows=_DRIFT_ROWS)
    again = _FOLDER / "again"
    again_options = BuildOptions(repository=again, progress=quiet, engine_dry_run=False)
    build(CompiledStages(), read_inputs(load_spec(_FOLDER / _DRIFTING), quiet), again_options)
    with Server(_REPOSITORY) as old, Server(again) as new:

        def make_turn(name: str, server: Server) -> Turn:
            load = {"clients": 8, "seconds": options.seconds}
            measure = partial(measure_cost, server.grpc_url, server.pid, _DRIFTING, long, **load)
            return Turn(name, lambda: [("", measure())])

        turns = [make_turn("built before", old), make_turn("built with them", new)]
        found = run_rounds([turns], options.rounds, max_minutes=options.max_minutes)
    before, after = ([server_core_ms(each) for each in one.rounds] for one in found)
    ratios = [f"{b / a:.2f}" for a, b in zip(before, after, strict=True)]
    notes = [f"core-ms after by before, round by round: {', '.join(ratios)}"]
    columns: dict[str, Callable[[Series], str]] = {
        "build": lambda one: one.system,
        "core-ms per text": lambda one: f"{median(map(server_core_ms, one.rounds)):.2f}",
        "texts/s": lambda one: one.text("rate_per_s"),
    }
    traffic = Table(f"{_DRIFT_ROWS} rows of each kind", ("traffic", "drifts"), rows)
    return [traffic, tabulate("Texts five times longer", found, columns)], notes


def _write_model(folder: Path) -> None:
    import torch
    from transformers import AutoTokenizer, BertForSequenceClassification

    torch.manual_seed(18)
    labels = dict(enumerate(_LABELS))
    model = BertForSequenceClassification.from_pretrained(
        model_folder(), num_hidden_layers=1, num_labels=len(labels), id2label=labels
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    with torch.inference_mode():  # Spread the logits, so that no label is first for all texts.
        logits = model(**tokenizer(traffic_texts()[:60], padding=True, return_tensors="pt")).logits
        scale = 0.6 / logits.std(0)
        model.classifier.weight.mul_(scale[:, None])
        model.classifier.bias.sub_(logits.mean(0)).mul_(scale)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _build(name: str, precision: str, *, layout: str = "packed") -> PipelineInputs:
    spec = {
        # A random head has no margins that int8 could keep, so the vectors are compared.
        "task": "text-embedding" if precision == "int8" else "text-classification",
        "model": {"source": str(_FOLDER / "model")},
        "core": {"precision": precision, "layout": layout},
        "serving": {"sample": {"rate": 1.0, "window_s": 0.2, "retention_hours": 1}},
    }
    lines = (PIPELINE / TRAFFIC_FILE).read_text(encoding="utf-8").splitlines()
    folder = write_spec(_FOLDER / name, spec, lines[:_TRAFFIC_ROWS])
    (folder / "hooks.py").write_text(_HOOKS, encoding="utf-8")
    say(f"building {name}")
    inputs = read_inputs(load_spec(folder), quiet)
    options = BuildOptions(repository=_REPOSITORY, progress=quiet, engine_dry_run=False)
    build(CompiledStages(), inputs, options)
    return inputs.with_built_layout(_REPOSITORY)


@contextmanager
def _serve(repository: Path) -> Iterator[str]:
    with Server(repository, environment={FOLDER_VARIABLE: str(_SAMPLES)}) as server:
        yield server.grpc_url


def _send(
    url: str, name: str, texts: Sequence[str], known: set[str] | None = None
) -> TrafficSample:
    """Send the texts and return their sample, once all rows are written."""
    known = known or set()

    def count_rows() -> int:
        files = list_files(_SAMPLES / name, name)
        return sum(file.rows for file in files if file.path.name not in known)

    before = count_rows()
    with Client(name, url) as client:
        for start in range(0, len(texts), 8):
            part = texts[start : start + 8]
            _ = client.embed(part) if "int8" in name else client.classify(part)
    deadline = time.monotonic() + 60
    while count_rows() < before + len(texts):
        if time.monotonic() > deadline:
            raise SystemExit(f"{name}: only {count_rows()} of {len(texts)} rows were sampled.")
        time.sleep(0.1)
    return read_sample(_SAMPLES, name, lambda *_: None, keep_hours=1, known=frozenset(known))


def _monitor(
    inputs: PipelineInputs,
    sample: TrafficSample,
    evidence: Mapping[str, SequentialEvidence] | None = None,
) -> MonitorRun:
    return run_monitor(inputs, _REPOSITORY, sample, quiet, evidence=evidence or {}, max_rows=10**6)


if __name__ == "__main__":
    raise SystemExit(main())
