"""The plan in words and numbers, for `inspect`: what would be written, and why it is so.

The part of a plan that a GPU needs, in words and numbers, for `inspect`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from triptych.base.releases import CONTEXT_MEMORY, first_release, parse_release
from triptych.base.tensors import Tensor, made_by_server
from triptych.spec.engine_plan import EnginePlan, ShapeRange
from triptych.spec.plan import Plan

if TYPE_CHECKING:
    from triptych.repository.lock import Lock


Described: TypeAlias = dict[str, Any]
"""Words and numbers by name, nested: ready to print or to dump as JSON."""

IN_FLIGHT = "ensemble_scheduling.max_inflight_requests"


def describe_cost(plan: Plan) -> str:
    """What a row is expected to cost in either layout; empty for images."""
    if plan.cost is None:
        return ""
    device = "GPU" if plan.spec.core.device == "gpu" else "CPU core"
    return (
        f"packed {plan.cost.packed:.0f} us, bucketed {plan.cost.bucketed:.0f} us of a usual "
        f"{device} a row of this traffic: arithmetic, not a measurement; `bench` and `tune` measure"
    )


def describe_gpu(plan: Plan) -> Described:
    """What is asked of Triton and TensorRT, and why."""
    core, serving = plan.spec.core, plan.spec.serving
    transfers = serving.transfers
    gpus = ", ".join(map(str, serving.gpus))
    described: Described = {
        "gpus": f"{gpus}: {serving.instances.core} instance(s) of the core on each",
        "pinned_memory": f"input {_yes(transfers.pinned_input)}, output "
        f"{_yes(transfers.pinned_output)}: memory that the GPU copies from without a detour",
        "gather_kernel_buffer_threshold": f"{plan.gather_threshold}: a kernel gathers so many "
        "buffers or more; fewer are copied one by one",
        "eager_batching": f"{_yes(transfers.eager_batching)}: "
        + (
            "the next batch is closed while one runs"
            if transfers.eager_batching
            else "a batch stays open until an instance is free, and so is as full as can be"
        ),
        "preferred_batch_sizes": "none: all profiles share the limit of rows, so no size is faster "
        "than its neighbors, and a preferred one would close batches early",
    }
    if serving.rate_limiter is not None:
        names = ", ".join(f"{each.name} x {each.count}" for each in serving.rate_limiter.resources)
        described["rate_limiter"] = f"priority {serving.rate_limiter.priority}, {names or 'no'} "
        described["rate_limiter"] += "resources: starts to count with --rate-limit=execution_count"
    if serving.max_inflight is not None:
        described["max_inflight"] = (
            f"{serving.max_inflight} requests in each step{_newer(IN_FLIGHT, serving.triton)}"
        )
    if core.backend == "onnxruntime":
        described["accelerator"] = f"{core.accelerator}, of ONNX Runtime"
    if plan.engine is not None:
        described |= _describe_engine(plan, plan.engine)
    return described


def describe_rehearsal(plan: Plan, lock: Lock | None) -> str:
    """What came of the rehearsal of this plan's engine, as the lock in place has it."""
    from triptych.core.engine.rehearsal import describe

    built = None if lock is None else lock.plan.engine
    if lock is None or lock.rehearsal is None or built is None or plan.engine is None:
        return "none yet: `triptych build`, or `triptych engine --rehearse`"
    same = replace(plan.engine, precision=built.precision) == built
    return ("" if same else "of another plan: ") + describe(lock.rehearsal)


def _describe_engine(plan: Plan, engine: EnginePlan) -> Described:
    described: Described = {
        "profiles": {
            str(place): ", ".join(f"{name} {_range(shapes)}" for name, shapes in profile.items())
            for place, profile in enumerate(engine.profiles)
        }
    }
    if not plan.builds_engine:
        return described
    described["why_these_profiles"] = _why_profiles(plan)
    described["cuda_graphs"] = _describe_graphs(plan, engine)
    described["output_copy_stream"] = (
        f"{_yes(plan.spec.serving.transfers.output_copy_stream)}: results are copied back beside "
        "the next batch"
    )
    if plan.spec.core.engine.context_memory != "static":
        described["context_memory"] = (
            "found anew when a batch needs another profile: less memory, a little more time"
            + _newer(CONTEXT_MEMORY, plan.spec.serving.triton)
        )
    options = {
        key: value for key, value in engine.options.items() if value not in (None, False, "none")
    }
    settings = ", ".join(f"{key}={value}" for key, value in sorted(options.items()))
    described["engine"] = f"precision {engine.precision}, {settings or 'no options'}"
    if engine.precision == "fp32":
        described["engine"] += "; fp16 or int8 use tensor cores, and go through the same gate"
    return described


def _newer(name: str, triton: str) -> str:
    """That a setting is left out, where the oldest server to serve on does not know it."""
    since = first_release(name)
    if parse_release(triton) >= since:
        return ""
    return f"; left out, since serving.triton {triton} does not know it: {since} does"


def _why_profiles(plan: Plan) -> str:
    if plan.packed:
        return (
            "one: with several, Triton looks at the first request to choose, not at the joined "
            f"batch. It ends at {plan.max_batch_size} rows of {plan.max_length} tokens, the most a "
            "batch can be; kernels are chosen for a full batch of this traffic"
        )
    if plan.layout == "fixed":
        return "one: all rows have one shape. Kernels are chosen for a full batch"
    return (
        "one for each padded length, which is fixed in it, so that kernels are chosen for that "
        "very length; all take as many rows, since the smallest limit would hold for all"
    )


def _describe_graphs(plan: Plan, engine: EnginePlan) -> str:
    if plan.packed:
        return "none: a packed batch hardly ever has the same number of tokens twice"
    if not engine.graph_specs:
        return "none: core.engine.cuda_graphs is off"
    sizes = sorted({spec.batch_size for spec in engine.graph_specs})
    return (
        f"{len(engine.graph_specs)}, for {', '.join(map(str, sizes))} rows of each profile; other "
        "batches use the next larger one. Each is captured at load, for each instance"
    )


def _range(shapes: ShapeRange) -> str:
    low, best, high = (
        "x".join(map(str, dims)) for dims in (shapes.minimum, shapes.optimum, shapes.maximum)
    )
    return f"{low}..{high}, best at {best}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


AUTO = "auto"


def describe_plan(plan: Plan) -> Described:
    core, serving, task = plan.spec.core, plan.spec.serving, plan.task
    made = made_by_server(plan.core_inputs)
    steps = {
        "preprocess": (task.inputs, (*plan.core_inputs, *plan.past_core), "python"),
        "core": (plan.core_inputs + made, plan.core.outputs, core.backend),
        "postprocess": ((*plan.core.outputs, *plan.past_core), task.outputs, "python"),
    }
    rules = task.parameters(plan.facts)
    return {
        "pipeline": plan.spec.name,
        "task": task.name,
        **({"tuned": dict(plan.spec.tuned)} if plan.spec.tuned else {}),
        "model": _describe_model(plan),
        "traffic": _describe_traffic(plan),
        "batching": {
            "layout": _describe_layout(plan),
            "precision": core.precision,
            "max_batch_size": f"{plan.max_batch_size}: {plan.reasons['max_batch_size']}",
            **_describe_memory(plan),
            "rows_a_request": f"{plan.request_rows}: {plan.reasons['request_rows']}",
            "bucket_edges": _describe_edges(plan),
            "padding": f"{plan.padding_share:.1%} of computed tokens on this traffic",
            "queue": f"{serving.queue.max_delay_us} us, {serving.queue.max_size} requests: "
            f"{plan.reasons['queue']}",
            "warm_ups": ", ".join(f"{w.rows}x{w.tokens}" for w in plan.warm_ups),
            **({} if plan.cost is None else {"expected_cost": describe_cost(plan)}),
        },
        **({"gpu": describe_gpu(plan)} if core.device == "gpu" else {}),
        "request_parameters": {
            name: " ".join(f"{k}={v}" for k, v in rule.as_dict().items())
            + f" default={plan.parameters.get(name, 'none')}"
            for name, rule in rules.items()
        },
        "models": {
            plan.spec.name: {
                "backend": "ensemble",
                "inputs": _describe_tensors(task.inputs),
                "outputs": _describe_tensors(task.outputs),
            },
            **{
                plan.step(step): {
                    "backend": backend,
                    "instances": getattr(serving.instances, step),
                    "inputs": _describe_tensors(inputs),
                    "outputs": _describe_tensors(outputs),
                }
                for step, (inputs, outputs, backend) in steps.items()
            },
        },
    }


def _describe_model(plan: Plan) -> Described:
    facts = plan.facts
    described: Described = {
        "source": plan.spec.model.source,
        "architecture": facts.architecture,
    }
    if plan.core.reads == "pooled":
        described |= {"pooling": "+".join(facts.pooling), "vector": facts.embedding_size}
    if facts.labels:
        some = ", ".join(facts.labels[:8]) + (", …" if len(facts.labels) > 8 else "")
        described |= {"labels": f"{len(facts.labels)}: {some}", "activation": facts.activation}
    if facts.image is not None:
        image = facts.image
        described["pixels"] = f"{image.height} x {image.width} x {image.channels}"
    else:
        described["max_length"] = f"{plan.max_length} tokens: {plan.reasons['max_length']}"
    return described


def _describe_traffic(plan: Plan) -> Described:
    lengths = plan.lengths
    if lengths is None:
        return {"rows": "images, all of one size for the core"}
    return {
        "rows": lengths.rows,
        "mean_tokens": round(lengths.mean, 1),
        "p50_tokens": lengths.quantile(0.5),
        "p99_tokens": lengths.quantile(0.99),
        "truncated": f"{lengths.truncated_share:.1%}",
    }


def _describe_memory(plan: Plan) -> Described:
    if plan.batch_mib is None:
        return {}
    tokens = plan.max_batch_size * plan.max_length
    return {
        "max_batch_tokens": f"{tokens}: {plan.max_batch_size} rows of {plan.max_length} tokens",
        "max_batch_memory": f"{plan.batch_mib:.0f} MiB beside the weights, estimated from shapes",
    }


def _describe_layout(plan: Plan) -> str:
    chosen = f" (core.layout {AUTO}: expected to cost less)" * (plan.spec.core.layout == AUTO)
    if plan.packed:
        return (
            f"packed{chosen}, if that leaves the model's results as they are: the build proves it"
        )
    return plan.layout + chosen


def _describe_edges(plan: Plan) -> str:
    if not plan.bucket_edges:
        return "none: no row is padded"
    edges = ", ".join(map(str, plan.bucket_edges))
    return f"{edges}: {plan.reasons['bucket_edges']}"


def _describe_tensors(tensors: tuple[Tensor, ...]) -> str:
    return ", ".join(f"{t.name} {t.dtype}{t.config_dims}" for t in tensors)
