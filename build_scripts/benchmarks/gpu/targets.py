"""The targets of the GPU core, each met, missed or not run, with the figures that decide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.gpu.engine_speed import Speed
from benchmarks.gpu.served import MIN_ANSWERED, SHARE, Served

Status = Literal["met", "missed", "not run"]
PRECISION = "fp16"
EAGER = "torch eager fp32"
MIN_SPEEDUP = 4.0
MIN_SERVED_SHARE = 0.7
MAX_TAIL = 3.0


@dataclass(frozen=True)
class Target:
    """One target for one model.

    Attributes:
        model: name of the model.
        promise: in words.
        status: what became of it.
        figures: that decide; the reason where it was not run.
    """

    model: str
    promise: str
    status: Status
    figures: str


def judge(model: str, speeds: Sequence[Speed], served: Sequence[Served]) -> list[Target]:
    """The three targets of one model, strictly read.

    - one by one: both sides run one row at a time, of the traffic's lengths; the faster of the
      fp16 engines counts, as a user may choose;
    - served: one text a request, tokenized by the server, against the same engine on rows tokenized
      beforehand, in the batch size that suits the engine best;
    - tail: against the median latency of one client alone.

    Of the fp16 layouts served, the one with the highest rate counts.
    """
    own = [speed for speed in speeds if speed.model == model and speed.lengths == "mixed"]
    candidates = [one for one in served if one.model == model and one.precision == PRECISION]
    best = max(candidates, key=lambda one: one.top.rate_per_s, default=None)
    return [_one_by_one(model, own), _share(model, own, best), _tail(model, best)]


def _one_by_one(model: str, speeds: Sequence[Speed]) -> Target:
    promise = f"{PRECISION} engine at least {MIN_SPEEDUP:g} times {EAGER}, one by one"
    single = [speed for speed in speeds if speed.batch_size == 1]
    engines = [speed for speed in single if speed.contender.startswith(f"engine {PRECISION} ")]
    eager = next((speed for speed in single if speed.contender == EAGER), None)
    if not engines or eager is None:
        lacking = [f"no engine {PRECISION}"] * (not engines) + [f"no {EAGER}"] * (eager is None)
        return Target(model, promise, "not run", " and ".join(lacking) + " was measured")
    best = max(engines, key=lambda speed: speed.rows_per_s)
    ratio = best.rows_per_s / eager.rows_per_s
    figures = f"{ratio:.1f} times: {best.rows_per_s:.0f} rows/s ({best.contender}) against "
    return _decided(model, promise, ratio >= MIN_SPEEDUP, f"{figures}{eager.rows_per_s:.0f} rows/s")


def _share(model: str, speeds: Sequence[Speed], served: Served | None) -> Target:
    promise = f"served at least {MIN_SERVED_SHARE:g} of the bare engine, tokenization included"
    if served is None:
        return Target(model, promise, "not run", "no served pipeline was measured")
    name = f"engine {PRECISION} {served.layout}"
    bare = [speed for speed in speeds if speed.contender.startswith(name)]
    if not bare:
        return Target(model, promise, "not run", f"no {name} was measured")
    best = max(bare, key=lambda speed: speed.rows_per_s)
    ratio = served.top.rate_per_s / best.rows_per_s
    figures = (
        f"{ratio:.2f}: {served.top.rate_per_s:.0f} texts/s ({served.layout}, "
        f"{served.top.clients} clients) against {best.rows_per_s:.0f} rows/s ({best.load})"
    )
    return _decided(model, promise, ratio >= MIN_SERVED_SHARE, figures)


def _tail(model: str, served: Served | None) -> Target:
    promise = f"p99 at {SHARE:.0%} load at most {MAX_TAIL:g} times the latency of a single request"
    if served is None:
        return Target(model, promise, "not run", "no served pipeline was measured")
    load = served.poisson
    ratio = load.p99_ms / served.alone.p50_ms
    figures = (
        f"{ratio:.1f} times: p99 {load.p99_ms:.2f} ms at {load.offered_per_s:.0f}/s against p50 "
        f"{served.alone.p50_ms:.2f} ms ({served.layout})"
    )
    held = load.rate_per_s >= MIN_ANSWERED * (load.offered_per_s or 0.0)
    if not held:
        figures += f"; only {load.rate_per_s:.0f}/s were answered"
    return _decided(model, promise, held and ratio <= MAX_TAIL, figures)


def _decided(model: str, promise: str, met: bool, figures: str) -> Target:
    return Target(model, promise, "met" if met else "missed", figures)
