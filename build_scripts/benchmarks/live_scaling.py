"""Autoscalers on real servers: live PromQL in, replicas behind a real Envoy out.

The controller is simulated (`autoscaler.py`), all else is real: a built pipeline whose core
sleeps, Envoy, Prometheus, and the queries of the ScaledObject that `triptych deploy` writes. Time
is scaled: a second here stands for several, in windows, scrapes and the controller's looks alike.
"""

from __future__ import annotations

import asyncio
import math
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
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
)
from benchmarks.fleet_simulation import Outcome, arrivals
from benchmarks.live_fleet import NAMESPACE, LiveFleet, live_fleet
from benchmarks.model import CACHE, PIPELINE, build
from triptych.base.explained import plain
from triptych.base.releases import Release
from triptych.deploy.basis import Basis, basis_of
from triptych.deploy.metrics import Metrics
from triptych.deploy.numbers import SCRAPE_S, SYNC_S
from triptych.deploy.options import DeployOptions
from triptych.deploy.scaling import scaled_object
from triptych.serving.bench.bench import machine

MOST = 4
"""Replicas at once: two cores hold no more, also where each only sleeps."""
SHARES = (0.35, 0.35, 0.42, 0.5, 0.6, 0.72, 0.86, 1.0, 0.6, 0.35)
"""Steps of the load, as shares of its peak."""
PEAK = 2.4
"""Of the load, in capacities of one replica."""
GROWTH = 0.2
"""What the user names: no step is a larger share above the last."""
STEP_S = 150.0
"""What a step stands for."""
_CORE = emulated_core.CoreTime(batch_us=150_000.0, row_us=20_000.0, token_us=0.0)
_TRIED_PER_S = (31.0, 28.0, 25.0, 22.0, 19.0, 16.0)
"""Of one replica; with 18 rows a batch the core itself allows 35."""
_TRIED_S, _DRAINED_S = 10.0, 3.0
_TEXT = "my delivery is late"
_NAME = PIPELINE.name
_PATIENCE = 4
"""Promises that a client waits for."""
Ask = Callable[[str], float]


@dataclass(frozen=True)
class Contender:
    """An autoscaler, from who answers its queries; Prometheus scrapes each `scrape_s` for it."""

    scaling: Callable[[Ask], Scaling]
    first: int
    scrape_s: float = SCRAPE_S


@dataclass(frozen=True)
class Load:
    """Seconds and requests a second of each step; all but a share are to be answered in time."""

    steps: Sequence[tuple[float, float]]
    limit_s: float
    share: float
    seed: int

    @property
    def seconds(self) -> float:
        return sum(seconds for seconds, _ in self.steps)

    def late(self, latencies_s: NDArray[np.float64]) -> int:
        """Requests that missed the promise."""
        return int((latencies_s > self.limit_s).sum())


def compare(
    step_s: float, limit_s: float, share: float, seed: int
) -> tuple[dict[str, Any], list[Outcome]]:
    """What one replica was measured to be, and what became of the load with each autoscaler.

    Args:
        step_s: real seconds of a step, which stands for `STEP_S`.
        limit_s: the promise.
        share: of requests that may miss it.
        seed: of the arrivals.
    """
    scale = step_s / STEP_S
    promised = f"serving.slo.p99_ms={1e3 * limit_s:g}"
    # No pipeline refuses what its client would wait for: misses are then those of the fleet's size.
    patient = f"serving.queue.max_backlog_ms={1e3 * _PATIENCE * limit_s:.0f}"
    built = build(CACHE / "gpu-scaling", "core.device=gpu", promised, patient)
    repository = emulated_core.write_pipeline(built, _NAME, CACHE / "scaling", _CORE)
    load = Load((), limit_s, share, seed)
    with tempfile.TemporaryDirectory() as folder:
        holds, ready_s = _measure(repository, Path(folder) / "one", load)
        options = DeployOptions(
            "triptych-serve:24.10", _NAME, Release(24, 10), namespace=NAMESPACE,
            rps_per_replica=holds, cpu_cores=1.0, memory_mib=4096,
            startup_seconds=ready_s / scale, max_growth=GROWTH,
        )  # fmt: skip
        basis = basis_of(repository, _NAME, options, CACHE / "reports")
        load = replace(load, steps=[(step_s, part * PEAK * holds) for part in SHARES])
        outcomes = []
        for number, contender in enumerate(_contenders(basis, scale)):
            one = _run(repository, Path(folder) / str(number), contender, load, scale)
            _say(str(one))
            outcomes.append(one)
    facts = {
        "machine": machine(),
        "a second stands for": 1 / scale,
        "one replica holds a second": holds,
        "seconds to ready": ready_s,
        "rate given to one replica": float(basis.sizes.threshold_per_s.value),
        "steps": load.steps,
    }
    return facts, outcomes


def _contenders(basis: Basis, scale: float) -> list[Contender]:
    metrics = replace(basis.metrics, time_scale=scale)
    spec = plain(scaled_object(basis.lock, basis.options, basis.sizes, metrics))["spec"]
    first = math.ceil(SHARES[0] * PEAK) + 1
    return [
        Contender(lambda ask: deployed(spec, ask, MOST), first),
        Contender(lambda ask: _asking(queue_by_compute(MOST), ask, _ratio(metrics)), first),
        Contender(lambda ask: _asking(supersonic(MOST), ask, _an_execution(metrics)), first, 5.0),
        Contender(lambda _: fixed(math.ceil(PEAK)), math.ceil(PEAK)),
    ]


def _asking(scaling: Scaling, ask: Ask, query: str) -> Scaling:
    """The same with its one trigger's value from Prometheus."""
    (trigger,) = scaling.triggers
    return replace(scaling, triggers=(replace(trigger, read=lambda _: ask(query)),))


def _ratio(metrics: Metrics) -> str:
    """NVIDIA's recording rule, of the core: that of an ensemble leaves out its steps' queues."""
    queue, compute = (
        f'rate({name}{{namespace="{NAMESPACE}",model="{_NAME}_core"}}[{metrics.window("1m")}])'
        for name in ("nv_inference_queue_duration_us", "nv_inference_compute_infer_duration_us")
    )
    return f"avg({queue} / clamp_min({compute}, 1))"


def _an_execution(metrics: Metrics) -> str:
    """The default metric of SuperSONIC's chart, in milliseconds, of all models as there."""
    queue, runs = (
        f'sum(rate({name}{{namespace="{NAMESPACE}"}}[{metrics.window("15s")}]))'
        for name in ("nv_inference_queue_duration_us", "nv_inference_exec_count")
    )
    return f"{queue} / ({runs} * 1000 + 0.001)"


def _measure(repository: Path, folder: Path, load: Load) -> tuple[float, float]:
    """The highest of a few rates that one replica holds, and its seconds from start to traffic."""
    with _fleet(repository, folder, load, 1, SCRAPE_S) as fleet:
        fleet.scale(1)
        ready_s = fleet.wait_ready()
        for rate in _TRIED_PER_S:
            time.sleep(_DRAINED_S)
            tried = replace(load, steps=[(_TRIED_S, rate)])
            latencies_s = _send(fleet.url, tried)
            missed = load.late(latencies_s) / len(latencies_s)
            _say(f"one replica, {rate:g}/s: {missed:.1%} missed; ready in {ready_s:.1f} s")
            if missed <= load.share:
                return rate, ready_s
    raise SystemExit(f"one replica holds not even {_TRIED_PER_S[-1]:g}/s: the machine is too busy")


def _run(repository: Path, folder: Path, contender: Contender, load: Load, scale: float) -> Outcome:
    """One autoscaler under the load."""
    with _fleet(repository, folder, load, MOST, scale * contender.scrape_s) as fleet:
        scaling = contender.scaling(fleet.ask)
        fleet.scale(contender.first)
        fleet.wait_ready()
        control = _Control(fleet, scaling, scale)
        began = time.monotonic()
        with control:
            latencies_s = _send(fleet.url, load)
        answered_s = latencies_s[np.isfinite(latencies_s)]
        return Outcome(
            scaling.name,
            len(latencies_s),
            load.late(latencies_s),
            fleet.replica_s(began, began + load.seconds),
            {percent: float(np.percentile(answered_s, percent)) for percent in (50, 99)},
            fleet.ask(_mean_batch(load.seconds)),
            control.most,
        )


def _fleet(
    repository: Path, folder: Path, load: Load, most: int, scrape_s: float
) -> AbstractContextManager[LiveFleet]:
    return live_fleet(
        repository, folder, pipeline=_NAME, most=most, limit_ms=1e3 * load.limit_s,
        scrape_s=scrape_s,
    )  # fmt: skip


class _Control:
    """The controller: looks, and has replicas started and stopped, while the context lasts."""

    def __init__(self, fleet: LiveFleet, scaling: Scaling, scale: float) -> None:
        self.most = fleet.wanted
        self._fleet = fleet
        self._autoscaler = Autoscaler(scaling)
        self._scale = scale
        self._is_over = threading.Event()
        self._pool = ThreadPoolExecutor(1, "controller")

    def __enter__(self) -> None:
        self._looks = self._pool.submit(self._look_on)

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._pool.shutdown()
        self._looks.result()

    def _look_on(self) -> None:
        began = time.monotonic()
        while not self._is_over.wait(self._scale * SYNC_S):
            self._look((time.monotonic() - began) / self._scale)

    def _look(self, now: float) -> None:
        fleet = self._fleet
        seen = Observed(math.nan, math.nan, math.nan, math.nan, max(1, fleet.ready))
        wanted = self._autoscaler.replicas(now, fleet.wanted, lambda _window_s: seen)
        if wanted != fleet.wanted:
            _say(f"{now:.0f} s: {fleet.wanted} -> {wanted} replicas")
        fleet.scale(wanted)
        self.most = max(self.most, wanted)


def _mean_batch(seconds: float) -> str:
    rows, runs = (
        f'sum(increase(nv_inference_{name}{{model="{_NAME}_core"}}[{seconds:.0f}s]))'
        for name in ("count", "exec_count")
    )
    return f"{rows} / {runs}"


def _send(url: str, load: Load) -> NDArray[np.float64]:
    """Latencies in seconds, from when each request was due; infinite where it failed."""
    return asyncio.run(_ask(url, arrivals(load.steps, load.seed), _PATIENCE * load.limit_s))


async def _ask(url: str, arrivals_s: NDArray[np.float64], patience_s: float) -> NDArray[np.float64]:
    from tritonclient.grpc import InferInput
    from tritonclient.grpc.aio import InferenceServerClient
    from tritonclient.utils import InferenceServerException

    tensor = InferInput("text", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[_TEXT.encode()]], dtype=np.object_))

    async def ask(due: float) -> float:
        try:
            await client.infer(_NAME, [tensor], client_timeout=patience_s)
        except InferenceServerException:
            return math.inf
        return time.perf_counter() - due

    async with InferenceServerClient(url) as client:
        start = time.perf_counter()
        tasks = []
        for at in arrivals_s.tolist():
            pause = start + at - time.perf_counter()
            if pause > 0:
                await asyncio.sleep(pause)
            tasks.append(asyncio.create_task(ask(start + at)))
        return np.array(await asyncio.gather(*tasks))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
