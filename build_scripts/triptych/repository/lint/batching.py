"""Lint: batches form, queues are bounded where they may be, and their policies make sense."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from triptych.base.releases import PRESERVE_ORDERING_BROKEN, STEP_QUEUE_LIMIT_SAFE
from triptych.repository.lint.ensemble import Wiring, wirings
from triptych.repository.lint.flaw import Flaw, dims_text, error, info, names, warning
from triptych.repository.lint.snapshot import BACKENDS, Model, enum_name

# Beyond these a number was most likely written in another unit than microseconds.
_SHORTEST_TIMEOUT_US = 1_000
_LONGEST_DELAY_US = 1_000_000


def dynamic_batching(model: Model) -> Iterator[Flaw]:
    """A model that takes batches lets the server form them."""
    config, known = model.config, BACKENDS.get(model.backend)
    batches = bool(known and known.batches_itself) or config.WhichOneof("scheduling_choice")
    if config.max_batch_size > 1 and not batches:
        yield warning(
            "should have dynamic_batching when max_batch_size is above 1",
            f"max_batch_size {config.max_batch_size}: each request runs alone",
            "Add dynamic_batching { max_queue_delay_microseconds: 500 }",
        )
    elif config.max_batch_size < 1 and config.HasField("dynamic_batching"):
        yield warning(
            "should have max_batch_size above 0 for dynamic_batching to do anything",
            f"max_batch_size {config.max_batch_size}",
            "Set max_batch_size, or remove dynamic_batching",
        )


def preferred_batch_size(model: Model) -> Iterator[Flaw]:
    """Preferred batch sizes lie between 1 and max_batch_size."""
    config = model.config
    preferred = [
        *config.dynamic_batching.preferred_batch_size,
        *config.sequence_batching.oldest.preferred_batch_size,
    ]
    outside = [size for size in preferred if not 1 <= size <= config.max_batch_size]
    if outside:
        yield error(
            f"must prefer batch sizes from 1 to max_batch_size ({config.max_batch_size})",
            names(outside),
            "Remove preferred_batch_size: without it the batcher fills up to the limit",
        )


def batch_shapes(model: Model) -> Iterator[Flaw]:
    """Inputs of variable length share batches: ragged, or padded to planned lengths."""
    if model.config.max_batch_size < 2 or not model.config.HasField("dynamic_batching"):
        return
    for tensor in model.config.input:
        if -1 not in tensor.dims or tensor.allow_ragged_batch:
            continue
        given = f"input {tensor.name} {dims_text(tensor.dims)}, dynamic batching"
        producers = [
            step.model
            for wiring in wirings(model.repository)
            for step in wiring.feeding(model, {tensor.name})
        ]
        if producers and all(producer and producer.is_ours for producer in producers):
            yield info(
                "batches only rows that the preprocess step padded to the same bucket",
                given,
                "Nothing to do: the producer pads to planned lengths and releases equal lengths "
                "next to each other",
            )
        else:
            yield warning(
                "should not leave a variable dimension to the dynamic batcher: requests of unequal "
                "shape never share a batch, each one closes it",
                given,
                "Set allow_ragged_batch: true (and a batch_input for the row sizes), or pad to a "
                "few fixed lengths before this model",
            )


def priority_levels(model: Model) -> Iterator[Flaw]:
    """Priorities lie between 1 and priority_levels."""
    batching = model.config.dynamic_batching
    levels, default = batching.priority_levels, batching.default_priority_level
    outside = [key for key in batching.priority_queue_policy if not 1 <= key <= levels]
    if levels and not 1 <= default <= levels:
        yield error(
            f"must have default_priority_level from 1 to priority_levels ({levels})",
            str(default),
            f"Write default_priority_level: {(levels + 1) // 2}",
        )
    if levels and outside:
        yield error(
            f"must have priority_queue_policy only for levels from 1 to {levels}",
            names(outside),
            "Correct the key, or raise priority_levels",
        )
    elif not levels and (outside or default):
        yield warning(
            "should set priority_levels when it says anything on priorities",
            f"default_priority_level {default}, policies for {names(outside)}",
            "Add priority_levels, or remove the rest: without it nothing of it counts",
        )


def preserve_ordering(model: Model) -> Iterator[Flaw]:
    """preserve_ordering is possible, works in the target release, and holds nothing back."""
    (first, last), triton = PRESERVE_ORDERING_BROKEN, model.repository.triton
    batching = model.config.dynamic_batching
    if not batching.preserve_ordering:
        return
    delaying = any(
        _delays(policy) and policy.default_timeout_microseconds for policy in model.queue_policies
    )
    clash = "timeout_action DELAY with a timeout" if delaying else ""
    if batching.priority_levels > 1:
        clash = f"priority_levels {batching.priority_levels}"
    if clash:
        yield error(
            "must not combine preserve_ordering with what reorders requests",
            clash,
            "Remove preserve_ordering, or the other one",
        )
    steps = (step.model_name for wiring in wirings(model.repository) for step in wiring.steps)
    if first <= triton <= last:
        yield warning(
            f"should not rely on preserve_ordering in Triton {first} to {last}: responses come in "
            "the order they are finished",
            f"preserve_ordering: true for Triton {triton}",
            "Remove it, or target a later release",
        )
    elif model.name in steps:
        yield warning(
            "should not preserve the order of responses within an ensemble",
            "preserve_ordering: true on a step",
            "Remove it: each ensemble request waits for its own response anyway, and a slow one "
            "would hold back those behind it",
        )


def _delays(policy: Any) -> bool:
    return enum_name(policy, "timeout_action") == "DELAY"


def queue_policy(model: Model) -> Iterator[Flaw]:
    """Timeouts outlast the queue delay, limits hold a full batch, and units are microseconds."""
    delay_us = model.config.dynamic_batching.max_queue_delay_microseconds
    if delay_us > _LONGEST_DELAY_US:
        yield warning(
            "should have a queue delay below a second",
            f"max_queue_delay_microseconds {delay_us}",
            "Write microseconds: 500 is half a millisecond",
        )
    for policy in model.queue_policies:
        timeout_us = policy.default_timeout_microseconds
        given = f"default_timeout_microseconds {timeout_us}"
        if 0 < timeout_us <= delay_us:
            yield error(
                f"must let requests wait longer than the queue delay ({delay_us} us)",
                given,
                "Raise default_timeout_microseconds, or lower max_queue_delay_microseconds",
            )
        elif 0 < timeout_us < _SHORTEST_TIMEOUT_US:
            yield warning(
                "should have a queue timeout of a millisecond or more",
                given,
                "Write microseconds: 5000000 is five seconds",
            )
        if _delays(policy) and not timeout_us and not policy.allow_timeout_override:
            yield warning(
                "should have a timeout for timeout_action DELAY to do anything",
                "no default_timeout_microseconds, and requests may not set one",
                "Add default_timeout_microseconds, or remove timeout_action",
            )
        if 0 < policy.max_queue_size < model.config.max_batch_size:
            yield warning(
                f"should queue at least one full batch ({model.config.max_batch_size})",
                f"max_queue_size {policy.max_queue_size}",
                "Raise max_queue_size to a few times max_batch_size",
            )


def queue_wake_up(model: Model) -> Iterator[Flaw]:
    """A queue policy turns pre-fetching off, and a lone instance then misses requests.

    Measured on 24.10: a request that comes while the instance works is not seen for up to 500 ms
    (triton-inference-server/server issue 8870 is a related report).
    """
    lone = sum(map(model.instances_of, model.config.instance_group)) <= 1
    policies = [policy for policy in model.queue_policies if policy.ByteSize()]
    if lone and (model.config.dynamic_batching.priority_levels or policies):
        yield warning(
            "should have no queue policy while it has one instance: a request that arrives beside "
            "a working one can wait 500 ms",
            "a queue policy or priority levels",
            "Remove it, or give the step a second instance",
        )


def queue_limit(wiring: Wiring) -> Iterator[Flaw]:
    """No step limits its queue while other steps of the same request may run.

    Seen with 24.10: in a chain of steps a full queue is answered with an error, wherever it is;
    with two branches nearly every request hung for ever.
    """
    stages = wiring.stages()
    cause = "steps that run at the same time" if any(len(s) > 1 for s in stages) else ""
    models = [step.model for step in wiring.steps if step.model]
    if any(model.config.model_transaction_policy.decoupled for model in models):
        cause = "a decoupled step"
    if wiring.ensemble.repository.triton >= STEP_QUEUE_LIMIT_SAFE or not cause:
        return
    first = stages[0] if stages and len(stages[0]) == 1 else []
    for step in wiring.steps:
        policies = step.model.queue_policies if step.model and step not in first else []
        limits = [policy.max_queue_size for policy in policies if policy.max_queue_size]
        if step.model and limits:
            yield error(
                f"must not limit the queue of a step before Triton {STEP_QUEUE_LIMIT_SAFE} while "
                "another step of the same request may run: the request hangs for ever",
                f"max_queue_size {names(limits)} on {step.label} of {wiring.ensemble.name}, which "
                f"has {cause}",
                "Limit the queue of the step that all requests pass first, alone, or target Triton "
                f"{STEP_QUEUE_LIMIT_SAFE} or later",
                step.model.config_file,
            )
