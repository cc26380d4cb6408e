"""Types of what a build records: the gate's result, the conversion, precisions that were tried.

One reader (`read_record`) and one writer (`plain_record`) serve the build manifest, the cache and
``--json``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, SkipValidation, TypeAdapter

from triptych.spec.backends import Precision
from triptych.spec.engine_plan import ShapeRange
from triptych.tasks.labeled import LabeledResult


def json_text(value: object) -> str:
    """Return the content of a JSON file with `value` as plain data."""
    return json.dumps(plain_data(value), indent=2, allow_nan=False) + "\n"


def plain_data(value: object) -> Any:
    """Return `value` with dicts and lists for all mappings and sequences.

    NaN and infinity become None.
    """
    if isinstance(value, Mapping):
        return {str(name): plain_data(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


Record = TypeVar("Record")
Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""A float that may be infinite or NaN, which is null in JSON."""

GatePrecision = Annotated[Precision, SkipValidation]
"""Precision of a gate's artifact. Pipelines that generate text have others too, such as
``fp8+fp8kv``, so that a record is read without a check of its precision."""


def read_record(kind: type[Record], data: object) -> Record:
    """Return a record from its plain data.

    Raises:
        pydantic.ValidationError: The data does not match the type.
    """
    return TypeAdapter(kind).validate_python(data)


def plain_record(record: Any) -> dict[str, Any]:
    """Return a record as plain data for JSON; optional fields without a value are omitted."""
    plain: dict[str, object] = plain_data(asdict(record))
    optional = getattr(record, "OPTIONAL", ())
    return {name: value for name, value in plain.items() if value or name not in optional}


@dataclass(frozen=True)
class Conversion:
    """Record of a conversion to lower precision."""

    OPTIONAL = ("layer_errors", "batch_ms", "fp32_products")

    # Layers that can be excluded from the conversion, in the order of the graph.
    layers: tuple[str, ...]
    excluded_layers: tuple[str, ...] = ()  # Layers that were excluded and stay in higher precision
    # Reason for each layer that the converter itself excluded.
    reasons: Mapping[str, str] = field(default_factory=dict)
    # Largest magnitude of each layer's input (or of each value) on calibration rows; may be
    # infinite, like that of the logarithm of 0.
    ranges: Mapping[str, Number] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # Further remarks for users, one sentence each
    # Error of the core's outputs if a layer alone, or with its neighbors in a large graph, is
    # converted, by layer. Only measured if the gate required exclusions.
    layer_errors: Mapping[str, float] = field(default_factory=dict)
    # Milliseconds of a batch on one thread: in fp32, without exclusions and as built.
    batch_ms: Mapping[str, float] = field(default_factory=dict)
    # Nodes that multiply matrices in fp32 on purpose, while all others use 16 bits or are
    # quantized.
    fp32_products: tuple[str, ...] = ()


@dataclass(frozen=True)
class PrecisionTrial:
    """A precision that `auto` tried, and its result."""

    precision: Precision
    status: Literal["chosen", "passed", "failed", "not runnable"]  # Result of the trial
    failures: tuple[str, ...] = ()  # Failures of the gate
    verdicts: Mapping[str, Number] | None = None  # Value of each metric
    throughput_per_s: float | None = None  # Requests per second; None if not measured
    p99_ms: float | None = None  # 99th percentile of the latency in milliseconds
    size_bytes: int | None = None  # Size of the core's files in bytes
    excluded_layers: tuple[str, ...] = ()  # Layers that stayed in higher precision
    note: str = ""  # Reason why it is not runnable
    backend: str = ""  # Backend that it was tried on; empty for that of the spec

    @property
    def label(self) -> str:
        """Name of the trial: the precision, after the backend if it is not that of the spec."""
        return f"{self.backend} {self.precision}".strip()


@dataclass(frozen=True)
class Verdict:
    """Result of one metric."""

    metric: str  # Name in `tasks.accuracy.METRICS`
    value: Number  # Measured value; NaN if it could not be measured
    limit: float | None  # Worst allowed value; None if there is no limit
    passed: bool  # Whether `value` is within `limit`


@dataclass(frozen=True)
class WorstRow:
    """A request whose answer differs most from the reference's."""

    preview: str  # Preview of the request
    # Error on the task's own scale; 0 if the answer is right, and for edge cases, which do not
    # count for the task's metrics.
    row_error: Number
    # Largest difference of any element of the core's outputs, as `max_difference`.
    difference: Number
    expected: str  # Preview of the reference's answer
    actual: str  # Preview of the artifact's answer


@dataclass(frozen=True)
class ProbeResult:
    """Result of a core of lower precision on the general probe, texts outside the traffic."""

    rows: int  # Number of probe texts that the pipeline accepts, or of rows of the pair
    verdicts: tuple[Verdict, ...]  # Result of each metric, with the probe's own limits
    # Rows with the largest errors, largest first; their difference is that of `edge_error`.
    worst: tuple[WorstRow, ...] = ()


@dataclass(frozen=True)
class LiveRun:
    """Circumstances in which a server gave the answers of a gate."""

    # Values of the task's metrics, by way of sending.
    by_way: Mapping[str, Mapping[str, Number]] = field(default_factory=dict)
    # Values of the metrics on the synthetic rows alone.
    edge_values: Mapping[str, Number] = field(default_factory=dict)
    # Number of requests by outcome, over all ways of sending.
    counts: Mapping[str, int] = field(default_factory=dict)
    # Failed requests and wrong ends of answers, as text; part of the failures.
    faults: tuple[str, ...] = ()
    pipeline: str = ""  # Name of the pipeline
    url: str = ""  # ``host:port`` of the server's gRPC endpoint
    clients: int = 0  # Number of requests in flight if they were sent concurrently
    # Mean number of rows in a batch of the core then; None if unknown.
    mean_batch: float | None = None
    seconds: float = 0.0  # Time of all requests in seconds
    sent: tuple[str, ...] = ()  # Description of the requests, one line each


@dataclass(frozen=True)
class GateResult:
    """Measurements of the accuracy gate."""

    OPTIONAL = ("probe", "pair", "conversion", "accepted", "candidates", "live")

    precision: GatePrecision  # Precision of the artifact
    rows: int  # Number of compared requests of the traffic
    edge_case_rows: int  # Number of edge-case requests: empty, at the length limit and similar
    finite: bool  # Whether no result is NaN or infinite
    verdicts: tuple[Verdict, ...]  # Result of each metric
    failures: tuple[str, ...]  # Limits that were exceeded, as text; empty if the artifact passed
    worst: tuple[WorstRow, ...] = ()  # Rows with the largest errors, largest first
    notes: tuple[str, ...] = ()  # Further remarks for readers, one sentence each
    # Largest difference of each request, as `WorstRow.difference`; edge cases first.
    row_differences: tuple[Number, ...] = ()
    # Difference between fp32 and fp64 in PyTorch, as `max_difference`; None if not measured.
    rounding: float | None = None
    # Result on texts outside the traffic; None for fp32 and without such texts.
    probe: ProbeResult | None = None
    # Result on the similarities with the rows of the pair; None without a pair.
    pair: ProbeResult | None = None
    labeled: LabeledResult | None = None  # Result on labeled rows; None if there are none
    # Record of the conversion to lower precision; None for fp32.
    conversion: Conversion | None = None
    accepted: str = ""  # Reason why a failed gate did not stop the build; empty if it passed
    # Precisions that were tried, if the spec leaves the precision open.
    candidates: tuple[PrecisionTrial, ...] = ()
    # Circumstances of a run through a server; None for a gate before the build.
    live: LiveRun | None = None

    @property
    def passed(self) -> bool:
        """Whether the artifact passed the gate."""
        return not self.failures

    def value(self, metric: str) -> float | None:
        """Return the measured value; None if the metric does not apply."""
        return next((v.value for v in self.verdicts if v.metric == metric), None)

    def without_texts(self) -> GateResult:
        """Return the result without the users' texts, which must not get into an image."""
        return replace(self, worst=())

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for the manifest, the report and ``--json``.

        NaN and infinity are null.
        """
        plain = plain_record(self)
        plain["row_differences"] = [
            None if value is None else float(f"{value:.3e}") for value in plain["row_differences"]
        ]
        if self.conversion is not None:
            plain["conversion"] = plain_record(self.conversion)
        return plain


@dataclass(frozen=True)
class DryRun:
    """Result of building an engine's graph without a GPU, with TensorRT for RTX."""

    tensorrt_rtx: str  # Version of TensorRT for RTX
    compute_capability: str  # Compute capability that it was built for, such as ``8.9``
    layers: int  # Number of layers in the parsed network
    products: Mapping[str, int]  # Number of matrix products by precision
    size_bytes: int  # Size of the plan in bytes


@dataclass(frozen=True)
class EngineCheck:
    """Comparison of an engine with its graph; only stored if it passed."""

    precision: str
    rows: int
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class EngineRecord:
    """A TensorRT engine that was built, inspected and checked."""

    key: str  # Hash of everything that decided the engine and its check
    onnx_sha256: str
    plan_sha256: str
    tensorrt: str
    cuda: str  # Version of the CUDA runtime
    driver: str
    gpu: str
    compute_capability: str
    version_compatible: bool  # Whether the plan also runs on newer releases of TensorRT
    hardware: str  # Other GPUs that it runs on, as `core.engine.hardware`
    precision: str
    matmuls: Mapping[str, int]  # Number of matrix products found in it by precision, and ``unseen``
    witness: str  # Proof of the precision: ``layers``, ``size``, or ``graph`` if it is fp32
    profiles: tuple[Mapping[str, ShapeRange], ...]  # Profiles of the engine, by input
    check: EngineCheck
