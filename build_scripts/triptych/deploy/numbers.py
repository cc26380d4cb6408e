"""Numbers of a deployment, each with its reason.

The numbers of a replica come from `bench` or from the user.
"""

from __future__ import annotations

import datetime
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from triptych.base.errors import UserError
from triptych.base.explained import ExplainedValue
from triptych.container.flags import CACHE_MIB, ServerFlags
from triptych.container.manifests import STEP_SHM_MIB, largest_request_mib
from triptych.container.serving_machine import parse_machine, variants_in
from triptych.container.supervisor import EXIT_S
from triptych.deploy.assumptions import (
    STEP_MIB,
    Assumption,
    assume_cores,
    assume_memory,
    assume_rate,
    count_step_processes,
)
from triptych.deploy.options import DeployOptions
from triptych.deploy.variables import CACHE, CACHE_SIZE, step_shm_mib
from triptych.repository.config import CONFIG_FILE, read_config
from triptych.repository.manifest import CompiledManifest
from triptych.serving.bench.results import (
    BenchResult,
    Measurement,
    Resources,
    find_best_point,
    format_rates,
    read_result,
)
from triptych.spec.slo import Slo

MEMORY_MARGIN = 1.25
"""Factor for memory limits, because longer runs and other requests need more than `bench`."""


@dataclass(frozen=True)
class MeasuredReplica:
    """Measurements of one replica."""

    capacity_per_s: ExplainedValue  # Maximum requests per second within the SLO
    peak_per_s: ExplainedValue  # Maximum requests per second, regardless of the SLO
    cpu_cores: ExplainedValue  # Number of busy cores at that rate
    memory_mib: ExplainedValue  # Maximum memory
    load_s: float | None  # Time from start to ready, with the warm-ups; None if it is unknown
    batch_s: float | None  # Duration of the largest batch; None if it is unknown
    gpu_memory_mib: float | None  # Maximum memory in use on the GPU; None without one
    assumptions: tuple[Assumption, ...] = ()  # Assumptions among these numbers


def read_measurements(
    build: CompiledManifest, options: DeployOptions, reports: Path, repository: Path
) -> MeasuredReplica:
    """Return the measurements of a built pipeline, and assumptions in place of missing ones.

    Args:
        build: Manifest of the build that is deployed.
        options: Options of the user, which override measurements.
        reports: Folder of the pipeline's reports.
        repository: Repository with the build.

    Raises:
        UserError: A number comes from another build or SLO, or shows that the SLO cannot be met.
    """
    bench = _read_bench(build, options, reports / "bench/bench.json")
    if bench is not None:
        _check_slo(bench, options.rps_per_replica)
    return _with_use(build, options, bench, repository)


def measured_memory_mib(build: CompiledManifest, reports: Path) -> float | None:
    """Return the maximum memory that `bench` measured for this build, in MiB; None without one.

    Raises:
        UserError: The result of `bench` cannot be read.
    """
    file = reports / "bench/bench.json"
    bench = read_result(BenchResult, file, "bench") if file.is_file() else None
    if bench is None or _fault(build, bench) is not None:
        return None
    return _max_memory_mib(bench) or None


def _capacity(
    build: CompiledManifest,
    options: DeployOptions,
    bench: BenchResult | None,
    assumptions: list[Assumption],
) -> ExplainedValue:
    if options.rps_per_replica is not None:
        return ExplainedValue(options.rps_per_replica, "given by the user (--rps-per-replica)")
    if bench is None or bench.rate is None:
        return _assume(assumptions, *assume_rate(build, bench))
    rate = bench.rate
    broken = rate.lowest_broken_per_s
    more = "" if broken is None else f", {broken:.4g}/s missed it"
    held = f"measured: {rate.highest_per_s:.4g}/s met {bench.slo}{more} ({_where(bench)})"
    return ExplainedValue(rate.highest_per_s, held)


def _peak(bench: BenchResult | None, capacity: ExplainedValue) -> ExplainedValue:
    best = find_best_point(bench.points, Slo()) if bench else None
    if bench is None or best is None:
        return capacity
    peak = best.median("throughput_per_s")
    return ExplainedValue(peak, f"measured: {peak:.4g}/s at most ({_where(bench)})")


def _assume(assumptions: list[Assumption], value: float, assumption: Assumption) -> ExplainedValue:
    assumptions.append(assumption)
    return ExplainedValue(value, str(assumption))


def _with_use(
    build: CompiledManifest, options: DeployOptions, bench: BenchResult | None, repository: Path
) -> MeasuredReplica:
    assumptions: list[Assumption] = []
    capacity = _capacity(build, options, bench, assumptions)
    used = None if bench is None else _use_at(bench, capacity.value)
    where = "" if bench is None else f" ({_where(bench)})"
    memory = _max_memory_mib(bench)
    if options.memory_mib is not None and options.memory_mib < memory:
        raise UserError(
            "--memory",
            "must not be below the measured use of the server",
            given=f"{options.memory_mib}Mi, and it used {memory:.0f} MiB",
            remedy="Give more, or build a smaller core (core.precision)",
        )
    planned = build.spec.serving.served_by
    if options.cpu_cores is not None:
        cpu_cores = ExplainedValue(options.cpu_cores, "given by the user (--cpu)")
    elif planned is not None:
        cpu_cores = ExplainedValue(planned.cores, f"the plan for {planned.name} (serving.machine)")
    elif used is None or not used.processes:
        cpu_cores = _assume(assumptions, *assume_cores(build))
    else:
        cores = sum(one.cpu_cores for one in used.processes)
        cpu_cores = ExplainedValue(
            cores,
            f"measured: {cores:.2f} of {used.cores} cores busy, at the rate nearest to "
            f"capacity{where}",
        )
    if options.memory_mib is not None:
        memory_mib = ExplainedValue(options.memory_mib, "given by the user (--memory)")
    elif used is None or not used.processes:
        memory_mib = _assume(assumptions, *assume_memory(build, repository))
    else:
        memory_mib = ExplainedValue(
            memory * MEMORY_MARGIN,
            f"measured: {memory:.0f} MiB at most{where}, times {MEMORY_MARGIN:g} for requests "
            "that a bench does not send",
        )
    gpus = [gpu.memory_mib for gpu in used.gpus] if used else []
    return MeasuredReplica(
        capacity_per_s=capacity,
        peak_per_s=_peak(bench, capacity),
        cpu_cores=cpu_cores,
        memory_mib=memory_mib,
        load_s=None if bench is None else bench.load_s,
        batch_s=_longest_batch_s(build, bench),
        gpu_memory_mib=max(gpus, default=None),
        assumptions=tuple(assumptions),
    )


def _read_bench(build: CompiledManifest, options: DeployOptions, file: Path) -> BenchResult | None:
    """Return the last bench of this build and SLO; None without a file."""
    by_hand = (options.rps_per_replica, options.cpu_cores, options.memory_mib)
    if not file.is_file():
        return None
    bench = read_result(BenchResult, file, "bench")
    again = f"Run `triptych bench {build.spec.name} --find-max-rate` again"
    given = _fault(build, bench)
    if given is None:
        return bench
    if None not in by_hand:
        return None
    raise UserError(str(file), "must be of this build and its SLO", given=given, remedy=again)


def _fault(build: CompiledManifest, bench: BenchResult) -> str | None:
    """Return the reason why a result is not valid for the build; None if it is valid."""
    subject = bench.subject
    own = (build.spec.name, build.gate.precision, build.plan.layout)
    measured = (subject.pipeline, subject.precision, subject.layout)
    if measured != own:
        return f"a measurement of {', '.join(measured)}; built is {', '.join(own)}"
    if _time(subject.measured_at) < _time(build.built_at):
        return f"measured at {subject.measured_at}, built at {build.built_at}"
    if bench.slo.limits_us != build.spec.serving.slo.limits_us:
        return f"measured for {bench.slo}; the SLO is {build.spec.serving.slo}"
    return None


def _check_slo(bench: BenchResult, capacity: float | None) -> None:
    """Raise a `UserError` if the measurements show that the SLO cannot be met."""
    name = bench.subject.pipeline
    rate = bench.rate
    alone = [p for p in bench.points if p.load.kind == "concurrency" and p.load.value == 1]
    latencies = bench.slo.without_throughput
    if any(point.rounds and point.judge(latencies) == "missed" for point in alone):
        raise UserError(
            "serving.slo",
            "must be met by one request alone",
            given=f"{bench.slo}; one client alone was measured at {alone[0].typical}",
            remedy=f"Raise the limit, or run `triptych tune {name}`",
        )
    if rate is None:
        return
    if rate.highest_per_s <= 0:
        raise UserError(
            "serving.slo",
            "must be met at some rate",
            given=f"{bench.slo}; {format_rates(rate)}",
            remedy=f"Raise the limit, or run `triptych tune {name}`",
        )
    broken = rate.lowest_broken_per_s
    if capacity is not None and broken is not None and capacity >= broken:
        raise UserError(
            "--rps-per-replica",
            "must be below the measured rate that missed the SLO",
            given=f"{capacity:g}/s; {broken:.4g}/s missed {bench.slo}",
            remedy=f"Leave it out: {rate.highest_per_s:.4g}/s met it",
        )


def _use_at(bench: BenchResult, rate_per_s: float) -> Resources | None:
    """Return the resources in the measured round whose throughput is nearest to a rate."""
    watched = [one for one in _rounds(bench) if one.resources is not None]
    nearest = min(watched, key=lambda one: abs(one.throughput_per_s - rate_per_s), default=None)
    return None if nearest is None else nearest.resources


def _max_memory_mib(bench: BenchResult | None) -> float:
    rounds = [] if bench is None else _rounds(bench)
    uses = [one.resources for one in rounds if one.resources is not None]
    return max((sum(p.memory_mib for p in use.processes) for use in uses), default=0.0)


def _rounds(bench: BenchResult) -> list[Measurement]:
    points = (*bench.points, *(bench.rate.points if bench.rate else ()))
    return [one for point in points for one in point.rounds]


def _longest_batch_s(build: CompiledManifest, bench: BenchResult | None) -> float | None:
    """Return the duration of the largest batch, by a row in the fullest batches of `bench`."""
    rounds = [] if bench is None else _rounds(bench)
    measured = [[use for use in one.steps if use.is_core and use.executions] for one in rounds]
    uses = max(measured, key=lambda cores: sum(use.mean_batch for use in cores), default=[])
    row_s = sum(use.compute_us / 1e6 / use.mean_batch for use in uses)
    tokens = build.traffic.get("mean_tokens", build.plan.max_length)
    longer = max(build.plan.max_length / max(tokens, 1), 1)
    return row_s * build.plan.max_batch_size * longer or None


def _where(bench: BenchResult) -> str:
    machine = bench.subject.machine
    kind = f"{machine.get('cores', '?')} cores of {machine.get('processor', 'a machine')}"
    return f"bench of {bench.subject.measured_at} on {kind}, server {bench.subject.server}"


def _time(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text)


START_S = 300
"""Start period of the image's own health check, for a load that is not measured."""
PROBE_S, PROBE_TIMEOUT_S, PROBE_FAILURES = 2, 10, 2
"""Interval, timeout and retries of the image's own health check."""
SCRAPE_S, POLL_S, SYNC_S, RATE_WINDOW_S = 15, 15, 15, 60
"""Intervals of Prometheus, KEDA and Kubernetes' autoscaler; the window of rates is four scrapes."""
TOLERANCE = 0.1
"""Relative deviation below which Kubernetes' autoscaler does not act."""
MIN_REPLICAS = 2
TMP_MIB = 64
PRE_STOP_S = 10
_DNS_S = 5

_START_TIMES, _MIN_START_S = 10, 60
_STABLE_TIMES, _MIN_STABLE_S, _MAX_STABLE_S = 3, 300, 3600
_END_MARGIN_S = 5
_MAX_FACTOR = 4


@dataclass(frozen=True)
class Sizes:
    """Seconds, MiB, cores and replicas of a deployment."""

    start_s: ExplainedValue
    pre_stop_s: ExplainedValue
    exit_timeout_s: ExplainedValue
    grace_s: ExplainedValue
    connection_age_s: ExplainedValue
    shm_mib: ExplainedValue
    memory_mib: ExplainedValue
    cpu_milli: ExplainedValue
    threshold_per_s: ExplainedValue  # Load of one replica: its capacity, less headroom
    min_replicas: ExplainedValue
    max_replicas: ExplainedValue
    stable_s: ExplainedValue
    tmp_mib: ExplainedValue = ExplainedValue(
        TMP_MIB, "scratch space of the steps; nothing in it persists"
    )


def compute_sizes(
    build: CompiledManifest, options: DeployOptions, measured: MeasuredReplica, repository: Path
) -> Sizes:
    """Return the numbers of a deployment.

    Raises:
        UserError: A replica cannot stop within its grace period, or its memory is too small.
    """
    ready_s, ready_reason = _ready(options, measured)
    delay_s = scaling_delay_s(ready_s)
    share = headroom(options.max_growth, ready_s)
    threshold = share * measured.capacity_per_s.value
    min_replicas = _min_replicas(build, threshold)
    exit_timeout = _exit_timeout(build, measured.batch_s)
    before_end = pre_stop(options)
    more = count_extra_instances(build, repository, math.ceil(measured.cpu_cores.value))
    shm = _shm(build, options, repository, more)
    return Sizes(
        start_s=_start(measured),
        pre_stop_s=before_end,
        exit_timeout_s=exit_timeout,
        grace_s=_grace(options, before_end.value, exit_timeout.value),
        connection_age_s=ExplainedValue(
            max(60, math.ceil(2 * delay_s)),
            "a gRPC client looks for new replicas only when a connection ends: twice the "
            f"{delay_s:.0f} s from more load to a ready replica, so that each soon gets its share",
        ),
        shm_mib=shm,
        memory_mib=_memory(build, options, measured, shm.value, more),
        cpu_milli=ExplainedValue(
            f"{max(100, math.ceil(measured.cpu_cores.value * 10) * 100)}m",
            f"{measured.cpu_cores.reason}. No limit: throttling would cost the slowest requests, "
            "and a step without CPU for a second may end the server. "
            f"{_threads(build)}",
        ),
        threshold_per_s=ExplainedValue(
            f"{threshold:.4g}",
            f"{share:.3f} (headroom) x {measured.capacity_per_s.value:.4g}/s (capacity): "
            f"replicas = ceil(rate / {threshold:.4g}). Capacity: {measured.capacity_per_s.reason}. "
            f"Headroom: the rate may grow by {options.max_growth:.0%} a minute (--max-growth), and "
            f"{delay_s:.0f} s pass until a new replica answers: {RATE_WINDOW_S / 2:.0f} s of the "
            f"rate's window, {SCRAPE_S} s to a scrape, {POLL_S} s to KEDA, {SYNC_S} s to the "
            f"autoscaler, {ready_s:.0f} s to ready ({ready_reason}); and the autoscaler "
            f"ignores deviations below {TOLERANCE:.0%}",
        ),
        min_replicas=min_replicas,
        max_replicas=_max_replicas(options, min_replicas.value, threshold),
        stable_s=ExplainedValue(
            stable_s(ready_s),
            f"a new replica takes {ready_s:.0f} s: before one is removed, the load "
            f"must have been lower for {_STABLE_TIMES} times that, and for Kubernetes' usual "
            f"{_MIN_STABLE_S} s",
        ),
    )


def scaling_delay_s(ready_s: float) -> float:
    """Return the seconds from a rise of the load to a new replica that serves."""
    return ready_s + SCRAPE_S + POLL_S + SYNC_S + RATE_WINDOW_S / 2


def headroom(growth: float, ready_s: float) -> float:
    """Return the ratio of a replica's capacity to use; the rest is for growth during scale-up."""
    return 1 / ((1 + growth * scaling_delay_s(ready_s) / 60) * (1 + TOLERANCE))


def stable_s(ready_s: float) -> int:
    """Return the seconds for which the load must have been lower before a replica is removed."""
    return min(_MAX_STABLE_S, max(_MIN_STABLE_S, math.ceil(_STABLE_TIMES * ready_s)))


def _threads(build: CompiledManifest) -> str:
    if build.spec.core.device == "gpu":
        return "The core itself is on the GPU"
    threads = build.spec.core.threads
    if threads is not None:
        return f"The core has {threads} threads (core.threads)"
    return "core.threads is not set: the core starts a thread for each core that the node has"


def _ready(options: DeployOptions, measured: MeasuredReplica) -> tuple[float, str]:
    if options.startup_seconds is not None:
        return options.startup_seconds, "given by the user, --startup-seconds"
    if measured.load_s is not None:
        return measured.load_s + PROBE_S, (
            f"the models were measured to load in {measured.load_s:.1f} s, and a probe; scheduling,"
            " images and new nodes are excluded: give --startup-seconds once a cluster has shown it"
        )
    return START_S, "not measured: the image's own start period; give --startup-seconds"


def _start(measured: MeasuredReplica) -> ExplainedValue:
    if measured.load_s is None:
        return ExplainedValue(
            START_S, "the load is not measured: the start period of the image itself"
        )
    seconds = max(_MIN_START_S, math.ceil(_START_TIMES * measured.load_s))
    return ExplainedValue(
        seconds,
        f"{seconds} s in all: measured, the models load and warm up in {measured.load_s:.1f} s; "
        f"{_START_TIMES} times that (at least {_MIN_START_S} s) for a slow disk and a busy node",
    )


def _exit_timeout(build: CompiledManifest, batch_s: float | None) -> ExplainedValue:
    """Return the maximum time in flight of a request: its wait plus its latency or batch."""
    wait_s = build.spec.serving.longest_wait_ms / 1e3
    limit_s = max(build.spec.serving.slo.limits_us.values()) / 1e6
    slowest_s = wait_s + max(limit_s, batch_s or 0)
    usual = ServerFlags.exit_timeout_s
    largest = f"takes {batch_s:.3g} s as measured" if batch_s else "is not measured"
    return ExplainedValue(
        str(max(usual, math.ceil(slowest_s))),
        f"requests in flight may still take {slowest_s:.3g} s (serving.queue and the SLO; the "
        f"largest batch {largest}); {usual} s is the image's own",
    )


def pre_stop(options: DeployOptions) -> ExplainedValue:
    """Return the seconds that a replica sleeps before SIGTERM."""
    if options.target == "compose":
        return ExplainedValue(
            0, "Docker keeps the container in DNS until SIGTERM, so a wait would have no effect"
        )
    why = "requests that still reach a stopping server fail"
    if options.envoy is not None:
        return ExplainedValue(
            PRE_STOP_S + _DNS_S,
            f"before SIGTERM, so that the proxy no longer uses this replica: {why}. {_DNS_S} s "
            "each for endpoints, the lifetime of a DNS answer, and the proxy's own refresh",
        )
    return ExplainedValue(
        PRE_STOP_S,
        f"before SIGTERM, so that endpoints and balancers no longer use this replica: {why}",
    )


def _grace(options: DeployOptions, pre_stop_s: int, exit_timeout: str) -> ExplainedValue:
    drain_s = pre_stop_s + int(exit_timeout) + math.ceil(EXIT_S)
    given = options.max_grace_seconds
    if given is not None and given < drain_s:
        raise UserError(
            "--max-grace-seconds",
            "must be longer than a replica takes to end: sleep, requests in flight, exit",
            given=f"{given} s; {pre_stop_s} + {exit_timeout} + {EXIT_S:g} s are {drain_s} s",
            remedy="Give more, or lower serving.queue.max_backlog_ms where the queue takes long",
        )
    return ExplainedValue(
        given or drain_s + _END_MARGIN_S,
        f"{pre_stop_s} s of preStop, {exit_timeout} s for requests in flight (exit timeout), "
        f"{EXIT_S:g} s for the server to end, and a margin: SIGKILL must never come first",
    )


def shm_mib(build: CompiledManifest, repository: Path) -> int:
    """Return the maximum shared memory of the Python steps in MiB."""
    processes = count_step_processes(build.spec)
    return processes * (STEP_SHM_MIB + largest_request_mib(repository, build.spec.name))


class ExtraInstances(NamedTuple):
    """Instances of Python steps and cores that a plan has in addition to ``config.pbtxt``."""

    python: int = 0
    core: int = 0


def count_extra_instances(build: CompiledManifest, repository: Path, cores: int) -> ExtraInstances:
    """Return the most instances that a plan for at most `cores` cores has in addition."""
    most = ExtraInstances()
    for name in variants_in(build.files):
        more = {True: 0, False: 0}
        for path in build.files if parse_machine(name).cores <= cores else ():
            model, _, file = path.partition("/")
            if file == f"configs/{name}.pbtxt":
                here, usual = (read_config(repository / model / f) for f in (file, CONFIG_FILE))
                count = here.instance_group[0].count - usual.instance_group[0].count
                more[here.backend == "python"] += count
        most = ExtraInstances(max(most.python, more[True]), max(most.core, more[False]))
    return most


def _shm(
    build: CompiledManifest, options: DeployOptions, repository: Path, more: ExtraInstances
) -> ExplainedValue:
    processes = count_step_processes(build.spec) + more.python
    request_mib = largest_request_mib(repository, build.spec.name)
    own_mib = step_shm_mib(options.server_variables)
    return ExplainedValue(
        processes * (own_mib + request_mib),
        f"{processes} Python processes (instances of preprocess and postprocess) x ({own_mib} "
        f"MiB + {request_mib} MiB, the largest request of the pipeline): tensors pass between "
        "Triton and its steps here, and steps die with the default of 64 MiB",
    )


def _memory(
    build: CompiledManifest,
    options: DeployOptions,
    measured: MeasuredReplica,
    shm_mib: int,
    more: ExtraInstances,
) -> ExplainedValue:
    if (given := given_memory(options, shm_mib)) is not None:
        return given
    instances = build.spec.serving.instances.core + more.core
    batch_mib = math.ceil((build.plan.batch_mib or 0) * instances)
    variables, cache_mib = options.server_variables, 0
    if build.spec.serving.response_cache and CACHE not in variables:
        cache_mib = int(variables.get(CACHE_SIZE, CACHE_MIB))
    planned_mib = more.python * STEP_MIB
    needed = measured.memory_mib.value + batch_mib + cache_mib + shm_mib + planned_mib
    return ExplainedValue(
        f"{round_up_mib(needed)}Mi",
        f"{measured.memory_mib.reason}; {batch_mib} MiB for {build.plan.max_batch_size} rows of "
        f"{build.plan.max_length} tokens in each of {instances} instances of the core, "
        f"estimated; {f'{cache_mib} MiB of response cache; ' if cache_mib else ''}"
        f"{f'{planned_mib} MiB of further Python steps; ' if planned_mib else ''}"
        f"and {shm_mib} MiB of shared memory, which counts as memory "
        "of the container. Request equals limit, so that a node cannot run out of memory",
    )


def given_memory(options: DeployOptions, shm_mib: int) -> ExplainedValue | None:
    """Return the memory of a replica that the user gives; None without the option.

    Raises:
        UserError: It is not more than the shared memory.
    """
    if options.memory_mib is None:
        return None
    if options.memory_mib <= shm_mib:
        raise UserError(
            "--memory",
            "must be more than shared memory, which counts as memory of the container",
            given=f"{options.memory_mib}Mi, of which {shm_mib} MiB may be shared",
            remedy="Give more, or fewer instances of the Python steps",
        )
    return ExplainedValue(
        f"{options.memory_mib}Mi", "given by the user (--memory); request and limit"
    )


def round_up_mib(mib: float) -> int:
    """Return a size of memory, rounded up to a multiple of 64 MiB."""
    return math.ceil(mib / 64) * 64


def _min_replicas(build: CompiledManifest, threshold: float) -> ExplainedValue:
    required = build.spec.serving.slo.throughput
    if required is None or required <= threshold:
        return ExplainedValue(
            MIN_REPLICAS,
            "one may end, or be replaced, while the other answers; the SLO's throughput needs no "
            "more",
        )
    needed = math.ceil(required / threshold)
    return ExplainedValue(
        max(MIN_REPLICAS, needed),
        f"{required:g}/s are the SLO (serving.slo.throughput): ceil({required:g} / "
        f"{threshold:.4g}), at least {MIN_REPLICAS}",
    )


def _max_replicas(options: DeployOptions, least: int, threshold: float) -> ExplainedValue:
    if options.peak_rps is None:
        return ExplainedValue(
            _MAX_FACTOR * least,
            f"{_MAX_FACTOR} times the minimum, to limit the cost; --peak-rps sets the need",
        )
    needed = math.ceil(options.peak_rps / threshold)
    return ExplainedValue(
        max(least, needed),
        f"a peak of {options.peak_rps:g}/s (--peak-rps): ceil({options.peak_rps:g} / "
        f"{threshold:.4g})",
    )
