"""`core.precision: auto`: build, check and measure every precision that runs here.

If the spec names no backend, the precisions of OpenVINO are measured with those of ONNX Runtime.
Candidates that fail the gate are dropped. The others are measured on real servers with the
pipeline's own traffic, and the fastest is chosen. Earlier results come from the cache.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from triptych.base.cache import cached_stage, code_hash, versions_of
from triptych.base.errors import Progress, UserError
from triptych.base.extras import install_command
from triptych.container.processor import find_processor
from triptych.core.engine.stage import EngineFailure, missing_for_engines
from triptych.core.gate.cached import GateFailure
from triptych.core.inputs import PipelineInputs
from triptych.core.precision.stage import CheckedCore, full_precision, lower_precision
from triptych.core.requests import hash_requests
from triptych.repository.manifest import CompiledManifest, read_manifest
from triptych.repository.records import GateResult, PrecisionTrial, plain_record, read_record
from triptych.repository.store import sibling_work_dir
from triptych.serving.bench import perf_analyzer
from triptych.serving.bench.measure import run_longer
from triptych.serving.bench.perf_analyzer import Duration
from triptych.serving.bench.results import OfferedLoad
from triptych.serving.endpoint import UNSAMPLED
from triptych.serving.server import Server
from triptych.spec.backends import BACKENDS, BackendName, Precision
from triptych.spec.fields import CoreSettings, check_runs

ROUNDS = 3
WINDOW_S = 1.5
MIN_RELATIVE_THROUGHPUT = 0.75
"""Minimum ratio of a candidate's throughput to the fastest one for it to be measured again."""

WARM_UP_REQUESTS = 100


@dataclass(frozen=True)
class Throughput:
    """Throughput of one candidate: medians over its rounds."""

    throughput_per_s: float  # Answered requests per second, of one row each
    p99_ms: float  # 99th percentile of the latency


def measure_throughputs(
    repositories: Mapping[str, Path],
    pipeline: str,
    requests: Sequence[perf_analyzer.Request],
    *,
    baseline: str,
    clients: int,
    progress: Progress,
) -> dict[str, Throughput]:
    """Measure the candidates in turn, round after round, while all servers keep running.

    An idle server costs no time, and a drift of the machine affects all candidates equally.

    Args:
        repositories: Candidate to the repository that it was built into.
        pipeline: Name of the ensemble, the same in each repository.
        requests: Traffic, one row in each request.
        baseline: Candidate that is measured in every round.
        clients: Number of clients, each with one request in flight.
        progress: Receives each measurement.

    Raises:
        UserError: A server does not start, or answers with an error.
    """
    results: dict[str, list[perf_analyzer.LoadResult]] = {name: [] for name in repositories}
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(Server(path, models=[pipeline], environment=UNSAMPLED))
            for name, path in repositories.items()
        }
        running = list(servers)
        for number in range(1, ROUNDS + 1):
            shift = number % len(running)  # so that the first candidate changes
            for name in running[shift:] + running[:shift]:
                run = partial(
                    perf_analyzer.run,
                    servers[name].grpc_url,
                    pipeline,
                    requests,
                    OfferedLoad("concurrency", clients),
                )
                span = Duration(warmup_requests=WARM_UP_REQUESTS if number == 1 else 0)
                result = run_longer(
                    lambda window_s: run(replace(span, window_s=window_s)),  # noqa: B023
                    WINDOW_S,
                )
                results[name].append(result)
                progress(
                    "throughput",
                    f"round {number}/{ROUNDS}: {name} {result.throughput_per_s:.0f}/s, "
                    f"p99 {result.percentile_us(99) / 1e3:.0f} ms",
                )
            fastest = max(results[name][-1].throughput_per_s for name in running)
            running = [
                name
                for name in running
                if name == baseline
                or results[name][-1].throughput_per_s >= MIN_RELATIVE_THROUGHPUT * fastest
            ]
    return {
        name: Throughput(
            median(one.throughput_per_s for one in rounds),
            median(one.percentile_us(99) for one in rounds) / 1e3,
        )
        for name, rounds in results.items()
    }


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

WriteRepository = Callable[[CheckedCore, Path], object]
"""Writes a repository with the pipeline around a core into a folder, engine included."""


def check_possible(core: CoreSettings) -> None:
    """Check that the precision of the spec can be built and, for ``auto``, measured here.

    Raises:
        UserError: The precision cannot be built or measured here.
    """
    if core.backend == "openvino" and not has_openvino():
        raise UserError(
            "core.backend",
            "needs the package openvino, with which the accuracy gate runs the core",
            given="openvino",
            remedy=f"Run `{install_command('openvino')}`, or set core.backend to onnxruntime",
        )
    if core.precision == "auto":
        _candidates_of(core)
    else:
        check_runs(core.precision, core.backend, core.device)


def has_openvino() -> bool:
    """Return whether OpenVINO is installed."""
    return find_spec("openvino") is not None


def choose(
    core: CheckedCore, repository: Path, write: WriteRepository, progress: Progress
) -> CheckedCore:
    """Return the fastest core that passes the gate; `GateResult.candidates` has all that ran.

    Args:
        core: Core in fp32.
        repository: Folder of the models; candidates are built in a folder next to it.
        write: Writes the repository of a candidate, ready to be served.
        progress: Receives each stage and its result.

    Raises:
        EngineFailure: The engine of the fp32 core differs from its graph.
        UserError: The device cannot be measured here.
    """
    spec = core.plan.spec
    bases = {str(precision): (core, precision) for precision in _candidates_of(spec.core)}
    if core.plan.backend.runs_gate:
        bases = {name: (base, name) for name, base in _bases_on(spec.core.backend, core, progress)}
    for backend in _other_backends(spec.core) if core.inputs.chain is None else ():
        for precision, base in _bases_on(backend, core, progress):
            bases[f"{backend} {precision}"] = base, precision
    cores: dict[str, CheckedCore] = {}
    candidates: dict[str, PrecisionTrial] = {}
    with sibling_work_dir(repository, "auto") as scratch:
        folders = {name: scratch / name.replace(" ", "_") for name in bases}
        for number, (name, (base, precision)) in enumerate(bases.items(), start=1):
            progress("auto", f"{name}: {number}/{len(bases)}")
            found, trial = _try(base, precision, folders[name], write, progress)
            own = base.plan.spec.core.backend
            candidates[name] = replace(trial, backend="" if own == spec.core.backend else own)
            if found is not None:
                cores[name] = found
        if not cores:
            raise UserError(
                "core.precision",
                "must have a precision that passes the gate",
                given="; ".join(
                    f"{name}: {one.note or one.failures}" for name, one in candidates.items()
                ),
                remedy="Name another backend, or one precision to see its worst rows",
            )
        rates = _measure(core.inputs, {name: folders[name] for name in cores}, progress)
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
    known = BACKENDS[core.backend].tried.get(core.device)
    missing = missing_for_engines() if core.backend == "tensorrt" else ""
    if known is None or missing:
        raise UserError(
            "core.precision",
            "must be one precision if this machine cannot measure them",
            given=f"auto for {core.backend} on a {core.device}" + f"; {missing}" * bool(missing),
            remedy="Choose one, such as fp16, and run `triptych verify` on the target machine",
        )
    return known


def _other_backends(core: CoreSettings) -> tuple[BackendName, ...]:
    """Return the backends to compare with that of the spec, which the spec leaves open."""
    named = {"backend", "layout"} & core.model_fields_set
    return ("openvino",) if core.device == "cpu" and not named and has_openvino() else ()


def _bases_on(
    backend: BackendName, core: CheckedCore, progress: Progress
) -> Iterator[tuple[Precision, CheckedCore]]:
    """Yield the fp32 core planned for a backend without batches, for each precision to try there.

    There are none if its graph fails the gate. The backend has an instance for each processor of
    this machine, unless the spec has more, because an instance computes one request at a time.
    """
    spec = core.plan.spec
    for precision in BACKENDS[backend].tried[spec.core.device]:
        changes: dict[str, object] = {"backend": backend, "layout": "bucketed"}
        changes["precision"] = precision
        if "bucket_count" not in spec.core.model_fields_set:
            changes["bucket_count"] = BACKENDS[backend].bucket_count
        inputs = core.inputs.replanned("bucketed", spec.core.model_copy(update=changes))
        inputs = inputs.with_core_instances(len(os.sched_getaffinity(0)))
        try:
            yield precision, full_precision(inputs, progress, "")
        except GateFailure as failure:
            progress("auto", f"{backend}: {failure}")
            return


def _try(
    core: CheckedCore,
    precision: Precision,
    target: Path,
    write: WriteRepository,
    progress: Progress,
) -> tuple[CheckedCore | None, PrecisionTrial]:
    """Write the core in `precision` to `target` and return it; None if it fails or cannot run."""
    is_served = precision == BASELINE and not core.plan.backend.runs_gate
    try:
        found = core if is_served else lower_precision(core, precision, progress)
        write(found, target)
    except GateFailure as failure:
        return None, _candidate(precision, failure.gate)
    except EngineFailure as failure:
        if is_served:
            raise
        return None, PrecisionTrial(precision, "failed", failure.gate.failures)
    except UserError as error:
        if is_served:
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
    inputs: PipelineInputs, repositories: Mapping[str, Path], progress: Progress
) -> dict[str, Throughput]:
    name = inputs.plan.spec.name
    requests = [dict(request.sent) for request in inputs.requests if not request.edge]
    key: dict[str, object] = {
        # The files of a repository decide everything that is served and measured.
        "files": {
            precision: dict(read_manifest(path, name, CompiledManifest).files)
            for precision, path in repositories.items()
        },
        "requests": hash_requests(inputs.requests),
        "clients": CLIENTS,
        "machine": [platform.processor(), find_processor(), len(os.sched_getaffinity(0))],
        "versions": versions_of("onnxruntime", "openvino", "nvidia-pytriton", "tokenizers"),
        "code": code_hash(*CODE),
    }

    def work(target: Path) -> None:
        rates = measure_throughputs(
            repositories, name, requests, baseline=BASELINE, clients=CLIENTS, progress=progress
        )
        plain = {precision: plain_record(rate) for precision, rate in rates.items()}
        (target / THROUGHPUT_FILE).write_text(json.dumps(plain), encoding="utf-8")

    folder, cached, _ = cached_stage("throughput", key, work, progress)
    if cached:
        progress("throughput", "as measured before (cached)")
    text = (folder / THROUGHPUT_FILE).read_text(encoding="utf-8")
    return read_record(dict[str, Throughput], json.loads(text))
