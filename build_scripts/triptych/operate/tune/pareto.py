"""Which points no other point beats in throughput and in tail latency both."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from triptych.serving.bench.points import Point


def _rate(point: Point) -> float:
    return point.median("throughput_per_s")


def _tail(point: Point) -> float:
    return point.median("p99_us")


def pareto_front(
    points: Sequence[Point],
    rate: Callable[[Point], float] = _rate,
    tail: Callable[[Point], float] = _tail,
) -> tuple[Point, ...]:
    """The points with more throughput than any that have as little p99, ascending in throughput.

    Medians of the rounds are compared. A point with errors, or without an answer, is none to
    choose; of two that are equal the first stays.

    Args:
        points: in any order.
        rate: of a point, the more the better.
        tail: of a point, the less the better.
    """
    usable = [point for point in points if not point.errors and point.median("requests") > 0]
    ranked = sorted(usable, key=lambda point: (-rate(point), tail(point)))
    front: list[Point] = []
    for point in ranked:
        if not front or tail(point) < tail(front[-1]):
            front.append(point)
    return tuple(reversed(front))
