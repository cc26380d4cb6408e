"""What a load did to a server: the one form of a result that all of bench, tune and reports use.

Times are in microseconds and seen by the client unless a name says otherwise. Every class is plain
data: `to_json` and `from_json` are each other's inverse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter

from triptych.pipeline.slo import PERCENTILES, Slo

Kind = Literal["concurrency", "poisson", "constant", "burst", "in_process"]
Value = TypeVar("Value")


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
    """One step during a measurement, in the server's own counts.

    Attributes:
        step: ``preprocess``, ``core``, ``postprocess``; the model's name where it is none of them.
        model: Triton's name.
        instances: that run it; None where the server does not tell.
        max_delay_us: how long its batcher may hold a batch open.
        requests: answered.
        failures: ended in an error.
        rows: in all requests.
        executions: batches.
        batch_sizes: rows of a batch to how many such batches ran.
        queue_us: mean wait of a request; so are the next three means.
        compute_input_us: gathering its batch.
        compute_infer_us: running it.
        compute_output_us: handing out its results.
        busy: share of the time that its instances ran a batch, 0 to 1; None where not known.
    """

    step: str
    model: str
    instances: int | None
    max_delay_us: int
    requests: int
    failures: int
    rows: int
    executions: int
    batch_sizes: dict[int, int]
    queue_us: float
    compute_input_us: float
    compute_infer_us: float
    compute_output_us: float
    busy: float | None

    @property
    def mean_batch(self) -> float:
        """Rows an execution."""
        return self.rows / self.executions if self.executions else 0.0

    @property
    def compute_us(self) -> float:
        """Mean time a request is in the step's hands, its queue apart."""
        return self.compute_input_us + self.compute_infer_us + self.compute_output_us


@dataclass(frozen=True)
class ProcessUse:
    """One process of the server: ``tritonserver``, or a step's Python process (all instances).

    Attributes:
        name: ``tritonserver`` or the step's model.
        cpu_cores: mean cores it kept busy.
        memory_mib: most private and shared memory (PSS) it held.
        wait_cores: mean cores it was ready to use and did not get, all of its threads together.
    """

    name: str
    cpu_cores: float
    memory_mib: float
    wait_cores: float = 0.0


@dataclass(frozen=True)
class GpuUse:
    """One GPU: mean utilisation (0 to 1) and most memory used."""

    name: str
    utilization: float
    memory_mib: float


@dataclass(frozen=True)
class Resources:
    """What the measurement took of the machine the server runs on.

    Attributes:
        cores: that this process may use.
        machine_cpu: share of all cores busy with anything, 0 to 1; None where not known.
        client_cpu_cores: mean cores of the load generator.
        processes: of the server; empty where it runs elsewhere.
        gpus: that the server's metrics tell of.
    """

    cores: int
    machine_cpu: float | None
    client_cpu_cores: float
    processes: tuple[ProcessUse, ...] = ()
    gpus: tuple[GpuUse, ...] = ()


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
class Measurement:
    """One round at one load.

    Attributes:
        seconds: that it lasted, warm-up apart.
        requests: answered well.
        errors: kind of error to how often; the kinds are the server's messages, shortened.
        throughput_per_s: requests answered a second.
        mean_us: of the latency.
        p50_us: percentile of the latency, and so on.
        p90_us: see `p50_us`.
        p95_us: see `p50_us`.
        p99_us: see `p50_us`.
        p99_9_us: see `p50_us`; of few requests (under 1,000) it is close to the largest.
        is_stable: whether its windows agree; None where that cannot be told.
        histogram_us: lower edge of a latency bin to requests in it; bins grow by a tenth each.
        steps: in the order a request goes through them; empty where no server answered.
        parts: where a request's mean time goes; they add up to `mean_us`.
        resources: None where they were not watched.
        warnings: what to know before the figures are used.
        sent_per_s: requests sent a second in an open loop, as it turned out; None in a closed one.
    """

    seconds: float
    requests: int
    errors: dict[str, int]
    throughput_per_s: float
    mean_us: float
    p50_us: float
    p90_us: float
    p95_us: float
    p99_us: float
    p99_9_us: float
    is_stable: bool | None
    histogram_us: dict[float, int] = field(default_factory=dict)
    steps: tuple[StepUse, ...] = ()
    parts: tuple[Part, ...] = ()
    resources: Resources | None = None
    warnings: tuple[str, ...] = ()
    sent_per_s: float | None = None

    @property
    def latencies_us(self) -> dict[str, float]:
        """Percentiles by name."""
        return {name: getattr(self, f"{name}_us") for name in PERCENTILES}


@dataclass(frozen=True)
class Point:
    """One contender at one load, over all rounds.

    Attributes:
        contender: the pipeline's name, or what it is compared with, as ``torch eager``.
        load: what was offered.
        rounds: at least one, in the order they were measured.
        bottleneck: of a served pipeline.
    """

    contender: str
    load: Load
    rounds: tuple[Measurement, ...]
    bottleneck: Bottleneck | None = None

    def median(self, name: str) -> float:
        """Of a number of `Measurement`, over the rounds."""
        return float(median(getattr(one, name) for one in self.rounds))

    def span(self, name: str) -> tuple[float, float]:
        """Lowest and highest round."""
        values = [getattr(one, name) for one in self.rounds]
        return min(values), max(values)

    @property
    def typical(self) -> Measurement:
        """The round whose throughput is the median one (the lower of two): for its details."""
        ranked = sorted(self.rounds, key=lambda one: one.throughput_per_s)
        return ranked[(len(ranked) - 1) // 2]

    @property
    def errors(self) -> dict[str, int]:
        """Of all rounds."""
        kinds = dict.fromkeys(kind for one in self.rounds for kind in one.errors)
        return {kind: sum(one.errors.get(kind, 0) for one in self.rounds) for kind in kinds}

    def meets(self, slo: Slo) -> bool:
        """Whether the medians hold all of `slo`, with no error."""
        latencies = {name: self.median(f"{name}_us") for name in PERCENTILES}
        enough = slo.throughput is None or self.median("throughput_per_s") >= slo.throughput
        return slo.strain(latencies) <= 1 and enough and not self.errors


@dataclass(frozen=True)
class RateSearch:
    """The highest Poisson rate at which a promise holds.

    Attributes:
        slo: the promise.
        highest_per_s: that held; 0 where none that was tried did.
        lowest_broken_per_s: that did not; None where every rate that was tried held.
        points: every rate tried, ascending.
    """

    slo: Slo
    highest_per_s: float
    lowest_broken_per_s: float | None
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Cost:
    """What a million inferences cost.

    Attributes:
        rate_per_s: that one device sustains, at the SLO where there is one.
        price_per_hour: of the device.
        per_million: of inferences.
        monthly: at `daily_requests`; None where no volume was given. Machines are whole.
        machines: needed for `peak_per_s` with `headroom`; None where no peak was given.
        currency: a word to print.
        daily_requests: asked for.
        peak_per_s: asked for.
        headroom: share of a machine's rate that is kept free.
    """

    rate_per_s: float
    price_per_hour: float
    per_million: float
    monthly: float | None
    machines: int | None
    currency: str
    daily_requests: float | None
    peak_per_s: float | None
    headroom: float


@dataclass(frozen=True)
class Subject:
    """What was measured, and on what.

    Attributes:
        pipeline: its name.
        task: what it decodes.
        architecture: of the model.
        precision: of the core.
        layout: how its rows share a batch.
        overrides: dotted key to value, of all that differs from the spec.
        server: ``tritonserver 2.51.0`` and where: ``embedded`` or its URL.
        machine: processor, cores, memory, GPU.
        versions: package to version.
        measured_at: UTC, ISO 8601.
        requests: different ones in the traffic.
        lengths: tokens of a core row to rows of the traffic; empty for images.
        padding: share of the computed tokens that are padding, for this traffic.
    """

    pipeline: str
    task: str
    architecture: str
    precision: str
    layout: str
    overrides: dict[str, Any]
    server: str
    machine: dict[str, str]
    versions: dict[str, str]
    measured_at: str
    requests: int
    lengths: dict[int, int]
    padding: float


@dataclass(frozen=True)
class BenchResult:
    """Everything `bench` found.

    Attributes:
        subject: what was measured.
        points: in the order of the loads; the pipeline's own.
        baselines: what the user would have instead, measured in the same rounds.
        slo: what is promised.
        rate: the search for the highest rate, where there was one.
        cost: where a price was given.
        not_runnable: baseline to why it does not run here.
        schema: of this form.
    """

    subject: Subject
    points: tuple[Point, ...]
    baselines: tuple[Point, ...] = ()
    slo: Slo = field(default_factory=Slo)
    rate: RateSearch | None = None
    cost: Cost | None = None
    not_runnable: dict[str, str] = field(default_factory=dict)
    schema: Literal["triptych-bench/1"] = "triptych-bench/1"


def to_json(value: Any) -> Any:
    """Plain data of any of the classes above."""
    return TypeAdapter(type(value)).dump_python(value, mode="json")


def from_json(kind: type[Value], document: Mapping[str, Any]) -> Value:
    """The inverse of `to_json`.

    Raises:
        pydantic.ValidationError: `document` is not of that form.
    """
    return TypeAdapter(kind).validate_python(document)
