"""The plan in words and numbers, for `inspect`: what would be written, and why it is so."""

from __future__ import annotations

from triptych.base.tensors import Tensor, made_by_server
from triptych.interface.cli.describe_gpu import Described, describe_cost, describe_gpu
from triptych.spec.plan import Plan

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
