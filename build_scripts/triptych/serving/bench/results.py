"""What a load did to a server: the one form of a result that all of bench, tune and reports use.

Times are in microseconds and seen by the client unless a name says otherwise. `to_json` is the only
writer of these classes, `from_json` and `read_result` (of a file) their only readers.

What a bench comes to: whether the promise holds, the best figures, what holds it back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Literal, TypeVar

from pydantic import JsonValue, TypeAdapter, ValidationError

from triptych.base.errors import UserError
from triptych.base.formatting import amount, milliseconds, rounded
from triptych.spec.slo import PERCENTILES, AnySlo, Slo

Kind = Literal["concurrency", "poisson", "constant", "burst", "in_process"]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Load:
    """What was offered.

    Attributes:
        kind: ``concurrency`` is a closed loop; the next three send whatever comes back;
            ``in_process`` calls a library directly, with no server.
        value: clients of a closed loop; mean requests a second of an open one; rows a call.
        burst: requests sent at once, where the kind is ``burst``.
    """

    kind: Kind
    value: float
    burst: int = 1

    def __str__(self) -> str:
        """``32 clients``, ``100/s poisson``, ``100/s in bursts of 8``."""
        if self.kind == "concurrency":
            return f"{self.value:g} client{'s' if self.value != 1 else ''}"
        if self.kind == "in_process":
            return f"{self.value:g} a call"
        how = f"in bursts of {self.burst}" if self.kind == "burst" else self.kind
        return f"{self.value:g}/s {how}"


@dataclass(frozen=True)
class StepUse:
    """One step during a measurement, in the server's own counts; times are means of a request."""

    step: str  # preprocess, core, postprocess; the model's name where it is none of them
    model: str
    instances: int | None  # None where the server does not tell
    max_delay_us: int  # how long its batcher may hold a batch open
    requests: int  # answered
    failures: int  # ended in an error
    rows: int
    executions: int  # batches
    batch_sizes: dict[int, int]  # rows of a batch to how many such batches ran
    queue_us: float
    compute_input_us: float  # gathering the batch
    compute_infer_us: float
    compute_output_us: float  # handing out its results
    busy: float | None  # share of the time that its instances ran a batch; None where not known

    @property
    def mean_batch(self) -> float:
        return self.rows / self.executions if self.executions else 0.0

    @property
    def compute_us(self) -> float:
        """Mean time a request is in the step's hands, its queue apart."""
        return self.compute_input_us + self.compute_infer_us + self.compute_output_us


@dataclass(frozen=True)
class ProcessUse:
    """One process of the server: ``tritonserver``, or a step's Python process (all instances)."""

    name: str  # tritonserver, or the step's model
    cpu_cores: float  # mean cores it kept busy
    memory_mib: float  # most private and shared memory (PSS) it held
    wait_cores: float = 0.0  # mean cores its threads were ready to use and did not get


@dataclass(frozen=True)
class GpuUse:
    """One GPU: mean utilization (0 to 1) and most memory used."""

    name: str
    utilization: float
    memory_mib: float


@dataclass(frozen=True)
class Resources:
    """What the measurement took of the machine the server runs on."""

    cores: int  # that this process may use
    machine_cpu: float | None  # share of all cores busy with anything; None where not known
    client_cpu_cores: float  # mean cores of the load generator
    processes: tuple[ProcessUse, ...] = ()  # empty where the server runs elsewhere
    gpus: tuple[GpuUse, ...] = ()  # that the server's metrics tell of


@dataclass(frozen=True)
class Part:
    """A part of the mean request's time: ``where`` it is (``core``) and ``what`` (``queue``)."""

    where: str
    what: str
    us: float


@dataclass(frozen=True)
class Bottleneck:
    """What holds the throughput, or most of the latency.

    Attributes:
        kind: ``queue delay`` (requests wait for a batch held open), ``instances`` (a step's
            instances are always busy while the machine has room), ``compute`` (the machine's
            cores, or the GPU, are full: the step that takes most of them), ``client`` (the load
            generator is), ``none`` (nothing is full: more load would find it).
        step: whose; empty where it is no step's.
        says: a sentence with the figures it is drawn from.
        remedy: what to change.
    """

    kind: Literal["queue delay", "instances", "compute", "client", "none"]
    step: str
    says: str
    remedy: str


@dataclass(frozen=True)
class Times:
    """Times of one kind: percentiles, and of how many samples they are."""

    samples: int
    mean_us: float = 0.0
    p50_us: float = 0.0
    p90_us: float = 0.0
    p95_us: float = 0.0
    p99_us: float = 0.0
    p99_9_us: float = 0.0


@dataclass(frozen=True)
class Streamed:
    """What a round says of answers that come token by token.

    Attributes:
        tokens: of the answers.
        tokens_per_s: of all answers together.
        goodput_per_s: requests a second that kept every limit of the promise.
        ttft: from a request to its first token.
        itl: between two responses of an answer, after the first.
    """

    tokens: int
    tokens_per_s: float
    goodput_per_s: float
    ttft: Times
    itl: Times


@dataclass(frozen=True)
class Measurement:
    """One round at one load."""

    seconds: float  # warm-up apart
    requests: int  # answered well
    errors: dict[str, int]  # the server's messages, shortened, to how often
    throughput_per_s: float  # requests answered
    mean_us: float  # of the latency, as are the percentiles
    p50_us: float
    p90_us: float
    p95_us: float
    p99_us: float
    p99_9_us: float  # of fewer than 1,000 requests it is close to the largest
    is_stable: bool | None  # whether its windows agree; None where that cannot be told
    histogram_us: dict[float, int] = field(default_factory=dict)
    """Lower edge of a latency bin to requests in it; bins grow by a tenth each."""
    steps: tuple[StepUse, ...] = ()  # in a request's order; empty where no server answered
    parts: tuple[Part, ...] = ()  # where the mean time goes; they add up to `mean_us`
    resources: Resources | None = None  # None where they were not watched
    warnings: tuple[str, ...] = ()  # what to know before the figures are used
    sent_per_s: float | None = None  # in an open loop, as it turned out; None in a closed one
    streamed: Streamed | None = None  # None of a pipeline that answers at once, and with errors

    @property
    def latencies_us(self) -> dict[str, float]:
        """By the names that promises limit."""
        found = {name: getattr(self, f"{name}_us") for name in PERCENTILES}
        if self.streamed is None:
            return found
        ttft, itl = self.streamed.ttft, self.streamed.itl
        return found | {
            f"{moment}_{name}": getattr(times, f"{name}_us")
            for moment, times in (("ttft", ttft), ("itl", itl), ("e2e", self))
            for name in PERCENTILES
        }

    @property
    def tokens_per_s(self) -> float:
        """Of streamed answers; else 0."""
        return self.streamed.tokens_per_s if self.streamed else 0.0

    @property
    def goodput_per_s(self) -> float:
        """Requests a second that kept the promise: of streamed answers; else 0."""
        return self.streamed.goodput_per_s if self.streamed else 0.0

    def __str__(self) -> str:
        """Rate and latencies, or the errors."""
        if self.errors:
            return "; ".join(f"{count} x {kind}" for kind, count in self.errors.items())
        middle, tail = self.p50_us / 1e3, self.p99_us / 1e3
        if self.streamed is None:
            return f"{self.throughput_per_s:.0f}/s, p50 {middle:.1f} ms, p99 {tail:.1f} ms"
        ttft, itl = self.streamed.ttft.p50_us / 1e3, self.streamed.itl.p50_us / 1e3
        return (
            f"{self.streamed.tokens_per_s:.1f} tokens/s, {self.throughput_per_s:.2f}/s, p50 of the "
            f"first token {ttft:.1f} ms, between tokens {itl:.1f} ms"
        )


@dataclass(frozen=True)
class Point:
    """One contender at one load, over all rounds."""

    contender: str  # the pipeline's name, or what it is compared with, as `torch eager`
    load: Load
    rounds: tuple[Measurement, ...]  # at least one, in the order they were measured
    bottleneck: Bottleneck | None = None  # of a served pipeline

    def median(self, name: str) -> float:
        """Of a number of `Measurement`, over the rounds."""
        return float(median(getattr(one, name) for one in self.rounds))

    def span(self, name: str) -> tuple[float, float]:
        values = [getattr(one, name) for one in self.rounds]
        return min(values), max(values)

    @property
    def typical(self) -> Measurement:
        """The round whose throughput is the median one (the lower of two): for its details."""
        ranked = sorted(self.rounds, key=lambda one: one.throughput_per_s)
        return ranked[(len(ranked) - 1) // 2]

    @property
    def streamed(self) -> tuple[Streamed, ...]:
        """Of each round that was answered token by token."""
        return tuple(one.streamed for one in self.rounds if one.streamed is not None)

    @property
    def errors(self) -> dict[str, int]:
        kinds = dict.fromkeys(kind for one in self.rounds for kind in one.errors)
        return {kind: sum(one.errors.get(kind, 0) for one in self.rounds) for kind in kinds}

    @property
    def latencies_us(self) -> dict[str, float]:
        """Median of each percentile over the rounds, by name."""
        rounds = [one.latencies_us for one in self.rounds]
        names = dict.fromkeys(name for one in rounds for name in one)
        return {name: float(median(one.get(name, 0.0) for one in rounds)) for name in names}

    def meets(self, slo: AnySlo) -> bool:
        """Whether the medians hold all of `slo`, with no error."""
        enough = slo.throughput is None or self.median("throughput_per_s") >= slo.throughput
        return slo.strain(self.latencies_us) <= 1 and enough and not self.errors


@dataclass(frozen=True)
class RateSearch:
    """The highest Poisson rate at which the latencies of a promise hold."""

    slo: AnySlo
    highest_per_s: float  # that held; 0 where none that was tried did
    lowest_broken_per_s: float | None  # None where every rate that was tried held
    points: tuple[Point, ...]  # every rate tried, ascending


@dataclass(frozen=True)
class Cost:
    rate_per_s: float  # that one device sustains, at the SLO where there is one
    price_per_hour: float  # of the device
    per_million: float
    monthly: float | None  # at `daily_requests`, with whole machines; None without a volume
    machines: int | None  # for `peak_per_s` with `headroom`; None where no peak was given
    currency: str
    daily_requests: float | None
    peak_per_s: float | None
    headroom: float  # share of a machine's rate that is kept free
    per_million_tokens: float | None = None  # generated; what their prompts cost is in it


@dataclass(frozen=True)
class Subject:
    pipeline: str
    task: str
    architecture: str
    precision: str
    layout: str
    overrides: dict[str, JsonValue]  # dotted key to value, of all that differs from the spec
    server: str  # its URL, or what was started here and which backend of it is replaced
    machine: dict[str, str]
    versions: dict[str, str]  # of packages
    measured_at: str  # UTC, ISO 8601
    requests: int  # different ones in the traffic
    lengths: dict[int, int]  # tokens of a core row to rows of the traffic; empty for images
    padding: float  # share of the computed tokens that are padding, for this traffic
    build: str = ""  # `build_id` of what was measured; empty where that is not known


@dataclass(frozen=True)
class BenchResult:
    subject: Subject
    points: tuple[Point, ...]  # the pipeline's own, in the order of the loads
    baselines: tuple[Point, ...] = ()  # what one would have instead, in the same rounds
    slo: AnySlo = field(default_factory=Slo)
    rate: RateSearch | None = None
    cost: Cost | None = None
    not_runnable: dict[str, str] = field(default_factory=dict)  # baseline to the reason
    load_s: float | None = None  # from the server's start to ready; None where it ran already
    schema: Literal["triptych-bench/1"] = "triptych-bench/1"


def to_json(value: object) -> JsonValue:
    """Plain data of any of the classes above."""
    plain: JsonValue = TypeAdapter(type(value)).dump_python(value, mode="json")
    return plain


def from_json(kind: type[Result], document: object) -> Result:
    """The inverse of `to_json`.

    Raises:
        pydantic.ValidationError: `document` is not of that form.
    """
    return TypeAdapter(kind).validate_python(document)


def read_result(kind: type[Result], file: Path, verb: str) -> Result:
    """The result that the command `verb` wrote as JSON.

    Raises:
        UserError: there is no such file, or it is of another form.
    """
    remedy = f"Give a {verb}.json that `triptych {verb}` wrote"
    try:
        return from_json(kind, json.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        given = error.strerror or error
        raise UserError(str(file), "must be a file to read", given=given, remedy=remedy) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the document"
        given = f"{where}: {first['msg']}"
        rule = f"must be a {verb} result"
        raise UserError(str(file), rule, given=given, remedy=remedy) from error
    except ValueError as error:  # of the text: no UTF-8, no JSON
        raise UserError(str(file), "must be JSON", given=error, remedy=remedy) from error


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
