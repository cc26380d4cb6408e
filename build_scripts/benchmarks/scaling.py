"""Compare autoscalers on missed SLOs and replica-seconds, in a simulation of KEDA.

First three real servers and their simulation get the same load, which shows how far the simulation
is off. Then the simulation compares. With ``--live`` the autoscalers read a real Prometheus and
scale up to four real servers instead.

Usage: ``python build_scripts/benchmarks/scaling.py [--replicas 1000 | --live]``.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks import live_scaling
from benchmarks.autoscaler import fixed, own, queue_by_compute, supersonic
from benchmarks.fleet_simulation import Fleet, Outcome, Service, arrivals, capacity
from benchmarks.harness import finish, make_parser, tabulate
from benchmarks.model import CACHE
from benchmarks.results import Table

LIMIT_S, MAX_MISS_RATIO = 1.0, 0.01
"""The SLO: 99 % of the requests within a second."""
READY_S = 30.0
REAL_REPLICAS = 3
REAL_STEPS = ((15.0, 20.0), (15.0, 45.0), (15.0, 120.0), (20.0, 25.0))
"""Seconds and rates of the load on real servers; one step is more than they sustain."""


def make_steps(peak_per_s: float) -> list[tuple[float, float]]:
    """Return twelve steps of 4 minutes up to a peak and down again, which grow by half at most."""
    ratios = (0.2, 0.3, 0.45, 0.65, 0.95, 1.0, 0.7, 0.45, 0.3, 0.2, 0.2, 0.2)
    return [(240.0, ratio * peak_per_s) for ratio in ratios]


def make_day(peak_per_s: float, hours: float) -> list[tuple[float, float]]:
    """Return a day in steps of 15 s, compressed to `hours`; the minimum is a fifth of the peak."""
    count = round(hours * 240)
    ratios = [0.6 - 0.4 * math.cos(2 * math.pi * (index + 0.5) / count) for index in range(count)]
    return [(15.0, ratio * peak_per_s) for ratio in ratios]


def compute_growth(steps: Sequence[tuple[float, float]]) -> float:
    """Return the maximum growth of the rate in a minute, as a ratio."""
    rates = np.repeat([rate for _, rate in steps], [round(seconds / 15) for seconds, _ in steps])
    return round(float((rates[4:] / rates[:-4]).max() - 1), 2)


def compare(
    service: Service, steps: Sequence[tuple[float, float]], seed: int
) -> tuple[float, list[Outcome]]:
    """Run every autoscaler under the same requests; return the growth and the outcomes."""
    capacity_per_s = capacity(service, LIMIT_S, MAX_MISS_RATIO)
    needed = math.ceil(max(rate for _, rate in steps) / capacity_per_s)
    growth, requests = compute_growth(steps), arrivals(steps, seed)
    maximum = 4 * needed
    first = math.ceil(steps[0][1] / capacity_per_s) + 1
    found = []
    for scaling in (
        own(capacity_per_s, LIMIT_S, growth, READY_S, maximum),
        queue_by_compute(maximum),
        supersonic(maximum),
        fixed(needed),
    ):
        started = max(scaling.min_replicas, first) if scaling.triggers else needed
        found.append(Fleet(service, scaling, LIMIT_S, READY_S, seed).run(requests, started))
    return growth, found


def make_table(title: str, outcomes: Sequence[Outcome]) -> Table:
    """Return a row for each outcome."""
    return tabulate(
        title,
        outcomes,
        {
            "autoscaler": lambda one: one.name,
            "requests": lambda one: f"{one.offered:,}",
            "missed": lambda one: f"{one.missed / one.offered:.3%}",
            "replica-seconds": lambda one: f"{one.replica_s:,.0f}",
            "p50 ms": lambda one: f"{1e3 * one.latency_s[50]:.0f}",
            "p99 ms": lambda one: f"{1e3 * one.latency_s[99]:.0f}",
            "rows per batch": lambda one: f"{one.mean_batch:.1f}",
            "most replicas": lambda one: str(one.max_replicas),
        },
    )


def main() -> int:
    """Compare in a simulation or on real servers."""
    parser = make_parser(__doc__, "scaling", "Autoscalers in a simulation (`make scaling`)")
    parser.add_argument("--replicas", type=int, default=12, help="replicas at the peak of the day")
    parser.add_argument("--hours", type=float, default=4.0, help="duration of the day")
    parser.add_argument("--live", action="store_true", help="scale real servers by live PromQL")
    parser.add_argument("--step-seconds", type=float, default=15.0, help="step with --live")
    parser.add_argument("--seed", type=int, default=1)
    if parser.parse_known_args()[0].live:
        title = "Autoscalers on real servers (`make scaling ARGS=--live`)"
        parser.set_defaults(output=CACHE / "scaling_live.json", name="scaling_live", title=title)
    options = parser.parse_args()
    if options.live:
        load = live_scaling.FleetLoad((), LIMIT_S, MAX_MISS_RATIO, options.seed)
        facts, outcomes = live_scaling.compare(options.step_seconds, load)
        table = make_table("Real servers behind Envoy, scaled by live PromQL", outcomes)
        finish(options, [table], outcomes, [f"{name}: {value}" for name, value in facts.items()])
        return 0
    tables, data = simulate(options)
    note = f"the SLO: p99 <= {LIMIT_S:g} s; {READY_S:.0f} s until a replica is ready"
    finish(options, tables, data, [note])
    return 0


def simulate(options: argparse.Namespace) -> tuple[list[Table], dict[str, Any]]:
    """Check the simulation with real servers, then compare by it."""
    load = live_scaling.FleetLoad(REAL_STEPS, LIMIT_S, MAX_MISS_RATIO, options.seed)
    real, service = live_scaling.run_fixed(load, REAL_REPLICAS)
    requests = arrivals(REAL_STEPS, options.seed)
    same = Fleet(service, fixed(REAL_REPLICAS), LIMIT_S, 0.0, options.seed)
    simulated = same.run(requests, REAL_REPLICAS)
    checked = [replace(real, name=f"{REAL_REPLICAS} real servers behind Envoy")]
    checked.append(replace(simulated, name="simulated"))
    tables = [make_table("The same load on real servers and simulated", checked)]
    data: dict[str, Any] = {"check": checked, "service": service}
    capacity_per_s = capacity(service, LIMIT_S, MAX_MISS_RATIO)
    day = make_day(options.replicas * capacity_per_s, options.hours)
    for title, steps in (
        ("Steps, 4 replicas at the peak", make_steps(4 * capacity_per_s)),
        (f"A day in {options.hours:g} h, {options.replicas} replicas at the peak", day),
    ):
        began = time.perf_counter()
        growth, data[title] = compare(service, steps, options.seed)
        took = time.perf_counter() - began
        text = f"{title}; growth {growth:.0%} a minute; simulated in {took:.0f} s"
        tables.append(make_table(text, data[title]))
    return tables, data


if __name__ == "__main__":
    raise SystemExit(main())
