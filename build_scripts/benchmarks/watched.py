"""What `watch` finds: faults and the rows until each is found; many looks at what is right; drift.

A small classifier, MiniLM's embeddings and first layer under a random head, is built once for each
fault, broken in the repository as the fault would, and served by a real server that samples every
row. ``--drift`` sends other traffic, follows the advice and measures both builds under it.

Usage: ``python build_scripts/benchmarks/watched.py [--drift] [--rows 400] [--looks 200]``.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import path_cost
from benchmarks.model import CACHE, PIPELINE, model_folder
from triptych.base.errors import UserError
from triptych.building.build import build
from triptych.client import Client
from triptych.core.inputs import PipelineInputs, read_inputs
from triptych.operate.monitor.apply import take_rows
from triptych.operate.monitor.results import MonitorRun
from triptych.operate.monitor.run import run_monitor
from triptych.operate.monitor.sample import TrafficSample, read_sample
from triptych.operate.monitor.sequential import SequentialEvidence
from triptych.operate.tune.drift import format_drift
from triptych.runtime.sample_files import FOLDER_VARIABLE, list_files
from triptych.serving.server import Server
from triptych.spec.spec import load_spec
from triptych.spec.traffic import TRAFFIC_FILE, read_traffic

_FOLDER = CACHE / "watched"
_REPOSITORY, _SAMPLES = _FOLDER / "repository", _FOLDER / "samples"
_LABELS = ("billing", "delivery", "returns", "technical", "account")
_TRAFFIC_ROWS = 150
_ROUNDS = 7
_CYRILLIC = str.maketrans("abcdefghiklmnoprstuvz", "абцдефгхиклмнопрстувз")
_HOOKS = "def before(rows):\n    return rows\n"
_DROPS = (
    "def before(rows):\n"
    "    return [{**row, 'text': row['text'].rpartition(' ')[0] or row['text']} for row in rows]\n"
)


def main() -> int:
    """Print the table of faults and the looks, or with ``--drift`` what the advice came to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=400, help="sampled of each fault")
    parser.add_argument("--looks", type=int, default=200, help="at what is right, of ten rows each")
    parser.add_argument("--drift", action="store_true", help="other traffic, and the advice")
    parser.add_argument("--fp32", action="store_true", help="leave int8 out, which takes longest")
    options = parser.parse_args()
    began = time.process_time()
    shutil.rmtree(_FOLDER, ignore_errors=True)
    _write_model(_FOLDER / "model")
    if options.drift:
        _drift()
    else:
        _faults(options.rows, options.looks, ("fp32",) if options.fp32 else ("fp32", "int8"))
    _say(f"{time.process_time() - began:.0f} s of processor time, servers not counted")
    return 0


# Faults


def _scale(file: Path, factor: float, wanted: Callable[[str, Any], bool]) -> None:
    """Multiply initializers of an ONNX graph."""
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(file)
    changed = 0
    for tensor in graph.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.dtype.kind == "f" and wanted(tensor.name, values):
            scaled = (values * factor).astype(values.dtype)
            tensor.CopyFrom(numpy_helper.from_array(scaled, tensor.name))
            changed += 1
    if not changed:
        raise SystemExit(f"{file}: nothing to scale")
    file.unlink()  # it may be one file with others
    onnx.save(graph, file)


def _replace(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    if old not in text:
        raise SystemExit(f"{file}: no {old!r}")
    file.unlink()
    file.write_text(text.replace(old, new), encoding="utf-8")


def _weights(name: str) -> None:
    _scale(_REPOSITORY / f"{name}_core/1/model.onnx", 1.03, lambda _, values: values.ndim == 2)


def _activations(name: str) -> None:
    """As a calibration on other rows would leave them: what is above a quarter is cut."""
    _scale(
        _REPOSITORY / f"{name}_core/1/model.onnx",
        0.25,
        lambda tensor, values: "scale" in tensor and values.ndim == 0,
    )


def _tokenizer(name: str) -> None:
    file = _REPOSITORY / f"{name}_preprocess/1/tokenizer.json"
    _replace(file, '"lowercase":true', '"lowercase":false')


def _labels(name: str) -> None:
    file = _REPOSITORY / f"{name}_postprocess/config.pbtxt"
    _replace(file, "billing", "???")
    _replace(file, "delivery", "billing")
    _replace(file, "???", "delivery")


def _hook(name: str) -> None:
    _replace(_REPOSITORY / f"{name}_preprocess/1/hooks.py", _HOOKS, _DROPS)


_FAULTS: dict[str, tuple[str, str, Callable[[str], None] | None]] = {
    "weights": ("weights x 1.03", "fp32", _weights),
    "tokenizer": ("tokenizer of another revision: cased", "fp32", _tokenizer),
    "labels": ("stale label map: two swapped", "fp32", _labels),
    "hook": ("`before` drops the last word", "fp32", _hook),
    "calibration_int8": ("int8, activation scales x 0.25", "int8", _activations),
    "right": ("none, fp32", "fp32", None),
    "right_int8": ("none, int8", "int8", None),
}


def _faults(rows: int, looks: int, precisions: Sequence[str]) -> None:
    inputs = {}
    for name, (_, precision, spoil) in _FAULTS.items():
        if precision not in precisions:
            continue
        try:
            inputs[name] = _build(name, precision)
        except UserError as error:
            _say(f"{name} is left out: {error}")
            continue
        if spoil is not None:
            spoil(name)
    texts, chance = _texts(), random.Random(18)
    print("| fault | rows | row of the alarm | tests that found it | named as |")
    print("| --- | --- | --- | --- | --- |")
    good: dict[str, TrafficSample] = {}
    with _served(_REPOSITORY) as url:
        for name, one in inputs.items():
            many = 10 * looks if _FAULTS[name][2] is None else rows
            sample = _ask(url, name, [chance.choice(texts) for _ in range(many)])
            if _FAULTS[name][2] is None:
                good[name] = sample
            _row(_FAULTS[name][0], _look(one, sample))
    for name, sample in good.items():
        called = 0
        evidence: Mapping[str, SequentialEvidence] = {}
        for start in range(0, 10 * looks, 10):
            part = replace(sample, rows=sample.rows[start : start + 10])
            found = _look(inputs[name], part, evidence)
            evidence, called = found.evidence, called + (not found.passed)
        print(f"{_FAULTS[name][0]}: {called} of {looks} looks at ten rows each called for anybody")


def _row(fault: str, look: MonitorRun) -> None:
    found = sorted((test.alarm_row, test.name) for test in look.tests if test.alarm_row is not None)
    tests = ", ".join(f"{name} at {row}" for row, name in found)
    known = {test.name for test in look.tests}
    named = [one for one in (*look.alarms, *look.drifts) if one.partition(":")[0] not in known]
    first = str(found[0][0]) if found else "never"
    print(f"| {fault} | {look.rows} | {first} | {tests} | {'; '.join(named)} |", flush=True)


# Drift


def _drift() -> None:
    """Three other kinds of traffic; then the advice for the longest, followed and measured."""
    inputs, texts, chance = (
        _build("drifting", "fp32", layout="bucketed"),
        _texts(),
        random.Random(5),
    )
    long = [" ".join(chance.choices(texts, k=5)) for _ in range(400)]
    other = [chance.choice(texts).lower().translate(_CYRILLIC) for _ in range(400)]
    with _served(_REPOSITORY) as url:
        with Client("drifting", url) as client:
            answers = [answer[0].label for answer in client.classify(texts, top_k=1)]
        one = max(set(answers), key=answers.count)
        alike = [text for text, label in zip(texts, answers, strict=True) if label == one]
        usual = _ask(url, "drifting", [chance.choice(texts) for _ in range(400)])
        known = set(usual.known)
        print("| traffic | drifts |")
        print("| --- | --- |")
        print(f"| as built for | {'; '.join(_look(inputs, usual).drifts) or 'none'} |")
        for kind, sent in (
            ("another language (Cyrillic)", other),
            (f"one label ({one})", [chance.choice(alike) for _ in range(400)]),
            ("five times longer", long),
        ):
            sample = _ask(url, "drifting", sent, known)
            known |= set(sample.known)
            print(f"| {kind} | {'; '.join(_look(inputs, sample).drifts) or 'none'} |", flush=True)
    change = take_rows(inputs, sample, replace=True, max_rows=400)
    if change.drift is not None:
        print("advice:", " ".join(line.strip() for line, _ in format_drift(change.drift)))
    again = _FOLDER / "again"
    build(read_inputs(load_spec(_FOLDER / "drifting"), _quiet), again, _quiet, engine_dry_run=False)
    costs: dict[str, list[tuple[float, float]]] = {"before": [], "after": []}
    with Server(_REPOSITORY) as old, Server(again) as new:
        for number in range(_ROUNDS):
            pairs = [("before", old), ("after", new)]
            for name, server in pairs[:: 1 if number % 2 else -1]:
                cost = path_cost.measure(
                    server.grpc_url,
                    server.pid,
                    "drifting",
                    long,
                    clients=8,
                    texts_a_request=1,
                    seconds=3.0,
                )
                core_ms = sum(cost.core_ms.values()) - cost.core_ms[path_cost.CLIENT]
                costs[name].append((core_ms, cost.texts_per_s))
    for name, found in costs.items():
        core_ms, rate = (median(values) for values in zip(*found, strict=True))
        print(f"{name} the advice: {core_ms:.2f} core-ms a text, {rate:.0f} texts/s")
    ratios = [after[0] / before[0] for before, after in zip(*costs.values(), strict=True)]
    print("core-ms after by before, round by round:", ", ".join(f"{one:.2f}" for one in ratios))


# Shared


def _write_model(folder: Path) -> None:
    import torch
    from transformers import AutoTokenizer, BertForSequenceClassification

    torch.manual_seed(18)
    labels = dict(enumerate(_LABELS))
    model = BertForSequenceClassification.from_pretrained(
        model_folder(), num_hidden_layers=1, num_labels=len(labels), id2label=labels
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    with torch.inference_mode():  # spread, so that no label wins on all texts
        logits = model(**tokenizer(_texts()[:60], padding=True, return_tensors="pt")).logits
        scale = 0.6 / logits.std(0)
        model.classifier.weight.mul_(scale[:, None])
        model.classifier.bias.sub_(logits.mean(0)).mul_(scale)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _build(name: str, precision: str, *, layout: str = "packed") -> PipelineInputs:
    folder = _FOLDER / name
    folder.mkdir()
    spec = {
        # A head of chance has no margins that int8 could keep: there the vectors are compared.
        "task": "text-embedding" if precision == "int8" else "text-classification",
        "model": {"source": str(_FOLDER / "model")},
        "core": {"precision": precision, "layout": layout},
        "serving": {"sample": {"rate": 1.0, "window_s": 0.2, "keep_hours": 1}},
    }
    (folder / "pipeline.yaml").write_text(json.dumps(spec), encoding="utf-8")  # JSON is YAML
    (folder / "hooks.py").write_text(_HOOKS, encoding="utf-8")
    lines = (PIPELINE / TRAFFIC_FILE).read_text(encoding="utf-8").splitlines()[:_TRAFFIC_ROWS]
    (folder / TRAFFIC_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    _say(f"building {name}")
    inputs = read_inputs(load_spec(folder), _quiet)
    build(inputs, _REPOSITORY, _quiet, engine_dry_run=False)
    return inputs.as_built(_REPOSITORY)


@contextmanager
def _served(repository: Path) -> Iterator[str]:
    with Server(repository, environment={FOLDER_VARIABLE: str(_SAMPLES)}) as server:
        yield server.grpc_url


def _ask(
    url: str, name: str, texts: Sequence[str], known: set[str] | frozenset[str] = frozenset()
) -> TrafficSample:
    """Send the texts; what was sampled of them."""

    def rows() -> int:
        files = list_files(_SAMPLES / name, name)
        return sum(file.rows for file in files if file.path.name not in known)

    before = rows()
    with Client(name, url) as client:
        for start in range(0, len(texts), 8):
            part = texts[start : start + 8]
            _ = client.embed(part) if "int8" in name else client.classify(part)
    deadline = time.monotonic() + 60
    while rows() < before + len(texts):
        if time.monotonic() > deadline:
            raise SystemExit(f"{name}: {rows()} of {len(texts)} rows were sampled")
        time.sleep(0.1)
    return read_sample(_SAMPLES, name, keep_hours=1, known=frozenset(known))


def _look(
    inputs: PipelineInputs,
    sample: TrafficSample,
    evidence: Mapping[str, SequentialEvidence] | None = None,
) -> MonitorRun:
    return run_monitor(inputs, _REPOSITORY, sample, _quiet, evidence=evidence or {}, max_rows=10**6)


def _texts() -> list[str]:
    return [row.inputs["text"] for row in read_traffic(PIPELINE, ("text",))][:_TRAFFIC_ROWS]


def _quiet(_stage: str, _line: str) -> None:
    """No progress."""


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
