"""The numbers of a replica and of the fleet, each from what decides it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from triptych.base.errors import UserError
from triptych.base.explained import Because
from triptych.container.flags import Options as ServerOptions
from triptych.container.sizes import STEP_SHM_MIB, largest_request_mib
from triptych.container.supervisor import EXIT_S
from triptych.deploy.measured import Measured
from triptych.deploy.options import Options
from triptych.repository.lock import Lock

START_S = 300
"""The start period of the image's own health check: for a load that nobody measured."""
PROBE_S, PROBE_TIMEOUT_S, PROBE_FAILURES = 2, 5, 2
"""Interval, timeout and retries of the image's own health check."""
SCRAPE_S, POLL_S, SYNC_S, RATE_WINDOW_S = 15, 15, 15, 60
"""Prometheus, KEDA and Kubernetes' autoscaler look so often; a rate is taken over four scrapes."""
TOLERANCE = 0.1
"""Kubernetes' autoscaler leaves a fleet alone that is less far off."""
FEWEST_REPLICAS = 2
TMP_MIB = 64
PRE_STOP_S = 10
_DNS_S = 5

_START_TIMES, _LEAST_START_S = 10, 60
_STABLE_TIMES, _LEAST_STABLE_S, _MOST_STABLE_S = 3, 300, 3600
_END_MARGIN_S = 5
_MEMORY_STEP_MIB = 64
_ABOVE_FEWEST = 4


@dataclass(frozen=True)
class Sizes:
    """Seconds, MiB, cores and replicas.

    `threshold_per_s` is the rate that one replica is given: its capacity, less headroom.
    """

    start_s: Because
    pre_stop_s: Because
    exit_timeout_s: Because
    grace_s: Because
    connection_age_s: Because
    shm_mib: Because
    memory_mib: Because
    cpu_milli: Because
    threshold_per_s: Because
    fewest: Because
    most: Because
    stable_s: Because
    tmp_mib: Because = Because(TMP_MIB, "the steps' scratch; nothing is kept there")


def sizes_of(lock: Lock, options: Options, measured: Measured, repository: Path) -> Sizes:
    """All numbers of a deployment.

    Raises:
        UserError: a replica could not end in the time that it is left.
    """
    ready_s, ready_reason = _ready(options, measured)
    delay_s = delay(ready_s)
    share = headroom(options.growth, ready_s)
    threshold = share * measured.capacity_per_s.value
    fewest = _fewest(lock, threshold)
    exit_timeout = _exit_timeout(lock)
    before_end = pre_stop(options)
    shm = _shm(lock, repository)
    return Sizes(
        start_s=_start(options, measured),
        pre_stop_s=before_end,
        exit_timeout_s=exit_timeout,
        grace_s=_grace(options, before_end.value, exit_timeout.value),
        connection_age_s=Because(
            max(60, math.ceil(2 * delay_s)),
            "a gRPC client looks for new replicas only when a connection ends: twice the "
            f"{delay_s:.0f} s from more load to a ready replica, so that each soon gets its part",
        ),
        shm_mib=shm,
        memory_mib=_memory(lock, options, measured, shm.value),
        cpu_milli=Because(
            f"{max(100, math.ceil(measured.cpu_cores.value * 10) * 100)}m",
            f"{measured.cpu_cores.reason}. No limit: throttling would cost the slowest requests. "
            f"{_threads(lock)}",
        ),
        threshold_per_s=Because(
            f"{threshold:.4g}",
            f"{share:.3f} (headroom) x {measured.capacity_per_s.value:.4g}/s (capacity): "
            f"replicas = ceil(rate / {threshold:.4g}). Capacity: {measured.capacity_per_s.reason}. "
            f"Headroom: the rate may grow by {options.growth:.0%} a minute (--growth), and "
            f"{delay_s:.0f} s pass until a new replica answers: {RATE_WINDOW_S / 2:.0f} s of the "
            f"rate's window, {SCRAPE_S} s to a scrape, {POLL_S} s to KEDA, {SYNC_S} s to the "
            f"autoscaler, {ready_s:.0f} s to ready ({ready_reason}); and the autoscaler leaves a "
            f"fleet alone that is less than {TOLERANCE:.0%} off",
        ),
        fewest=fewest,
        most=_most(options, fewest.value, threshold),
        stable_s=Because(
            stable_s(ready_s),
            f"a replica that goes is missed for the {ready_s:.0f} s that a new one takes: the load "
            f"must have been lower for {_STABLE_TIMES} times that, and for Kubernetes' usual "
            f"{_LEAST_STABLE_S} s",
        ),
    )


def delay(ready_s: float) -> float:
    """Seconds from more load to a replica that takes its part."""
    return ready_s + SCRAPE_S + POLL_S + SYNC_S + RATE_WINDOW_S / 2


def headroom(growth: float, ready_s: float) -> float:
    """Share of its capacity that a replica is given: the rest is for growth until another one."""
    return 1 / ((1 + growth * delay(ready_s) / 60) * (1 + TOLERANCE))


def stable_s(ready_s: float) -> int:
    """Seconds for which the load must have been lower before a replica goes."""
    return min(_MOST_STABLE_S, max(_LEAST_STABLE_S, math.ceil(_STABLE_TIMES * ready_s)))


def _threads(lock: Lock) -> str:
    if lock.spec.core.device == "gpu":
        return "The core itself is on the GPU"
    threads = lock.spec.core.threads
    if threads is not None:
        return f"The core has {threads} threads (core.threads)"
    return "core.threads is not set: the core starts a thread for each core that the node has"


def _ready(options: Options, measured: Measured) -> tuple[float, str]:
    if options.ready_s is not None:
        return options.ready_s, "given by hand, --ready"
    if measured.load_s is not None:
        return measured.load_s + PROBE_S, (
            f"the models were measured to load in {measured.load_s:.1f} s, and a probe; scheduling,"
            " images and new nodes are not in it: give --ready once a cluster has told it"
        )
    return START_S, "nobody measured it: the image's own start period; give --ready"


def _start(options: Options, measured: Measured) -> Because:
    if measured.load_s is None:
        return Because(START_S, "nobody measured the load: the start period of the image itself")
    seconds = max(_LEAST_START_S, math.ceil(_START_TIMES * measured.load_s))
    return Because(
        seconds,
        f"{seconds} s in all: measured, the models load in {measured.load_s:.1f} s; "
        f"{_START_TIMES} times that (at least {_LEAST_START_S} s) for a slow disk and a busy node",
    )


def _exit_timeout(lock: Lock) -> Because:
    """Whatever is under way may take as long as it may wait, and its latency."""
    slowest_ms = (
        lock.spec.serving.longest_wait_ms + max(lock.spec.serving.slo.limits_us.values()) / 1e3
    )
    usual = ServerOptions.exit_timeout_s
    return Because(
        str(max(usual, math.ceil(slowest_ms / 1e3))),
        f"requests under way may still take {slowest_ms / 1e3:g} s (serving.queue and the promise);"
        f" {usual} s is the image's own",
    )


def pre_stop(options: Options) -> Because:
    """Seconds of a replica before SIGTERM."""
    if options.target == "compose":
        return Because(
            0, "Docker takes nothing out of its DNS before SIGTERM: a wait gains nothing"
        )
    why = "a server that is told to stop at once fails what still comes to it"
    if options.envoy is not None:
        return Because(
            PRE_STOP_S + _DNS_S,
            f"before SIGTERM, so that the proxy has let go of this replica: {why}. {_DNS_S} s each "
            "for endpoints, the time that DNS keeps an answer, and the proxy's own look",
        )
    return Because(
        PRE_STOP_S,
        f"before SIGTERM, so that endpoints and balancers have let go of this replica: {why}",
    )


def _grace(options: Options, pre_stop_s: int, exit_timeout: str) -> Because:
    drain_s = pre_stop_s + int(exit_timeout) + math.ceil(EXIT_S)
    given = options.grace_s
    if given is not None and given < drain_s:
        raise UserError(
            "--grace",
            "must be longer than a replica takes to end: sleep, requests under way, exit",
            given=f"{given} s; {pre_stop_s} + {exit_timeout} + {EXIT_S:g} s are {drain_s} s",
            remedy="Give more, or lower serving.queue.max_wait_ms where it is what takes long",
        )
    return Because(
        given or drain_s + _END_MARGIN_S,
        f"{pre_stop_s} s of preStop, {exit_timeout} s for requests under way (exit timeout), "
        f"{EXIT_S:g} s for the server to end, and a margin: SIGKILL must never come first",
    )


def shm_mib(lock: Lock, repository: Path) -> int:
    """Shared memory that the Python steps of a pipeline may need, in MiB."""
    processes = _step_processes(lock)
    return processes * (STEP_SHM_MIB + largest_request_mib(repository))


def _step_processes(lock: Lock) -> int:
    instances = lock.spec.serving.instances
    return instances.preprocess + instances.postprocess


def _shm(lock: Lock, repository: Path) -> Because:
    processes = _step_processes(lock)
    request_mib = largest_request_mib(repository)
    return Because(
        shm_mib(lock, repository),
        f"{processes} Python processes (instances of preprocess and postprocess) x ({STEP_SHM_MIB} "
        f"MiB + {request_mib} MiB, the largest request that the pipeline takes): tensors pass "
        "between Triton and its steps here, and 64 MiB, the usual size, ends them",
    )


def _memory(lock: Lock, options: Options, measured: Measured, shm_mib: int) -> Because:
    if options.memory_mib is not None:
        if options.memory_mib <= shm_mib:
            raise UserError(
                "--memory",
                "must be more than shared memory, which counts as the container's",
                given=f"{options.memory_mib}Mi, of which {shm_mib} MiB may be shared",
                remedy="Give more, or fewer instances of the Python steps",
            )
        return Because(f"{options.memory_mib}Mi", "given by hand (--memory); request and limit")
    instances = lock.spec.serving.instances.core
    batch_mib = math.ceil((lock.plan.batch_mib or 0) * instances)
    needed = measured.memory_mib.value + batch_mib + shm_mib
    rounded = math.ceil(needed / _MEMORY_STEP_MIB) * _MEMORY_STEP_MIB
    return Because(
        f"{rounded}Mi",
        f"{measured.memory_mib.reason}; {batch_mib} MiB for {lock.plan.max_batch_size} rows of "
        f"{lock.plan.max_length} tokens in each of {instances} instances of the core, "
        f"estimated; and {shm_mib} MiB of shared memory, which counts as the "
        "container's. Request and limit are one: a node must not run out of what it promised",
    )


def _fewest(lock: Lock, threshold: float) -> Because:
    promised = lock.spec.serving.slo.throughput
    if promised is None or promised <= threshold:
        return Because(
            FEWEST_REPLICAS, "one may end, or be exchanged, while the other answers; no promised "
            "throughput asks for more",
        )  # fmt: skip
    needed = math.ceil(promised / threshold)
    return Because(
        max(FEWEST_REPLICAS, needed),
        f"{promised:g}/s are promised (serving.slo.throughput): ceil({promised:g} / "
        f"{threshold:.4g}), at least {FEWEST_REPLICAS}",
    )


def _most(options: Options, fewest: int, threshold: float) -> Because:
    if options.peak_per_s is None:
        return Because(
            _ABOVE_FEWEST * fewest,
            f"{_ABOVE_FEWEST} times the fewest: a bound on cost; --peak-rate says what is needed",
        )
    needed = math.ceil(options.peak_per_s / threshold)
    return Because(
        max(fewest, needed),
        f"a peak of {options.peak_per_s:g}/s (--peak-rate): ceil({options.peak_per_s:g} / "
        f"{threshold:.4g})",
    )
