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
    plain: dict[str, Any] = plain_data(asdict(record))
    optional = getattr(record, "OPTIONAL", ())
    return {name: value for name, value in plain.items() if value or name not in optional}


@dataclass(frozen=True)
class Conversion:
    """Record of a conversion to lower precision.

    Attributes:
        layers: Layers that can be excluded from the conversion, in the order of the graph.
        excluded_layers: Layers that were excluded and stay in higher precision.
        reasons: Reason for each layer that the converter itself excluded.
        ranges: Largest magnitude of each layer's input (or of each value) on calibration rows; may
            be infinite, like that of the logarithm of 0.
        notes: Further remarks for users, one sentence each.
        layer_errors: Error of the core's outputs if a layer alone, or with its neighbors in a large
            graph, is converted, by layer. Only measured if the gate required exclusions.
        batch_ms: Milliseconds of a batch on one thread: in fp32, without exclusions and as built.
        fp32_products: Nodes that multiply matrices in fp32 on purpose, while all others use 16 bits
            or are quantized.
    """

    OPTIONAL = ("layer_errors", "batch_ms", "fp32_products")

    layers: tuple[str, ...]
    excluded_layers: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    ranges: Mapping[str, Number] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    layer_errors: Mapping[str, float] = field(default_factory=dict)
    batch_ms: Mapping[str, float] = field(default_factory=dict)
    fp32_products: tuple[str, ...] = ()


@dataclass(frozen=True)
class PrecisionTrial:
    """A precision that `auto` tried, and its result.

    Attributes:
        status: Result of the trial.
        failures: Failures of the gate.
        verdicts: Value of each metric.
        throughput_per_s: Requests per second; None if not measured.
        p99_ms: 99th percentile of the latency in milliseconds.
        size_bytes: Size of the core's files in bytes.
        excluded_layers: Layers that stayed in higher precision.
        note: Reason why it is not runnable.
        backend: Backend that it was tried on; empty for that of the spec.
    """

    precision: Precision
    status: Literal["chosen", "passed", "failed", "not runnable"]
    failures: tuple[str, ...] = ()
    verdicts: Mapping[str, Number] | None = None
    throughput_per_s: float | None = None
    p99_ms: float | None = None
    size_bytes: int | None = None
    excluded_layers: tuple[str, ...] = ()
    note: str = ""
    backend: str = ""

    @property
    def label(self) -> str:
        """Name of the trial: the precision, after the backend if it is not that of the spec."""
        return f"{self.backend} {self.precision}".strip()


@dataclass(frozen=True)
class Verdict:
    """Result of one metric.

    Attributes:
        metric: Name in `tasks.accuracy.METRICS`.
        value: Measured value; NaN if it could not be measured.
        limit: Worst allowed value; None if there is no limit.
        passed: Whether `value` is within `limit`.
    """

    metric: str
    value: Number
    limit: float | None
    passed: bool


@dataclass(frozen=True)
class WorstRow:
    """A request whose answer differs most from the reference's.

    Attributes:
        preview: Preview of the request.
        row_error: Error on the task's own scale; 0 if the answer is right, and for edge cases,
            which do not count for the task's metrics.
        difference: Largest difference of any element of the core's outputs, as `max_difference`.
        expected: Preview of the reference's answer.
        actual: Preview of the artifact's answer.
    """

    preview: str
    row_error: Number
    difference: Number
    expected: str
    actual: str


@dataclass(frozen=True)
class ProbeResult:
    """Result of a core of lower precision on the general probe, texts outside the traffic.

    Attributes:
        rows: Number of probe texts that the pipeline accepts.
        verdicts: Result of each metric, with the probe's own limits.
        worst: Rows with the largest errors, largest first; their difference is that of
            `edge_error`.
    """

    rows: int
    verdicts: tuple[Verdict, ...]
    worst: tuple[WorstRow, ...] = ()


@dataclass(frozen=True)
class LiveRun:
    """Circumstances in which a server gave the answers of a gate.

    Attributes:
        by_way: Values of the task's metrics, by way of sending.
        edge_values: Values of the metrics on the synthetic rows alone.
        counts: Number of requests by outcome, over all ways of sending.
        faults: Failed requests and wrong ends of answers, as text; part of the failures.
        pipeline: Name of the pipeline.
        url: ``host:port`` of the server's gRPC endpoint.
        clients: Number of requests in flight if they were sent concurrently.
        mean_batch: Mean number of rows in a batch of the core then; None if unknown.
        seconds: Time of all requests in seconds.
        sent: Description of the requests, one line each.
    """

    by_way: Mapping[str, Mapping[str, Number]] = field(default_factory=dict)
    edge_values: Mapping[str, Number] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    pipeline: str = ""
    url: str = ""
    clients: int = 0
    mean_batch: float | None = None
    seconds: float = 0.0
    sent: tuple[str, ...] = ()


@dataclass(frozen=True)
class GateResult:
    """Measurements of the accuracy gate.

    Attributes:
        precision: Precision of the artifact.
        rows: Number of compared requests of the traffic.
        edge_case_rows: Number of edge-case requests: empty, at the length limit and similar.
        finite: Whether no result is NaN or infinite.
        verdicts: Result of each metric.
        failures: Limits that were exceeded, as text; empty if the artifact passed.
        worst: Rows with the largest errors, largest first.
        notes: Further remarks for readers, one sentence each.
        row_differences: Largest difference of each request, as `WorstRow.difference`; edge cases
            first.
        rounding: Difference between fp32 and fp64 in PyTorch, as `max_difference`; None if not
            measured.
        probe: Result on texts outside the traffic; None for fp32 and without such texts.
        labeled: Result on labeled rows; None if there are none.
        conversion: Record of the conversion to lower precision; None for fp32.
        accepted: Reason why a failed gate did not stop the build; empty if it passed.
        candidates: Precisions that were tried, if the spec leaves the precision open.
        live: Circumstances of a run through a server; None for a gate before the build.
    """

    OPTIONAL = ("probe", "conversion", "accepted", "candidates", "live")

    precision: GatePrecision
    rows: int
    edge_case_rows: int
    finite: bool
    verdicts: tuple[Verdict, ...]
    failures: tuple[str, ...]
    worst: tuple[WorstRow, ...] = ()
    notes: tuple[str, ...] = ()
    row_differences: tuple[Number, ...] = ()
    rounding: float | None = None
    probe: ProbeResult | None = None
    labeled: LabeledResult | None = None
    conversion: Conversion | None = None
    accepted: str = ""
    candidates: tuple[PrecisionTrial, ...] = ()
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
    """Result of building an engine's graph without a GPU, with TensorRT for RTX.

    Attributes:
        tensorrt_rtx: Version of TensorRT for RTX.
        compute_capability: Compute capability that it was built for, such as ``8.9``.
        layers: Number of layers in the parsed network.
        products: Number of matrix products by precision.
        size_bytes: Size of the plan in bytes.
    """

    tensorrt_rtx: str
    compute_capability: str
    layers: int
    products: Mapping[str, int]
    size_bytes: int


@dataclass(frozen=True)
class EngineCheck:
    """Comparison of an engine with its graph; only stored if it passed."""

    precision: str
    rows: int
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class EngineRecord:
    """A TensorRT engine that was built, inspected and checked.

    Attributes:
        key: Hash of everything that decided the engine and its check.
        cuda: Version of the CUDA runtime.
        version_compatible: Whether the plan also runs on newer releases of TensorRT.
        hardware: Other GPUs that it runs on, as `core.engine.hardware`.
        matmuls: Number of matrix products found in it by precision, and ``unseen``.
        witness: Proof of the precision: ``layers``, ``size``, or ``graph`` if it is fp32.
        profiles: Profiles of the engine, by input.
    """

    key: str
    onnx_sha256: str
    plan_sha256: str
    tensorrt: str
    cuda: str
    driver: str
    gpu: str
    compute_capability: str
    version_compatible: bool
    hardware: str
    precision: str
    matmuls: Mapping[str, int]
    witness: str
    profiles: tuple[Mapping[str, ShapeRange], ...]
    check: EngineCheck
