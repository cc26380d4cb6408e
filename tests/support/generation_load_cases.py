"""Results of `bench` on streamed text, worked out by hand."""

from dataclasses import replace
from typing import Any

from tests.support.load_samples import bench, measurement, outcome
from triptych.operate.tune.results import Outcome
from triptych.serving.bench.bottleneck import find_bottleneck
from triptych.serving.bench.perf_output import (
    LoadResult,
    StreamedAnswer,
    compute_streaming_metrics,
    split_answer_time,
)
from triptych.serving.bench.results import BenchResult, LoadPoint, OfferedLoad
from triptych.spec.slo import GenerationSlo

MS = 1_000_000


def result(*, slow: float = 1.0) -> BenchResult:
    """A bench of answers with 10 tokens, at two loads; `slow` stretches their times."""
    slo = GenerationSlo(ttft_p99="200ms", itl_p99="25ms")
    points = []
    for clients in (1, 4):
        step = int(5 * MS * clients * slow)
        times = tuple(60 * MS + step * number for number in range(10))
        answers = tuple(StreamedAnswer(0, times, 10) for _ in range(20 * clients))
        timed = LoadResult((0, 10_000 * MS), tuple(times[-1:]), (times[-1] / 1e3,), answers)
        streamed = compute_streaming_metrics(timed, slo)
        changes = dict.fromkeys(("mean_us", "p50_us", "p99_us"), times[-1] / 1000.0)
        one = replace(
            measurement(clients, requests=20 * clients, throughput_per_s=2.0 * clients, **changes),
            streamed=streamed,
            parts=split_answer_time(times[-1] / 1e3, streamed),
        )
        load = OfferedLoad("concurrency", clients)
        points.append(LoadPoint(load, (one, one), find_bottleneck(one, load)))
    return bench(points=tuple(points), slo=slo, rate=None, cost=None)


def found(*, slow: float, **changes: Any) -> Outcome:
    """An outcome of `tune` with the loads of `result`."""
    points = result(slow=slow).points
    best = max(point.median("goodput_per_s") for point in points)
    return outcome(1, points=points, score=best, rate=None, cost=None, **changes)
