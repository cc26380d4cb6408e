"""Results of load tests, used by bench, tune and reports, with SLO verdict and summaries.

Times are client latencies in microseconds unless a name says otherwise. `to_json` is the only
writer of these classes; `read_record` and `read_result` are their only readers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log
from pathlib import Path
from statistics import median
from typing import Literal, TypeVar

from pydantic import JsonValue, TypeAdapter, ValidationError

from triptych.base.confidence import Ratio, limit_ratio
from triptych.base.errors import UserError
from triptych.base.formatting import amount, milliseconds, rounded
from triptych.repository.records import read_record
from triptych.spec.slo import PERCENTILES, AnySlo, Slo

Kind = Literal["concurrency", "poisson", "constant", "burst"]
Result = TypeVar("Result")


@dataclass(frozen=True)
class OfferedLoad:
    """Load of a measurement."""

    # ``concurrency`` is a closed loop; ``poisson``, ``constant`` and ``burst`` are open loops.
    kind: Kind
    value: float  # Clients of a closed loop, or mean requests per second of an open loop
    burst: int = 1  # Requests sent at once, for the kind ``burst``

    def __str__(self) -> str:
        """Return text such as ``32 clients``, ``100/s poisson`` or ``100/s in bursts of 8``."""
        if self.kind == "concurrency":
            return f"{self.value:g} client{'s' if self.value != 1 else ''}"
        how = f"in bursts of {self.burst}" if self.kind == "burst" else self.kind
        return f"{self.value:g}/s {how}"


@dataclass(frozen=True)
class StepUse:
    """One step during a measurement, by the server's counts; times are means per request."""

    step: str  # preprocess, core, postprocess, or the model's name
    model: str
    instances: int | None  # None if unknown
    max_delay_us: int  # maximum queue delay of its batcher
    requests: int  # answered
    failures: int  # ended in an error
    rows: int
    executions: int  # batches
    batch_sizes: dict[int, int]  # number of batches by batch size
    queue_us: float
    compute_input_us: float  # time to gather the batch
    compute_infer_us: float
    compute_output_us: float  # time to distribute the results
    busy: float | None  # share of the time that instances ran a batch; None if unknown

    @property
    def is_core(self) -> bool:
        """Whether the step is the core of a pipeline, or that of one of its models."""
        return f"_{self.step}".endswith("_core")

    @property
    def instances_field(self) -> str:
        """Field of the spec with the number of its instances."""
        if self.is_core and self.step != "core":
            return f"models.{self.step.removesuffix('_core')}.instances"
        is_own = self.step in ("core", "postprocess")  # a function between models has no own field
        return f"serving.instances.{self.step if is_own else 'preprocess'}"

    @property
    def mean_batch(self) -> float:
        return self.rows / self.executions if self.executions else 0.0

    @property
    def compute_us(self) -> float:
        """Mean time of a request in the step, without the queue."""
        return self.compute_input_us + self.compute_infer_us + self.compute_output_us


@dataclass(frozen=True)
class ProcessUse:
    """One process of the server: ``tritonserver``, or a step's Python process (all instances)."""

    name: str  # tritonserver, or the step's model
    cpu_cores: float  # mean busy cores
    memory_mib: float  # maximum memory (PSS)
    wait_cores: float = 0.0  # mean cores that its threads waited for


@dataclass(frozen=True)
class GpuUse:
    """One GPU: mean utilization (0 to 1) and maximum memory."""

    name: str
    utilization: float
    memory_mib: float


@dataclass(frozen=True)
class Resources:
    """Resources that the measurement used on the server's machine."""

    cores: int  # cores available to this process
    machine_cpu: float | None  # busy share of all cores; None if unknown
    client_cpu_cores: float  # mean busy cores of the load generator
    processes: tuple[ProcessUse, ...] = ()  # empty for a server on another machine
    gpus: tuple[GpuUse, ...] = ()  # GPUs of the server's metrics


@dataclass(frozen=True)
class Part:
    """A part of the mean request's time: ``where`` it is (``core``) and ``what`` (``queue``)."""

    where: str
    what: str
    us: float


@dataclass(frozen=True)
class Bottleneck:
    """Bottleneck of the throughput, or the largest part of the latency."""

    # ``queue delay`` (requests wait for a batch held open), ``instances`` (a step's instances are
    # always busy while cores are free), ``compute`` (all cores or the GPU are busy), ``client``
    # (the load generator), ``none`` (nothing is saturated at this load).
    kind: Literal["queue delay", "instances", "compute", "client", "none"]
    step: str  # Step of the bottleneck; empty if it is not a step
    explanation: str  # Cause with the metric values
    remedy: str  # Recommended change


@dataclass(frozen=True)
class Times:
    """Mean and percentiles of a number of samples, in microseconds."""

    samples: int
    mean_us: float = 0.0
    p50_us: float = 0.0
    p90_us: float = 0.0
    p95_us: float = 0.0
    p99_us: float = 0.0
    p99_9_us: float = 0.0


@dataclass(frozen=True)
class Streamed:
    """Metrics of streamed answers in one round."""

    tokens: int  # Number of tokens of the answers
    tokens_per_s: float  # Tokens per second of all answers
    goodput_per_s: float  # Requests per second that met every limit of the SLO
    ttft: Times  # Times from a request to its first token
    itl: Times  # Times between two responses of an answer, after the first


@dataclass(frozen=True)
class Measurement:
    """Metrics of one round at one load."""

    seconds: float  # duration without the warm-up
    requests: int  # requests answered without an error
    errors: dict[str, int]  # number of errors by shortened message of the server
    throughput_per_s: float  # requests answered
    mean_us: float  # mean latency
    p50_us: float
    p90_us: float
    p95_us: float
    p99_us: float
    p99_9_us: float  # 99.9th percentile; close to the maximum for fewer than 1,000 requests
    is_stable: bool | None  # whether the windows agree; None if unknown
    histogram_us: dict[float, int] = field(default_factory=dict)
    """Number of requests by lower bound of the latency bin; each bin is 10 % wider than before."""
    steps: tuple[StepUse, ...] = ()  # steps in the order of a request; empty without a server
    parts: tuple[Part, ...] = ()  # parts of the mean latency, which add up to `mean_us`
    resources: Resources | None = None  # None if not monitored
    warnings: tuple[str, ...] = ()  # warnings about the metrics
    sent_per_s: float | None = None  # actual rate of an open loop; None in a closed loop
    streamed: Streamed | None = None  # None without streaming, or with errors

    @property
    def latencies_us(self) -> dict[str, float]:
        """Latencies by the names of SLO limits."""
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
        """Tokens per second of streamed answers; 0 for others."""
        return self.streamed.tokens_per_s if self.streamed else 0.0

    @property
    def goodput_per_s(self) -> float:
        """Requests per second that met the SLO, for streamed answers; 0 for others."""
        return self.streamed.goodput_per_s if self.streamed else 0.0

    def slo_ratio(self, slo: AnySlo) -> float:
        """Return the largest ratio to a limit of `slo`: above 1 the SLO is missed."""
        return max(slo.slo_ratio(self.latencies_us), (slo.throughput or 0) / self.throughput_per_s)

    def __str__(self) -> str:
        """Return text with rate and latencies, or with the errors."""
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


SloState = Literal["met", "missed", "cannot tell"]
_MIN_SLO_RATIO = 1e-9
"""Minimum ratio to a limit, because a ratio of 0 has no logarithm."""


def judge_ratio(ratio: Ratio | None) -> SloState:
    """Return on which side of its limit a measurement is; None stands for errors."""
    if ratio is None:
        return "missed"
    states: dict[str, SloState] = {"below": "met", "above": "missed"}
    return states.get(ratio.side_of(1.0), "cannot tell")


@dataclass(frozen=True)
class LoadPoint:
    """Measurements of a pipeline at one load, over all rounds."""

    load: OfferedLoad
    rounds: tuple[Measurement, ...]  # one or more measurements, in order
    bottleneck: Bottleneck | None = None

    def median(self, name: str) -> float:
        """Return the median of a field of `Measurement` over the rounds."""
        return float(median(getattr(one, name) for one in self.rounds))

    def span(self, name: str) -> tuple[float, float]:
        values = [getattr(one, name) for one in self.rounds]
        return min(values), max(values)

    @property
    def load_text(self) -> str:
        """Load, in an open loop with the rate sent, such as ``20/s poisson, 19.9/s sent``."""
        sent = [one.sent_per_s for one in self.rounds if one.sent_per_s is not None]
        return f"{self.load}, {rounded(median(sent))}/s sent" if sent else str(self.load)

    @property
    def typical(self) -> Measurement:
        """Round with the median throughput (the lower of two medians)."""
        ranked = sorted(self.rounds, key=lambda one: one.throughput_per_s)
        return ranked[(len(ranked) - 1) // 2]

    @property
    def streamed(self) -> tuple[Streamed, ...]:
        """Streaming metrics of each round with streamed answers."""
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
        """Whether the medians meet all limits of `slo`, without errors."""
        enough = slo.throughput is None or self.median("throughput_per_s") >= slo.throughput
        return slo.slo_ratio(self.latencies_us) <= 1 and enough and not self.errors

    def slo_ratio(self, slo: AnySlo) -> Ratio | None:
        """Return the ratio of the rounds to the limits of `slo`; None with errors."""
        if self.errors or not all(one.requests and one.throughput_per_s for one in self.rounds):
            return None
        return limit_ratio([log(max(one.slo_ratio(slo), _MIN_SLO_RATIO)) for one in self.rounds])

    def judge(self, slo: AnySlo) -> SloState:
        """Return whether `slo` is met, with 95 % confidence; errors miss it."""
        return judge_ratio(self.slo_ratio(slo))


@dataclass(frozen=True)
class RateSearch:
    """Highest Poisson rate at which the latencies meet the SLO, with 95 % confidence."""

    slo: AnySlo
    highest_per_s: float  # highest rate that met the SLO; 0 without one
    lowest_broken_per_s: float | None  # lowest rate that missed the SLO; None without one
    points: tuple[LoadPoint, ...]  # every rate tried, ascending

    def state_of(self, rate_per_s: float) -> SloState:
        """Return whether the SLO is met at a rate."""
        if 0 < rate_per_s <= self.highest_per_s:
            return "met"
        broken = self.lowest_broken_per_s
        return "missed" if broken is not None and rate_per_s >= broken else "cannot tell"

    @property
    def open_per_s(self) -> list[float]:
        """Rates that were tried without a result, ascending."""
        rates = [point.load.value for point in self.points]
        return [rate for rate in rates if self.state_of(rate) == "cannot tell"]

    @property
    def verdict(self) -> SloState:
        """Whether a rate meets the SLO, and its throughput if it has one."""
        if self.slo.throughput is not None:
            return self.state_of(self.slo.throughput)
        if self.highest_per_s > 0:
            return "met"
        return "cannot tell" if self.open_per_s or self.lowest_broken_per_s is None else "missed"


@dataclass(frozen=True)
class Cost:
    rate_per_s: float  # sustained rate of one device, within the SLO
    price_per_hour: float  # price of one device
    per_million: float
    monthly: float | None  # at `daily_requests`, with whole machines; None without a volume
    machines: int | None  # machines for `peak_per_s` with `headroom`; None without a peak
    currency: str
    daily_requests: float | None
    peak_per_s: float | None
    headroom: float  # unused share of a machine's rate
    per_million_tokens: float | None = None  # cost per million generated tokens, prompts included

    def has_price_of(self, other: Cost) -> bool:
        """Return whether a device has the same price in both."""
        return (self.currency, self.price_per_hour) == (other.currency, other.price_per_hour)


@dataclass(frozen=True)
class Subject:
    pipeline: str
    task: str
    architecture: str
    precision: str
    layout: str
    overrides: dict[str, JsonValue]  # values that differ from the spec, by dotted key
    server: str  # URL, or the local server with its emulated backend
    machine: dict[str, str]
    versions: dict[str, str]  # versions by package
    measured_at: str  # UTC, ISO 8601
    requests: int  # number of distinct requests in the traffic
    lengths: dict[int, int]  # number of core rows by token length; empty for images
    padding: float  # padding share of the computed tokens for this traffic
    build: str = ""  # `build_id` of the measured build; empty if unknown


@dataclass(frozen=True)
class BenchResult:
    subject: Subject
    points: tuple[LoadPoint, ...]  # points in the order of the loads
    slo: AnySlo = field(default_factory=Slo)
    rate: RateSearch | None = None
    cost: Cost | None = None
    load_s: float | None = None  # time from the server's start to ready; None if it ran before
    schema: Literal["triptych-bench/1"] = "triptych-bench/1"


def to_json(value: object) -> JsonValue:
    """Return an object of a class of this module as plain data."""
    plain: JsonValue = TypeAdapter(type(value)).dump_python(value, mode="json")
    return plain


def read_result(kind: type[Result], file: Path, verb: str) -> Result:
    """Return the result that the command `verb` wrote as JSON.

    Raises:
        UserError: The file is missing or has another form.
    """
    remedy = f"Give a {verb}.json that `triptych {verb}` wrote"
    try:
        return read_record(kind, json.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        given = error.strerror or error
        raise UserError(str(file), "must be a readable file", given=given, remedy=remedy) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the document"
        given = f"{where}: {first['msg']}"
        rule = f"must be a {verb} result"
        raise UserError(str(file), rule, given=given, remedy=remedy) from error
    except ValueError as error:  # the text is not UTF-8 or not JSON
        raise UserError(str(file), "must be JSON", given=error, remedy=remedy) from error


SloKind = Literal["met", "not met", "cannot tell", "none"]
SLO_WORDS: Mapping[SloKind, str] = {
    "met": "SLO met",
    "not met": "SLO NOT MET",
    "cannot tell": "SLO: cannot tell",
    "none": "No SLO",
}
SLO_KINDS: Mapping[SloState, SloKind] = {
    "met": "met",
    "missed": "not met",
    "cannot tell": "cannot tell",
}
"""Verdict by the state of a measurement."""


@dataclass(frozen=True)
class SloVerdict:
    """SLO verdict, with an explanation."""

    kind: SloKind
    explanation: str

    @property
    def word(self) -> str:
        return SLO_WORDS[self.kind]

    @property
    def passed(self) -> bool:
        """Whether the SLO is proven to be met, or there is none."""
        return self.kind in ("met", "none")


def closed_loop_points(points: Sequence[LoadPoint]) -> list[LoadPoint]:
    """Return the points of closed loops, ascending in clients."""
    closed = [point for point in points if point.load.kind == "concurrency"]
    return sorted(closed, key=lambda point: point.load.value)


def find_best_point(points: Sequence[LoadPoint], slo: AnySlo) -> LoadPoint | None:
    """Return the point with the highest throughput: within the SLO, without errors, or any."""
    within_slo = [point for point in points if point.meets(slo)]
    clean = [point for point in points if not point.errors]
    return max(
        within_slo or clean or points,
        key=lambda point: point.median("throughput_per_s"),
        default=None,
    )


def find_limiting_bottleneck(points: Sequence[LoadPoint]) -> Bottleneck | None:
    """Return the bottleneck at the highest throughput, regardless of the SLO."""
    known = [point for point in points if point.bottleneck is not None]
    best = find_best_point(known, Slo())
    return best.bottleneck if best else None


def judge_slo(result: BenchResult) -> SloVerdict:
    """Return whether `result` meets its SLO.

    A rate search takes precedence, because clients of a closed loop slow down with the server and
    thereby hide queues.
    """
    slo = result.slo
    if slo.is_empty:
        return SloVerdict("none", "The pipeline has no SLO.")
    if result.rate is not None:
        rate = replace(result.rate, slo=slo)
        return SloVerdict(SLO_KINDS[rate.verdict], f"{slo}: {format_rates(rate)}.")
    if not result.points:
        return SloVerdict("cannot tell", f"{slo}: nothing was measured.")
    state = judge_points(result.points, slo)
    if state == "met":
        loads = [str(point.load) for point in result.points if point.judge(slo) == "met"]
        return SloVerdict("met", f"{slo}: met at {', '.join(loads)}.")
    nearest = min(result.points, key=lambda point: (bool(point.errors), _slo_ratio(point, slo)))
    text = f"The nearest: {format_point(nearest)}{format_slo_ratio(nearest, slo)}."
    none = "met at no load" if state == "missed" else "no load is proven to meet it"
    return SloVerdict(SLO_KINDS[state], f"{slo}: {none}. {text}")


def judge_points(points: Sequence[LoadPoint], slo: AnySlo) -> SloState:
    """Return ``met`` if one load meets the SLO, and ``missed`` only if all loads miss it."""
    states = {point.judge(slo) for point in points}
    if "met" in states:
        return "met"
    return "missed" if states == {"missed"} else "cannot tell"


def format_headline(result: BenchResult) -> str:
    """Return the best metrics in one line; empty without measurements."""
    best = find_best_point(result.points, result.slo)
    return f"Best: {format_point(best)}" if best else ""


def format_point(point: LoadPoint) -> str:
    """Return text such as ``231/s at 8 clients, p50 34.1 ms, p99 41.2 ms``, and any errors.

    For streamed answers, the text has tokens, goodput, and p99 of the first token and between
    tokens.
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
    return f"{rate}/s at {point.load_text}, p50 {half} ms, p99 {most} ms{errors}"


def collect_warnings(points: Sequence[LoadPoint]) -> list[str]:
    """Return the warnings of all points, with their loads.

    Warnings that differ only in numbers are merged, with the numbers of the first.
    """
    found: dict[str, list[tuple[str, str]]] = {}
    for point in points:
        for text in (text for one in point.rounds for text in one.warnings):
            kind = re.sub(r"\d+(\.\d+)?", "0", text)
            found.setdefault(kind, []).append((text, str(point.load)))
    merged = []
    for alike in found.values():
        where = "; ".join(dict.fromkeys(point for _, point in alike))
        times = f", {len(alike)} similar warnings" if len(alike) > 1 else ""
        merged.append(f"{alike[0][0]}{times} ({where})")
    return merged


def format_rates(rate: RateSearch) -> str:
    """Return text about the highest rate that meets the SLO."""
    tried = ", ".join(f"{rounded(point.load.value)}/s" for point in rate.points)
    open_rates = ", ".join(f"{rounded(one)}/s" for one in rate.open_per_s)
    unclear = f"; cannot tell at {open_rates}, where the rounds vary too much" if open_rates else ""
    if rate.highest_per_s <= 0:
        none = "no rate that was tried is proven to meet it" if unclear else "met at no rate tried"
        return f"{none} ({tried or 'none'}){unclear}"
    met = f"met up to {rounded(rate.highest_per_s)}/s of requests that arrive at random"
    if rate.lowest_broken_per_s is not None:
        return f"{met}, and missed at {rounded(rate.lowest_broken_per_s)}/s{unclear}"
    return f"{met}{unclear or '; no higher rate was tried'}"


MAX_ROUNDS = 100
"""Maximum number of rounds that is recommended."""


def format_slo_ratio(point: LoadPoint, slo: AnySlo) -> str:
    """Return the ratio to the limit as the end of a sentence, and what a result would take."""
    ratio = point.slo_ratio(slo)
    if ratio is None:
        return ""
    text = f", {ratio} the limit"
    if judge_ratio(ratio) != "cannot tell":
        return text
    needed = ratio.rounds_to_tell(1.0)
    if needed is None:
        return f"{text}: one round does not show the noise, use --rounds 3"
    if needed > MAX_ROUNDS:
        return f"{text}: too close to the limit, or too noisy, for {MAX_ROUNDS} rounds"
    return f"{text}: about {max(needed, ratio.rounds + 1)} rounds (--rounds) would tell"


def _slo_ratio(point: LoadPoint, slo: AnySlo) -> float:
    """Return the SLO ratio of a point: above 1 it misses the SLO."""
    latency = slo.slo_ratio(point.latencies_us)
    rate = point.median("throughput_per_s")
    # A round without answers has no latency.
    if rate <= 0:
        return float("inf")
    return max(latency, (slo.throughput or 0) / rate)
