"""Autoscalers on real servers: live PromQL as input, replicas behind a real Envoy as output.

Only the controller is simulated (`autoscaler.py`). The pipeline is built as usual, with an emulated
core, and the queries are those of the ScaledObject that `triptych deploy` writes. Time is scaled:
windows, scrapes and the interval of the controller are shortened by the same factor.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import emulated_core
from benchmarks.autoscaler import (
    Autoscaler,
    Observed,
    Scaling,
    deployed,
    fixed,
    queue_by_compute,
    supersonic,
)  # fmt: skip
from benchmarks.fleet_simulation import Outcome, Service, arrivals
from benchmarks.harness import say
from benchmarks.live_fleet import NAMESPACE, LiveFleet, live_fleet
from benchmarks.model import CACHE, PIPELINE, build
from triptych.base.explained import plain
from triptych.deploy.context import DeploymentContext, read_context
from triptych.deploy.kubernetes import render_scaled_object
from triptych.deploy.metrics import Metrics
from triptych.deploy.numbers import SCRAPE_S, SYNC_S
from triptych.deploy.options import DeployOptions

MAX_REPLICAS = 4
"""Maximum number of replicas at once, for a machine with two cores."""
LOAD_RATIOS = (0.35, 0.35, 0.42, 0.5, 0.6, 0.72, 0.86, 1.0, 0.6, 0.35)
"""Rates of the steps of the load as ratios of its peak."""
PEAK = 2.4
"""Peak of the load as a multiple of the capacity of one replica."""
GROWTH = 0.2
"""Maximum growth from one step to the next, which is given to `triptych deploy`."""
STEP_S = 150.0
"""Duration of a step before time is scaled."""
TIMEOUT_RATIO = 4
"""Timeout of a request and maximum backlog of the pipeline, as a multiple of the SLO limit."""
_CORE = emulated_core.CoreTime(batch_us=150_000.0, row_us=20_000.0, token_us=0.0)
_TRIED_RATES_PER_S = (31.0, 28.0, 25.0, 22.0, 19.0, 16.0)
"""Rates tried on one replica; with batches of 18 rows the core itself allows 35."""
_TRIAL_S, _DRAIN_S = 10.0, 3.0
_TEXT = "my delivery is late"
_NAME = PIPELINE.name
Query = Callable[[str], float]


@dataclass(frozen=True)
class LiveSystem:
    """An autoscaler under test, created from the function that answers its queries."""

    make_scaling: Callable[[Query], Scaling]
    first: int
    scrape_s: float = SCRAPE_S


@dataclass(frozen=True)
class FleetLoad:
    """Steps of seconds and rate; at most `max_miss_ratio` may be slower than `limit_s`."""

    steps: Sequence[tuple[float, float]]
    limit_s: float
    max_miss_ratio: float
    seed: int

    @property
    def seconds(self) -> float:
        return sum(seconds for seconds, _ in self.steps)

    def count_missed(self, latencies_s: NDArray[np.float64]) -> int:
        return int((latencies_s > self.limit_s).sum())


def build_repository(limit_s: float) -> Path:
    """Build the pipeline with an SLO and an emulated core; return its repository."""
    slo = f"serving.slo.p99_ms={1e3 * limit_s:g}"
    # The pipeline refuses only what its client would not wait for, so that all misses are due to
    # the size of the fleet.
    backlog = f"serving.queue.max_backlog_ms={1e3 * TIMEOUT_RATIO * limit_s:.0f}"
    built = build(CACHE / "gpu-scaling", "core.device=gpu", slo, backlog)
    return emulated_core.write_pipeline(built, _NAME, CACHE / "scaling", _CORE)


def run_fixed(load: FleetLoad, replicas: int) -> tuple[Outcome, Service]:
    """Run real servers without an autoscaler.

    Returns:
        The outcome, and the same replica for the simulation: the configured times of the core, and
        the overhead around it as the median latency of single requests shows it.
    """
    repository = build_repository(load.limit_s)
    config = emulated_core.read_config(repository / f"{_NAME}_core" / "config.pbtxt")
    rows = range(1, config.max_batch_size + 1)
    batch_s = [0.0, *((_CORE.batch_us + n * _CORE.row_us) / 1e6 for n in rows)]
    with tempfile.TemporaryDirectory() as folder:
        with live_fleet(repository, Path(folder) / "idle", 1, load.limit_s, SCRAPE_S) as fleet:
            fleet.scale(1)
            fleet.wait_ready()
            idle_s = float(np.median(_send(fleet.url, np.arange(10) * 0.5, load.limit_s)))
        system = LiveSystem(lambda _: fixed(replicas), replicas)
        outcome = _run(repository, Path(folder) / "run", system, load, 1.0)
    overhead_s = max(0.0, idle_s - batch_s[1])
    return outcome, Service(tuple(batch_s), TIMEOUT_RATIO * load.limit_s, overhead_s)


def compare(step_s: float, load: FleetLoad) -> tuple[dict[str, Any], list[Outcome]]:
    """Run every autoscaler under the same load.

    Args:
        step_s: Real duration of a step, which stands for `STEP_S`.
        load: Limits of the load; its steps are chosen by the capacity of a replica.

    Returns:
        Measured facts about one replica and the load, and the outcome of each autoscaler.
    """
    scale = step_s / STEP_S
    repository = build_repository(load.limit_s)
    with tempfile.TemporaryDirectory() as folder:
        capacity_per_s, ready_s = _measure_replica(repository, Path(folder) / "one", load)
        options = DeployOptions(
            image="triptych-serve:24.10", name=_NAME, triton="24.10", namespace=NAMESPACE,
            rps_per_replica=capacity_per_s, cpu_cores=1.0, memory_mib=4096,
            startup_seconds=ready_s / scale, max_growth=GROWTH,
        )  # fmt: skip
        context = read_context(repository, _NAME, options, CACHE / "reports", time_scale=scale)
        load = replace(load, steps=[(step_s, part * PEAK * capacity_per_s) for part in LOAD_RATIOS])
        outcomes = []
        for number, system in enumerate(_make_systems(context)):
            outcomes.append(_run(repository, Path(folder) / str(number), system, load, scale))
            say(str(outcomes[-1]))
    facts = {
        "a second stands for": f"{1 / scale:g} s",
        "capacity of one replica": f"{capacity_per_s:g}/s",
        "time until a replica is ready": f"{ready_s:.1f} s",
        "rate given to one replica": f"{float(context.sizes.threshold_per_s.value):.1f}/s",
    }
    return facts, outcomes


def _make_systems(context: DeploymentContext) -> list[LiveSystem]:
    metrics = context.metrics
    spec = plain(render_scaled_object(context))["spec"]
    first = math.ceil(LOAD_RATIOS[0] * PEAK) + 1
    by_compute, chart = queue_by_compute(MAX_REPLICAS), supersonic(MAX_REPLICAS)
    return [
        LiveSystem(lambda query: deployed(spec, query, MAX_REPLICAS), first),
        LiveSystem(lambda query: _with_query(by_compute, query, _ratio_query(metrics)), first),
        LiveSystem(lambda query: _with_query(chart, query, _execution_query(metrics)), first, 5.0),
        LiveSystem(lambda _: fixed(math.ceil(PEAK)), math.ceil(PEAK)),
    ]


def _with_query(scaling: Scaling, query: Query, text: str) -> Scaling:
    """Return the same configuration, with the value of its one trigger from Prometheus."""
    (trigger,) = scaling.triggers
    return replace(scaling, triggers=(replace(trigger, read=lambda _: query(text)),))


def _ratio_query(metrics: Metrics) -> str:
    """Return NVIDIA's recording rule for the core; an ensemble's excludes its steps' queues."""
    queue, compute = (
        f'rate({name}{{namespace="{NAMESPACE}",model="{_NAME}_core"}}[{metrics.window("1m")}])'
        for name in ("nv_inference_queue_duration_us", "nv_inference_compute_infer_duration_us")
    )
    return f"avg({queue} / clamp_min({compute}, 1))"


def _execution_query(metrics: Metrics) -> str:
    """Return the default metric of SuperSONIC's chart in ms; like the chart, for all models."""
    queue, runs = (
        f'sum(rate({name}{{namespace="{NAMESPACE}"}}[{metrics.window("15s")}]))'
        for name in ("nv_inference_queue_duration_us", "nv_inference_exec_count")
    )
    return f"{queue} / ({runs} * 1000 + 0.001)"


def _measure_replica(repository: Path, folder: Path, load: FleetLoad) -> tuple[float, float]:
    """Return the highest rate that one replica sustains, and its seconds until it is ready."""
    with live_fleet(repository, folder, 1, load.limit_s, SCRAPE_S) as fleet:
        fleet.scale(1)
        ready_s = fleet.wait_ready()
        for rate in _TRIED_RATES_PER_S:
            time.sleep(_DRAIN_S)
            latencies_s = _send(fleet.url, arrivals([(_TRIAL_S, rate)], load.seed), load.limit_s)
            missed = load.count_missed(latencies_s) / len(latencies_s)
            say(f"one replica, {rate:g}/s: {missed:.1%} missed; ready in {ready_s:.1f} s")
            if missed <= load.max_miss_ratio:
                return rate, ready_s
    raise SystemExit(f"One replica does not sustain {rate:g}/s: the machine is too busy.")


def _run(
    repository: Path, folder: Path, system: LiveSystem, load: FleetLoad, scale: float
) -> Outcome:
    """Run one autoscaler under the load."""
    limits = MAX_REPLICAS, load.limit_s, scale * system.scrape_s
    with live_fleet(repository, folder, *limits) as fleet:
        scaling = system.make_scaling(fleet.query)
        fleet.scale(system.first)
        fleet.wait_ready()
        began = time.monotonic()
        with _controlling(fleet, scaling, scale) as chosen:
            latencies_s = _send(fleet.url, arrivals(load.steps, load.seed), load.limit_s)
        answered_s = latencies_s[np.isfinite(latencies_s)]
        rows, runs = (
            f'sum(increase(nv_inference_{name}{{model="{_NAME}_core"}}[{load.seconds:.0f}s]))'
            for name in ("count", "exec_count")
        )
        return Outcome(
            scaling.name,
            len(latencies_s),
            load.count_missed(latencies_s),
            fleet.replica_s(began, began + load.seconds),
            {percent: float(np.percentile(answered_s, percent)) for percent in (50, 99)},
            fleet.query(f"{rows} / {runs}"),
            max(chosen),
        )


@contextmanager
def _controlling(fleet: LiveFleet, scaling: Scaling, scale: float) -> Iterator[list[int]]:
    """Run the autoscaler in a thread while the block runs; yield its numbers of replicas."""
    autoscaler, is_over, chosen = Autoscaler(scaling), threading.Event(), [fleet.wanted]

    def observe(_window_s: float) -> Observed:
        # The triggers query all other metrics themselves.
        return Observed(math.nan, math.nan, math.nan, math.nan, max(1, fleet.ready))

    def control() -> None:
        began = time.monotonic()
        while not is_over.wait(scale * SYNC_S):
            now = (time.monotonic() - began) / scale
            wanted = autoscaler.replicas(now, fleet.wanted, observe)
            if wanted != fleet.wanted:
                say(f"{now:.0f} s: {fleet.wanted} -> {wanted} replicas")
            fleet.scale(wanted)
            chosen.append(wanted)

    with ThreadPoolExecutor(1, "controller") as pool:
        work = pool.submit(control)
        try:
            yield chosen
        finally:
            is_over.set()
            work.result()


def _send(url: str, arrivals_s: NDArray[np.float64], limit_s: float) -> NDArray[np.float64]:
    """Send a request at each of these seconds.

    Returns:
        Latencies in seconds from the arrival; infinite where a request failed or timed out.
    """
    from tritonclient.grpc import InferInput
    from tritonclient.grpc.aio import InferenceServerClient
    from tritonclient.utils import InferenceServerException

    tensor = InferInput("text", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[_TEXT.encode()]], dtype=np.object_))

    async def send_all() -> NDArray[np.float64]:
        async def send(due: float) -> float:
            try:
                await client.infer(_NAME, [tensor], client_timeout=TIMEOUT_RATIO * limit_s)
            except InferenceServerException:
                return math.inf
            return time.perf_counter() - due

        async with InferenceServerClient(url) as client:
            start, tasks = time.perf_counter(), []
            for at in arrivals_s.tolist():
                await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
                tasks.append(asyncio.create_task(send(start + at)))
            return np.array(await asyncio.gather(*tasks))

    return asyncio.run(send_all())
