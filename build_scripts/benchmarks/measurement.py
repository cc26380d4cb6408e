"""One measurement of one contender, and the medians over rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from triptych.serving.bench import perf_analyzer


@dataclass(frozen=True)
class Measurement:
    """What one contender did in one round.

    Attributes:
        contender: its name in the table.
        clients: how many sent a text at a time; 0 where there is no client at all.
        throughput_per_s: texts (or requests) answered a second.
        p50_ms: median latency.
        p99_ms: 99th percentile of it.
        notes: what else is worth keeping.
    """

    contender: str
    clients: int
    throughput_per_s: float
    p50_ms: float
    p99_ms: float
    notes: dict[str, object] = field(default_factory=dict)


def closed_loop(
    contender: str,
    url: str,
    model: str,
    requests: Sequence[str],
    *,
    clients: int,
    seconds: float,
    http_path: str | None = None,
) -> Measurement:
    """perf_analyzer with so many `clients`, after a short warm-up; see `perf_analyzer.run`."""
    result = perf_analyzer.run(
        url,
        model,
        requests,
        concurrency=clients,
        window_s=seconds / 3,
        warmup_requests=2 * clients + 20,
        http_path=http_path,
    )
    return Measurement(
        contender=contender,
        clients=clients,
        throughput_per_s=result.throughput_per_s,
        p50_ms=result.p50_us / 1e3,
        p99_ms=result.p99_us / 1e3,
        notes={"requests": result.requests, "is_stable": result.is_stable},
    )


@dataclass(frozen=True)
class Summary:
    """The medians of one contender over the rounds, and how far the rounds lie apart."""

    contender: str
    clients: int
    rounds: int
    throughput_per_s: float
    throughput_lowest_per_s: float
    throughput_highest_per_s: float
    p50_ms: float
    p99_ms: float


def summarize(measurements: Sequence[Measurement]) -> list[Summary]:
    """One summary for each contender and number of clients, in the order they first came."""
    groups: dict[tuple[str, int], list[Measurement]] = {}
    for one in measurements:
        groups.setdefault((one.contender, one.clients), []).append(one)
    return [
        Summary(
            contender=contender,
            clients=clients,
            rounds=len(group),
            throughput_per_s=median(one.throughput_per_s for one in group),
            throughput_lowest_per_s=min(one.throughput_per_s for one in group),
            throughput_highest_per_s=max(one.throughput_per_s for one in group),
            p50_ms=median(one.p50_ms for one in group),
            p99_ms=median(one.p99_ms for one in group),
        )
        for (contender, clients), group in groups.items()
    ]
