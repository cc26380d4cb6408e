"""`triptych bench`: a served pipeline under its own traffic, at every load, with its baselines."""

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
from triptych.base.errors import Progress, UserError
from triptych.client.address import check_single
from triptych.core.inputs import PipelineInputs
from triptych.repository.manifest import build_id, find_manifest
from triptych.serving.bench.baselines import ALL, Baselines
from triptych.serving.bench.bottleneck import find_bottleneck
from triptych.serving.bench.comparison import cost_of
from triptych.serving.bench.measure import Target, measure
from triptych.serving.bench.perf_analyzer import Distribution, Request
from triptych.serving.bench.rates import highest_rate
from triptych.serving.bench.results import (
    BenchResult,
    Cost,
    Load,
    Measurement,
    Point,
    RateSearch,
    Subject,
)
from triptych.serving.doctor import processor
from triptych.serving.embedded import describe_local_server
from triptych.serving.endpoint import check_built, open_endpoint
from triptych.spec.slo import AnySlo, GenerationSlo, Slo

CONCURRENCY = (1, 2, 4, 8, 16, 32)
SERVED_BY = ("numpy", "nvidia-pytriton", "onnxruntime", "tokenizers", "tritonclient")
"""Packages whose versions decide how fast a pipeline is served here."""

WARM_UP_REQUESTS = 100
WARM_UP_ANSWERS = 3
"""Of a pipeline that streams them, and at least one of each client: they take seconds each."""


@dataclass(frozen=True)
class Price:
    """What `cost_of` wants to know; see there."""

    price_per_hour: float
    currency: str = "USD"
    daily_requests: float | None = None
    peak_per_s: float | None = None
    headroom: float = 0.3

    def cost(self, rate_per_s: float, tokens: float | None = None) -> Cost | None:
        """At the rate that a device sustains; None where it sustains none.

        Args:
            rate_per_s: requests a second.
            tokens: that an answer has in the mean; None of a pipeline that generates none.
        """
        if rate_per_s <= 0:
            return None
        per_s = None if tokens is None else tokens * rate_per_s
        return cost_of(rate_per_s, **vars(self), tokens_per_s=per_s)


def price_of(
    per_hour: float | None,
    *,
    currency: str,
    daily_requests: float | None,
    peak_per_s: float | None,
    headroom: float,
) -> Price | None:
    """The price as options give it; None without one.

    Raises:
        UserError: a number out of range, or a volume without a price.
    """
    if per_hour is None:
        if daily_requests is not None or peak_per_s is not None:
            raise UserError(
                "--price-per-hour",
                "must be given for the cost of a volume or a peak",
                remedy="Give the price of one device",
            )
        return None
    price = Price(per_hour, currency, daily_requests, peak_per_s, headroom)
    price.cost(1.0)  # refuses now what it would refuse after minutes of measuring
    return price


@dataclass(frozen=True)
class Bench:
    """What to measure.

    Each load and baseline is measured once a round, in turns, so that what drifts hits all alike.
    """

    loads: tuple[Load, ...] = tuple(Load("concurrency", clients) for clients in CONCURRENCY)
    rounds: int = 3
    seconds: float = 3.0  # of each measurement
    budget_s: float = 600.0  # no round is begun that would end later; the first one always is run
    slo: AnySlo = field(default_factory=Slo)
    find_rate: bool = False  # search the highest Poisson rate that holds the latencies of `slo` too
    baselines: bool = False  # measure what one would have instead, too
    price: Price | None = None


def bench_pipeline(
    inputs: PipelineInputs,
    repository: Path,
    bench: Bench,
    progress: Progress,
    *,
    url: str | None = None,
    metrics_url: str | None = None,
) -> BenchResult:
    """Measure a built pipeline.

    Args:
        inputs: the pipeline.
        repository: folder of the models; its lock tells what was built.
        bench: what to measure.
        progress: told each measurement.
        url: ``host:port`` of a server's gRPC endpoint; None starts one on `repository`.
        metrics_url: of the metrics page of the server at `url`.

    Raises:
        UserError: nothing is built, `url` is several servers, or the server does not serve this
            pipeline (any more).
    """
    if url is not None:
        check_single(url, "measure it")
    inputs = inputs.as_built(repository)
    if url is None:
        check_built(repository, inputs.plan.spec.name)
    core = repository / inputs.plan.step("core") / "1" / "model.onnx"
    names = ALL if bench.baselines else ()
    subject = subject_of(inputs, repository, server=server_of(url, inputs.plan.spec.core.backend))
    with Baselines(inputs, core, names=names, progress=progress) as baselines:
        return bench_requests(
            subject,
            inputs.traffic,
            repository,
            bench,
            progress,
            url=url,
            metrics_url=metrics_url,
            baselines=baselines,
        )


def server_of(url: str | None, backend: str = "") -> str:
    """Return the name of the server in a result: its address, or what is started here.

    Args:
        url: Address of a server that runs already; None for one that is started here.
        backend: Triton backend of the pipeline's core.
    """
    return describe_local_server(backend) if url is None else url


def bench_requests(
    subject: Subject,
    requests: Sequence[Request],
    repository: Path,
    bench: Bench,
    progress: Progress,
    *,
    url: str | None = None,
    metrics_url: str | None = None,
    baselines: Baselines | None = None,
) -> BenchResult:
    """Measure a pipeline of any kind.

    Args:
        subject: what is measured; its build is found here.
        requests: sent in turn.
        repository: see `bench_pipeline`, as for the other arguments.
        bench: of a promise of the kind `GenerationSlo` the answers are streamed.
        progress: told each measurement.
        url: of a server's gRPC endpoint.
        metrics_url: of its metrics page.
        baselines: measured in the same rounds.

    Raises:
        UserError: see `bench_pipeline`.
    """
    name = subject.pipeline
    # What a server elsewhere has loaded may be of another build.
    build = build_id(repository, name) if url is None else ""
    with open_endpoint(repository, name, url, progress, metrics_url=metrics_url) as endpoint:
        promise = bench.slo if isinstance(bench.slo, GenerationSlo) else None
        target = Target(endpoint.grpc_url, name, endpoint.metrics_url, endpoint.pid, promise)
        points, others = _points(target, requests, bench, baselines, progress)
        rate = None
        if bench.find_rate and bench.slo.limits_us:
            rate = highest_rate(
                target,
                requests,
                bench.slo,
                start_per_s=0.5 * max(point.median("throughput_per_s") for point in points),
                seconds=bench.seconds,
                budget_s=bench.budget_s / 2,
                progress=progress,
            )
    cost = None
    if bench.price is not None:
        cost = bench.price.cost(sustained(points, bench.slo, rate), tokens_of(points))
    return BenchResult(
        subject=replace(subject, build=build),
        points=points,
        baselines=others,
        slo=bench.slo,
        rate=rate,
        cost=cost,
        not_runnable={} if baselines is None else dict(baselines.not_runnable),
        load_s=endpoint.load_s,
    )


def tokens_of(points: Sequence[Point]) -> float | None:
    """Tokens of an answer in the mean; None of a pipeline that generates none."""
    rounds = [one for point in points for one in point.rounds if one.streamed is not None]
    answers = sum(one.requests for one in rounds)
    return sum(one.streamed.tokens for one in rounds if one.streamed) / answers if answers else None


def sustained(points: Sequence[Point], slo: AnySlo, rate: RateSearch | None) -> float:
    """Requests a second that one server sustains with its latencies as promised; 0 for none."""
    if rate is not None:
        return rate.highest_per_s
    latencies = slo.model_copy(update={"throughput": None})
    return max((p.median("throughput_per_s") for p in points if p.meets(latencies)), default=0.0)


def _points(
    target: Target,
    requests: Sequence[Request],
    bench: Bench,
    baselines: Baselines | None,
    progress: Progress,
) -> tuple[tuple[Point, ...], tuple[Point, ...]]:
    """The pipeline's points and the baselines', every one measured once a round."""
    turns: list[tuple[str, Load]] = [(target.pipeline, load) for load in bench.loads]
    if baselines is not None:
        turns += [(name, baselines.load_of(name)) for name in baselines.names]
    found: dict[tuple[str, Load], list[Measurement]] = {turn: [] for turn in turns}
    for number, order in _rounds(turns, bench):
        for contender, load in order:
            if contender == target.pipeline:
                earlier = found[contender, load]
                seconds = bench.seconds
                if earlier and target.promise is not None:  # the warm-up may have made it longer
                    seconds = max(seconds, earlier[0].seconds)
                warm = 0 if earlier else WARM_UP_ANSWERS if target.promise else WARM_UP_REQUESTS
                one = measure(target, requests, load, seconds=seconds, warmup_requests=warm)
            elif baselines is not None and contender in baselines.names:
                try:
                    one = baselines.measure(contender, bench.seconds)
                except UserError as error:  # it ended, and is among those that do not run
                    progress("baseline", str(error))
                    continue
            else:
                continue
            found[contender, load].append(one)
            progress("load", f"round {number}/{bench.rounds}: {contender}, {load}: {one}")
    points = [
        Point(contender, load, tuple(rounds))
        for (contender, load), rounds in found.items()
        if rounds
    ]
    own = (point for point in points if point.contender == target.pipeline)
    others = (point for point in points if point.contender != target.pipeline)
    return tuple(
        replace(point, bottleneck=find_bottleneck(point.typical, point.load)) for point in own
    ), tuple(others)


def _rounds(
    turns: Sequence[tuple[str, Load]], bench: Bench
) -> Iterator[tuple[int, list[tuple[str, Load]]]]:
    """Numbered rounds, each in an order that starts elsewhere, for as long as the budget lasts."""
    began = time.monotonic()
    for index in range(bench.rounds):
        gone = time.monotonic() - began
        if index and gone + gone / index > bench.budget_s:
            return
        shift = index * len(turns) // bench.rounds
        yield index + 1, [*turns[shift:], *turns[:shift]]


def subject_of(
    inputs: PipelineInputs,
    repository: Path,
    *,
    server: str,
    overrides: Mapping[str, JsonValue] | None = None,
) -> Subject:
    """What is measured, and on what.

    Args:
        inputs: the pipeline.
        repository: its lock tells what was really built.
        server: where it is served.
        overrides: of the spec; None takes those of ``tuned.yaml``.
    """
    plan = inputs.plan
    lock = find_manifest(repository, plan.spec.name)
    lengths = plan.lengths.counts if plan.lengths is not None else {}
    return Subject(
        pipeline=plan.spec.name,
        task=plan.task.name,
        architecture=plan.facts.architecture,
        precision=plan.spec.core.precision if lock is None else lock.gate.precision,
        layout=plan.layout if lock is None else lock.plan.layout,
        overrides=dict(plan.spec.tuned if overrides is None else overrides),
        server=server,
        machine=machine(),
        versions=versions_of(*SERVED_BY),
        measured_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        requests=len(inputs.traffic),
        lengths=dict(lengths),
        padding=plan.padding_share,
    )


def machine() -> dict[str, str]:
    memory_gib = psutil.virtual_memory().total / 2**30
    return {
        "processor": processor() or platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory_gib:.0f} GiB",
        "system": platform.platform(terse=True),
    }


def parse_loads(
    concurrency: Sequence[int], rates: Sequence[float], arrivals: str, burst: int
) -> tuple[Load, ...]:
    """Closed loops of so many clients, then open ones of so many requests a second.

    Raises:
        UserError: nothing to measure, or a number out of range.
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
            remedy="Name one",
        )
    if burst < 1:
        raise UserError("--burst", "must be at least 1", given=burst)
    size = burst if arrivals == "burst" else 1
    closed = [Load("concurrency", float(clients)) for clients in concurrency]
    return (*closed, *(Load(kind, rate, size) for rate in rates))
