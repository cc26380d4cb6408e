"""One round at one load: the client's figures, the server's, and what the machine gave for them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from triptych.base.errors import UserError
from triptych.serving.bench import perf_analyzer
from triptych.serving.bench.perf_output import Export, LoadResult, check_stability, histogram_of
from triptych.serving.bench.resources import Watch
from triptych.serving.bench.results import Load, Measurement, Part, StepUse
from triptych.serving.bench.statistics import Counts, ServedStep, ServerCounts, step_use
from triptych.serving.bench.streamed import answer_parts, streamed_of
from triptych.spec.slo import GenerationSlo

WINDOWS = 3
STRETCH = 1.2
"""perf_analyzer's windows last so many times what it was asked for."""

WARM_UP_CLIENTS = 8
NO_ANSWER = "no answer in time"
STREAM_ERROR = "refused or failed: the server counted it, its log may say why"
MAX_ANSWERS = 3.0
"""A measurement of streamed answers takes at least so many times the longest of the warm-up: one
for each window, or a window may see no answer end."""

LONGER = 2
"""Times that windows are doubled where one of them saw no answer."""

STREAMS_END_S = 60.0
"""After the windows of streamed answers those under way may take so long, and as long as the
windows: perf_analyzer waits for ever where a stream ended with an error."""

_MAX_KIND = 160
_STRANGERS = 1.2
"""Requests that the server may have answered for each one that was sent, before it is said."""


@dataclass(frozen=True)
class Target:
    grpc_url: str  # host:port
    pipeline: str  # an ensemble, or a model by itself
    metrics_url: str | None = None  # the whole address of the metrics page: tells of GPUs
    pid: int | None = None  # of tritonserver, where it runs on this machine
    promise: GenerationSlo | None = None  # of one that streams its answers, which goodput keeps


def measure(
    target: Target,
    requests: Sequence[perf_analyzer.Request],
    load: Load,
    *,
    seconds: float,
    warmup_requests: int = 0,
    timeout_s: float = 900.0,
) -> Measurement:
    """Load the pipeline once, for three windows one after the other.

    Args:
        target: what is measured.
        requests: sent in turn, over and over.
        load: what is offered: clients, or a rate.
        seconds: of all windows together; perf_analyzer stretches them (`STRETCH`). They are longer
            where a warm-up of streamed answers, or a window without any, shows that they must be.
        warmup_requests: sent before, by a few clients in a closed loop, and not counted.
        timeout_s: for each of warm-up and load. Where it runs out, `errors` say so.

    Returns:
        With errors, all figures but `errors` and `steps` are 0: perf_analyzer stops at the first.

    Raises:
        UserError: no server, no such model, a load that cannot be offered, or no perf_analyzer.
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
                    concurrency=clients,
                    request_count=max(warmup_requests, clients),
                    timeout_s=timeout_s,
                    exports=target.promise is not None,
                    streaming=target.promise is not None,
                )
                if warmed.export is not None:
                    longest_s = max(warmed.export.latencies_us) / 1e6
                    seconds = max(seconds, MAX_ANSWERS * longest_s)
                before = counts.read()
            with Watch(target.pid, target.metrics_url) as watch:
                result = run_longer(partial(_run, target, requests, load, timeout_s), seconds)
        except perf_analyzer.LoadError as error:
            return _failed(error, counts, before)
        after = counts.read()
    finally:
        counts.close()
    did = {model: after[model] - before[model] for model in after}
    if result.export is None:
        raise RuntimeError("perf_analyzer answered requests, and exported none")
    measured = _measured(result, result.export, did, counts.steps, target.pipeline)
    if target.promise is not None:
        streamed = streamed_of(result.export, target.promise)
        parts = answer_parts(measured.mean_us, streamed)
        measured = replace(measured, streamed=streamed, parts=parts)
    span = result.export.boundaries_ns
    return replace(measured, resources=watch.between(span[0], span[-1]))


def run_longer(run: Callable[[float], LoadResult], seconds: float) -> LoadResult:
    """What `run` measures in so many seconds; in more where a window saw no answer at all.

    Raises:
        LoadError: of `run`.
    """
    for _ in range(LONGER):
        try:
            return run(seconds)
        except perf_analyzer.LoadError as error:
            if not error.is_empty:
                raise
            seconds *= 2
    return run(seconds)


def _run(
    target: Target,
    requests: Sequence[perf_analyzer.Request],
    load: Load,
    timeout_s: float,
    seconds: float,
) -> LoadResult:
    is_streaming = target.promise is not None
    if load.kind == "in_process":
        raise UserError("load", "must be one that a server can be given", given=load)
    is_closed = load.kind == "concurrency"
    return perf_analyzer.run(
        target.grpc_url,
        target.pipeline,
        requests,
        concurrency=round(load.value) if is_closed else None,
        request_rate_per_s=None if is_closed else load.value,
        distribution="poisson" if load.kind == "concurrency" else load.kind,
        burst=load.burst,
        window_s=seconds / WINDOWS,
        timeout_s=min(timeout_s, 2 * seconds + STREAMS_END_S) if is_streaming else timeout_s,
        exports=True,
        streaming=is_streaming,
    )


def _measured(
    result: LoadResult,
    export: Export,
    did: Mapping[str, Counts],
    steps: Sequence[ServedStep],
    pipeline: str,
) -> Measurement:
    answered = did[pipeline].statistics.requests
    requests = len(export.latencies_us)
    share = min(1.0, requests / answered) if answered else 1.0
    uses = tuple(step_use(step, did[step.model], share, export.seconds) for step in steps)
    p50, p90, p95, p99, p99_9 = export.percentiles_us(50, 90, 95, 99, 99.9)
    is_stable, unstable = check_stability(export.windows())
    said = [line for line in result.warnings if not line.startswith("unstable")]
    if answered > requests * _STRANGERS + 100:
        said.append(f"the server answered {answered} requests, {requests} of them measured here")
    return Measurement(
        seconds=export.seconds,
        requests=requests,
        errors={},
        throughput_per_s=export.throughput_per_s,
        mean_us=export.mean_us,
        p50_us=p50,
        p90_us=p90,
        p95_us=p95,
        p99_us=p99,
        p99_9_us=p99_9,
        is_stable=is_stable,
        histogram_us=histogram_of(export.latencies_us),
        steps=uses,
        parts=time_parts(export.mean_us, did[pipeline].mean_us, uses),
        warnings=tuple(said + unstable),
        sent_per_s=result.sent_per_s,
    )


def _failed(
    error: perf_analyzer.LoadError, counts: ServerCounts, before: Mapping[str, Counts]
) -> Measurement:
    """Nothing but the errors, as often as the server counted them.

    Raises:
        LoadError: `error`, where it is neither an answer nor a missing one.
    """
    if not error.errors and not error.is_late:
        raise error
    did = {model: now - before[model] for model, now in counts.read().items()}
    failures = max(counted.statistics.failures for counted in did.values())
    missing = STREAM_ERROR if failures and error.is_late else NO_ANSWER
    kinds = list(dict.fromkeys(error_kind(one) for one in error.errors)) or [missing]
    errors = dict.fromkeys(kinds, 1)
    # The server does not tell its errors apart: what is left goes to the first that was seen.
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
        warnings=("perf_analyzer stops at the first error: there are no figures",),
    )


def error_kind(message: str) -> str:
    """A server's message without what differs from request to request, and not too long."""
    kind = re.sub(r"\d+", "N", " ".join(message.split()))
    return kind if len(kind) <= _MAX_KIND else kind[: _MAX_KIND - 1] + "…"


def time_parts(client_us: float, server_us: float, steps: Sequence[StepUse]) -> tuple[Part, ...]:
    """The mean latency of the client, taken apart.

    `transport` is what the server does not see: the network, gRPC, and the wait for a processor on
    both sides. `scheduling` is what the server sees and no step does: the hops between the steps.

    A step that answers a request before its batch ends keeps the request until then, and Triton
    counts it up to there, in the step and in the ensemble: both times may be longer than what the
    client saw. The excess is taken off the compute time of the core first.

    Args:
        client_us: mean latency seen by the client.
        server_us: mean time from a request's arrival to its answer, seen by the server.
        steps: of the pipeline.
    """
    server_us = min(server_us, client_us)
    times_us = [us for step in steps for us in (step.queue_us, step.compute_us)]
    excess_us = max(0.0, sum(times_us) - server_us)
    if excess_us:
        at = 1 + 2 * next((at for at, step in enumerate(steps) if step.step == "core"), 0)
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
