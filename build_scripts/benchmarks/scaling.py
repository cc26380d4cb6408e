"""Autoscalers compared on missed promises and replica-seconds: a simulation of KEDA.

First three real servers and the simulation of them get the same load, which tells how far the
simulation is off; what a batch takes is measured there. Then the simulation compares.

With ``--live`` the autoscalers read a real Prometheus and move up to four real servers instead.

Usage: ``python build_scripts/benchmarks/scaling.py [--replicas 1000 | --live]``.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import live_scaling, real_fleet
from benchmarks.autoscaler import Scaling, fixed, own, queue_by_compute, supersonic
from benchmarks.fleet_simulation import Fleet, Outcome, Service, arrivals, capacity
from benchmarks.model import CACHE

LIMIT_S, SHARE = 1.0, 0.01
"""The promise: 99 % within it."""
READY_S = 30.0
REAL_STEPS = ((15.0, 20.0), (15.0, 45.0), (15.0, 95.0), (20.0, 25.0))
"""Seconds and requests a second on three real servers; one step is more than they hold."""


def measure(seed: int) -> tuple[Service, real_fleet.RealRun]:
    """What one replica takes, and the run of three that told it."""
    with tempfile.TemporaryDirectory() as folder:
        found = real_fleet.run(Path(folder) / "models", 3, arrivals(REAL_STEPS, seed))
    sizes = sorted(found.batch_s)
    took = np.interp(range(1, real_fleet.MAX_ROWS + 1), sizes, [found.batch_s[n] for n in sizes])
    overhead = max(0.0, found.idle_s - found.batch_s[sizes[0]])
    return Service((0.0, *took.tolist()), 2 * LIMIT_S, overhead), found


def stepped(peak_per_s: float) -> list[tuple[float, float]]:
    """Twelve steps of 4 minutes up to a peak and down again, none more than half above the last."""
    shares = (0.2, 0.3, 0.45, 0.65, 0.95, 1.0, 0.7, 0.45, 0.3, 0.2, 0.2, 0.2)
    return [(240.0, share * peak_per_s) for share in shares]


def curve(peak_per_s: float, hours: float) -> list[tuple[float, float]]:
    """A day in so many hours: a fifth of the peak at night, a step each 15 s."""
    count = round(hours * 240)
    shares = [0.6 - 0.4 * math.cos(2 * math.pi * (index + 0.5) / count) for index in range(count)]
    return [(15.0, share * peak_per_s) for share in shares]


def growth_of(steps: Sequence[tuple[float, float]]) -> float:
    """The most by which the rate grows in a minute: what the user names."""
    rates = np.repeat([rate for _, rate in steps], [round(seconds / 15) for seconds, _ in steps])
    return round(float((rates[4:] / rates[:-4]).max() - 1), 2)


def compare(
    service: Service, steps: Sequence[tuple[float, float]], seed: int
) -> tuple[float, list[Outcome]]:
    """Every autoscaler under the same requests, the fixed fleet made for the peak; the growth."""
    holds = capacity(service, LIMIT_S, SHARE)
    needed = math.ceil(max(rate for _, rate in steps) / holds)
    growth, came = growth_of(steps), arrivals(steps, seed)
    most = 4 * needed
    scalings: list[Scaling] = [
        own(holds, LIMIT_S, growth, READY_S, most),
        queue_by_compute(most),
        supersonic(most),
        fixed(needed),
    ]
    first = math.ceil(steps[0][1] / holds) + 1
    found = []
    for scaling in scalings:
        started = needed if not scaling.triggers else max(scaling.fewest, first)
        found.append(Fleet(service, scaling, LIMIT_S, READY_S, seed).run(came, started))
    return growth, found


def show(title: str, outcomes: Sequence[Outcome]) -> None:
    """A Markdown table."""
    print(f"\n{title}\n")
    print(
        "| autoscaler | missed | replica-seconds | p50 ms | p99 ms | rows a batch | most replicas |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for one in outcomes:
        latencies = " | ".join(f"{1e3 * one.latency_s[percent]:.0f}" for percent in (50, 99))
        print(
            f"| {one.name} | {one.missed / one.offered:.3%} | {one.replica_s:,.0f} | {latencies} |"
            f" {one.mean_batch:.1f} | {one.most} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=12, help="of the large fleet, at its peak")
    parser.add_argument("--hours", type=float, default=4.0, help="that its day takes")
    parser.add_argument("--live", action="store_true", help="on real servers, by live PromQL")
    parser.add_argument("--step-seconds", type=float, default=15.0, help="of a step, with --live")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="the results as JSON")
    args = parser.parse_args()
    results = live(args.step_seconds, args.seed) if args.live else simulate(args)
    out = args.out or CACHE / ("scaling-live.json" if args.live else "scaling.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1))


def live(step_s: float, seed: int) -> dict[str, Any]:
    """Compare on real servers, and print."""
    facts, outcomes = live_scaling.compare(step_s, LIMIT_S, SHARE, seed)
    for name, value in facts.items():
        print(f"{name}: {value}")
    show("Real servers behind Envoy, scaled by live PromQL", outcomes)
    return {**facts, "outcomes": [asdict(one) for one in outcomes]}


def simulate(args: argparse.Namespace) -> dict[str, Any]:
    """Hold the simulation against real servers, then compare by it, and print."""
    service, real = measure(args.seed)
    holds = capacity(service, LIMIT_S, SHARE)
    patient = replace(service, longest_wait_s=math.inf)  # the real servers here refuse nobody
    same = Fleet(patient, fixed(3), LIMIT_S, 0.0, args.seed).run(arrivals(REAL_STEPS, args.seed), 3)
    p50, p99 = np.percentile(real.latency_s, [50, 99])
    seen = Outcome(
        "three real servers", len(real.latency_s), int((real.latency_s > LIMIT_S).sum()),
        3 * sum(seconds for seconds, _ in REAL_STEPS), {50: p50, 99: p99}, real.mean_batch, 3,
    )  # fmt: skip
    print(f"one replica holds {holds:.1f}/s; batches of 1 to {service.most} take, in ms: "
          + ", ".join(f"{1e3 * took:.0f}" for took in service.batch_s[1:])
          + f"; {1e3 * service.overhead_s:.1f} ms around them")  # fmt: skip
    show("The same load on real servers and simulated", [seen, same])
    results: dict[str, Any] = {"real": asdict(seen), "simulated": asdict(same)}
    for title, steps in (
        ("Steps, for 4 replicas at the peak", stepped(4 * holds)),
        (f"A day in {args.hours:g} h, {args.replicas} at the peak",
         curve(args.replicas * holds, args.hours)),
    ):  # fmt: skip
        began = time.perf_counter()
        growth, outcomes = compare(service, steps, args.seed)
        took = time.perf_counter() - began
        show(
            f"{title}; growth {growth:.0%} a minute, {READY_S:.0f} s to ready ({took:.0f} s)",
            outcomes,
        )
        results[title] = [asdict(one) for one in outcomes]
    return results


if __name__ == "__main__":
    main()
