"""`triptych bench`: a served pipeline under its own traffic, at every load."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

import psutil
from pydantic import JsonValue

from triptych.base.cache import versions_of
from triptych.base.errors import Progress, UserError, counted
from triptych.client.connection import check_single
from triptych.container.processor import find_processor
from triptych.core.inputs import PipelineInputs
from triptych.repository.manifest import CompiledManifest, build_id, find_manifest, find_settings
from triptych.serving.bench.bottleneck import find_bottleneck
from triptych.serving.bench.comparison import Price
from triptych.serving.bench.measure import BenchTarget, measure
from triptych.serving.bench.perf_analyzer import Distribution, Request, export_rows
from triptych.serving.bench.rates import find_highest_rate
from triptych.serving.bench.results import (
    BenchResult,
    LoadPoint,
    Measurement,
    OfferedLoad,
    RateSearch,
    Subject,
)
from triptych.serving.embedded import describe_local_server
from triptych.serving.endpoint import check_built, open_endpoint
from triptych.spec.slo import AnySlo, GenerationSlo, Slo

CONCURRENCY = (1, 2, 4, 8, 16, 32)
SERVED_BY = ("numpy", "nvidia-pytriton", "onnxruntime", "tokenizers", "tritonclient")
"""Packages whose versions affect the speed of a server here."""

WARM_UP_REQUESTS = 100
WARM_UP_ANSWERS = 3
"""Minimum number of streamed warm-up answers, which take seconds each."""


@dataclass(frozen=True)
class Bench:
    """Options of a load test.

    Each load is measured once per round, so that slow changes affect all equally.
    """

    loads: tuple[OfferedLoad, ...] = tuple(
        OfferedLoad("concurrency", clients) for clients in CONCURRENCY
    )
    rounds: int = 3
    seconds: float = 3.0  # duration of a measurement
    budget_s: float = 600.0  # time budget; the first round always runs
    slo: AnySlo = field(default_factory=Slo)
    find_rate: bool = False  # whether to search the highest Poisson rate within the SLO
    price: Price | None = None
    export: Path | None = None  # file for the requests with all options


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Place and options of a load test."""

    repository: Path  # folder of the models, with the build manifest of the build
    progress: Progress  # called at each measurement
    bench: Bench
    url: str | None = None  # gRPC address of a server; None starts one on `repository`
    metrics_url: str | None = None  # URL of the metrics page of the server at `url`


def bench_pipeline(inputs: PipelineInputs, options: BenchOptions) -> BenchResult:
    """Measure a built pipeline.

    Raises:
        UserError: The pipeline is not built, `url` is several servers, or the server does not serve
            the pipeline.
    """
    repository, url = options.repository, options.url
    if url is not None:
        check_single(url, "measure it")
    inputs = inputs.with_built_layout(repository)
    if url is None:
        check_built(repository, inputs.plan.spec.name)
    subject = describe_target(
        inputs, repository, server=describe_server(url, inputs.plan.spec.core.backend)
    )
    return bench_requests(subject, inputs.traffic, options)


def describe_server(url: str | None, backend: str = "") -> str:
    """Return the name of the server in a result: its address, or what is started here.

    Args:
        url: Address of a server that runs already; None for one that is started here.
        backend: Triton backend of the pipeline's core.
    """
    return describe_local_server(backend) if url is None else url


def bench_requests(
    subject: Subject, requests: Sequence[Request], options: BenchOptions
) -> BenchResult:
    """Measure a pipeline of any kind; with a `GenerationSlo` the answers are streamed.

    Args:
        subject: Description of the target, without the build.
        requests: Requests, sent in turn.
        options: Place and options.

    Raises:
        UserError: See `bench_pipeline`.
    """
    bench, repository, progress = options.bench, options.repository, options.progress
    name = subject.pipeline
    if bench.export is not None:
        export_rows(bench.export, requests, find_settings(repository, name))
    # A server elsewhere may have loaded another build.
    build = build_id(repository, name) if options.url is None else ""
    with open_endpoint(
        repository, name, options.url, progress, metrics_url=options.metrics_url
    ) as endpoint:
        streaming_slo = bench.slo if isinstance(bench.slo, GenerationSlo) else None
        target = BenchTarget(
            endpoint.grpc_url, name, endpoint.metrics_url, endpoint.pid, streaming_slo
        )
        points = _measure_points(target, requests, bench, progress)
        rate = None
        fastest_per_s = max((point.median("throughput_per_s") for point in points), default=0.0)
        if bench.find_rate and bench.slo.limits_us and fastest_per_s:
            rate = find_highest_rate(
                target,
                requests,
                bench.slo,
                start_per_s=0.5 * fastest_per_s,
                seconds=bench.seconds,
                budget_s=bench.budget_s / 2,
                progress=progress,
            )
    cost = None
    if bench.price is not None:
        cost = bench.price.cost(sustained_rate(points, bench.slo, rate), mean_answer_tokens(points))
    return BenchResult(
        subject=replace(subject, build=build),
        points=points,
        slo=bench.slo,
        rate=rate,
        cost=cost,
        load_s=endpoint.load_s,
    )


def mean_answer_tokens(points: Sequence[LoadPoint]) -> float | None:
    """Return the mean number of tokens of an answer; None without text generation."""
    rounds = [one for point in points for one in point.rounds if one.streamed is not None]
    answers = sum(one.requests for one in rounds)
    return sum(one.streamed.tokens for one in rounds if one.streamed) / answers if answers else None


def sustained_rate(points: Sequence[LoadPoint], slo: AnySlo, rate: RateSearch | None) -> float:
    """Return the sustained requests per second within the latency SLO; 0 without one."""
    if rate is not None:
        return rate.highest_per_s
    latencies = slo.without_throughput
    return max((p.median("throughput_per_s") for p in points if p.meets(latencies)), default=0.0)


def _measure_points(
    target: BenchTarget, requests: Sequence[Request], bench: Bench, progress: Progress
) -> tuple[LoadPoint, ...]:
    """Measure every load once per round."""
    found: dict[OfferedLoad, list[Measurement]] = {load: [] for load in bench.loads}
    measurements = ((number, load) for number, order in _rounds(bench) for load in order)
    total = bench.rounds * len(bench.loads)
    for number, load in counted(measurements, "measurements", total):
        earlier = found[load]
        seconds = bench.seconds
        if earlier and target.streaming_slo is not None:  # the warm-up may have extended it
            seconds = max(seconds, earlier[0].seconds)
        warm = 0 if earlier else WARM_UP_ANSWERS if target.streaming_slo else WARM_UP_REQUESTS
        one = measure(target, requests, load, seconds=seconds, warmup_requests=warm)
        found[load].append(one)
        progress("load", f"round {number}/{bench.rounds}: {load}: {one}")
    points = (LoadPoint(load, tuple(rounds)) for load, rounds in found.items() if rounds)
    return tuple(
        replace(point, bottleneck=find_bottleneck(point.typical, point.load)) for point in points
    )


def _rounds(bench: Bench) -> Iterator[tuple[int, Sequence[OfferedLoad]]]:
    """Yield numbered rounds of the loads in rotated orders until the time budget is used."""
    began = time.monotonic()
    for index in range(bench.rounds):
        gone = time.monotonic() - began
        if index and gone + gone / index > bench.budget_s:
            return
        shift = index * len(bench.loads) // bench.rounds
        yield index + 1, (*bench.loads[shift:], *bench.loads[:shift])


def describe_target(
    inputs: PipelineInputs,
    repository: Path,
    *,
    server: str,
    overrides: Mapping[str, JsonValue] | None = None,
) -> Subject:
    """Return a description of the measured pipeline, server and machine.

    Args:
        inputs: Inputs of the pipeline.
        repository: Folder of the models, with the build manifest of the build.
        server: Name of the server.
        overrides: Overrides of the spec; None takes those of ``tuned.yaml``.
    """
    plan = inputs.plan
    manifest = find_manifest(repository, plan.spec.name, CompiledManifest)
    lengths = plan.lengths.counts if plan.lengths is not None else {}
    return Subject(
        pipeline=plan.spec.name,
        task=plan.task.name,
        architecture=plan.info.architecture,
        precision=plan.spec.core.precision if manifest is None else manifest.gate.precision,
        layout=plan.layout if manifest is None else manifest.plan.layout,
        overrides=dict(plan.spec.tuned if overrides is None else overrides),
        server=server,
        machine=describe_machine(),
        versions=versions_of(*SERVED_BY),
        measured_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        requests=len(inputs.traffic),
        lengths=dict(lengths),
        padding=plan.padding_share,
    )


def describe_machine() -> dict[str, str]:
    memory_gib = psutil.virtual_memory().total / 2**30
    return {
        "processor": find_processor() or platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory_gib:.0f} GiB",
        "system": platform.platform(terse=True),
    }


def parse_loads(
    concurrency: Sequence[int], rates: Sequence[float], arrivals: str, burst: int
) -> tuple[OfferedLoad, ...]:
    """Return closed loops for the numbers of clients, then open loops for the rates.

    Raises:
        UserError: A number is out of range, or `arrivals` is unknown.
    """
    if any(clients < 1 for clients in concurrency) or any(rate <= 0 for rate in rates):
        raise UserError(
            "load", "must be above 0", given=[*concurrency, *rates], remedy="Give other numbers"
        )
    kind = next((kind for kind in get_args(Distribution) if kind == arrivals), None)
    if kind is None:
        raise UserError(
            "--arrivals",
            f"must be one of {', '.join(get_args(Distribution))}",
            given=arrivals,
            remedy="Choose one of them",
        )
    if burst < 1:
        raise UserError("--burst", "must be at least 1", given=burst, remedy="Give another number")
    size = burst if arrivals == "burst" else 1
    closed = [OfferedLoad("concurrency", float(clients)) for clients in concurrency]
    return (*closed, *(OfferedLoad(kind, rate, size) for rate in rates))
