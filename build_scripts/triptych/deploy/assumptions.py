"""Assumptions of a deployment, in place of what nobody has measured or set."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from triptych.repository.manifest import CompiledManifest
from triptych.serving.bench.results import BenchResult
from triptych.spec.model_fields import CompiledSpec, is_own

P99_MS = 500.0
"""Assumed latency limit at p99 in ms, which Triton's histogram has as a bound by default."""
STEP_MIB, SERVER_MIB, CORE_COPIES = 256, 256, 3
"""Assumed memory of a Python step and of the server in MiB; copies of the core's files in memory,
since a runtime packs the weights while it loads them."""


@dataclass(frozen=True)
class Assumption:
    """A number of the manifests that is neither measured nor set."""

    about: str  # Meaning of the number
    value: str  # The number with its unit
    reason: str  # Source of the number
    remedy: str  # Command, option or field that replaces it

    def __str__(self) -> str:
        return f"ASSUMED {self.about}: {self.value}, {self.reason}. {self.remedy}"

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def assume_slo(build: CompiledManifest) -> tuple[CompiledManifest, list[Assumption]]:
    """Return the build with a latency limit, and the assumption if it had none."""
    serving = build.spec.serving
    if serving.slo.limits_us:
        return build, []
    slo = serving.slo.model_copy(update={"p99_ms": P99_MS})
    spec = build.spec.model_copy(
        update={"serving": serving.model_copy(update={"slo": slo})},
    )
    assumption = Assumption(
        "latency limit, from which alerts and times follow",
        f"p99 <= {P99_MS:g} ms",
        "a bound that Triton's histogram has",
        f"Set serving.slo.p99_ms, and run `triptych build {build.spec.name}`",
    )
    return replace(build, spec=spec), [assumption]


def assume_alone(name: str, others: Iterable[str]) -> list[Assumption]:
    """Return the assumption that the served volume or image holds one pipeline of a repository."""
    names = ", ".join(others)
    if not names:
        return []
    return [
        Assumption(
            "content of the volume or image",
            f"{name} alone",
            f"although the repository also holds {names}: each pipeline scales by its own load",
            f"Run `triptych build {name} --repository FOLDER`, and copy that folder",
        )
    ]


def assume_rate(build: CompiledManifest, bench: BenchResult | None) -> tuple[float, Assumption]:
    """Return the requests per second of a replica: those of one client, if they are measured.

    Else those that the build measured when it chose the precision, or that the SLO needs.
    """
    points = [] if bench is None else bench.points
    rates = [
        measured.throughput_per_s
        for point in points
        if point.load.kind == "concurrency" and point.load.value == 1
        for measured in point.rounds
    ]
    tried = [trial for trial in build.gate.candidates if trial.status == "chosen"]
    built = [trial.throughput_per_s for trial in tried if trial.throughput_per_s]
    longest_ms = max(build.spec.serving.slo.limits_ms.values(), default=P99_MS)
    if rates:
        rate, reason = min(rates), "of one client alone, measured"
    elif built:
        rate, reason = built[0], "measured on the building machine, to choose the precision"
    else:
        rate, reason = 1e3 / longest_ms, f"one request at a time, {longest_ms:g} ms each by the SLO"
    return rate, Assumption(
        "capacity of a replica",
        f"{rate:.4g}/s",
        reason,
        f"Run `triptych bench {build.spec.name} --find-max-rate`, or pass --rps-per-replica",
    )


def _models(spec: CompiledSpec) -> list[CompiledSpec]:
    """Return the spec with each of its models alone."""
    return [spec.with_model(name) for name in spec.models or [""]] if is_own(spec) else [spec]


def is_on_gpu(spec: CompiledSpec) -> bool:
    """Return whether the core, or one of several cores, runs on a GPU."""
    return any(one.core.device == "gpu" for one in _models(spec))


def count_step_processes(spec: CompiledSpec) -> int:
    """Return the number of Python processes: functions between models have those of preprocess."""
    instances, functions = spec.serving.instances, len(spec.steps) if is_own(spec) else 1
    return instances.preprocess * functions + instances.postprocess


def assume_cores(build: CompiledManifest) -> tuple[float, Assumption]:
    """Return the number of cores that a replica keeps busy: one for each instance and thread."""
    models = _models(build.spec)
    threads = sum(one.serving.instances.core * (one.core.threads or 1) for one in models)
    cores = float(count_step_processes(build.spec) + threads)
    return cores, Assumption(
        "processor cores of a replica",
        f"{cores:g}",
        "one for each instance of a step, and for each of core.threads",
        f"Run `triptych bench {build.spec.name} --find-max-rate`, or pass --cpu",
    )


def core_files_mib(repository: Path, pipeline: str) -> float:
    """Return the size of the files of a pipeline's cores in MiB."""
    cores = [repository / f"{pipeline}_core", *repository.glob(f"{pipeline}.*_core")]
    files = [file for core in cores for file in core.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files) / 2**20


def assume_memory(build: CompiledManifest, repository: Path) -> tuple[float, Assumption]:
    """Return the memory of a replica in MiB, by the size of the files of its core."""
    size = core_files_mib(repository, build.spec.name)
    instances = max(one.serving.instances.core for one in _models(build.spec))
    steps = count_step_processes(build.spec)
    memory = float(SERVER_MIB + STEP_MIB * steps + math.ceil(CORE_COPIES * size * instances))
    return memory, Assumption(
        "memory of a replica without a batch and shared memory",
        f"{memory:.0f} MiB",
        f"{SERVER_MIB} for the server, {STEP_MIB} for each Python step, and {CORE_COPIES} times "
        "the files of the core",
        f"Run `triptych bench {build.spec.name} --find-max-rate`, or pass --memory",
    )
