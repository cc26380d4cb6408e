"""Compare the core in every precision: the gate on the CPU, accuracy and speed on a device.

Usage: ``python build_scripts/benchmarks/precisions.py --provider CUDAExecutionProvider`` on a
machine with onnxruntime-gpu; any other provider of ONNX Runtime works, too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Turn, finish, make_parser, progress, quiet, run_rounds
from benchmarks.model import CACHE, PIPELINE, build, cosines
from benchmarks.results import Table
from triptych.base.cache import sha256_of
from triptych.base.onnx_graph import MODEL_FILE
from triptych.core.gate.cached import Gate
from triptych.core.inputs import PipelineInputs, read_inputs
from triptych.core.precision.layer_exclusion import ConvertedCore, convert_with_exclusions
from triptych.core.requests import Feed, core_feed
from triptych.repository.manifest import EncoderManifest, read_manifest
from triptych.repository.records import Conversion
from triptych.spec.fields import Precision
from triptych.spec.spec import load_spec
from triptych.spec.tasks import TASKS
from triptych.spec.tasks.accuracy import thresholds

PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "bf16", "int8", "int8_dynamic", "fp8")
BATCHES = (1, 8, 32)
CPU = "CPUExecutionProvider"


@dataclass(frozen=True)
class PrecisionResult:
    """A precision on the device.

    Attributes:
        excluded: Number of layers (fp16, bf16: nodes) in higher precision.
        gate_failures: Failures of the gate on the CPU.
        mean_cosine: Mean cosine of the vectors with those of fp32 on the CPU.
        is_accurate: Whether gate and cosines meet the limits.
        fault: Reason why the precision does not run on the device; empty where it does.
    """

    precision: str
    excluded: int
    gate_failures: tuple[str, ...]
    mean_cosine: float = 0.0
    min_cosine: float = 0.0
    is_accurate: bool = False
    fault: str = ""


def main() -> int:
    """Build, run and compare; return 1 where a precision fails its gate or is inaccurate."""
    options = _parse()
    inputs = read_inputs(load_spec(PIPELINE), quiet)
    plan = inputs.plan
    # The gate has other limits for synthetic rows.
    samples = [row for request in inputs.requests if not request.edge for row in request.rows]

    def make_feeds(size: int) -> list[Feed]:
        pad = plan.facts.pad_token_id
        starts = range(0, len(samples), size)
        return [
            core_feed(samples[start : start + size], plan.core_inputs, pad_token_id=pad)
            for start in starts
        ]

    cores = {precision: _convert(inputs, precision) for precision in options.precisions}
    feeds = make_feeds(BATCHES[-1])
    expected = _run(_open_session(_find_source(inputs)[0], CPU), feeds)
    sessions, results = {}, []
    for precision, core in cores.items():
        excluded, failures = len(core.conversion.excluded_layers), core.gate.failures
        try:
            sessions[precision] = _open_session(core.file, options.provider)
            actual = _run(sessions[precision], feeds)
        except Exception as error:  # whatever prevents a run is a row of the table
            sessions.pop(precision, None)
            fault = " ".join(str(error).split())[:200]
            results.append(PrecisionResult(precision, excluded, failures, fault=fault))
            continue
        found = cosines(actual, expected)
        limits = thresholds(TASKS["text-embedding"], precision, {})
        mean, lowest = float(found.mean()), float(found.min())
        right = mean >= limits["mean_cosine"] and lowest >= limits["min_cosine"] and not failures
        results.append(PrecisionResult(precision, excluded, failures, mean, lowest, right))
    groups = [
        [Turn(name, partial(_time, one, make_feeds(size), size)) for name, one in sessions.items()]
        for size in BATCHES
    ]
    series = run_rounds(groups, options.rounds, max_minutes=options.max_minutes)
    rates = {(one.system, one.load): one.text("rate_per_s") for one in series}
    head = ["precision", "excluded layers", "gate on the CPU", "mean cosine", "min cosine"]
    head += [*(f"rows/s, batch {size}" for size in BATCHES), "accurate"]
    rows = [
        (
            one.precision,
            str(one.excluded),
            "failed" if one.gate_failures else "passed",
            f"{one.mean_cosine:.6f}",
            f"{one.min_cosine:.6f}",
            *(rates.get((one.precision, str(size)), "-") for size in BATCHES),
            one.fault or ("yes" if one.is_accurate else "NO"),
        )
        for one in results
    ]
    title = "The core in every precision (`make precisions`)"
    data = {"results": results, "speed": series}
    finish(options, "precisions", title, [Table(options.provider, head, rows)], data)
    return (
        1 if any(one.gate_failures or not (one.is_accurate or one.fault) for one in results) else 0
    )


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__, "precisions", rounds=3)
    parser.add_argument("--provider", default="CUDAExecutionProvider", help="of ONNX Runtime")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    options = parser.parse_args()
    import onnxruntime

    available = onnxruntime.get_available_providers()
    if options.provider not in available:
        parser.error(f"{options.provider} is not available, only {', '.join(available)}")
    return options


def _find_source(inputs: PipelineInputs) -> tuple[Path, str]:
    """Build the pipeline; return the fp32 core and its key."""
    repository = build(CACHE / "precisions")
    lock = read_manifest(repository, PIPELINE.name, EncoderManifest)
    return repository / inputs.plan.step("core") / "1" / MODEL_FILE, lock.source_key


def _convert(inputs: PipelineInputs, precision: Precision) -> ConvertedCore:
    """Return the core with as few excluded layers as its gate allows, whatever could serve it."""
    file, key = _find_source(inputs)
    gate = Gate(inputs, precision, progress)
    if precision == "fp32":
        files = {file.name: sha256_of(file)}
        return ConvertedCore(file, key, gate.run(file, files), Conversion(()), files)
    return convert_with_exclusions(inputs, file, key, gate, progress)


def _open_session(file: Path, provider: str) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    providers = list(dict.fromkeys([provider, CPU]))
    session = onnxruntime.InferenceSession(file, options, providers=providers)
    if session.get_providers()[0] != provider:
        raise RuntimeError(f"{provider} refused the session.")
    return session


def _run(session: Any, feeds: Sequence[Feed]) -> NDArray[np.float32]:
    return np.concatenate([session.run(None, feed)[0] for feed in feeds])


def _time(session: Any, feeds: Sequence[Feed], size: int) -> list[tuple[str, dict[str, float]]]:
    """Return the rows per second over all feeds."""
    started = time.perf_counter()
    rows = len(_run(session, feeds))
    return [(str(size), {"rate_per_s": rows / (time.perf_counter() - started)})]


if __name__ == "__main__":
    raise SystemExit(main())
