"""Load, the parts without a server: what is read from text, and what is concluded from figures."""

import json
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

from triptych.serving.bench import rates
from triptych.serving.bench.bottleneck import find_bottleneck
from triptych.serving.bench.measure import BenchTarget, is_sent, split_latency
from triptych.serving.bench.perf_analyzer import draw_intervals_us, export_rows
from triptych.serving.bench.perf_output import (
    BIN_GROWTH,
    LoadResult,
    check_stability,
    make_histogram,
    read_export,
)
from triptych.serving.bench.rates import LOOKS, MAX_BRACKET_RATIO, find_highest_rate, judge_rate
from triptych.serving.bench.resources import Snapshot, read_metrics, summarize
from triptych.serving.bench.results import (
    GpuUse,
    LoadPoint,
    Measurement,
    OfferedLoad,
    ProcessUse,
    Resources,
    StepUse,
)
from triptych.spec.slo import Slo


def test_exported_rows_have_every_option(tmp_path: Path) -> None:
    rules = {
        "dimensions": {"type": "int", "min": 1, "max": 8},
        "encoding": {"type": "str", "choices": ["float", "int8"]},
        "labels": {"type": "list"},
        "normalize": {"type": "bool"},
        "prompt": {"type": "str", "choices": ["a", "b"]},
        "top_k": {"type": "int", "min": 1, "max": 5},
    }
    defaults = {"encoding": "int8", "labels": ["x", "y"], "top_k": 2}
    settings = {"request_parameters": rules, "parameters": defaults}
    export_rows(tmp_path / "a.json", ["é"], settings)
    (row,) = json.loads((tmp_path / "a.json").read_text())["data"]
    assert row.pop("text") == {"content": {"b64": "AgAAAMOp"}, "shape": [1]}
    assert row == {
        "dimensions": [8],
        "encoding": ["int8"],
        "labels": ['["x", "y"]'],
        "normalize": [False],
        "prompt": ["a"],
        "top_k": [2],
    }


PAGE = """
# HELP nv_gpu_utilization GPU utilization rate [0.0 - 1.0)
# TYPE nv_gpu_utilization gauge
nv_gpu_utilization{gpu_uuid="GPU-1"} 0.25
nv_inference_count{model="a",version="1"} 12
odd{quote="a\\"b\\\\n,c}",empty=""} +Inf 1700000000
plain 1e3
broken{ 3
words here now
"""

# The third request is still under way; the second's text looks like a field of the export.
EXPORT = (
    '{"experiments":[{"experiment":{"mode":"concurrency","value":2},"requests":['
    '{"timestamp":1000000,"request_inputs":{"text":"one"},'
    '"response_timestamps":[3000000],"response_outputs":[{"embedding":[0.5,-1]}]},'
    '{"timestamp":2000000,"request_inputs":{"text":"{\\"timestamp\\":5,\\"request_inputs\\":1'
    ' \\"response_timestamps\\":[7]"},"response_timestamps":[6000000],"response_outputs":[{}]},'
    '{"timestamp":8000000,"request_inputs":{"text":"\udcff"},"response_timestamps":[],'
    '"response_outputs":[]}],'
    '"window_boundaries":[500000,4000000,9000000]}],"version":"2.51.0"}'
)


def test_a_metrics_page_is_read_sample_by_sample() -> None:
    assert read_metrics(PAGE) == [
        ("nv_gpu_utilization", {"gpu_uuid": "GPU-1"}, 0.25),
        ("nv_inference_count", {"model": "a", "version": "1"}, 12.0),
        ("odd", {"quote": 'a"b\\n,c}', "empty": ""}, math.inf),
        ("plain", {}, 1000.0),
    ]


def test_an_export_gives_the_times_whatever_its_texts_are(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_bytes(EXPORT.encode("utf-8", "surrogateescape"))
    export = read_export(path)

    times = ((500000, 4000000, 9000000), (3000000, 6000000), (2000.0, 4000.0))
    assert export == LoadResult(*times)
    assert export.seconds == 0.0085
    assert [window.latency_us for window in export.windows()] == [2000.0, 4000.0]
    no_answer = '{"experiments":[{"requests":[],"window_boundaries":[1,2]}]}'
    for text in ("", "{}", no_answer, EXPORT[:120]):
        path.write_text(text)
        assert read_export(path) is None, text


def test_percentiles_and_histogram_hold_every_request() -> None:
    latencies = tuple(map(float, range(1, 1002)))
    export = LoadResult((0, 10**9), tuple(range(1001)), latencies)

    assert export.percentiles_us(50, 90, 99, 99.9) == [501, 901, 991, 1000]
    assert (export.throughput_per_s, export.mean_us) == (1001, 501)
    histogram = make_histogram(export.latencies_us)
    assert sum(histogram.values()) == 1001
    edges = list(histogram)
    assert edges == sorted(edges)
    assert edges[-1] / edges[-2] == pytest.approx(BIN_GROWTH, rel=0.01)
    gap = LoadResult((0, 10**9, 2 * 10**9), (5, 6), (1.0, 2.0))
    is_stable, said = check_stability(gap.windows())  # one window has no answer
    assert (is_stable, len(said)) == (False, 2)


def use(step: str, **changes: Any) -> StepUse:
    counts = {"failures": 0, **dict.fromkeys(("requests", "rows", "executions"), 1000)}
    times = {"queue_us": 100.0, "compute_input_us": 0.0, "compute_infer_us": 1000.0}
    plain = {"model": f"m_{step}", "instances": 1, "max_delay_us": 0, "batch_sizes": {1: 1000}}
    values = {**plain, **counts, **times, "compute_output_us": 0.0, "busy": 0.1, **changes}
    return StepUse(step=step, **values)


def test_time_for_which_a_step_runs_on_after_its_answer_is_its_own() -> None:
    steps = [use("preprocess"), use("core", compute_infer_us=30000.0)]
    found = split_latency(20000, 31200, steps)
    parts = {(part.where, part.what): part.us for part in found}
    assert parts["preprocess", "compute"] == 1000
    assert parts["core", "compute"] == 20000 - 1000 - 100 - 100
    assert sum(parts.values()) == pytest.approx(20000)
    short = [part.us for part in split_latency(1000, 900, steps)]  # the core's time is not enough
    assert sum(short) == pytest.approx(1000)
    assert min(short) >= 0


def taken(*steps: StepUse, resources: Resources | None) -> Measurement:
    """A round of 1000 requests of 10 ms in a second."""
    latencies = (10000.0,) * 6
    return Measurement(
        1.0, 1000, {}, 1000, *latencies, is_stable=True, steps=steps, resources=resources
    )


def machine(
    share: float | None, cores: float = 0.98, client: float = 0.1, waits: float = 0, gpu: float = 0
) -> Resources:
    """The core takes `cores` of 4, and waits for others."""
    core = ProcessUse("m_core", cores, 100, wait_cores=waits)
    return Resources(4, share, client, (core,), (GpuUse("GPU-1", gpu, 100),) if gpu else ())


FIELDS = {
    "core": "serving.instances.core",
    "preprocess": "serving.instances.preprocess",
    "parts_crop": "serving.instances.preprocess",
    "detector_core": "models.detector.instances",
}
"""Field of the spec for the instances of a step; the last two are of several own models."""
SATURATED = use("core", busy=0.99, queue_us=5000, compute_infer_us=4000)


def test_the_bottleneck_is_what_the_figures_prove() -> None:
    for step, resources, kind in (
        (SATURATED, machine(0.3), "instances"),
        (SATURATED, machine(0.99, 0.02), "instances"),  # others fill the machine, not the step
        (SATURATED, machine(0.99, 0.3, waits=0.7), "compute"),
        (SATURATED, machine(0.99, 3.8), "compute"),
        (SATURATED, None, "compute"),
        (replace(SATURATED, step="preprocess"), None, "instances"),
        (replace(SATURATED, step="parts_crop"), None, "instances"),
        (replace(SATURATED, step="detector_core"), machine(0.3), "instances"),
        (replace(SATURATED, queue_us=50), machine(0.3), "none"),  # one client: no queue
        (SATURATED, machine(0.3, gpu=0.97), "compute"),
        (use("core"), machine(0.3), "none"),
        (use("core"), machine(0.99, 0.3, client=2.0, waits=0.7), "client"),
        (use("core"), machine(None, 0.02, client=3.9), "client"),
        (use("core", max_delay_us=5000, queue_us=5000), machine(0.3, 0.02), "none"),
        (use("core", max_delay_us=5000, queue_us=5000, executions=100), None, "queue delay"),
        (use("core", max_delay_us=5000, queue_us=300, executions=100), None, "none"),
    ):
        found = find_bottleneck(taken(step, resources=resources), OfferedLoad("concurrency", 8))
        assert found.kind == kind, (step, resources)
        if kind == "instances":
            assert found.remedy == f"Raise {FIELDS[step.step]}"
    empty = replace(taken(use("core"), resources=None), requests=0, errors={"bad": 1})
    assert find_bottleneck(empty, OfferedLoad("poisson", 5)).kind == "none"


def test_a_rate_holds_where_all_comes_back_in_time() -> None:
    plain = replace(taken(use("core"), resources=None), sent_per_s=1000.0)
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "met"),
        ({"p99_us": 60000.0}, "missed"),
        ({"errors": {"bad": 1}}, "missed"),
        ({"throughput_per_s": 900.0}, "missed"),  # a backlog grows
        ({"sent_per_s": 850.0, "throughput_per_s": 850.0}, "cannot tell"),  # never sent
        ({"sent_per_s": 980.0, "throughput_per_s": 975.0}, "met"),
        ({"requests": 0}, "missed"),
    ]
    for changes, expected in cases:
        one = replace(plain, **changes)
        assert judge_rate([one] * 3, Slo(p99_ms=50), 1000) == expected, changes
        assert judge_rate([one], Slo(p99_ms=50), 1000) == "cannot tell"  # shows no noise
        if expected == "missed":
            assert judge_rate([plain, one, plain], Slo(p99_ms=50), 1000) == "cannot tell"


def test_counters_are_read_off_at_the_ends_of_the_span() -> None:
    second = 10**9
    samples = [
        Snapshot(0, {"tritonserver": 10.0}, (0.0, 0.0), memory_mib={"tritonserver": 50.0}),
        Snapshot(2 * second, {"tritonserver": 11.0, "perf_analyzer": 0.5}, (2.0, 4.0)),
        Snapshot(4 * second, {"tritonserver": 12.0, "perf_analyzer": 1.5}, (6.0, 8.0)),
        Snapshot(6 * second, {"tritonserver": 12.0}, (6.0, 12.0)),
    ]
    seen = summarize(samples, second, 5 * second, is_local=True)

    assert seen is not None
    assert seen.machine_cpu == pytest.approx(5 / 8)
    assert seen.client_cpu_cores == pytest.approx((1.5 - 0.25) / 4)
    assert seen.processes == (ProcessUse("tritonserver", 1.5 / 4, 50.0),)
    assert summarize(samples[:1], 0, second, is_local=True) is None


def test_poisson_arrivals_have_the_expected_number_of_requests() -> None:
    for rate, seconds in ((20.0, 3.6), (200.0, 3.6), (0.5, 7.2), (5000.0, 0.36)):
        drawn = draw_intervals_us(rate, seconds)
        assert len(drawn) == round(rate * seconds)
        assert sum(drawn) == pytest.approx(len(drawn) / rate * 1e6, rel=2e-3), rate
        assert min(drawn) >= 1
    gaps = draw_intervals_us(1000.0, 20.0)
    assert stdev(gaps) == pytest.approx(mean(gaps), rel=0.1)  # as of an exponential distribution
    assert draw_intervals_us(20.0, 3.6) != draw_intervals_us(20.0, 3.6)
    assert len(draw_intervals_us(0.1, 1.0)) == 1


def test_a_shortfall_of_the_load_generator_is_not_the_server_s() -> None:
    plain = taken(use("core"), resources=None)
    load = OfferedLoad("poisson", 20.0)
    for sent, kept in ((None, True), (19.9, True), (16.1, False)):
        assert is_sent(replace(plain, sent_per_s=sent), load) is kept
    found = LoadPoint(load, (replace(plain, sent_per_s=16.1),))
    assert found.load_text == "20/s poisson, 16.1/s sent"
    assert replace(found, rounds=(plain,)).load_text == "20/s poisson"


def simulated(
    capacity: float, noise: Callable[[], float], power: float = 2.0
) -> Callable[..., Measurement]:
    """A server whose p99 reaches the limit of 50 ms at `capacity`, with noise in each round."""
    plain = replace(taken(use("core"), resources=None), p50_us=1.0, p90_us=1.0, p95_us=1.0)

    def measure(_target: BenchTarget, _requests: Any, load: OfferedLoad, **_: Any) -> Measurement:
        p99_us = 50e3 * (load.value / capacity) ** power * math.exp(noise())
        return replace(plain, p99_us=p99_us, throughput_per_s=load.value, sent_per_s=load.value)

    return measure


def test_noise_seldom_misleads_the_search_for_the_highest_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of searches in noise, few call a rate met that is missed, or missed that is met."""
    slo, searches = Slo(p99_ms=50.0), 100

    def search(start_per_s: float = 60.0) -> Any:
        return find_highest_rate(
            BenchTarget("", "p"), [], slo, start_per_s=start_per_s, seconds=1.0, budget_s=1e6,
            progress=lambda _stage, _line: None,
        )  # fmt: skip

    for sigma, bursts in ((0.0, 0.0), (0.02, 0.0), (0.1, 0.0), (0.3, 0.0), (0.05, 0.1)):
        rng = random.Random(6)

        def noise() -> float:
            burst = rng.uniform(1, 3) if rng.random() < bursts else 0.0  # noqa: B023
            return rng.gauss(0, sigma) + burst  # noqa: B023

        monkeypatch.setattr(rates, "measure", simulated(137.0, noise))
        found = [search() for _ in range(searches)]
        too_high = sum(one.highest_per_s > 137 * 1.02 for one in found)
        too_low = sum((one.lowest_broken_per_s or 1e9) < 137 / 1.02 for one in found)
        firm = sum(one.verdict == "missed" for one in found)
        assert max(too_high, too_low, firm) <= 10, (sigma, bursts, too_high, too_low, firm)
        for one in found:
            assert all(len(point.rounds) <= 2 * LOOKS[-1] for point in one.points)
            assert one.lowest_broken_per_s is None or one.highest_per_s < one.lowest_broken_per_s
        if sigma < 0.05:
            assert mean(one.highest_per_s for one in found) > 120
        if sigma == 0:
            assert len(search(5000.0).points) < 20
            assert found[0].lowest_broken_per_s <= found[0].highest_per_s * MAX_BRACKET_RATIO

    # A p99 of 30 % over the limit at every rate, once in much noise and once in little.
    for sigma, expected in ((0.5, "cannot tell"), (0.05, "missed")):
        noisy = simulated(137.0, lambda: rng.gauss(0.26, sigma), 0.0)  # noqa: B023
        monkeypatch.setattr(rates, "measure", noisy)
        verdicts = Counter(search().verdict for _ in range(40))
        assert verdicts["met"] <= 5, verdicts
        assert verdicts[expected] > 20, verdicts
