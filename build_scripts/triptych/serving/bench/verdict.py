"""What a bench comes to: whether the promise holds, the best figures, what holds it back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from triptych.base.formatting import amount, milliseconds, rounded
from triptych.serving.bench.points import BenchResult, Bottleneck, Point, RateSearch
from triptych.spec.slo import AnySlo, Slo


@dataclass(frozen=True)
class SloVerdict:
    """Whether a promise holds: a word, and a sentence with the figures."""

    kind: Literal["met", "not met", "none"]
    says: str

    @property
    def word(self) -> str:
        return {"met": "SLO met", "not met": "SLO NOT MET", "none": "No SLO"}[self.kind]


def closed_loops(points: Sequence[Point]) -> list[Point]:
    """Those with a number of clients, ascending."""
    closed = [point for point in points if point.load.kind == "concurrency"]
    return sorted(closed, key=lambda point: point.load.value)


def best_point(points: Sequence[Point], slo: AnySlo) -> Point | None:
    """The highest throughput that holds `slo`; else without an error, else of any."""
    held = [point for point in points if point.meets(slo)]
    clean = [point for point in points if not point.errors]
    return max(
        held or clean or points, key=lambda point: point.median("throughput_per_s"), default=None
    )


def bottleneck_of(points: Sequence[Point]) -> Bottleneck | None:
    """That of the highest throughput, promise or not: what holds it from growing."""
    told = [point for point in points if point.bottleneck is not None]
    best = best_point(told, Slo())
    return best.bottleneck if best else None


def verdict_of(result: BenchResult) -> SloVerdict:
    """Whether `result` holds its promise.

    Where rates were searched they decide: a closed loop slows its clients down with the server,
    and so hides a queue that real clients would stand in.
    """
    slo = result.slo
    if slo.is_empty:
        return SloVerdict("none", "Nothing is promised, so there is nothing to hold it to.")
    if result.rate is not None:
        highest = result.rate.highest_per_s
        met = highest > 0 and highest >= (slo.throughput or 0)
        return SloVerdict("met" if met else "not met", f"{slo}: {rates_say(result.rate)}.")
    held = [point for point in result.points if point.meets(slo)]
    best = best_point(result.points, slo)
    if best is None:
        return SloVerdict("not met", f"{slo}: nothing was measured.")
    if held:
        loads = ", ".join(str(point.load) for point in held)
        return SloVerdict("met", f"{slo}: holds at {loads}.")
    nearest = min(result.points, key=lambda point: (bool(point.errors), _strain(point, slo)))
    return SloVerdict("not met", f"{slo}: holds at no load. The nearest: {figures_of(nearest)}.")


def headline(result: BenchResult) -> str:
    """The best figures in one line; "" where nothing was measured."""
    best = best_point(result.points, result.slo)
    return f"Best: {figures_of(best)}" if best else ""


def figures_of(point: Point) -> str:
    """``231/s at 8 clients, p50 34.1 ms, p99 41.2 ms``, and errors where there were any.

    Of streamed answers tokens and goodput, and the times to the first token and between tokens.
    """
    rate = rounded(point.median("throughput_per_s"))
    half, most = (milliseconds(point.median(name)) for name in ("p50_us", "p99_us"))
    failed = sum(point.errors.values())
    errors = f", {amount(failed, 'error')}" if failed else ""
    if not point.median("requests"):
        return f"no answer at {point.load}{errors}"
    if point.streamed:
        times = {name: milliseconds(us) for name, us in point.latencies_us.items()}
        return (
            f"{rounded(point.median('tokens_per_s'))} tokens/s at {point.load}, goodput"
            f" {rounded(point.median('goodput_per_s'))}/s of {rate}/s, p99 of the first token"
            f" {times['ttft_p99']} ms, between tokens {times['itl_p99']} ms{errors}"
        )
    return f"{rate}/s at {point.load}, p50 {half} ms, p99 {most} ms{errors}"


def warnings_of(points: Sequence[Point]) -> list[str]:
    """What to know before the figures are used, and where.

    Warnings that differ only in their numbers are told once, with the numbers of the first.
    """
    found: dict[str, list[tuple[str, str]]] = {}
    for point in points:
        for text in (text for one in point.rounds for text in one.warnings):
            kind = re.sub(r"\d+(\.\d+)?", "0", text)
            found.setdefault(kind, []).append((text, f"{point.contender}, {point.load}"))
    told = []
    for alike in found.values():
        where = "; ".join(dict.fromkeys(place for _, place in alike))
        times = f", {len(alike)} times the like" if len(alike) > 1 else ""
        told.append(f"{alike[0][0]}{times} ({where})")
    return told


def rates_say(rate: RateSearch) -> str:
    """How far the promise holds when requests arrive at random."""
    if rate.highest_per_s <= 0:
        tried = ", ".join(f"{rounded(point.load.value)}/s" for point in rate.points)
        return f"holds at no rate that was tried ({tried or 'none'})"
    held = f"holds up to {rounded(rate.highest_per_s)}/s of requests that arrive at random"
    if rate.lowest_broken_per_s is None:
        return f"{held}; no higher rate was tried"
    return f"{held}, and no longer at {rounded(rate.lowest_broken_per_s)}/s"


def _strain(point: Point, slo: AnySlo) -> float:
    """How far from holding: above 1 it does not."""
    latency = slo.strain(point.latencies_us)
    rate = point.median("throughput_per_s")
    # A round without any answer has no latency, and is the furthest from a promise.
    if rate <= 0:
        return float("inf")
    return max(latency, (slo.throughput or 0) / rate)
