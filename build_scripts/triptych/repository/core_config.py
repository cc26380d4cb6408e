"""The config of a core: what a backend is told of batches, devices, graphs and warm-ups."""

from __future__ import annotations

from typing import Any

from triptych.plan.engine_spec import EnginePlan
from triptych.plan.plan import Plan
from triptych.releases import CONTEXT_MEMORY
from triptych.repository.config import new_config
from triptych.tensors import INPUT_IDS, ROW_STRIDE, Tensor

ACCELERATOR_PRECISION = {"fp32": "FP32", "fp16": "FP16", "bf16": "BF16", "int8": "INT8"}
"""What ONNX Runtime's TensorRT accelerator may compute in, by the graph's precision."""


def core_config(plan: Plan) -> Any:
    """The core's ModelConfig; every number in it is the plan's."""
    core, serving = plan.spec.core, plan.spec.serving
    config = new_config(
        name=plan.step("core"),
        backend=core.backend,
        max_batch_size=plan.max_batch_size,
        input=[declare(tensor) for tensor in plan.core_inputs],
        output=[declare(tensor) for tensor in plan.core.outputs],
        instance_group=[_instances(plan)],
        dynamic_batching={
            "max_queue_delay_microseconds": serving.queue.max_delay_us,
            **_queue_policy(plan),
        },
        model_warmup=[_warm_up(plan, rows=w.rows, tokens=w.tokens) for w in plan.warm_ups],
        parameters={
            key: {"string_value": str(value)}
            for key, value in (
                ("intra_op_thread_count", core.threads),
                ("token_budget", core.token_budget),
                (CONTEXT_MEMORY, _context_memory(plan)),
            )
            if value is not None
        },
    )
    if core.device == "gpu":
        config.optimization.MergeFrom(_optimization(plan))
    if plan.packed:
        _join_rows(plan, config)
    return config


def _instances(plan: Plan) -> dict[str, Any]:
    core, serving = plan.spec.core, plan.spec.serving
    group: dict[str, Any] = {"kind": "KIND_CPU", "count": serving.instances.core}
    if core.device == "gpu":
        group.update(kind="KIND_GPU", gpus=serving.gpus)
    if plan.engine is not None and plan.builds_engine:
        # Without names the backend makes a context for profile 0 only.
        group["profile"] = [str(place) for place in range(len(plan.engine.profiles))]
    if serving.rate_limiter is not None:
        limiter = serving.rate_limiter
        group["rate_limiter"] = {
            "resources": [
                {"name": each.name, "count": each.count, "global": each.shared}
                for each in limiter.resources
            ],
            "priority": limiter.priority,
        }
    return group


def _context_memory(plan: Plan) -> str | None:
    """The strategy, where it is not the backend's own."""
    strategy = plan.spec.core.engine.context_memory
    return None if strategy == "static" else strategy.upper()


def _queue_policy(plan: Plan) -> dict[str, Any]:
    queue = plan.spec.serving.queue
    if queue.timeout_ms is None:
        return {}
    policy = {
        "timeout_action": "REJECT",
        "default_timeout_microseconds": queue.timeout_ms * 1000,
        "allow_timeout_override": True,  # a request may only shorten it
        "max_queue_size": queue.max_size,
    }
    return {"default_queue_policy": policy}


def _optimization(plan: Plan) -> Any:
    core, transfers = plan.spec.core, plan.spec.serving.transfers
    optimization = new_config().optimization
    optimization.input_pinned_memory.enable = transfers.pinned_input
    optimization.output_pinned_memory.enable = transfers.pinned_output
    optimization.gather_kernel_buffer_threshold = plan.gather_threshold
    optimization.eager_batching = transfers.eager_batching
    if plan.builds_engine:
        optimization.cuda.output_copy_stream = transfers.output_copy_stream
    if plan.engine is not None and plan.builds_engine:
        _graphs(plan.engine, optimization.cuda)
    if core.accelerator == "tensorrt" and plan.engine is not None:
        accelerator = optimization.execution_accelerators.gpu_execution_accelerator.add()
        accelerator.name = "tensorrt"
        accelerator.parameters.update(_accelerator(plan.engine))
    return optimization


def _graphs(engine: EnginePlan, cuda: Any) -> None:
    cuda.graphs = bool(engine.graph_specs)
    for spec in engine.graph_specs:
        made = cuda.graph_spec.add(batch_size=spec.batch_size)
        made.graph_lower_bound.batch_size = spec.lowest_batch_size
        for name, dims in spec.inputs.items():
            made.input[name].dim.extend(dims)
            made.graph_lower_bound.input[name].dim.extend(dims)


def _accelerator(engine: EnginePlan) -> dict[str, str]:
    """Parameters of ONNX Runtime's TensorRT accelerator: src/onnxruntime.cc of that backend.

    Without shapes it builds an engine whenever a batch has a new one, while requests wait.
    """
    return {
        "precision_mode": ACCELERATOR_PRECISION.get(engine.precision, "FP32"),
        **{
            f"trt_profile_{short}_shapes": ",".join(
                f"{name}:{'x'.join(map(str, getattr(shapes, attribute)))}"
                for profile in engine.profiles
                for name, shapes in profile.items()
            )
            for short, attribute in (("min", "minimum"), ("opt", "optimum"), ("max", "maximum"))
        },
    }


def _join_rows(plan: Plan, config: Any) -> None:
    """Rows of a batch end to end, with their sizes beside them; results per token cut up again."""
    ragged = INPUT_IDS.name
    next(i for i in config.input if i.name == ragged).allow_ragged_batch = True
    config.batch_input.add(
        kind="BATCH_ITEM_SHAPE_FLATTEN",
        target_name=[ROW_STRIDE.name],
        data_type=ROW_STRIDE.config_type,
        source_input=[ragged],
    )
    if plan.core.per_token:
        config.batch_output.add(
            kind="BATCH_SCATTER_WITH_INPUT_SHAPE",
            target_name=[tensor.name for tensor in plan.core.outputs],
            source_input=[ragged],
        )


def _warm_up(plan: Plan, *, rows: int, tokens: int) -> dict[str, Any]:
    # Zeros: any token id from 0 is valid, and a row of length 0 is all padding.
    return {
        "name": f"{rows}x{tokens}",
        "batch_size": rows,
        "inputs": {
            tensor.name: {
                "data_type": tensor.config_type,
                "dims": [tokens if dim == -1 else dim for dim in tensor.config_dims],
                "zero_data": True,
            }
            for tensor in plan.core_inputs
        },
    }


def declare(tensor: Tensor) -> dict[str, Any]:
    """A tensor as an input or output of a config."""
    return {"name": tensor.name, "data_type": tensor.config_type, "dims": tensor.config_dims}
