"""Measure one round at one load: metrics of the client, the server and the machine."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from triptych.serving.bench import perf_analyzer
from triptych.serving.bench.perf_analyzer import Duration, RequestForm
from triptych.serving.bench.perf_output import (
    LoadResult,
    check_stability,
    compute_streaming_metrics,
    make_histogram,
    split_answer_time,
)
from triptych.serving.bench.resources import ResourceMonitor
from triptych.serving.bench.results import Measurement, OfferedLoad, Part, StepUse
from triptych.serving.bench.statistics import Counts, ServedStep, ServerCounts, step_use
from triptych.spec.slo import GenerationSlo

WINDOWS = 3
WINDOW_FACTOR = perf_analyzer.WINDOWS_SPAN / WINDOWS
"""Actual duration of perf_analyzer's windows, relative to the requested one."""

MIN_SENT_RATIO = 0.97
"""Minimum ratio of the sent to the offered rate, before a warning."""

WARM_UP_CLIENTS = 8
NO_ANSWER = "no answer in time"
STREAM_ERROR = "refused or failed: the server counted it, its log may say why"
ANSWER_WINDOWS = 3.0
"""Minimum duration of a measurement of streamed answers, in longest answers of the warm-up.

One answer per window, because a window may otherwise contain no end of an answer."""

MIN_WINDOW_DOUBLINGS = 2
"""Minimum number of times that windows are doubled if one contained no answer."""

EMPTY_S = 30.0
"""Minimum duration of windows without an answer before a measurement fails, in seconds.

A machine that does nothing for seconds leaves short windows empty, too."""

STREAMS_END_S = 60.0
"""Timeout for streams after the windows, besides the duration of the windows, in seconds.

perf_analyzer waits forever if a stream ended with an error."""

_MAX_KIND = 160
MAX_FOREIGN_RATIO = 1.2
"""Maximum ratio of requests answered by the server to requests sent, before a warning."""


@dataclass(frozen=True)
class BenchTarget:
    grpc_url: str  # host:port
    pipeline: str  # an ensemble or a single model
    metrics_url: str | None = None  # URL of the metrics page, for GPUs
    pid: int | None = None  # process id of tritonserver on this machine
    streaming_slo: GenerationSlo | None = None  # SLO of streamed answers, for goodput


def measure(
    target: BenchTarget,
    requests: Sequence[perf_analyzer.Request],
    load: OfferedLoad,
    *,
    seconds: float,
    warmup_requests: int = 0,
    timeout_s: float = 900.0,
) -> Measurement:
    """Load the pipeline once, for three consecutive windows.

    Args:
        target: Target of the load.
        requests: Requests, sent in turn and repeated.
        load: Number of clients, or rate.
        seconds: Duration of all windows, stretched by `WINDOW_FACTOR`. Longer if
            the warm-up of streamed answers, or a window without an answer, shows the need.
        warmup_requests: Number of uncounted requests before, by a few clients in a closed loop.
        timeout_s: Timeout of warm-up and of load, in seconds; `errors` reports it.

    Returns:
        The measurement. With errors, only `errors` and `steps` are set, because perf_analyzer stops
        at the first error.

    Raises:
        UserError: The server, the model, the load or perf_analyzer is unusable.
    """
    counts = ServerCounts(target.grpc_url, target.pipeline)
    try:
        before = counts.read()
        try:
            if warmup_requests:
                clients = round(load.value) if load.kind == "concurrency" else WARM_UP_CLIENTS
                warmed = perf_analyzer.run(
                    target.grpc_url,
                    target.pipeline,
                    requests,
                    OfferedLoad("concurrency", clients),
                    Duration(request_count=max(warmup_requests, clients)),
                    form=RequestForm(streaming=target.streaming_slo is not None),
                    timeout_s=timeout_s,
                )
                if target.streaming_slo is not None:
                    longest_s = max(warmed.latencies_us) / 1e6
                    seconds = max(seconds, ANSWER_WINDOWS * longest_s)
                before = counts.read()
            with ResourceMonitor(target.pid, target.metrics_url) as monitor:
                result = run_longer(partial(_run, target, requests, load, timeout_s), seconds)
        except perf_analyzer.LoadError as error:
            return _failed(error, counts, before)
        after = counts.read()
    finally:
        counts.close()
    did = {model: after[model] - before[model] for model in after}
    measured = _make_measurement(result, did, counts.steps, target.pipeline)
    if not is_sent(measured, load):
        warning = (
            f"the load generator sent {measured.sent_per_s:.3g}/s of {load.value:g}/s: the"
            " shortfall is its own, not the server's"
        )
        measured = replace(measured, warnings=(*measured.warnings, warning))
    if target.streaming_slo is not None:
        streamed = compute_streaming_metrics(result, target.streaming_slo)
        parts = split_answer_time(measured.mean_us, streamed)
        measured = replace(measured, streamed=streamed, parts=parts)
    span = result.boundaries_ns
    return replace(measured, resources=monitor.between(span[0], span[-1]))


def is_sent(measured: Measurement, load: OfferedLoad) -> bool:
    """Whether the load generator sent the rate of an open loop."""
    sent = measured.sent_per_s
    return sent is None or sent >= MIN_SENT_RATIO * load.value


def run_longer(run: Callable[[float], LoadResult], seconds: float) -> LoadResult:
    """Run for `seconds`, and for twice as long as before if a window contained no answer.

    Raises:
        LoadError: `run` failed, also in windows of `EMPTY_S` after `MIN_WINDOW_DOUBLINGS`.
    """
    last_s = max(EMPTY_S, seconds * 2**MIN_WINDOW_DOUBLINGS)
    while True:
        try:
            return run(seconds)
        except perf_analyzer.LoadError as error:
            if not error.is_empty or seconds >= last_s:
                raise
            seconds *= 2


def _run(
    target: BenchTarget,
    requests: Sequence[perf_analyzer.Request],
    load: OfferedLoad,
    timeout_s: float,
    seconds: float,
) -> LoadResult:
    is_streaming = target.streaming_slo is not None
    return perf_analyzer.run(
        target.grpc_url,
        target.pipeline,
        requests,
        load,
        Duration(window_s=seconds / WINDOWS),
        form=RequestForm(streaming=is_streaming),
        timeout_s=min(timeout_s, 2 * seconds + STREAMS_END_S) if is_streaming else timeout_s,
    )


def _make_measurement(
    result: LoadResult,
    did: Mapping[str, Counts],
    steps: Sequence[ServedStep],
    pipeline: str,
) -> Measurement:
    answered = did[pipeline].statistics.requests
    share = min(1.0, result.requests / answered) if answered else 1.0
    uses = tuple(step_use(step, did[step.model], share, result.seconds) for step in steps)
    p50, p90, p95, p99, p99_9 = result.percentiles_us(50, 90, 95, 99, 99.9)
    is_stable, unstable = check_stability(result.windows())
    warnings = [*result.warnings, *unstable]
    if answered > result.requests * MAX_FOREIGN_RATIO + 100:
        warnings.append(
            f"the server answered {answered} requests, {result.requests} of them measured here"
        )
    return Measurement(
        seconds=result.seconds,
        requests=result.requests,
        errors={},
        throughput_per_s=result.throughput_per_s,
        mean_us=result.mean_us,
        p50_us=p50,
        p90_us=p90,
        p95_us=p95,
        p99_us=p99,
        p99_9_us=p99_9,
        is_stable=is_stable,
        histogram_us=make_histogram(result.latencies_us),
        steps=uses,
        parts=split_latency(result.mean_us, did[pipeline].mean_us, uses),
        warnings=tuple(warnings),
        sent_per_s=result.sent_per_s,
    )


def _failed(
    error: perf_analyzer.LoadError, counts: ServerCounts, before: Mapping[str, Counts]
) -> Measurement:
    """Return a measurement with errors only, as counted by the server.

    Raises:
        LoadError: `error`, if it is neither an error response nor a missing answer.
    """
    if not error.errors and not error.is_late:
        raise error
    did = {model: now - before[model] for model, now in counts.read().items()}
    failures = max(counted.statistics.failures for counted in did.values())
    missing = STREAM_ERROR if failures and error.is_late else NO_ANSWER
    kinds = list(dict.fromkeys(normalize_error(one) for one in error.errors)) or [missing]
    errors = dict.fromkeys(kinds, 1)
    # The server counts errors without kinds; the rest is assigned to the first kind.
    errors[kinds[0]] += max(0, failures - len(kinds))
    return Measurement(
        seconds=0.0,
        requests=0,
        errors=errors,
        throughput_per_s=0.0,
        mean_us=0.0,
        p50_us=0.0,
        p90_us=0.0,
        p95_us=0.0,
        p99_us=0.0,
        p99_9_us=0.0,
        is_stable=None,
        steps=tuple(step_use(step, did[step.model], 1.0, 0.0) for step in counts.steps),
        warnings=("perf_analyzer stopped at the first error: there are no metrics",),
    )


def normalize_error(message: str) -> str:
    """Return a server's message with numbers replaced by N, shortened to 160 characters."""
    kind = re.sub(r"\d+", "N", " ".join(message.split()))
    return kind if len(kind) <= _MAX_KIND else kind[: _MAX_KIND - 1] + "…"


def split_latency(client_us: float, server_us: float, steps: Sequence[StepUse]) -> tuple[Part, ...]:
    """Split the client's mean latency into parts.

    `transport` is outside the server: network, gRPC, and waiting for a processor on both sides.
    `scheduling` is in the server but in no step: the hops between the steps.

    A step may answer a request before its batch ends, but Triton counts the request until the end.
    Server times may then exceed the client's latency; the excess is subtracted from the core's
    compute time first.

    Args:
        client_us: Mean latency at the client.
        server_us: Mean time from a request's arrival to its answer at the server.
        steps: Steps of the pipeline.
    """
    server_us = min(server_us, client_us)
    times_us = [us for step in steps for us in (step.queue_us, step.compute_us)]
    excess_us = max(0.0, sum(times_us) - server_us)
    if excess_us:
        at = 1 + 2 * next((at for at, step in enumerate(steps) if step.is_core), 0)
        taken_us = min(excess_us, times_us[at])
        times_us[at] -= taken_us
        scale = 1 - (excess_us - taken_us) / (sum(times_us) or 1.0)
        times_us = [us * scale for us in times_us]
    names = [(step.step, what) for step in steps for what in ("queue", "compute")]
    return (
        Part("client", "transport", client_us - server_us),
        *(Part(*name, us) for name, us in zip(names, times_us, strict=True)),
        Part("server", "scheduling", max(0.0, server_us - sum(times_us))),
    )
