"""Checks of a single config.

The target release must know its fields. Batches must form, limits, policies and warm-ups must have
an effect, and CUDA graphs must be of requests that the model accepts. Triton itself says what else
is wrong when it loads the config.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from triptych.base.releases import (
    ACCELERATOR_BF16,
    OVERFLOW_CHECKED,
    PRESERVE_ORDERING_BROKEN,
    STEP_QUEUE_LIMIT_SAFE,
    fields_newer_than,
    parameters_newer_than,
)
from triptych.repository.lint.ensemble import Wiring, wirings
from triptych.repository.lint.snapshot import (
    BACKENDS,
    Flaw,
    Model,
    calls,
    dims_text,
    enum_name,
    error,
    fits,
    info,
    names,
    request_parameters,
    warning,
)

if TYPE_CHECKING:
    from tritonclient.grpc.model_config_pb2 import ModelOptimizationPolicy, ModelWarmup

# A value outside these limits was probably not written in microseconds.
_MIN_TIMEOUT_US = 1_000
_MAX_DELAY_US = 1_000_000


def dynamic_batching(model: Model) -> Iterator[Flaw]:
    """Check that the server forms batches for a model that supports batches."""
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


def batch_shapes(model: Model) -> Iterator[Flaw]:
    """Check that inputs of variable length share batches: ragged, or padded to planned lengths."""
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
    """Check that fields of priorities have an effect."""
    batching = model.config.dynamic_batching
    others = batching.default_priority_level or len(batching.priority_queue_policy)
    if not batching.priority_levels and others:
        yield warning(
            "should set priority_levels if it sets other fields of priorities",
            f"default_priority_level {batching.default_priority_level}, policies for "
            f"{names(batching.priority_queue_policy)}",
            "Add priority_levels, or remove the rest: without it the other fields have no effect",
        )


def preserve_ordering(model: Model) -> Iterator[Flaw]:
    """Check that preserve_ordering works in the target release, and is of use."""
    (first, last), triton = PRESERVE_ORDERING_BROKEN, model.repository.triton
    if not model.config.dynamic_batching.preserve_ordering:
        return
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


def _delays(policy: object) -> bool:
    return enum_name(policy, "timeout_action") == "DELAY"


def queue_policy(model: Model) -> Iterator[Flaw]:
    """Check that timeouts outlast the queue delay and limits allow a full batch."""
    delay_us = model.config.dynamic_batching.max_queue_delay_microseconds
    if delay_us > _MAX_DELAY_US:
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
        elif 0 < timeout_us < _MIN_TIMEOUT_US:
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
    """Check that a model with one instance has no queue policy.

    A queue policy disables prefetching, and a single instance then misses requests. Measured on
    24.10: a request that arrives while the instance works is not noticed for up to 500 ms
    (triton-inference-server/server issue 8870 is a related report).
    """
    lone = sum(map(model.instances_of, model.config.instance_group)) <= 1
    policies = [policy for policy in model.queue_policies if policy.ByteSize()]
    if lone and (model.config.dynamic_batching.priority_levels or policies):
        yield warning(
            "should have no queue policy while it has one instance: a request that arrives during "
            "another one can wait 500 ms",
            "a queue policy or priority levels",
            "Remove it, or give the step a second instance",
        )


def python_shapes(model: Model) -> Iterator[Flaw]:
    """Check that the inputs of a Python step that Triptych did not write have fixed dimensions.

    Before 26.04 a request of 78 bytes, INT32 ``[1, 2**62]`` without data, ends the process of a
    step with a free dimension: its size is 0 in 64 bits, so that Triton takes it as complete.
    """
    if model.backend != "python" or model.is_ours or model.repository.triton >= OVERFLOW_CHECKED:
        return
    free = [each.name for each in model.config.input if -1 in each.dims]
    if free:
        yield warning(
            "should have inputs of fixed dimensions: before Triton 26.04 a request with a shape "
            "that overflows 64 bits ends the process of the step",
            f"a free dimension of {names(free)}",
            "Pack the values into BYTES [1], or let only trusted clients call the model",
        )


def queue_limit(wiring: Wiring) -> Iterator[Flaw]:
    """Check that no step limits its queue while other steps of the same request may run.

    Seen with 24.10: in a chain of steps a full queue is answered with an error, whichever step it
    belongs to. With two branches nearly every request hung.
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
                "another step of the same request may run: the request hangs",
                f"max_queue_size {names(limits)} on {step.label} of {wiring.ensemble.name}, which "
                f"has {cause}",
                "Limit the queue of the step that all requests pass first, alone, or target Triton "
                f"{STEP_QUEUE_LIMIT_SAFE} or later",
                step.model.where,
            )


def triton_version(model: Model) -> Iterator[Flaw]:
    """Check that no field is newer than the target Triton, which would reject the config.

    Triton ignores parameters that its backend does not know.
    """
    triton = model.repository.triton
    for field in fields_newer_than(model.config, triton):
        yield error(
            f"must hold only fields that Triton {triton} knows",
            f"{field.name}, new in {field.release}",
            f"Remove it, or target Triton {field.release} or later",
        )
    for parameter in parameters_newer_than(model.config, triton):
        yield warning(
            f"should hold only parameters that Triton {triton} knows: it ignores others",
            f"parameter {parameter.name}, new in {parameter.release}",
            f"Remove it, or target Triton {parameter.release} or later",
        )
    accelerators = model.config.optimization.execution_accelerators.gpu_execution_accelerator
    modes = {each.parameters.get("precision_mode") for each in accelerators}
    if "BF16" in modes and triton < ACCELERATOR_BF16:
        yield error(
            f"must have a precision_mode that ONNX Runtime's backend of Triton {triton} knows",
            f"precision_mode BF16, new in {ACCELERATOR_BF16}",
            f"Use core.precision fp16 or fp32, or target Triton {ACCELERATOR_BF16} or later "
            "(serving.triton)",
        )


def instance_group(model: Model) -> Iterator[Flaw]:
    """Check counts and profiles of the instance groups."""
    for index, group in enumerate(model.config.instance_group):
        label = f"instance_group {group.name or index}"
        if group.count < 1:
            yield warning(
                "should have a count of at least 1",
                f"{label}: count {group.count}, for which the server takes "
                f"{model.instances_of(group)}",
                "Write count: 1 or more",
            )
        if group.profile:
            yield from _profile_flaws(model, group.profile, f"{label}: profile")


def _profile_flaws(model: Model, profiles: Sequence[str], label: str) -> Iterator[Flaw]:
    wrong = [profile for profile in profiles if not profile.isdecimal()]
    if wrong:
        yield error(
            "must name optimization profiles by their number",
            f"{label} {names(wrong)}",
            'Write for example profile: "0"',
        )
    if len(profiles) > 1 and model.ragged:
        yield warning(
            "should name one profile for a core with ragged inputs",
            f"{label} {names(profiles)}",
            "Keep the one that spans the packed lengths: the choice looks at the first request",
        )


def response_cache(model: Model) -> Iterator[Flaw]:
    """Check that a cached response depends only on what the key of the cache contains.

    The key is a hash of model, version and input tensors (TritonCache::Hash in src/cache_manager.cc
    of Triton's core). Request parameters and the names of requested outputs are not part of it.
    """
    config, models = model.config, model.repository.models
    if not config.response_cache.enable:
        return
    named = [models.get(step.model_name) for step in config.ensemble_scheduling.step]
    steps = [step for step in named if step is not None and step.config is not None]
    if model.is_ours and not model.is_ensemble:
        yield error(
            "must not cache the responses of a single step of a pipeline: they are of one request",
            f"response_cache of {model.name}",
            "Remove response_cache here, and set serving.response_cache in the pipeline, which "
            "enables it on the ensemble",
        )
        return
    if len(config.output) > 1:
        yield warning(
            "should have one output to cache its responses: the answer to a request for some of "
            "the outputs is stored, and returned to requests for all of them",
            f"response_cache of {model.name} with {names(output.name for output in config.output)}",
            "Remove response_cache",
        )
    for each in steps or [model]:
        yield from _hidden_parameters(model, each)


def _refuses_parameters(step: Model) -> bool:
    """Return whether a step refuses options as request parameters, if it is a first one."""
    is_refusing = any(source.path.name == "preprocess_cached.py" for source in step.sources)
    # Older builds have the setting; later steps need not refuse what the first one does.
    return bool(
        step.settings.get("refuses_parameters", is_refusing or "row_maker" not in step.settings)
    )


def _hidden_parameters(model: Model, step: Model) -> Iterator[Flaw]:
    """Yield a flaw if `step` of the cached `model` reads request parameters."""
    options = [name for name in request_parameters(step) if name not in model.inputs]
    if options:
        yield error(
            "must not cache responses that depend on request parameters: they are not part of the "
            "cache's key, so a request gets the response of another one with other parameters",
            f"{step.name} reads {names(options)}",
            f"Remove response_cache, or build the pipeline again: {names(options)} become optional "
            "inputs",
        )
    elif request_parameters(step) and not _refuses_parameters(step):
        yield error(
            "must have steps that refuse options as request parameters, which are not part of the "
            "cache's key",
            f"{step.name} accepts them",
            "Set serving.response_cache in the pipeline and build it again",
        )
    readers = [source.file for source in step.sources if calls(source.tree, "parameters")]
    if readers and not step.is_ours:
        yield warning(
            "should not cache responses that depend on request parameters: they are not part of "
            "the cache's key",
            f"{names(readers)} calls request.parameters()",
            "Remove response_cache, or read options from input tensors",
        )


def warmup(model: Model) -> Iterator[Flaw]:
    """Check that every warm-up runs, with inputs and values that the model has."""
    for index, sample in enumerate(model.config.model_warmup):
        yield from _doubtful(model, sample, f"model_warmup {sample.name or index}")


def _doubtful(model: Model, sample: ModelWarmup, label: str) -> Iterator[Flaw]:
    if sample.batch_size == 0:
        yield warning(
            "should give every warm-up a batch_size, 0 is skipped",
            f"{label}: no batch_size",
            "Write batch_size: 1 or more",
        )
    controls = {control.name for control in model.config.sequence_batching.control_input}
    unknown = set(sample.inputs) - set(model.inputs) - controls
    if model.inputs and unknown:
        yield warning(
            "should warm up only inputs that exist",
            f"{label}: unknown input {names(unknown)}; inputs: {names(model.inputs)}",
            "Correct the name, or remove it",
        )
    # Random bytes are ids beyond the vocabulary, which lookups reject.
    random_ids = [
        name
        for name, data in sample.inputs.items()
        if data.random_data and "INT" in enum_name(data, "data_type")
    ]
    if random_ids and model.backend != "python":
        yield warning(
            "should not warm up integer inputs with random_data: ids are out of range",
            f"{label}: {names(random_ids)}",
            "Use zero_data: true, or an input_data_file with real ids",
        )


def graph_spec(model: Model) -> Iterator[Flaw]:
    """Check that CUDA graphs are captured for batch sizes and shapes that the model accepts."""
    for index, spec in enumerate(model.config.optimization.cuda.graph_spec):
        for rule, given in spec_faults(model, spec):
            yield error(
                rule, f"graph_spec {index}: {given}", "Correct the graph_spec, or remove it"
            )


def spec_faults(
    model: Model, spec: ModelOptimizationPolicy.Cuda.GraphSpec
) -> Iterator[tuple[str, str]]:
    """Yield a rule and the given value for each fault of a `graph_spec`."""
    limit = model.config.max_batch_size
    if not min(limit, 1) <= spec.batch_size <= limit:
        span = f"from 1 to {limit}" if limit else "0"
        yield f"must capture a CUDA graph for batch_size {span}", f"batch_size {spec.batch_size}"
    yield from _shape_faults(model, spec.input)
    if spec.HasField("graph_lower_bound"):
        yield from _shape_faults(model, spec.graph_lower_bound.input)


def _shape_faults(
    model: Model, shapes: Mapping[str, ModelOptimizationPolicy.Cuda.GraphSpec.Shape]
) -> Iterator[tuple[str, str]]:
    known = {*model.inputs, *model.added}
    unknown = set(shapes) - known
    if model.inputs and unknown:
        given = f"unknown input {names(unknown)}; inputs: {names(known)}"
        yield "must name inputs that exist in a graph_spec", given
    for name, shape in sorted(shapes.items()):
        given = f"input {name} {dims_text(shape.dim)}"
        tensor = model.inputs.get(name)
        if any(dim < 1 for dim in shape.dim):
            yield "must have concrete dims in a graph_spec", given
        # Ragged and batch inputs have their shape after joining, which cannot be compared.
        elif tensor and not tensor.allow_ragged_batch and not fits(shape.dim, tensor.dims):
            rule = f"must fit the input's dims, without the batch: {dims_text(tensor.dims)}"
            yield rule, given
