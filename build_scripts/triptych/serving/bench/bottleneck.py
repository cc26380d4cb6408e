"""Find the bottleneck of a pipeline from one measurement.

A long queue alone proves nothing: requests wait for a batch to fill, for a free instance, or for a
free core. The busy share of the instances, the processor time of the step's process, and the time
its threads waited for a core distinguish these causes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from triptych.serving.bench.results import (
    Bottleneck,
    Measurement,
    OfferedLoad,
    Resources,
    StepUse,
    Streamed,
)

FULL_RATIO = 0.85
"""Minimum busy share of cores or a GPU to count as full."""

SATURATED_RATIO = 0.75
"""Minimum busy share of a step's instances to count as saturated if requests queue for them.

It is lower than `FULL_RATIO`, because instances rest while closed-loop clients send again."""

MIN_DELAY_RATIO = 0.4
"""Minimum ratio of queue wait to configured delay for the delay to count as the bottleneck."""

MIN_LATENCY_RATIO = 0.2
"""Minimum share of the total latency for a part to be reported."""

MIN_COMPUTE_RATIO = 0.5
"""Minimum share of its busy time that a step needs a core, to count as computing."""


def find_bottleneck(measurement: Measurement, load: OfferedLoad) -> Bottleneck:
    """Return the bottleneck of the throughput, or the largest part of the latency.

    Without resources (a server on another machine), the busy share of the steps alone decides. For
    a saturated Python step, more instances are recommended first, because each uses one core.

    Args:
        measurement: Measurement of a served pipeline.
        load: Load of the measurement.
    """
    if not measurement.requests or not measurement.steps:
        return Bottleneck("none", "", "No request was answered, so the bottleneck is unknown.", "")
    if measurement.streamed is not None:
        return _client(measurement, load) or _generating(measurement, measurement.streamed)
    return (
        _queue_delay(measurement)
        or _client(measurement, load)
        or _full_gpu(measurement)
        or _full_instances(measurement)
        or _full_cores(measurement)
        or _nothing(measurement)
    )


def _queue_delay(measurement: Measurement) -> Bottleneck | None:
    """Return a step whose requests wait although an instance is free, or None.

    A free instance takes a partial batch only after the queue delay. So the delay costs a request
    at most its waiting time, and at most the idle time of an instance before a batch.
    """
    for step in sorted(measurement.steps, key=lambda step: -step.queue_us):
        held_us = min(step.queue_us, _rest_us(step, measurement), float(step.max_delay_us))
        if step.max_delay_us and held_us >= max(
            MIN_DELAY_RATIO * step.max_delay_us, MIN_LATENCY_RATIO * measurement.mean_us
        ):
            return Bottleneck(
                "queue delay",
                step.step,
                f"A request waits {step.queue_us / 1e3:.1f} ms for {step.step}, whose batcher may"
                f" hold a batch open for {step.max_delay_us / 1e3:g} ms; its instances are busy"
                f" {_percent(step.busy)} of the time. The whole request takes"
                f" {measurement.mean_us / 1e3:.1f} ms.",
                f"Lower serving.queue.max_delay_us of {step.step}",
            )
    return None


def _client(measurement: Measurement, load: OfferedLoad) -> Bottleneck | None:
    """Return the load generator if it has too few cores or uses most of a full machine."""
    seen = measurement.resources
    if seen is None:
        return None
    server = sum(process.cpu_cores for process in seen.processes)
    starves = seen.machine_cpu is None and seen.client_cpu_cores >= FULL_RATIO * seen.cores
    crowds = (
        seen.machine_cpu is not None
        and seen.machine_cpu >= FULL_RATIO
        and seen.client_cpu_cores >= max(server, seen.cores / 3)
    )
    if not starves and not crowds:
        return None
    return Bottleneck(
        "client",
        "",
        f"The load generator takes {seen.client_cpu_cores:.1f} of {seen.cores} cores at {load};"
        f" the server's processes take {server:.1f}.",
        "Run the load from another machine",
    )


def _full_gpu(measurement: Measurement) -> Bottleneck | None:
    seen = measurement.resources
    full = [gpu for gpu in seen.gpus if gpu.utilization >= FULL_RATIO] if seen else []
    if not full:
        return None
    step = _core(measurement.steps)
    return Bottleneck(
        "compute",
        step.step,
        f"The GPU is busy {_percent(full[0].utilization)} of the time; {step.step} runs batches of"
        f" {step.mean_batch:.1f} rows.",
        "Try core.precision or core.max_batch_size, or add another machine",
    )


def _full_instances(measurement: Measurement) -> Bottleneck | None:
    """Return the step with the most requests if its instances are saturated and more may help.

    A step that batches more rows when it falls behind can be busy all the time without limiting
    the throughput. So the step must also hold most of the requests.
    """
    step = _slowest(measurement.steps)
    if (
        step.busy is None
        or step.busy < SATURATED_RATIO
        or step.queue_us < MIN_LATENCY_RATIO * step.compute_us
    ):
        return None
    needed = _needed_cores(step, measurement.resources)
    if needed is None:
        if step.is_core:
            return _compute(step, "the server's cores were not monitored", measurement)
        evidence = "the server's cores were not monitored"
    elif needed >= MIN_COMPUTE_RATIO * step.busy * (step.instances or 1) and not _has_free_cores(
        measurement
    ):
        return None
    else:
        evidence = f"its process needs {needed:.2f} cores"
    count = step.instances or 1
    return Bottleneck(
        "instances",
        step.step,
        f"The {f'{count} instances' if count != 1 else 'instance'} of {step.step}"
        f" {'are' if count != 1 else 'is'} busy"
        f" {_percent(step.busy)} of the time and a request waits {step.queue_us / 1e3:.1f} ms for"
        f" {'them' if count != 1 else 'it'}; {evidence}{_machine_words(measurement.resources)}.",
        f"Raise {step.instances_field}",
    )


def _full_cores(measurement: Measurement) -> Bottleneck | None:
    seen = measurement.resources
    if seen is None or seen.machine_cpu is None or _has_free_cores(measurement):
        return None
    by_model = {process.name: process.cpu_cores for process in seen.processes}
    # Threads of the core also wait for work in a loop, while it is not busy.
    most = {step.model: (step.busy or 1.0) * seen.cores for step in measurement.steps}
    step = max(measurement.steps, key=lambda s: min(by_model.get(s.model, 0.0), most[s.model]))
    if not by_model.get(step.model):
        step = _slowest(measurement.steps)
    own = sum(by_model.values()) + seen.client_cpu_cores
    others = max(0.0, seen.machine_cpu * seen.cores - own)
    words = f"{_percent(seen.machine_cpu)} of the {seen.cores} cores are busy, "
    words += f"{by_model.get(step.model, 0.0):.1f} cores by {step.step}"
    found = _compute(step, words, measurement)
    if others < MIN_LATENCY_RATIO * seen.cores:
        return found
    return replace(
        found,
        explanation=f"{found.explanation} Other programs take {others:.1f} cores.",
        remedy=f"Stop the other programs and measure again. {found.remedy}",
    )


def _compute(step: StepUse, words: str, measurement: Measurement) -> Bottleneck:
    remedy = "Try core.precision or core.max_batch_size, or add another machine"
    if not step.is_core:
        remedy = f"Make {step.step} cheaper, or add another machine"
    return Bottleneck(
        "compute",
        step.step,
        f"{words[0].upper()}{words[1:]}; {step.step} is busy {_percent(step.busy)} of the time"
        f" with batches of {step.mean_batch:.1f} rows, and takes {step.compute_us / 1e3:.1f} of the"
        f" {measurement.mean_us / 1e3:.1f} ms.",
        remedy,
    )


def _generating(measurement: Measurement, streamed: Streamed) -> Bottleneck:
    """Find the bottleneck of streamed answers from the machine, because step counts lack them."""
    seen = measurement.resources
    words = (
        f"the first token takes {streamed.ttft.mean_us / 1e3:.1f} ms on average, the next tokens"
        f" {streamed.itl.mean_us / 1e3:.1f} ms each."
    )
    if seen is not None and (full := [one for one in seen.gpus if one.utilization >= FULL_RATIO]):
        explanation = f"The GPU is busy {_percent(full[0].utilization)} of the time; {words}"
    elif seen is not None and seen.machine_cpu is not None and not _has_free_cores(measurement):
        by_process = {process.name: process.cpu_cores for process in seen.processes}
        core = by_process.get(_core(measurement.steps).model, 0.0)
        others = max(0.0, seen.machine_cpu * seen.cores - sum(by_process.values()))
        explanation = (
            f"{_percent(seen.machine_cpu)} of the {seen.cores} cores are busy, {core:.1f} cores by"
            f" core, {max(0.0, others - seen.client_cpu_cores):.1f} by other programs; {words}"
        )
    else:
        return Bottleneck("none", "", f"Nothing is full: {words}", "More load would find the limit")
    remedy = "Try core.precision, core.max_num_seqs or shorter answers, or add another machine"
    return Bottleneck("compute", "core", explanation, remedy)


def _nothing(measurement: Measurement) -> Bottleneck:
    step = _slowest(measurement.steps)
    return Bottleneck(
        "none",
        "",
        f"Nothing is full: {step.step} takes the longest, {step.compute_us / 1e3:.1f} ms of"
        f" {measurement.mean_us / 1e3:.1f} ms and {step.queue_us / 1e3:.1f} ms of queue, and its"
        f" instances are busy {_percent(step.busy)} of the time"
        f"{_machine_words(measurement.resources)}.",
        "More load would find the limit",
    )


def _slowest(steps: Sequence[StepUse]) -> StepUse:
    """Return the step with the most time per request, where most requests are."""
    return max(steps, key=lambda step: step.queue_us + step.compute_us)


def _rest_us(step: StepUse, measurement: Measurement) -> float:
    """Return the mean idle time of an instance before a batch, in microseconds."""
    if step.busy is None or not step.executions or not step.requests:
        return 0.0
    executions = step.executions * min(1.0, measurement.requests / step.requests)
    room_us = (step.instances or 1) * measurement.seconds * 1e6
    return (1 - step.busy) * room_us / executions if executions else 0.0


def _core(steps: Sequence[StepUse]) -> StepUse:
    return next((step for step in steps if step.is_core), _slowest(steps))


def _needed_cores(step: StepUse, resources: Resources | None) -> float | None:
    """Return the cores a step used or waited for; None if its process was not monitored."""
    if resources is None:
        return None
    found = [process for process in resources.processes if process.name == step.model]
    return sum(one.cpu_cores + one.wait_cores for one in found) if found else None


def _has_free_cores(measurement: Measurement) -> bool:
    seen = measurement.resources
    return seen is not None and seen.machine_cpu is not None and seen.machine_cpu < FULL_RATIO


def _machine_words(resources: Resources | None) -> str:
    if resources is None or resources.machine_cpu is None:
        return ""
    return f", and {_percent(resources.machine_cpu)} of the {resources.cores} cores are busy"


def _percent(share: float | None) -> str:
    return "an unknown share" if share is None else f"{share * 100:.0f} %"
