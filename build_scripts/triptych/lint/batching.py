"""Lint: batches form, queues are bounded where they may be, and their policies make sense."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from triptych.lint.backends import BACKENDS
from triptych.lint.config import instances_of
from triptych.lint.flaw import Flaw, dims_text, error, info, names, warning
from triptych.lint.snapshot import Model, Repository, enum_name
from triptych.lint.wiring import Step, Wiring, wirings
from triptych.releases import PRESERVE_ORDERING_BROKEN, STEP_QUEUE_LIMIT_SAFE

# Beyond these a number was most likely written in another unit than microseconds.
_SHORTEST_TIMEOUT_US = 1_000
_LONGEST_DELAY_US = 1_000_000


def dynamic_batching(repository: Repository) -> Iterator[Flaw]:
    """A model that takes batches lets the server form them."""
    for model in repository.executed():
        config = model.config
        known = BACKENDS.get(model.backend)
        batches = bool(known and known.batches_itself) or config.WhichOneof("scheduling_choice")
        if config.max_batch_size > 1 and not batches:
            yield warning(
                model.config_file,
                "should have dynamic_batching when max_batch_size is above 1",
                given=f"max_batch_size {config.max_batch_size}: each request runs alone",
                remedy="Add dynamic_batching { max_queue_delay_microseconds: 500 }",
            )
        elif config.max_batch_size < 1 and config.HasField("dynamic_batching"):
            yield warning(
                model.config_file,
                "should have max_batch_size above 0 for dynamic_batching to do anything",
                given=f"max_batch_size {config.max_batch_size}",
                remedy="Set max_batch_size, or remove dynamic_batching",
            )


def preferred_batch_size(repository: Repository) -> Iterator[Flaw]:
    """Preferred batch sizes lie between 1 and max_batch_size."""
    for model in repository.configured():
        config = model.config
        preferred = [
            *config.dynamic_batching.preferred_batch_size,
            *config.sequence_batching.oldest.preferred_batch_size,
        ]
        outside = [size for size in preferred if not 1 <= size <= config.max_batch_size]
        if outside:
            yield error(
                model.config_file,
                f"must prefer batch sizes from 1 to max_batch_size ({config.max_batch_size})",
                given=names(outside),
                remedy="Remove preferred_batch_size: without it the batcher fills up to the limit",
            )


def batch_shapes(repository: Repository) -> Iterator[Flaw]:
    """Inputs of variable length share batches: ragged, or padded to planned lengths."""
    all_wirings = wirings(repository)
    for model in repository.executed():
        if model.config.max_batch_size < 2 or not model.config.HasField("dynamic_batching"):
            continue
        for tensor in model.config.input:
            if -1 not in tensor.dims or tensor.allow_ragged_batch:
                continue
            given = f"input {tensor.name} {dims_text(tensor.dims)}, dynamic batching"
            if _fed_by_us(all_wirings, model, tensor.name):
                yield info(
                    model.config_file,
                    "batches only rows that the preprocess step padded to the same bucket",
                    given=given,
                    remedy="Nothing to do: the producer pads to planned lengths and releases equal "
                    "lengths next to each other",
                )
            else:
                yield warning(
                    model.config_file,
                    "should not leave a variable dimension to the dynamic batcher: requests of "
                    "unequal shape never share a batch, each one closes it",
                    given=given,
                    remedy="Set allow_ragged_batch: true (and a batch_input for the row sizes), or "
                    "pad to a few fixed lengths before this model",
                )


def _fed_by_us(all_wirings: list[Wiring], model: Model, input_name: str) -> bool:
    producers = [
        producer.model
        for wiring in all_wirings
        for step in wiring.steps
        if step.model_name == model.name and input_name in step.inputs
        for producer in wiring.producers.get(step.inputs[input_name], [])
    ]
    return bool(producers) and all(producer and producer.is_ours for producer in producers)


def priority_levels(repository: Repository) -> Iterator[Flaw]:
    """Priorities lie between 1 and priority_levels."""
    for model in repository.configured():
        batching = model.config.dynamic_batching
        levels, default = batching.priority_levels, batching.default_priority_level
        outside = [key for key in batching.priority_queue_policy if not 1 <= key <= levels]
        if levels and not 1 <= default <= levels:
            yield error(
                model.config_file,
                f"must have default_priority_level from 1 to priority_levels ({levels})",
                given=str(default),
                remedy=f"Write default_priority_level: {(levels + 1) // 2}",
            )
        if levels and outside:
            yield error(
                model.config_file,
                f"must have priority_queue_policy only for levels from 1 to {levels}",
                given=names(outside),
                remedy="Correct the key, or raise priority_levels",
            )
        elif not levels and (outside or default):
            yield warning(
                model.config_file,
                "should set priority_levels when it says anything on priorities",
                given=f"default_priority_level {default}, policies for {names(outside)}",
                remedy="Add priority_levels, or remove the rest: without it nothing of it counts",
            )


def preserve_ordering(repository: Repository) -> Iterator[Flaw]:
    """preserve_ordering is possible, works in the target release, and holds nothing back."""
    first, last = PRESERVE_ORDERING_BROKEN
    steps = {step.model_name for wiring in wirings(repository) for step in wiring.steps}
    for model in repository.configured():
        batching = model.config.dynamic_batching
        if not batching.preserve_ordering:
            continue
        clash = _ordering_clash(batching)
        if clash:
            yield error(
                model.config_file,
                "must not combine preserve_ordering with what reorders requests",
                given=clash,
                remedy="Remove preserve_ordering, or the other one",
            )
        if first <= repository.triton <= last:
            yield warning(
                model.config_file,
                f"should not rely on preserve_ordering in Triton {first} to {last}: responses come "
                "in the order they are finished",
                given=f"preserve_ordering: true for Triton {repository.triton}",
                remedy="Remove it, or target a later release",
            )
        elif model.name in steps:
            yield warning(
                model.config_file,
                "should not preserve the order of responses within an ensemble",
                given="preserve_ordering: true on a step",
                remedy="Remove it: each ensemble request waits for its own response anyway, and a "
                "slow one would hold back those behind it",
            )


def _ordering_clash(batching: Any) -> str:
    if batching.priority_levels > 1:
        return f"priority_levels {batching.priority_levels}"
    for policy in [batching.default_queue_policy, *batching.priority_queue_policy.values()]:
        delays = enum_name(policy, "timeout_action") == "DELAY"
        if delays and policy.default_timeout_microseconds:
            return "timeout_action DELAY with a timeout"
    return ""


def queue_policy(repository: Repository) -> Iterator[Flaw]:
    """Timeouts outlast the queue delay, limits hold a full batch, and units are microseconds."""
    for model in repository.executed():
        batching = model.config.dynamic_batching
        delay_us = batching.max_queue_delay_microseconds
        if delay_us > _LONGEST_DELAY_US:
            yield warning(
                model.config_file,
                "should have a queue delay below a second",
                given=f"max_queue_delay_microseconds {delay_us}",
                remedy="Write microseconds: 500 is half a millisecond",
            )
        for policy in [batching.default_queue_policy, *batching.priority_queue_policy.values()]:
            yield from _check_timeout(model, policy, delay_us)
            if 0 < policy.max_queue_size < model.config.max_batch_size:
                yield warning(
                    model.config_file,
                    f"should queue at least one full batch ({model.config.max_batch_size})",
                    given=f"max_queue_size {policy.max_queue_size}",
                    remedy="Raise max_queue_size to a few times max_batch_size",
                )


def queue_wake_up(repository: Repository) -> Iterator[Flaw]:
    """A queue policy turns pre-fetching off, and a lone instance then misses requests.

    Measured on 24.10: a request that comes while the instance works is not seen for up to 500 ms
    (triton-inference-server/server issue 8870 is a related report).
    """
    for model in repository.executed():
        batching = model.config.dynamic_batching
        policies = [batching.default_queue_policy, *batching.priority_queue_policy.values()]
        lone = sum(instances_of(model, g) for g in model.config.instance_group) <= 1
        if lone and (batching.priority_levels or any(policy.ByteSize() for policy in policies)):
            yield warning(
                model.config_file,
                "should have no queue policy while it has one instance: a request that arrives "
                "beside a working one can wait 500 ms",
                given="a queue policy or priority levels",
                remedy="Remove it, or give the step a second instance",
            )


def _check_timeout(model: Model, policy: Any, delay_us: int) -> Iterator[Flaw]:
    timeout_us = policy.default_timeout_microseconds
    given = f"default_timeout_microseconds {timeout_us}"
    if 0 < timeout_us <= delay_us:
        yield error(
            model.config_file,
            f"must let requests wait longer than the queue delay ({delay_us} us)",
            given=given,
            remedy="Raise default_timeout_microseconds, or lower max_queue_delay_microseconds",
        )
    elif 0 < timeout_us < _SHORTEST_TIMEOUT_US:
        yield warning(
            model.config_file,
            "should have a queue timeout of a millisecond or more",
            given=given,
            remedy="Write microseconds: 5000000 is five seconds",
        )
    delays = enum_name(policy, "timeout_action") == "DELAY"
    if delays and not timeout_us and not policy.allow_timeout_override:
        yield warning(
            model.config_file,
            "should have a timeout for timeout_action DELAY to do anything",
            given="no default_timeout_microseconds, and requests may not set one",
            remedy="Add default_timeout_microseconds, or remove timeout_action",
        )


def queue_limit(repository: Repository) -> Iterator[Flaw]:
    """No step limits its queue while other steps of the same request may run.

    Seen with 24.10: in a chain of steps a full queue is answered with an error, wherever it is;
    with two branches nearly every request hung for ever.
    """
    if repository.triton >= STEP_QUEUE_LIMIT_SAFE:
        return
    for wiring in wirings(repository):
        stages = wiring.stages()
        cause = "steps that run at the same time" if any(len(s) > 1 for s in stages) else ""
        cause = "a decoupled step" if any(map(_is_decoupled, wiring.steps)) else cause
        first = stages[0] if stages and len(stages[0]) == 1 else []
        for step in wiring.steps if cause else ():
            limits = _queue_limits(step.model) if step.model and step not in first else []
            if step.model and limits:
                yield error(
                    step.model.config_file,
                    f"must not limit the queue of a step before Triton {STEP_QUEUE_LIMIT_SAFE} "
                    "while another step of the same request may run: the request hangs for ever",
                    given=f"max_queue_size {names(limits)} on {step.label} of "
                    f"{wiring.ensemble.name}, which has {cause}",
                    remedy="Limit the queue of the step that all requests pass first, alone, or "
                    f"target Triton {STEP_QUEUE_LIMIT_SAFE} or later",
                )


def _is_decoupled(step: Step) -> bool:
    return bool(step.model and step.model.config.model_transaction_policy.decoupled)


def _queue_limits(model: Model) -> list[int]:
    batching = model.config.dynamic_batching
    policies = [batching.default_queue_policy, *batching.priority_queue_policy.values()]
    return [policy.max_queue_size for policy in policies if policy.max_queue_size]
