"""What a build puts on record, as types: the gate's result, the conversion, the candidates.

One reader (`read_record`) and one writer (`plain_record`) serve the lock, the cache and ``--json``.

Results as plain data, for JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, TypeAdapter

from triptych.spec.engine_plan import ShapeRange
from triptych.spec.fields import Precision
from triptych.spec.renamed import METRICS
from triptych.spec.tasks.labeled import LabeledResult


def json_text(value: Any) -> str:
    """The content of a file with `value` as plain data."""
    return json.dumps(plain_data(value), indent=2, allow_nan=False) + "\n"


def plain_data(value: Any) -> Any:
    """`value` with dicts and lists for all mappings and sequences; what is no number is None."""
    if isinstance(value, Mapping):
        return {str(name): plain_data(held) for name, held in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(held) for held in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


Record = TypeVar("Record")
Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""A float; one that is not finite is null in JSON."""

MetricName = Annotated[str, BeforeValidator(lambda name: METRICS.get(name, name))]
"""Name of a metric; locks and caches of earlier releases have former names."""


def read_record(kind: type[Record], data: object) -> Record:
    """A record from its plain data.

    Raises:
        pydantic.ValidationError: the data is not of that kind.
    """
    return TypeAdapter(kind).validate_python(data)


def plain_record(record: Any) -> dict[str, Any]:
    """A record as plain data for JSON; fields without a value are left out."""
    plain: dict[str, Any] = plain_data(asdict(record))
    optional = getattr(record, "OPTIONAL", ())
    return {name: value for name, value in plain.items() if value or name not in optional}


@dataclass(frozen=True)
class Conversion:
    """What a conversion to lower precision did.

    Attributes:
        layers: what can be kept in higher precision, in the order of the graph.
        kept: those that are.
        reasons: kept layer to why, where the converter itself decided it.
        ranges: layer (or value) to the largest magnitude that calibration rows showed there; it
            may be infinite, as that of the logarithm of 0.
        notes: what else a user should know, a sentence each.
        layer_errors: layer to the error of the core's outputs by its conversion alone, where
            layers had to be kept for the gate.
        batch_ms: what keeping them costs: milliseconds of a batch in fp32, with nothing kept and
            as kept, on one thread.
        fp32_products: nodes that multiply matrices and stay in fp32 on purpose, where all others
            are in 16 bits or quantized.
    """

    OPTIONAL = ("layer_errors", "batch_ms", "fp32_products")

    layers: tuple[str, ...]
    kept: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    ranges: Mapping[str, Number] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    layer_errors: Mapping[str, float] = field(default_factory=dict)
    batch_ms: Mapping[str, float] = field(default_factory=dict)
    fp32_products: tuple[str, ...] = ()


@dataclass(frozen=True)
class PrecisionTrial:
    """One precision that `auto` tried, and what became of it.

    Attributes:
        precision: of the core.
        status: what became of it.
        failures: of the gate.
        verdicts: metric to value.
        throughput_per_s: requests answered a second; None where it was not measured.
        p99_ms: 99th percentile of the latency, in milliseconds.
        size_bytes: of the core's files.
        kept: layers that stayed in higher precision.
        note: why it is not runnable.
    """

    precision: Precision
    status: Literal["chosen", "passed", "failed", "not runnable"]
    failures: tuple[str, ...] = ()
    verdicts: Mapping[str, Number] | None = None
    throughput_per_s: float | None = None
    p99_ms: float | None = None
    size_bytes: int | None = None
    kept: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """One metric.

    Attributes:
        metric: its name in `tasks.accuracy.METRICS`.
        value: measured; NaN where it could not be.
        limit: the worst value allowed; None where there is none.
        passed: whether `value` keeps to `limit`.
    """

    metric: MetricName
    value: Number
    limit: float | None
    passed: bool


@dataclass(frozen=True)
class WorstRow:
    """A request whose answer is far from the reference's.

    Attributes:
        shown: the request in short.
        badness: how wrong the answer is on the task's own scale; 0 where it is right, or where
            the row is made up and has no part in the task's metrics.
        difference: largest difference of any element of the core's outputs, as `max_difference`.
        wanted: the reference's answer in short.
        got: the artifact's.
    """

    shown: str
    badness: Number
    difference: Number
    wanted: str
    got: str


@dataclass(frozen=True)
class ProbeResult:
    """What a core of lower precision makes of the general probe, texts outside the traffic.

    Attributes:
        rows: texts of the probe that the pipeline takes.
        verdicts: one a metric, with limits of the probe's own.
        worst: the worst rows, worst first; their difference is that of `edge_error`.
    """

    rows: int
    verdicts: tuple[Verdict, ...]
    worst: tuple[WorstRow, ...] = ()


@dataclass(frozen=True)
class GateResult:
    """What the gate measured.

    Attributes:
        precision: of the artifact.
        rows: requests of the traffic compared.
        edge_rows: requests made up: empty, at the limit and the like.
        finite: no NaN, no infinity.
        verdicts: one a metric.
        failures: what broke a limit, in words; empty when the artifact may ship.
        worst: the worst rows, worst first.
        notes: what else a reader should know, a sentence each.
        row_differences: of each request, as `WorstRow.difference`; made-up ones first.
        rounding: what fp32 makes of fp64 in PyTorch, as `max_difference`; None where not measured.
        probe: the result on texts outside the traffic; None for fp32 and where there are none.
        labeled: the result on labeled rows; None where there are none.
        conversion: to lower precision; None for fp32.
        accepted: why a failed gate did not stop the build; empty where it did not fail.
        candidates: what the precision was chosen from, where it was left open.
    """

    OPTIONAL = ("probe", "conversion", "accepted", "candidates")

    precision: Precision
    rows: int
    edge_rows: int
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

    @property
    def passed(self) -> bool:
        """Whether the artifact may ship."""
        return not self.failures

    def value(self, metric: str) -> float | None:
        """What was measured; None where the metric does not apply."""
        return next((v.value for v in self.verdicts if v.metric == metric), None)

    def as_dict(self) -> dict[str, Any]:
        """For the lock, the report and ``--json``: a number that is not finite is null."""
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
    """The engine against its graph: figures of the gate; it passed, or there is no record."""

    precision: str
    rows: int
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class EngineRecord:
    """A TensorRT engine that was built, inspected and checked.

    Attributes:
        key: hash of all that decided the engine and its check.
        cuda: version of the CUDA runtime.
        version_compatible: whether the plan also runs on newer releases of TensorRT.
        hardware: other GPUs that it runs on, as `core.engine.hardware`.
        matmuls: precision to matrix products seen in it, and ``unseen``.
        witness: what proves the precision: ``layers``, ``size``, or ``graph`` where it is fp32.
        profiles: as the engine has them, by input.
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
