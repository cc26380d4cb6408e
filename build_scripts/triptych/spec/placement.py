"""Plan for the machine that serves: instances of the steps, threads, and the largest batch.

It follows from the cores of the machine and from costs: milliseconds of a core for each request and
each row in the Python steps and the server, and the time of a batch in the core.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from triptych.base.errors import UserError
from triptych.base.explained import ExplainedValue
from triptych.container.serving_machine import GPUS, ServingMachine
from triptych.models.info import ModelInfo
from triptych.spec.backends import BACKENDS
from triptych.spec.engine_plan import CPU, GPU, USUAL_LAYERS, row_us
from triptych.spec.fields import CoreSettings
from triptych.spec.model_fields import CompiledSpec, is_own
from triptych.spec.traffic import Lengths
from triptych.spec.tuned import read_tuned

BATCH_SIZES = (32, 64, 128, 256, 512)
"""Rows of the largest batch on a GPU that are compared."""
LIST_ROWS = (1, 32)
"""Rows of the requests that a plan must be good for."""
BUSY_SHARE = 0.8
"""Share of the time that an instance of a Python step is busy at the planned rate."""
CORES_PER_SESSION = 8
"""Threads of an instance of a core on processors; more share an operator with less and less use."""
BATCH_MEMORY_SHARE = 0.25
"""Share of the GPU's memory for the largest batch of an instance. The rest is for weights, other
instances, and what the allocator holds."""
NEEDLESS_RATE, NEARLY_ALL = 1.2, 0.9
"""A batch is large enough if the core is this much faster than the cores around it, or if it has
this share of the rate of the largest one."""


class StepCost(NamedTuple):
    """Milliseconds of a processor core for each request and each of its rows."""

    request_ms: float
    row_ms: float

    def of_row(self, rows: float) -> float:
        """Return the cost of a row in requests of `rows` rows."""
        return self.request_ms / rows + self.row_ms


@dataclass(frozen=True)
class Costs:
    """Costs of a pipeline, from which its plan for a machine is computed.

    Attributes:
        steps: Costs of preprocess, postprocess and the server.
        batch_ms: Time of a batch in the core whatever its rows, in ms of the GPU, or of a processor
            core without one.
        row_ms: Additional time of each row.
        source: Origin of the costs.
    """

    steps: Mapping[str, StepCost]
    batch_ms: float
    row_ms: float
    source: str

    def core_ms(self, rows: int) -> float:
        """Return the time of a batch of `rows` rows in the core."""
        return self.batch_ms + self.row_ms * rows


REFERENCE_TOKENS = 28.5
_STEPS = {
    "preprocess": StepCost(0.25, 0.117),
    "postprocess": StepCost(0.10, 0.013),
    "server": StepCost(0.64, 0.040),
}
"""MiniLM's texts of 28.5 tokens. Preprocess: one process beside an H200 ended at 2,700 requests of
one text, and 8,000 texts in lists of 32. The others: by their share of the processor time of
preprocess on two cores, with a core that waits."""
IMAGE_ROW_MS = 6.0
"""Decoding and resizing a photo."""
_LAYER_MS = {"packed": 0.52, "bucketed": 0.23, "fixed": 0.23}
"""Time of ONNX Runtime's CUDA kernels to start the operators of a layer, by layout: MiniLM on an
H200 took 3.1 and 1.4 ms for a row in 6 layers."""
_UNKNOWN_ROW_MS = {False: 100.0, True: 1.0}
"""Time of a row in a core of unknown size (images, own models), on processors and on an A100."""
ASSUMED = "ASSUMED from reference figures, not measured with this pipeline"


def reference_costs(
    spec: CompiledSpec, info: ModelInfo, lengths: Lengths | None, machine: ServingMachine
) -> Costs:
    """Return costs from reference figures and the sizes of the model."""
    on_gpu, layers = spec.core.device == "gpu", info.layers or USUAL_LAYERS
    row_ms = _UNKNOWN_ROW_MS[on_gpu]
    scale = 1.0
    if lengths is not None:
        row_ms = row_us(info, GPU if on_gpu else CPU, lengths.mean, lengths.mean) / 1e3
        row_ms *= 1 if on_gpu else 2  # the rate of the processor is that of two cores
        scale = lengths.mean / REFERENCE_TOKENS
    layer_ms = CPU.run_us / 1e3
    if on_gpu:
        row_ms *= GPUS["a100"].teraflops / GPUS[machine.gpu].teraflops
        layout = "packed" if spec.core.layout == "auto" else spec.core.layout
        layer_ms = _LAYER_MS[layout if lengths is not None else "fixed"]
        if "tensorrt" in (spec.core.backend, spec.core.accelerator):
            layer_ms = GPU.run_us / 1e3
    steps = {name: StepCost(cost.request_ms, cost.row_ms * scale) for name, cost in _STEPS.items()}
    if info.image is not None:
        steps["preprocess"] = StepCost(_STEPS["preprocess"].request_ms, IMAGE_ROW_MS)
    return Costs(steps, batch_ms=layers * layer_ms, row_ms=row_ms, source=ASSUMED)


def with_measured(costs: Costs, found: Mapping[str, object]) -> Costs:
    """Return costs with those of the Python steps as `tune` measured them.

    Args:
        costs: Reference figures, whose ratio of requests to rows is kept.
        found: ``rows`` of a request, and core-ms of a request by step; other values are ignored.
    """
    numbers = {key: float(v) for key, v in found.items() if isinstance(v, int | float) and v > 0}
    rows = max(1.0, numbers.pop("rows", 1.0))
    steps = dict(costs.steps)
    for name in numbers.keys() & {"preprocess", "postprocess"}:
        factor = numbers[name] / (rows * steps[name].of_row(rows))
        steps[name] = StepCost(*(part * factor for part in steps[name]))
    if steps == costs.steps:
        return costs
    measured = " and ".join(name for name in steps if steps[name] != costs.steps[name])
    return replace(costs, steps=steps, source=f"{measured} measured by `tune`, others {ASSUMED}")


@dataclass(frozen=True)
class MachinePlan:
    """Numbers of a pipeline on a machine.

    Attributes:
        asked: Spec without these numbers, as the user wrote it and `tune` completed it.
        values: Value of each field of the spec, dotted, with its reason.
        rates_per_s: Expected rows per second, by rows of a request.
    """

    asked: CompiledSpec
    machine: ServingMachine
    costs: Costs
    values: Mapping[str, ExplainedValue]
    rates_per_s: Mapping[int, float]

    @property
    def changes(self) -> dict[str, object]:
        """Settings of the spec with the numbers of this plan."""
        found = {field: explained.value for field, explained in self.values.items()}
        instances = {name: found[INSTANCES + name] for name in _INSTANCES}
        serving = self.asked.serving
        changed = serving.instances.model_copy(update=instances)
        core = {name.partition(".")[2]: v for name, v in found.items() if name.startswith("core.")}
        return {
            "serving": serving.model_copy(update={"instances": changed}),
            "core": self.asked.core.model_copy(update=core),
        }


_INSTANCES = ("preprocess", "core", "postprocess")
INSTANCES = "serving.instances."


def _check(spec: CompiledSpec, machine: ServingMachine, *, is_built: bool) -> None:
    steps = 1 + (len(spec.steps) if is_own(spec) else 1)
    if is_built and machine.cores < steps:
        raise UserError(
            "serving.machine",
            f"must have a core for each of the {steps} Python steps",
            given=machine.name,
            remedy="Name a larger machine, or remove it",
        )
    if spec.core.device == "gpu" and not machine.gpu:
        raise UserError(
            "serving.machine",
            "must have a GPU for core.device: gpu",
            given=machine.name,
            remedy="Name one, such as l4x8, or set core.device: cpu",
        )


def _costs(
    spec: CompiledSpec, info: ModelInfo, lengths: Lengths | None, machine: ServingMachine
) -> Costs:
    costs = reference_costs(spec, info, lengths, machine)
    if spec.tuned and (tuned := read_tuned(spec.folder)) is not None:
        found = tuned.provenance.get("costs")
        costs = with_measured(costs, found if isinstance(found, dict) else {})
    return costs


def place(
    spec: CompiledSpec,
    info: ModelInfo,
    lengths: Lengths | None,
    machine: ServingMachine,
    *,
    row_mib: float | None,
    most: int | None = None,
) -> MachinePlan:
    """Return the plan of a pipeline for a machine. Numbers that the spec sets are kept.

    Args:
        spec: Spec as the user wrote it, with tuned values.
        lengths: Token lengths of the traffic; None if they are unknown.
        row_mib: Memory of a row of maximum length in a batch on a GPU; None if unknown.
        most: Largest batch that was built; None if this plan is built.

    Raises:
        UserError: The machine has fewer cores than Python steps, or lacks a GPU or its memory.
    """
    _check(spec, machine, is_built=most is None)
    costs = _costs(spec, info, lengths, machine)
    on_gpu, rows = spec.core.device == "gpu", spec.core.max_batch_size
    values: dict[str, ExplainedValue] = {}
    if on_gpu:
        rows = _place_batch(spec, machine, costs, row_mib, most, values)
    gpus = spec.serving.gpus_of_replica if on_gpu else 1
    count, why = _core_instances(spec, machine, costs, rows)
    if (given := _given(spec, INSTANCES + "core")) is not None:
        count, why = given, GIVEN
    values[INSTANCES + "core"] = ExplainedValue(count, why)
    if not on_gpu and not _has_several(spec):
        threads: int | None = max(1, machine.cores // count)
        why = f"{machine.cores} cores for {count} instance{'s' * (count > 1)} of the core"
        if "threads" in spec.core.model_fields_set:
            threads, why = spec.core.threads, GIVEN
        values["core.threads"] = ExplainedValue(threads, why)
    most_per_s = 1e3 * rows * count * gpus / costs.core_ms(rows) if on_gpu else math.inf
    rates = {n: min(_rate_of_cores(costs, machine, rows, n), most_per_s) for n in LIST_ROWS}
    for step in ("preprocess", "postprocess"):
        field, cost = INSTANCES + step, costs.steps[step]
        needs = {n: rate * cost.of_row(n) / 1e3 for n, rate in rates.items()}
        lists = max(needs, key=lambda n: needs[n])
        highest = max(1, machine.cores // 2)
        count = max(1, math.ceil(needs[lists] / BUSY_SHARE))
        why = (
            f"{needs[lists]:.1f} cores at {rates[lists]:,.0f} rows/s in requests of {lists}, what "
            f"this machine reaches; {cost.of_row(lists):.3f} core-ms a row, {BUSY_SHARE:.0%} busy"
        )
        if count > highest:
            count, why = highest, f"{why}; at most half of the {machine.cores} cores"
        if (given := _given(spec, field)) is not None:
            count, why = given, GIVEN
        values[field] = ExplainedValue(count, why)
        rates = {n: min(rate, 1e3 * count / cost.of_row(n)) for n, rate in rates.items()}
    return MachinePlan(spec, machine, costs, values, rates)


GIVEN = "set in pipeline.yaml or tuned.yaml, or by another pipeline or model"


def without(core: CoreSettings, placement: MachinePlan) -> CoreSettings:
    """Return settings of a core with the values that a placement set as they were before it."""
    asked = placement.asked.core
    planned = {name.partition(".")[2] for name in placement.values if name.startswith("core.")}
    planned -= asked.model_fields_set
    before = {name: getattr(asked, name) for name in planned}
    return CoreSettings.model_construct(core.model_fields_set - planned, **{**dict(core), **before})


def _given(spec: CompiledSpec, field: str) -> int | None:
    """Return the number of instances that the spec sets; None if it sets none."""
    instances, step = spec.serving.instances, field.removeprefix(INSTANCES)
    is_set = step in instances.model_fields_set or (step == "core" and _has_several(spec))
    return int(getattr(instances, step)) if is_set else None


def _has_several(spec: CompiledSpec) -> bool:
    """Whether the spec has several models, each with instances and threads of its own."""
    return is_own(spec) and bool(spec.models)


def _rate_of_cores(costs: Costs, machine: ServingMachine, batch: int, rows: int) -> float:
    """Return the rows per second that the processor cores reach in requests of `rows` rows.

    A processor core starts the operators of a batch on the GPU, and waits for it.
    """
    steps_ms = sum(cost.of_row(rows) for cost in costs.steps.values())
    return 1e3 * machine.cores / (steps_ms + costs.core_ms(batch) / batch)


def _core_instances(
    spec: CompiledSpec, machine: ServingMachine, costs: Costs, rows: int
) -> tuple[int, str]:
    if spec.core.device == "cpu":
        if not BACKENDS[spec.core.backend].batches:
            count = max(1, machine.cores // 2)
            return count, "one for each 2 cores, since each computes one request at a time"
        count = max(1, machine.cores // CORES_PER_SESSION)
        return count, f"one for each {CORES_PER_SESSION} cores, at least one"
    share = costs.batch_ms / costs.core_ms(rows)
    if share > 0.5 and machine.cores >= 4 and spec.core.backend != "tensorrt":
        return 2, f"{share:.0%} of a batch is the start of its operators, during which another runs"
    return 1, "a batch keeps the GPU busy"


def _place_batch(
    spec: CompiledSpec,
    machine: ServingMachine,
    costs: Costs,
    row_mib: float | None,
    most: int | None,
    values: dict[str, ExplainedValue],
) -> int:
    """Add the largest batch on a GPU and its memory to `values`; return the batch."""
    core, least = spec.core, spec.core.max_batch_size
    limit_mib = float(core.max_batch_mib)
    if "max_batch_mib" not in core.model_fields_set:
        limit_mib = machine.memory_gib * 1024 * BATCH_MEMORY_SHARE
        why = f"{BATCH_MEMORY_SHARE:.0%} of the {machine.memory_gib:g} GiB of the GPU"
        values["core.max_batch_mib"] = ExplainedValue(max(1, int(limit_mib)), why)
    if row_mib is not None and row_mib > min(limit_mib, machine.memory_gib * 1024):
        raise UserError(
            "serving.machine",
            "must have memory for a row in a batch",
            given=f"{machine.name}, {limit_mib:.0f} MiB for a batch; a row takes {row_mib:.0f} MiB",
            remedy="Name a GPU with more memory, or lower tokenizer.max_length",
        )
    is_fixed = core.shared_from is not None or is_own(spec)
    if is_fixed or "max_batch_size" in core.model_fields_set:
        values["core.max_batch_size"] = ExplainedValue(least, GIVEN)
        return least
    within = most or BATCH_SIZES[-1]
    if row_mib is not None:
        within = min(within, int(limit_mib / row_mib))
    limit_ms = min(spec.serving.slo.limits_ms.values(), default=math.inf) / 2
    sizes = [n for n in BATCH_SIZES if n <= within and costs.core_ms(n) <= limit_ms]
    # A request is never split, so that a batch holds at least the largest one.
    sizes = sizes or [min(least, within)]
    best = sizes[-1] / costs.core_ms(sizes[-1])
    wanted = NEEDLESS_RATE * _rate_of_cores(costs, machine, sizes[-1], LIST_ROWS[-1]) / 1e3
    for rows in sizes:
        rate = rows / costs.core_ms(rows)
        if rate >= min(NEARLY_ALL * best, wanted):
            break
    times = ", ".join(f"{n}: {costs.core_ms(n):.1f} ms" for n in sizes)
    why = f"{rate * 1e3:,.0f} rows/s; {times}; bounded by memory and half the SLO's latency"
    values["core.max_batch_size"] = ExplainedValue(rows, why)
    return rows
