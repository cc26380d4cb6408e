"""Compare the core in every precision: the gate on the CPU, accuracy and speed on a device.

Usage: ``python build_scripts/benchmarks/precisions.py --provider CUDAExecutionProvider`` on a
machine with onnxruntime-gpu; any other provider of ONNX Runtime works, too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Turn, finish, make_parser, progress, quiet, run_rounds, tabulate
from benchmarks.model import CACHE, CPU_PROVIDER, PIPELINE, build, cosines, open_session
from triptych.base.cache import sha256_of
from triptych.base.onnx_graph import MODEL_FILE
from triptych.core.gate.cached import Gate
from triptych.core.inputs import PipelineInputs, read_inputs
from triptych.core.precision.layer_exclusion import ConvertedCore, convert_with_exclusions
from triptych.core.requests import Feed, core_feed
from triptych.repository.manifest import CompiledManifest, read_manifest
from triptych.repository.records import Conversion
from triptych.spec.backends import Precision
from triptych.spec.spec import load_spec
from triptych.tasks.accuracy import thresholds
from triptych.tasks.catalog import TASKS

PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "bf16", "int8", "int8_dynamic", "fp8")
BATCHES = (1, 8, 32)


@dataclass
class PrecisionResult:
    """A precision on the device.

    Attributes:
        excluded: Number of layers (fp16, bf16: nodes) in higher precision.
        gate_failures: Failures of the gate on the CPU.
        cosines: Mean and minimum cosine of the vectors with those of fp32 on the CPU.
        verdict: ``yes`` if gate and cosines meet the limits, ``NO`` if not, else the reason why the
            precision does not run on the device.
        rates_per_s: Rows per second by size of the batch.
    """

    precision: Precision
    excluded: int
    gate_failures: tuple[str, ...]
    cosines: tuple[float, float] = (0.0, 0.0)
    verdict: str = ""
    rates_per_s: dict[int, str] = field(default_factory=dict)


def main() -> int:
    """Build, run and compare; return 1 where a precision fails its gate or is inaccurate."""
    options = _parse()
    inputs = read_inputs(load_spec(PIPELINE), quiet)
    plan = inputs.plan
    # The gate has other limits for synthetic rows.
    samples = [row for request in inputs.requests if not request.edge for row in request.rows]

    def make_feeds(size: int) -> list[Feed]:
        chunks = (samples[start : start + size] for start in range(0, len(samples), size))
        pad = plan.info.pad_token_id
        return [core_feed(chunk, plan.core_inputs, pad_token_id=pad) for chunk in chunks]

    feeds = make_feeds(BATCHES[-1])
    expected = _run(open_session(_find_source(inputs)[0], CPU_PROVIDER), feeds)
    sessions, results = {}, {}
    for precision in options.precisions:
        core = _convert(inputs, precision)
        excluded, failures = len(core.conversion.excluded_layers), core.gate.failures
        results[precision] = result = PrecisionResult(precision, excluded, failures)
        try:
            session = open_session(core.file, options.provider)
            found = cosines(_run(session, feeds), expected)
        except Exception as error:  # whatever prevents a run is a row of the table
            result.verdict = " ".join(str(error).split())[:200]
            continue
        sessions[precision] = session
        limits = thresholds(TASKS["text-embedding"], precision, {})
        result.cosines = mean, lowest = float(found.mean()), float(found.min())
        right = mean >= limits["mean_cosine"] and lowest >= limits["min_cosine"] and not failures
        result.verdict = "yes" if right else "NO"
    groups = [
        [Turn(name, partial(_time, one, make_feeds(size), size)) for name, one in sessions.items()]
        for size in BATCHES
    ]
    series = run_rounds(groups, options.rounds, max_minutes=options.max_minutes)
    for one in series:
        results[one.system].rates_per_s[int(one.load)] = one.text("rate_per_s")
    table = tabulate(
        options.provider,
        results.values(),
        {
            "precision": lambda one: one.precision,
            "excluded layers": lambda one: str(one.excluded),
            "gate on the CPU": lambda one: "failed" if one.gate_failures else "passed",
            "mean cosine": lambda one: f"{one.cosines[0]:.6f}",
            "min cosine": lambda one: f"{one.cosines[1]:.6f}",
            **{f"rows/s, batch {size}": partial(_format_rate, size) for size in BATCHES},
            "accurate": lambda one: one.verdict,
        },
    )
    finish(options, [table], {"results": [*results.values()], "speed": series})
    return 1 if any(one.gate_failures or one.verdict == "NO" for one in results.values()) else 0


def _format_rate(size: int, one: PrecisionResult) -> str:
    return one.rates_per_s.get(size, "-")


def _parse() -> argparse.Namespace:
    title = "The core in every precision (`make precisions`)"
    parser = make_parser(__doc__, "precisions", title, rounds=3)
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
    manifest = read_manifest(repository, PIPELINE.name, CompiledManifest)
    return repository / inputs.plan.step("core") / "1" / MODEL_FILE, manifest.source_key


def _convert(inputs: PipelineInputs, precision: Precision) -> ConvertedCore:
    """Return the core with as few excluded layers as its gate allows, whatever could serve it."""
    file, key = _find_source(inputs)
    gate = Gate(inputs, precision, progress)
    if precision == "fp32":
        files = {file.name: sha256_of(file)}
        return ConvertedCore(file, key, gate.run(file, files), Conversion(()), files)
    return convert_with_exclusions(inputs, file, key, gate, progress)


def _run(session: Any, feeds: Sequence[Feed]) -> NDArray[np.float32]:
    return np.concatenate([session.run(None, feed)[0] for feed in feeds])


def _time(session: Any, feeds: Sequence[Feed], size: int) -> list[tuple[str, dict[str, float]]]:
    """Return the rows per second over all feeds."""
    started = time.perf_counter()
    rows = len(_run(session, feeds))
    return [(str(size), {"rate_per_s": rows / (time.perf_counter() - started)})]


if __name__ == "__main__":
    raise SystemExit(main())
