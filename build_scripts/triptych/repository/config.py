"""Write and read ``config.pbtxt``, and make the config of a core.

`ModelConfig` messages of Triton's protobuf are the config classes. `core_config` declares batching,
devices, CUDA graphs and warm-ups. `latency_buckets` adds the SLO limits to Triton's latency
histogram, which alerts use.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triptych.base.errors import UserError
from triptych.base.onnx_graph import MODEL_FILE
from triptych.base.releases import CONTEXT_MEMORY, Release, first_release, parse_release
from triptych.base.tensors import INPUT_IDS, LONGEST, ROW_SPAN, ROW_STRIDE, Tensor
from triptych.runtime.packing_spans import count_slots
from triptych.spec.engine_plan import EnginePlan
from triptych.spec.fields import AcceleratorOptions, CoreSettings, SessionOptions
from triptych.spec.model_fields import CompiledSpec, is_own
from triptych.spec.plan import Plan
from triptych.spec.slo import Slo

if TYPE_CHECKING:
    from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelOptimizationPolicy

CONFIG_FILE = "config.pbtxt"


def new_config(**fields: object) -> ModelConfig:
    """Return an `inference.ModelConfig` message with `fields` set.

    Raises:
        ValueError: The schema does not have a field.
    """
    # Imported here, because the import of grpc takes about 0.25 s, which would slow `--help` down.
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    return ModelConfig(**fields)


def parse_config(text: str, *, file: str = CONFIG_FILE) -> ModelConfig:
    """Parse the text of a ``config.pbtxt``.

    Raises:
        UserError: The text is not a ModelConfig; the message contains line and column.
    """
    from google.protobuf import text_format

    try:
        return text_format.Parse(text, new_config())
    except text_format.ParseError as error:
        raise UserError(
            file,
            "is not a ModelConfig in protobuf text format",
            given=str(error),
            remedy="Correct the line or build the pipeline again",
        ) from error


def read_config(path: Path) -> ModelConfig:
    return parse_config(path.read_text(encoding="utf-8"), file=str(path))


FIELD_ORDER = (
    "name",
    "platform",
    "backend",
    "default_model_filename",
    "version_policy",
    "max_batch_size",
    "input",
    "output",
    "batch_input",
    "batch_output",
    "ensemble_scheduling",
    "dynamic_batching",
    "sequence_batching",
    "model_transaction_policy",
    "instance_group",
    "optimization",
    "model_warmup",
    "response_cache",
    "model_metrics",
    "parameters",
)
"""Fields in the order of a written config, by what a reader wants to know first."""
_LINE_WIDTH, _COMMENT_WIDTH = 110, 98


def print_config(config: object, comments: Mapping[str, str] | None = None) -> str:
    """Return the text of ``config.pbtxt`` for `config`; equal messages give equal text.

    A message that fits into a line is one line.

    Args:
        config: A ModelConfig.
        comments: Comment for each field, written above it where the field is set. The name of a
            field of a message follows that of the message: ``dynamic_batching.priority_levels``.
    """
    return "\n".join(_field_lines(config, comments or {})) + "\n"


def _field_lines(message: Any, comments: Mapping[str, str], path: str = "") -> Iterator[str]:
    """Yield the lines of the set fields of a message; `path` is its name with a final point."""
    from google.protobuf import text_format

    indent = "  " * path.count(".")
    as_text = partial(text_format.MessageToString, use_short_repeated_primitives=True, as_utf8=True)
    place = {} if path else {name: index for index, name in enumerate(FIELD_ORDER)}
    fields = sorted(message.ListFields(), key=lambda each: place.get(each[0].name, len(place)))
    for field, value in fields:
        name = path + field.name
        for line in textwrap.wrap(comments.get(name, ""), _COMMENT_WIDTH - len(indent)):
            yield f"{indent}# {line}"
        for element in _elements(field, value):
            single = type(message)(**{field.name: element})
            line = indent + as_text(single, as_one_line=True).rstrip()
            if len(line) <= _LINE_WIDTH and not _has_comments(element, comments, name):
                yield line
            elif field.message_type is None or isinstance(element, dict):
                yield from as_text(single, indent=len(indent)).splitlines()
            else:
                yield f"{indent}{field.name} {{"
                inner = element[0] if isinstance(element, list) else element
                yield from _field_lines(inner, comments, f"{name}.")
                yield f"{indent}}}"


def _has_comments(element: object, comments: Mapping[str, str], name: str) -> bool:
    """Return whether a field inside the message `name` is set and has a comment."""
    if not hasattr(element, "ListFields"):
        return False
    inner = [(f"{name}.{field.name}", value) for field, value in element.ListFields()]
    return any(key in comments or _has_comments(value, comments, key) for key, value in inner)


def _elements(field: Any, value: Any) -> list[Any]:
    """Return the values of a field to write one by one; lists of numbers or texts stay whole."""
    if field.message_type is None:
        return [value]
    if field.message_type.GetOptions().map_entry:
        return [{key: value[key]} for key in sorted(value)]
    return [[each] for each in value] if isinstance(value, Sequence) else [value]


ACCELERATOR_PRECISION = {"fp32": "FP32", "fp16": "FP16", "bf16": "BF16", "int8": "INT8"}
"""Precision of ONNX Runtime's TensorRT accelerator, by the graph's precision."""

ARENA = {
    "shrink": {"memory.enable_memory_arena_shrinkage": "cpu:0"},
    "keep": {},
    "none": {"enable_mem_arena": "0"},
}
"""Parameters of `core.session.memory_arena`. By default, and without planning for each new shape,
ONNX Runtime releases the memory of a large batch. Measured on MiniLM in fp32, 2 cores, a batch of
32 rows of 256 tokens: peak 422 MiB instead of 652 MiB, 167 instead of 628 MiB afterwards. One short
row takes 3.6 ms in both cases."""


def core_parameters(plan: Plan) -> dict[str, str]:
    """Return the `parameters` that the backend of the core reads."""
    core, parameters = plan.spec.core, {}
    if core.backend == "openvino":
        return openvino_parameters(core, plan.spec.serving.instances.core)
    if core.threads is not None:
        parameters["intra_op_thread_count"] = str(core.threads)
    if core.device == "cpu":
        parameters |= session_parameters(core.session)
    elif core.backend == "onnxruntime":
        parameters |= cuda_parameters(core.accelerator_options)
    if core.engine.context_memory != "static":  # the backend's default strategy
        parameters[CONTEXT_MEMORY] = core.engine.context_memory.upper()
    return parameters


def cuda_parameters(options: AcceleratorOptions) -> dict[str, str]:
    """Return the parameters of ONNX Runtime's CUDA kernels that differ from the defaults.

    The backend numbers the choices. It reads them from `parameters` alone: values in the CUDA
    accelerator are replaced by its defaults.
    """
    usual, parameters = AcceleratorOptions(), {}
    if options.memory_limit_mib is not None:
        parameters["gpu_mem_limit"] = str(options.memory_limit_mib * 2**20)
    if options.arena != usual.arena:
        parameters["arena_extend_strategy"] = "1"
    if options.convolution_search != usual.convolution_search:
        number = ("exhaustive", "heuristic", "default").index(options.convolution_search)
        parameters["cudnn_conv_algo_search"] = str(number)
    return parameters


def openvino_parameters(core: CoreSettings, instances: int) -> dict[str, str]:
    """Return the parameters of the OpenVINO backend (`ParseParameters` of its src/openvino.cc).

    All instances share one compiled model. Each stream of it runs one request at a time.
    """
    parameters = {
        "NUM_STREAMS": str(instances),
        "PERFORMANCE_HINT": "LATENCY" if instances == 1 else "THROUGHPUT",
    }
    if core.threads is not None:
        parameters["INFERENCE_NUM_THREADS"] = str(core.threads * instances)
    if core.precision == "bf16":
        parameters["HINT_BF16"] = "YES"
    return parameters


def session_parameters(options: SessionOptions) -> dict[str, str]:
    """Return the parameters of the ONNX Runtime backend for a core on a CPU."""
    parameters = {"enable_mem_pattern": str(int(options.memory_pattern))}
    if options.inter_threads > 1:
        parameters |= {
            "execution_mode": "1",
            "inter_op_thread_count": str(options.inter_threads),
        }
    return parameters | ARENA[options.memory_arena]


def core_config(plan: Plan) -> ModelConfig:
    """Return the core's ModelConfig; all numbers come from the plan."""
    core, serving = plan.spec.core, plan.spec.serving
    config = new_config(
        name=plan.step("core"),
        backend=core.backend,
        max_batch_size=plan.max_batch_size,
        input=[declare(tensor) for tensor in plan.core_inputs],
        output=[declare(tensor) for tensor in plan.core.outputs],
        instance_group=[_instances(plan)],
        dynamic_batching={"max_queue_delay_microseconds": serving.queue.max_delay_us},
        model_warmup=[_warm_up(plan, rows=w.rows, tokens=w.tokens) for w in plan.warm_ups],
        parameters={key: {"string_value": text} for key, text in core_parameters(plan).items()},
    )
    if serving.queue_policy_of_triton:
        timeout_ms = serving.queue.timeout_ms or int(serving.longest_wait_ms)
        policy = config.dynamic_batching.default_queue_policy
        policy.timeout_action = policy.REJECT
        policy.default_timeout_microseconds = timeout_ms * 1000
        policy.allow_timeout_override = True  # a request can only shorten the timeout
        policy.max_queue_size = serving.queue.max_in_flight
    if serving.priority is not None:
        levels = serving.priority.levels
        config.dynamic_batching.priority_levels = levels
        config.dynamic_batching.default_priority_level = serving.priority.default or levels
    if core.device == "gpu":
        _optimize(plan, config.optimization)
    if plan.packed:
        _join_rows(plan, config)
    if not plan.backend.batches:
        _run_requests_alone(config)
    return config


def _run_requests_alone(config: ModelConfig) -> None:
    """Give a core the batch dimension in `dims`, so that each request is a batch of its own."""
    config.max_batch_size = 0
    config.default_model_filename = MODEL_FILE
    for tensor in (*config.input, *config.output):
        tensor.dims.insert(0, -1)
    for warm_up in config.model_warmup:
        rows, warm_up.batch_size = warm_up.batch_size, 1
        for value in warm_up.inputs.values():
            value.dims.insert(0, rows)
    batching = config.dynamic_batching
    batching.ClearField("max_queue_delay_microseconds")
    if batching == type(batching)():  # else it has a policy of the queue, or priorities
        config.ClearField("dynamic_batching")


def _instances(plan: Plan) -> dict[str, object]:
    core, serving = plan.spec.core, plan.spec.serving
    group: dict[str, object] = {"kind": "KIND_CPU", "count": serving.instances.core}
    if core.device == "gpu":
        # Without ids Triton runs the instances on each GPU that it sees.
        group |= {"kind": "KIND_GPU", "gpus": [] if serving.gpus == "all" else serving.gpus}
    if plan.engine is not None and plan.builds_engine:
        # Without names the backend creates a context for profile 0 only.
        group["profile"] = [str(index) for index in range(len(plan.engine.profiles))]
    if serving.rate_limiter is not None:
        limiter = serving.rate_limiter
        group["rate_limiter"] = {
            "resources": [
                {"name": resource.name, "count": resource.count, "global": resource.shared}
                for resource in limiter.resources
            ],
            "priority": limiter.priority,
        }
    return group


def _optimize(plan: Plan, optimization: ModelOptimizationPolicy) -> None:
    core, transfers, engine = plan.spec.core, plan.spec.serving.transfers, plan.engine
    optimization.input_pinned_memory.enable = transfers.pinned_input
    optimization.output_pinned_memory.enable = transfers.pinned_output
    optimization.gather_kernel_buffer_threshold = plan.gather_threshold
    optimization.eager_batching = transfers.eager_batching
    if plan.builds_engine and engine is not None:
        cuda = optimization.cuda
        cuda.output_copy_stream = transfers.output_copy_stream
        cuda.graphs = bool(engine.graph_specs)
        for spec in engine.graph_specs:
            shapes = {name: {"dim": dims} for name, dims in spec.inputs.items()}
            bound = {"batch_size": spec.lowest_batch_size, "input": shapes}
            cuda.graph_spec.add(batch_size=spec.batch_size, input=shapes, graph_lower_bound=bound)
    if core.accelerator == "tensorrt" and engine is not None:
        optimization.execution_accelerators.gpu_execution_accelerator.add(
            name="tensorrt", parameters=_accelerator(engine, core)
        )
    if core.backend == "onnxruntime" and not core.accelerator_options.tf32:
        # Its CUDA kernels round the inputs of fp32 products to TF32 by default. Every supported
        # release forwards the options of this accelerator (d992c5b of onnxruntime_backend, 24.06).
        optimization.execution_accelerators.gpu_execution_accelerator.add(
            name="cuda", parameters={"use_tf32": "0"}
        )


def _accelerator(engine: EnginePlan, core: CoreSettings) -> dict[str, str]:
    """Return the parameters of ONNX Runtime's TensorRT accelerator (see its src/onnxruntime.cc).

    Without shapes it builds an engine for every new shape of a batch, while requests wait. Without
    a cache each start of the server builds every engine again.
    """
    options, cache = core.accelerator_options, core.accelerator_cache
    parameters: dict[str, str] = {}
    if options.engine_cache:
        for kind in ("engine", "timing"):
            parameters[f"trt_{kind}_cache_enable"] = "true"
            parameters[f"trt_{kind}_cache_path"] = cache
    if options.workspace_mib is not None:
        parameters["max_workspace_size_bytes"] = str(options.workspace_mib * 2**20)
    if options.optimization_level is not None:
        parameters["trt_builder_optimization_level"] = str(options.optimization_level)
    if options.min_subgraph_size is not None:
        parameters["trt_min_subgraph_size"] = str(options.min_subgraph_size)
    if options.share_context_memory:
        parameters["trt_context_memory_sharing_enable"] = "true"
    if options.layer_norm_fp32:
        parameters["trt_layer_norm_fp32_fallback"] = "true"
    return parameters | {
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


def _join_rows(plan: Plan, config: ModelConfig) -> None:
    """Declare that rows of a batch are joined end to end, and that results per token are split."""
    ragged = INPUT_IDS.name
    next(i for i in config.input if i.name == ragged).allow_ragged_batch = True
    config.batch_input.add(
        kind="BATCH_ITEM_SHAPE_FLATTEN",
        target_name=[ROW_STRIDE.name],
        data_type=ROW_STRIDE.config_type,
        source_input=[ragged],
    )
    if ROW_SPAN in plan.core_inputs:
        next(i for i in config.input if i.name == ROW_SPAN.name).allow_ragged_batch = True
        config.batch_input.add(
            kind="BATCH_MAX_ELEMENT_COUNT_AS_SHAPE",
            target_name=[LONGEST.name],
            data_type=LONGEST.config_type,
            source_input=[ROW_SPAN.name],
        )
    for tensor in plan.core.token_outputs:
        # One entry per output: with several targets Triton's backends only fill the first one
        # (BackendOutputResponder::ProcessBatchOutput, releases 24.10 to 26.08).
        config.batch_output.add(
            kind="BATCH_SCATTER_WITH_INPUT_SHAPE",
            target_name=[tensor.name],
            source_input=[ragged],
        )


def _warm_up(plan: Plan, *, rows: int, tokens: int) -> dict[str, object]:
    # The server makes `batch_size` requests of the single row in the files.
    return {
        "name": f"{rows}x{tokens}",
        "batch_size": rows,
        "inputs": {
            tensor.name: {
                "data_type": tensor.config_type,
                "dims": [_size(tensor, tokens) if dim == -1 else dim for dim in tensor.config_dims],
                "input_data_file": warm_up_file(tensor, tokens),
            }
            for tensor in plan.core_inputs
        },
    }


def _size(tensor: Tensor, tokens: int) -> int:
    return count_slots(tokens) if tensor == ROW_SPAN else tokens


def warm_up_file(tensor: Tensor, tokens: int) -> str:
    """Return the name of a row's file in the core's folder ``warmup``, by its number of tokens."""
    return f"{tensor.name}.{tokens}"


def declare(tensor: Tensor) -> dict[str, object]:
    """Return a tensor as an output of a config, or as a required input."""
    return {"name": tensor.name, "data_type": tensor.config_type, "dims": tensor.config_dims}


def declare_input(tensor: Tensor) -> dict[str, object]:
    """Return a tensor as an input of a config, which requests may leave out if it is optional."""
    return {**declare(tensor), "optional": tensor.optional}


def version_policy(versions: Sequence[int]) -> dict[str, object] | None:
    """Return the policy that serves these versions; None for one version, as Triton's default."""
    return {"specific": {"versions": sorted(set(versions))}} if len(versions) > 1 else None


HISTOGRAM = "nv_inference_first_response_histogram_ms"
DEFAULT_BOUNDS_MS = (100.0, 500.0, 2000.0, 5000.0)
"""Default bucket upper bounds of Triton in ms: src/metric_model_reporter.h of its core."""
COUNTED_FROM = first_release("metrics-config.histogram_latencies")
"""First release whose histogram counts ordinary models."""


def latency_buckets(slo: Slo) -> dict[str, object]:
    """Return histogram buckets with an upper bound at each SLO latency, in milliseconds.

    Triton rounds latencies down to whole milliseconds (`UpdateResponseMetrics` of its core), so the
    bound of 50 includes latencies below 51.
    """
    bounds = sorted({*DEFAULT_BOUNDS_MS, *slo.limits_ms.values()})
    return {
        "metric_identifier": {"family": HISTOGRAM},
        "histogram_options": {"buckets": bounds},
    }


def has_bucket_bound(spec: CompiledSpec, limit_ms: float, release: Release) -> bool:
    """Return whether the histogram of a server of `release` counts the requests within a limit."""
    in_slo = (
        parse_release(spec.serving.triton) >= first_release("model_metrics")
        and limit_ms in spec.serving.slo.limits_ms.values()
    )
    return release >= COUNTED_FROM and (in_slo or limit_ms in DEFAULT_BOUNDS_MS)


def space_of(plan: Plan) -> str:
    """Return the vector space of a pipeline; empty if it has no pair."""
    if is_own(plan.spec) or plan.spec.pair_with is None or plan.info.space is None:
        return ""
    size = plan.parameters.get("dimensions") or plan.info.embedding_size
    return f"{plan.info.space.id}, {size} numbers"


def describe_space(plan: Plan) -> str:
    """Return the JSON with the vector space of a pipeline with a pair, for clients."""
    space = {} if plan.info.space is None else asdict(plan.info.space)
    space |= {"id": space_of(plan), "size": plan.info.embedding_size}
    return json.dumps({**space, "pair_with": plan.encoder_spec.pair_with})
