"""The core in every precision: the gate on the CPU, then accuracy and speed on a device.

Usage: ``python build_scripts/benchmarks/precisions.py --provider CUDAExecutionProvider`` on a
machine with onnxruntime-gpu; any other provider of ONNX Runtime does as well.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.model import CACHE, PIPELINE, build
from triptych.base.cache import sha256_of
from triptych.base.onnx_graph import MODEL_FILE
from triptych.core.feeds import Feed, core_feed
from triptych.core.gate.cached import Gate
from triptych.core.inputs import PipelineInputs, read_inputs
from triptych.core.precision.keep_layers import ConvertedCore, convert_with_exclusions
from triptych.repository.manifest import read_manifest
from triptych.repository.records import Conversion
from triptych.spec.fields import Precision
from triptych.spec.spec import load_spec
from triptych.spec.tasks import TASKS
from triptych.spec.tasks.accuracy import thresholds

PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "bf16", "int8", "int8_dynamic", "fp8")
BATCHES = (1, 8, 32)
ROUNDS = 3
CPU = "CPUExecutionProvider"


@dataclass(frozen=True)
class Row:
    """One precision on the device.

    Attributes:
        precision: of the core.
        kept: layers (fp16, bf16: nodes) in higher precision.
        gate: what of the gate failed on the CPU; empty where it passed.
        mean_cosine: of its vectors with those of fp32 on the CPU.
        min_cosine: the lowest.
        right: whether both meet the gate's limits, and the gate passed.
        rows_per_s: by rows a batch; medians over rounds that take turns.
        fault: why it does not run; empty where it does.
    """

    precision: str
    kept: int
    gate: tuple[str, ...]
    mean_cosine: float
    min_cosine: float
    right: bool
    rows_per_s: dict[int, float]
    fault: str


def main() -> int:
    """Build, run, compare, print; 1 where a precision fails its gate, or is wrong on the device."""
    options = _parse()
    inputs = read_inputs(load_spec(PIPELINE), lambda stage, line: None)
    plan = inputs.plan
    # Made-up rows have a limit of their own, in the gate.
    samples = [row for request in inputs.requests if not request.edge for row in request.rows]

    def feeds(size: int) -> list[Feed]:
        return [
            core_feed(
                samples[start : start + size],
                plan.core_inputs,
                pad_token_id=plan.facts.pad_token_id,
            )
            for start in range(0, len(samples), size)
        ]

    cores = {precision: _core(inputs, precision) for precision in options.precisions}
    wanted = _vectors(_session(_source(inputs)[0], CPU), feeds(BATCHES[-1]))
    sessions, faults = {}, {}
    for precision, core in cores.items():
        try:
            sessions[precision] = _session(core.file, options.provider)
            _vectors(sessions[precision], feeds(1)[:1])
        except Exception as error:  # whatever keeps it from running is a line of the table
            faults[precision] = " ".join(str(error).split())[:200]
            sessions.pop(precision, None)
    speeds = {size: _speeds(sessions, feeds(size)) for size in BATCHES}
    rows = [
        _row(core, precision, sessions, faults, wanted, feeds(BATCHES[-1]), speeds)
        for precision, core in cores.items()
    ]
    print(_table(rows))
    report = {"provider": options.provider, "rows": [asdict(row) for row in rows]}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 1 if any(row.gate or not (row.right or row.fault) for row in rows) else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--provider", default="CUDAExecutionProvider", help="of ONNX Runtime")
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS)
    parser.add_argument("--output", type=Path, default=CACHE / "precisions.json")
    options = parser.parse_args()
    import onnxruntime

    available = onnxruntime.get_available_providers()
    if options.provider not in available:
        parser.error(f"no {options.provider} here, only {', '.join(available)}")
    return options


def _source(inputs: PipelineInputs) -> tuple[Path, str]:
    """The fp32 core and its key."""
    repository = build(CACHE / "precisions")
    lock = read_manifest(repository, PIPELINE.name)
    return repository / inputs.plan.step("core") / "1" / MODEL_FILE, lock.source_key


def _core(inputs: PipelineInputs, precision: Precision) -> ConvertedCore:
    """The core with as few layers kept as its gate allows, whatever could serve it."""
    file, key = _source(inputs)
    gate = Gate(inputs, precision, _tell)
    if precision == "fp32":
        files = {file.name: sha256_of(file)}
        return ConvertedCore(file, key, gate.run(file, files), Conversion(()), files)
    return convert_with_exclusions(inputs, file, key, gate, _tell)


def _tell(stage: str, line: str) -> None:
    print(f"  {stage:8} {line}", file=sys.stderr, flush=True)


def _session(file: Path, provider: str) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    providers = list(dict.fromkeys([provider, CPU]))
    session = onnxruntime.InferenceSession(file, options, providers=providers)
    if session.get_providers()[0] != provider:
        raise RuntimeError(f"{provider} refused the session")
    return session


def _vectors(session: Any, feeds: Sequence[Feed]) -> NDArray[np.float32]:
    return np.concatenate([session.run(None, feed)[0] for feed in feeds])


def _speeds(sessions: dict[str, Any], feeds: Sequence[Feed]) -> dict[str, float]:
    """Rows a second of each session over all feeds."""
    taken: dict[str, list[float]] = {name: [] for name in sessions}
    rows = sum(len(feed["row_length"]) for feed in feeds)
    for _ in range(ROUNDS):
        for name, session in sessions.items():
            started = time.perf_counter()
            _vectors(session, feeds)
            taken[name].append(rows / (time.perf_counter() - started))
    return {name: median(rates) for name, rates in taken.items()}


def _row(
    core: ConvertedCore,
    precision: str,
    sessions: dict[str, Any],
    faults: dict[str, str],
    wanted: NDArray[np.float32],
    feeds: Sequence[Feed],
    speeds: dict[int, dict[str, float]],
) -> Row:
    kept, failures = len(core.conversion.kept), core.gate.failures
    if precision in faults:
        return Row(precision, kept, failures, 0.0, 0.0, False, {}, faults[precision])
    got = _vectors(sessions[precision], feeds)
    cosines = (got * wanted).sum(1) / np.linalg.norm(got, axis=1) / np.linalg.norm(wanted, axis=1)
    limits = thresholds(TASKS["text-embedding"], precision, {})
    mean, lowest = float(cosines.mean()), float(cosines.min())
    right = mean >= limits["mean_cosine"] and lowest >= limits["min_cosine"] and not failures
    rates = {size: round(by_name[precision], 1) for size, by_name in speeds.items()}
    return Row(precision, kept, failures, mean, lowest, right, rates, "")


def _table(rows: Sequence[Row]) -> str:
    sizes = " | ".join(f"rows/s, batch {size}" for size in BATCHES)
    lines = [
        f"| precision | kept | gate on the CPU | mean cosine | min cosine | {sizes} | right |",
        "| --- " * 9 + "|",
    ]
    for row in rows:
        rates = [str(row.rows_per_s.get(size, "-")) for size in BATCHES]
        gate = "failed" if row.gate else "passed"
        cells = [
            row.precision,
            str(row.kept),
            gate,
            f"{row.mean_cosine:.6f}",
            f"{row.min_cosine:.6f}",
            *rates,
        ]
        lines.append(f"| {' | '.join(cells)} | {row.fault or ('yes' if row.right else 'NO')} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
