"""`core.precision: auto`: every precision that runs here is built, checked and measured.

Those that fail the gate are dropped, the others race under the pipeline's own traffic, and the
fastest is taken. What was built, checked or measured before is not done again.

Built candidates against each other, each on a real server, under the pipeline's own traffic.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from triptych.base.cache import cached_stage, code_hash, versions_of
from triptych.base.errors import Progress, UserError
from triptych.core.engine.stage import EngineFailure, missing_for_engines
from triptych.core.gate.cached import GateFailure
from triptych.core.inputs import PipelineInputs
from triptych.core.precision.stage import CheckedCore, lower_precision
from triptych.core.samples import hash_requests
from triptych.repository.manifest import read_manifest
from triptych.repository.records import GateResult, PrecisionTrial, plain_record, read_record
from triptych.repository.store import sibling_work_dir
from triptych.serving.bench import perf_analyzer
from triptych.serving.doctor import processor
from triptych.serving.endpoint import UNSAMPLED
from triptych.serving.server import Server
from triptych.spec.fields import CoreSettings, Precision, check_runs

ROUNDS = 3
WINDOW_S = 1.5
FAR_BEHIND = 0.75
"""A candidate slower than this share of the fastest is not measured again, but for the baseline."""

WARM_UP_REQUESTS = 100


@dataclass(frozen=True)
class Throughput:
    """How fast one candidate answered: medians over its rounds.

    Attributes:
        throughput_per_s: requests answered a second, of one row each.
        lowest_per_s: in the slowest round.
        highest_per_s: in the fastest.
        p99_ms: 99th percentile of the latency.
        rounds: that it was measured in.
    """

    throughput_per_s: float
    lowest_per_s: float
    highest_per_s: float
    p99_ms: float
    rounds: int


def race(
    repositories: Mapping[Precision, Path],
    pipeline: str,
    requests: Sequence[perf_analyzer.Request],
    *,
    baseline: Precision,
    clients: int,
    progress: Progress,
) -> dict[Precision, Throughput]:
    """Measure every candidate in turn, round after round; their servers run all the while.

    A server without requests costs no time, and what drifts on the machine hits all alike.

    Args:
        repositories: candidate to the repository it was built into.
        pipeline: name of the ensemble, the same in each.
        requests: the traffic, a row each.
        baseline: the candidate that the others are compared with.
        clients: each with one request under way.
        progress: told each measurement.

    Raises:
        UserError: a server does not start, or answers with an error.
    """
    results: dict[Precision, list[perf_analyzer.LoadResult]] = {name: [] for name in repositories}
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(Server(path, models=[pipeline], environment=UNSAMPLED))
            for name, path in repositories.items()
        }
        running = list(servers)
        for number in range(1, ROUNDS + 1):
            shift = number % len(running)  # no candidate always comes first
            for name in running[shift:] + running[:shift]:
                result = perf_analyzer.run(
                    servers[name].grpc_url,
                    pipeline,
                    requests,
                    concurrency=clients,
                    window_s=WINDOW_S,
                    warmup_requests=WARM_UP_REQUESTS if number == 1 else 0,
                )
                results[name].append(result)
                progress(
                    "race",
                    f"round {number}/{ROUNDS}: {name} {result.throughput_per_s:.0f}/s, "
                    f"p99 {result.p99_us / 1e3:.0f} ms",
                )
            fastest = max(results[name][-1].throughput_per_s for name in running)
            running = [
                name
                for name in running
                if name == baseline or results[name][-1].throughput_per_s >= FAR_BEHIND * fastest
            ]
    return {name: _throughput(of_one) for name, of_one in results.items()}


def _throughput(results: Sequence[perf_analyzer.LoadResult]) -> Throughput:
    rates = [result.throughput_per_s for result in results]
    return Throughput(
        throughput_per_s=median(rates),
        lowest_per_s=min(rates),
        highest_per_s=max(rates),
        p99_ms=median(result.p99_us for result in results) / 1e3,
        rounds=len(results),
    )


AUTO = "auto"
BASELINE: Precision = "fp32"
CLIENTS = 32
THROUGHPUT_FILE = "throughput.json"
CODE = (
    "building/auto.py",
    "serving/bench/*.py",
    "serving/backends/*/*.py",
    "serving/backends/*.py",
    "runtime/*.py",
    "repository/*.py",
)

RUNS: dict[tuple[str, str], tuple[Precision, ...]] = {
    ("onnxruntime", "cpu"): ("fp32", "int8", "int8_dynamic", "fp16"),
    ("tensorrt", "gpu"): ("fp32", "fp16", "bf16", "int8", "fp8"),
}
"""Backend and device to the precisions worth a try there. On a CPU, ONNX Runtime computes bf16 not
at all, fp8 and fp16 in fp32; some models gain by fp16 all the same, for their size."""

WriteRepository = Callable[[CheckedCore, Path], object]
"""Writes a repository with the pipeline around a core into a folder, engine included."""


def check_possible(core: CoreSettings) -> None:
    """The precision that the spec asks for can be built and, if open, measured here.

    Raises:
        UserError: it cannot.
    """
    if core.precision == AUTO:
        _candidates_of(core)
    else:
        check_runs(core.precision, core.backend, core.device)


def choose(
    core: CheckedCore, repository: Path, write: WriteRepository, progress: Progress
) -> CheckedCore:
    """The fastest core that passes the gate; `GateResult.candidates` has all that were tried.

    Args:
        core: the fp32 one.
        repository: where the chosen one is going to be written: candidates are built beside it.
        write: makes a candidate ready to be served.
        progress: told what becomes of each stage.

    Raises:
        EngineFailure: no engine of the fp32 core computes what its graph does.
        UserError: the device cannot be measured here.
    """
    precisions = _candidates_of(core.plan.spec.core)
    cores: dict[Precision, CheckedCore] = {}
    candidates: dict[Precision, PrecisionTrial] = {}
    with sibling_work_dir(repository, "auto") as scratch:
        for number, precision in enumerate(precisions, start=1):
            progress("auto", f"{precision}: {number}/{len(precisions)}")
            target = scratch / precision
            found, candidates[precision] = _try(core, precision, target, write, progress)
            if found is not None:
                cores[precision] = found
        rates = _measure(core.inputs, {name: scratch / name for name in cores}, progress)
    for name, rate in rates.items():
        candidates[name] = replace(
            candidates[name], throughput_per_s=rate.throughput_per_s, p99_ms=rate.p99_ms
        )
    best = max(rates, key=lambda name: rates[name].throughput_per_s)
    candidates[best] = replace(candidates[best], status="chosen")
    progress("auto", f"{best} is the fastest that passes")
    gate = replace(cores[best].gate, candidates=tuple(candidates.values()))
    return replace(cores[best], gate=gate)


def _candidates_of(core: CoreSettings) -> tuple[Precision, ...]:
    known = RUNS.get((core.backend, core.device))
    missing = missing_for_engines() if core.backend == "tensorrt" else ""
    if known is None or missing:
        raise UserError(
            "core.precision",
            "must be named where it cannot be measured here",
            given=f"auto for {core.backend} on a {core.device}" + f"; {missing}" * bool(missing),
            remedy="Name one, such as fp16; `triptych verify` tells how right it is there",
        )
    return known


def _try(
    core: CheckedCore,
    precision: Precision,
    target: Path,
    write: WriteRepository,
    progress: Progress,
) -> tuple[CheckedCore | None, PrecisionTrial]:
    """The core in `precision`, written into `target`; None where it cannot be taken."""
    try:
        found = core if precision == BASELINE else lower_precision(core, precision, progress)
        write(found, target)
    except GateFailure as failure:
        return None, _candidate(precision, failure.gate)
    except EngineFailure as failure:
        if precision == BASELINE:
            raise
        return None, PrecisionTrial(precision, "failed", failure.gate.failures)
    except UserError as error:
        if precision == BASELINE:
            raise
        return None, PrecisionTrial(precision, "not runnable", note=str(error))
    size = sum(path.stat().st_size for path in target.glob("*_core/1/*"))
    passed = _candidate(precision, found.gate)
    return found, replace(passed, status="passed", failures=(), size_bytes=size)


def _candidate(precision: Precision, gate: GateResult) -> PrecisionTrial:
    return PrecisionTrial(
        precision,
        "failed",
        gate.failures,
        verdicts={verdict.metric: verdict.value for verdict in gate.verdicts},
        excluded_layers=() if gate.conversion is None else gate.conversion.excluded_layers,
    )


def _measure(
    inputs: PipelineInputs, repositories: Mapping[Precision, Path], progress: Progress
) -> dict[Precision, Throughput]:
    name = inputs.plan.spec.name
    requests = [dict(request.sent) for request in inputs.requests if not request.edge]
    key: dict[str, object] = {
        # The files of a repository tell all that is served, and so all that is measured.
        "files": {
            precision: dict(read_manifest(path, name).files)
            for precision, path in repositories.items()
        },
        "requests": hash_requests(inputs.requests),
        "clients": CLIENTS,
        "machine": [platform.processor(), processor(), len(os.sched_getaffinity(0))],
        "versions": versions_of("onnxruntime", "nvidia-pytriton", "tokenizers"),
        "code": code_hash(*CODE),
    }

    def work(target: Path) -> None:
        rates = race(
            repositories, name, requests, baseline=BASELINE, clients=CLIENTS, progress=progress
        )
        plain = {precision: plain_record(rate) for precision, rate in rates.items()}
        (target / THROUGHPUT_FILE).write_text(json.dumps(plain), encoding="utf-8")

    folder, cached, _ = cached_stage("race", key, work, progress)
    if cached:
        progress("race", "as measured before (cached)")
    text = (folder / THROUGHPUT_FILE).read_text(encoding="utf-8")
    return read_record(dict[Precision, Throughput], json.loads(text))
