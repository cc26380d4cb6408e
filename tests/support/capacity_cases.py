"""A search for the highest rate that meets an SLO, with measurements worked out by hand."""

from __future__ import annotations

from typing import Any

from triptych.serving.bench.results import LoadPoint, Measurement, OfferedLoad, RateSearch, StepUse
from triptych.spec.slo import Slo


def step(name: str, busy_us: float) -> StepUse:
    means: Any = {"queue_us": 0.0, "compute_input_us": 0.0, "compute_output_us": 0.0, "busy": None}
    return StepUse(
        name, f"minilm_{name}", 1, 0, 100, 0, 100, 50, {2: 50}, compute_infer_us=busy_us, **means
    )


def point(rate: float, p99_ms: float, core_us: float = 900.0) -> LoadPoint:
    times: dict[str, Any] = dict.fromkeys(("mean_us", "p50_us", "p90_us", "p95_us"), p99_ms * 500)
    slow: dict[str, Any] = dict.fromkeys(("p99_us", "p99_9_us"), p99_ms * 1000)
    one = Measurement(
        seconds=10.0,
        requests=int(10 * rate),
        errors={},
        throughput_per_s=rate,
        is_stable=True,
        steps=(step("preprocess", 60.0), step("core", core_us), step("postprocess", 40.0)),
        **times,
        **slow,
    )
    return LoadPoint("minilm", OfferedLoad("poisson", rate), (one,))


SEARCH = RateSearch(
    slo=Slo(p99_ms=50.0),
    highest_per_s=200.0,
    lowest_broken_per_s=250.0,
    points=(point(50, 10), point(100, 20), point(200, 50), point(250, 200)),
)
