"""Comments of a generated ``config.pbtxt``: the reason of each number, as `inspect` shows it.

No comment contains the name of a field that the config does not set, because the serving image
looks for such names in the text (`container.flags.mentions`).
"""

from __future__ import annotations

from triptych.repository.config import parse_config
from triptych.repository.config_text import FIELD
from triptych.spec.fields import SessionOptions
from triptych.spec.plan import Plan

_STEP_BATCHING = (
    "Each request is handled by itself, so that requests of different shapes share a batch. There "
    "is no delay and no limit of the queue: "
)
_LIMITED_BY = {
    "triptych": "preprocess chooses the requests that the core gets next.",
    "triton": "the core has them, or nothing does if it has one instance (serving.flow_control: "
    "triton).",
    "none": "no request is rejected (serving.flow_control: none).",
}
_ACCELERATOR = (
    "Shapes of the planned profiles, so that no engine is built while requests wait. The caches "
    "keep the engines for the next start of the server."
)
_FP32 = "ONNX Runtime rounds the inputs of fp32 products to TF32 by default."
_CPU_MEMORY = (
    "ONNX Runtime frees the memory of a large batch after it, and does not plan again for each new "
    "shape."
)
_STREAMS = "A stream for each instance; each computes one request at a time, without a batch."
_SESSION = "The others are of core.session."


def explain(plan: Plan, step: str) -> dict[str, str]:
    """Return the comments of a step's config, in the form of `print_config`.

    Fields that `serving.config` sets have a comment that names it.
    """
    serving, reasons = plan.spec.serving, plan.reasons
    comments = {"name": written_by(plan.spec.name.partition(".")[0])}
    if step == "ensemble":
        comments |= {
            "version_policy": "serving.versions.",
            "max_batch_size": _sentence(reasons["request_rows"]),
            "ensemble_scheduling.max_inflight_requests": "serving.max_inflight_requests.",
            "response_cache": "serving.response_cache.",
            "model_metrics": "Upper bounds in ms: Triton's own, and each limit of serving.slo.",
        }
    else:
        comments |= {
            "max_batch_size": _sentence(reasons["max_batch_size"]),
            "dynamic_batching": _STEP_BATCHING + _LIMITED_BY[serving.flow_control],
            "instance_group": f"serving.instances.{plan.instances_of(step)}. Each instance is a "
            "process.",
        }
    if step == "core":
        comments |= _core_comments(plan)
    if step != "ensemble" and plan.placement is not None:
        count = plan.placement.values[f"serving.instances.{plan.instances_of(step)}"]
        comments["instance_group"] += f" On {plan.placement.machine.name}: {count.reason}."
    return own_comments(comments, serving.config.get(step, ""), step)


def written_by(pipeline: str) -> str:
    """Return the first comment of a config."""
    return f"Written by `triptych build {pipeline}`, which replaces this file."


def own_comments(comments: dict[str, str], text: str, step: str) -> dict[str, str]:
    """Return the comments, with those of the fields that a text of `serving.config` sets replaced.

    Args:
        comments: Comments of the generated fields.
        text: Text of the step in the format of ``config.pbtxt``, or "".
        step: Step that the text belongs to.
    """
    own = {field.name for field, _ in parse_config(text).ListFields()}
    generated = {key: note for key, note in comments.items() if key.split(".")[0] not in own}
    return generated | dict.fromkeys(own, f"Set by {FIELD}.{step}, at least in part.")


def _core_comments(plan: Plan) -> dict[str, str]:
    queue, on_gpu = plan.spec.serving.queue, plan.spec.core.device == "gpu"
    group = "serving.instances.core" + f", or models.{plan.model}.instances" * bool(plan.model)
    if on_gpu:
        everywhere = plan.spec.serving.gpus == "all"
        group += " on each GPU of " + ("the server" if everywhere else "serving.gpus")
    if plan.engine is not None and plan.builds_engine:
        group += "; an instance has a context for each profile of the engine"
    warm_up = "A row of each padded length"
    if not plan.bucket_edges:
        warm_up = "A row"
        if plan.lengths is not None:
            warm_up = "Rows of median length and of the 99th percentile of the traffic's lengths"
    parameters = [
        "intra_op_thread_count is core.threads." if plan.spec.core.threads else "",
        "" if on_gpu else _CPU_MEMORY if plan.spec.core.session == SessionOptions() else _SESSION,
    ]
    if plan.spec.core.backend == "openvino":
        parameters = [_STREAMS]
    return {
        "batch_input": "Triton joins the rows of a batch end to end, without padding.",
        "dynamic_batching": "" if queue.max_delay_us else _sentence(plan.reasons["queue"]),
        "dynamic_batching.priority_levels": "serving.priority.levels.",
        "dynamic_batching.default_priority_level": "serving.priority.default.",
        "dynamic_batching.max_queue_delay_microseconds": "serving.queue.max_delay_us.",
        "dynamic_batching.default_queue_policy": (
            "serving.queue.timeout_ms (by default the largest limit of serving.slo, or 5 s), which "
            "a request can only shorten, and serving.queue.max_in_flight."
        ),
        "instance_group": f"{group}.",
        "optimization.gather_kernel_buffer_threshold": _sentence(
            plan.reasons["gather_kernel_buffer_threshold"]
        ),
        "optimization.cuda.graph_spec": (
            "CUDA graphs, captured at load; a batch uses the one with its number of rows or the "
            f"next larger number. {_sentence(plan.reasons.get('cuda_graphs', 'none'))}"
        ),
        "optimization.execution_accelerators": " ".join(
            [_ACCELERATOR] * (plan.spec.core.accelerator == "tensorrt")
            + [_FP32] * (not plan.spec.core.accelerator_options.tf32)
        ),
        "model_warmup": f"{warm_up}, alone{' and in a full batch' if on_gpu else ''}.",
        "parameters": " ".join(filter(None, parameters)),
    }


def _sentence(text: str) -> str:
    first = text.split()[0]
    return f"{text if '.' in first else text[0].upper() + text[1:]}."
