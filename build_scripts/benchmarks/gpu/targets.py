"""Targets of the GPU core, each with the figures that decide whether it is met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.gpu.engine_speed import Speed
from benchmarks.gpu.served import MIN_ANSWERED_RATIO, POISSON_RATIO, Served

Status = Literal["met", "missed", "not run"]
PRECISION = "fp16"
EAGER = "torch eager fp32"
MIN_SPEEDUP = 4.0
MIN_SERVED_RATIO = 0.7
MAX_TAIL_RATIO = 3.0


@dataclass(frozen=True)
class Target:
    """A target for a model; the figures are the reason where it was not run."""

    model: str
    text: str
    status: Status
    figures: str


def judge(model: str, speeds: Sequence[Speed], served: Sequence[Served]) -> list[Target]:
    """Return the three targets of a model.

    - one row at a time: both sides on the traffic's lengths; the faster fp16 engine counts;
    - served: one text a request, tokenized by the server, and the same engine on rows that are
      tokenized before, in its best batch size;
    - tail: p99 at 70 % load and the median latency of one client alone.

    Of the fp16 layouts that are served, the one with the highest rate counts.
    """
    own = [speed for speed in speeds if speed.model == model and speed.lengths == "mixed"]
    candidates = [one for one in served if one.model == model and one.precision == PRECISION]
    best = max(candidates, key=lambda one: one.top.rate_per_s, default=None)
    return [_judge_single(model, own), _judge_served(model, own, best), _judge_tail(model, best)]


def _judge_single(model: str, speeds: Sequence[Speed]) -> Target:
    text = f"{PRECISION} engine at least {MIN_SPEEDUP:g} times {EAGER}, one row at a time"
    single = [speed for speed in speeds if speed.batch_size == 1]
    engines = [speed for speed in single if speed.system.startswith(f"engine {PRECISION} ")]
    eager = next((speed for speed in single if speed.system == EAGER), None)
    if not engines or eager is None:
        missing = [f"no engine {PRECISION}"] * (not engines) + [f"no {EAGER}"] * (eager is None)
        return Target(model, text, "not run", " and ".join(missing) + " was measured")
    best = max(engines, key=lambda speed: speed.rate_per_s)
    ratio = best.rate_per_s / eager.rate_per_s
    figures = f"{ratio:.1f} times: {best.rate_per_s:.0f} rows/s ({best.system}) and "
    return _decide(model, text, ratio >= MIN_SPEEDUP, f"{figures}{eager.rate_per_s:.0f} rows/s")


def _judge_served(model: str, speeds: Sequence[Speed], served: Served | None) -> Target:
    text = f"served at least {MIN_SERVED_RATIO:g} of the engine in process, with tokenization"
    if served is None:
        return Target(model, text, "not run", "no served pipeline was measured")
    name = f"engine {PRECISION} {served.layout}"
    engines = [speed for speed in speeds if speed.system.startswith(name)]
    if not engines:
        return Target(model, text, "not run", f"no {name} was measured")
    best = max(engines, key=lambda speed: speed.rate_per_s)
    ratio = served.top.rate_per_s / best.rate_per_s
    figures = (
        f"{ratio:.2f}: {served.top.rate_per_s:.0f} texts/s ({served.layout}, "
        f"{served.top.clients} clients) and {best.rate_per_s:.0f} rows/s ({best.load})"
    )
    return _decide(model, text, ratio >= MIN_SERVED_RATIO, figures)


def _judge_tail(model: str, served: Served | None) -> Target:
    text = f"p99 at {POISSON_RATIO:.0%} load at most {MAX_TAIL_RATIO:g} times the single latency"
    if served is None:
        return Target(model, text, "not run", "no served pipeline was measured")
    load = served.poisson
    ratio = load.p99_ms / served.single.p50_ms
    figures = (
        f"{ratio:.1f} times: p99 {load.p99_ms:.2f} ms at {load.offered_per_s:.0f}/s and p50 "
        f"{served.single.p50_ms:.2f} ms ({served.layout})"
    )
    is_valid = load.rate_per_s >= MIN_ANSWERED_RATIO * (load.offered_per_s or 0.0)
    if not is_valid:
        figures += f"; only {load.rate_per_s:.0f}/s were answered"
    return _decide(model, text, is_valid and ratio <= MAX_TAIL_RATIO, figures)


def _decide(model: str, text: str, is_met: bool, figures: str) -> Target:
    return Target(model, text, "met" if is_met else "missed", figures)
