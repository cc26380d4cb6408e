"""The plan in words and numbers, for `inspect`: what would be written, and why it is so."""

from __future__ import annotations

from typing import Any

from triptych.plan import Plan
from triptych.tensors import ROW_STRIDE, TICKET, Tensor


def describe_plan(plan: Plan) -> dict[str, Any]:
    """The plan as nested plain data, ready to print or to dump as JSON."""
    core, serving = plan.spec.core, plan.spec.serving
    stride = (ROW_STRIDE,) if plan.packed else ()
    steps = {
        "preprocess": (plan.task.inputs, (*plan.core_inputs, TICKET), "python"),
        "core": (plan.core_inputs + stride, plan.core_outputs, core.backend),
        "postprocess": ((*plan.core_outputs, TICKET), plan.outputs, "python"),
    }
    return {
        "pipeline": plan.spec.name,
        "task": plan.task.name,
        "model": {
            "source": plan.spec.model.source,
            "architecture": plan.facts.architecture,
            "pooling": "+".join(plan.facts.pooling),
            "vector": plan.facts.embedding_size,
            "max_length": f"{plan.max_length} tokens: {plan.reasons['max_length']}",
        },
        "traffic": {
            "rows": plan.lengths.rows,
            "mean_tokens": round(plan.lengths.mean, 1),
            "p50_tokens": plan.lengths.quantile(0.5),
            "p99_tokens": plan.lengths.quantile(0.99),
            "truncated": f"{plan.lengths.truncated_share:.1%}",
        },
        "batching": {
            "layout": core.layout,
            "precision": core.precision,
            "max_batch_size": f"{core.max_batch_size}: {plan.reasons['max_batch_size']}",
            "bucket_edges": _describe_edges(plan),
            "padding": f"{plan.padding_share:.1%} of computed tokens on this traffic",
            "queue": f"{serving.queue.max_delay_us} us, {serving.queue.max_size} requests: "
            f"{plan.reasons['queue']}",
            "warm_ups": ", ".join(f"{w.rows}x{w.tokens}" for w in plan.warm_ups),
        },
        "request_parameters": {
            name: " ".join(f"{k}={v}" for k, v in rule.items())
            for name, rule in plan.request_parameters.items()
        },
        "models": {
            plan.spec.name: {
                "backend": "ensemble",
                "inputs": _describe_tensors(plan.task.inputs),
                "outputs": _describe_tensors(plan.outputs),
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


def _describe_edges(plan: Plan) -> str:
    if plan.packed:
        return "none: rows lie end to end without padding"
    edges = ", ".join(map(str, plan.bucket_edges))
    return f"{edges}: {plan.reasons['bucket_edges']}"


def _describe_tensors(tensors: tuple[Tensor, ...]) -> str:
    return ", ".join(f"{t.name} {t.dtype}{t.config_dims}" for t in tensors)
