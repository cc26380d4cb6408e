"""The plan of a pipeline in words and numbers, for `inspect`: what a build would write, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from triptych.base.errors import Progress
from triptych.base.formatting import amount
from triptych.base.releases import CONTEXT_MEMORY, first_release, parse_release
from triptych.base.tensors import INPUT_IDS, Tensor, made_by_server
from triptych.building.compiled import read_compiled
from triptych.building.generation.inputs import (
    GeneratingInputs,
    GenerationInputs,
    read_generation,
)
from triptych.building.generation.render import FROM_CORE, INPUTS, OUTPUTS, TO_CORE
from triptych.building.generation.text2text import Text2TextInputs, read_text2text
from triptych.core.export.to_onnx import plain_reason
from triptych.core.inputs import PipelineInputs
from triptych.models.tokenizer import OUT_OF_REACH
from triptych.repository.manifest import CompiledManifest, find_manifest
from triptych.repository.render import python_steps, stages_of
from triptych.runtime.engine_ctranslate2 import UNKNOWN
from triptych.runtime.sampling_parameters import DEFAULTS
from triptych.spec.any_spec import AnySpec
from triptych.spec.engine_plan import EnginePlan, ShapeRange
from triptych.spec.fields import TRITON_AS_NONE, PriorityLevels, SessionOptions
from triptych.spec.generation_fields import GenerationSpec, Text2TextSpec
from triptych.spec.model_fields import ModelSpec
from triptych.spec.placement import MachinePlan
from triptych.spec.plan import Plan
from triptych.spec.spec import EncoderSpec
from triptych.tasks.classes import LABELS_FILE

Described: TypeAlias = dict[str, Any]
"""Nested plain data, which can be printed or written as JSON."""

IN_FLIGHT = "ensemble_scheduling.max_inflight_requests"


def describe_cost(plan: Plan) -> str:
    """Return the estimated cost of a row in both layouts; "" for images."""
    if plan.cost is None:
        return ""
    device = "GPU" if plan.spec.core.device == "gpu" else "CPU core"
    return (
        f"packed {plan.cost.packed:.0f} us, bucketed {plan.cost.bucketed:.0f} us per row of this "
        f"traffic on a typical {device}: an estimate; `bench` and `tune` measure"
    )


def describe_gpu(plan: Plan) -> Described:
    """Return the GPU settings of Triton and TensorRT, with their reasons."""
    core, serving = plan.spec.core, plan.spec.serving
    transfers = serving.transfers
    gpus = "all" if serving.gpus == "all" else ", ".join(map(str, serving.gpus))
    described: Described = {
        "gpus": f"{gpus}: {amount(serving.instances.core, 'instance')} of the core on each",
        "pinned_memory": f"input {_yes(transfers.pinned_input)}, output "
        f"{_yes(transfers.pinned_output)}: memory that the GPU copies directly",
        "gather_kernel_buffer_threshold": f"{plan.gather_threshold}: "
        f"{plan.reasons['gather_kernel_buffer_threshold']}",
        "eager_batching": f"{_yes(transfers.eager_batching)}: "
        + (
            "the next batch is formed while a batch runs"
            if transfers.eager_batching
            else "a batch accepts rows until an instance is free, so that batches are full"
        ),
        "preferred_batch_sizes": "none: all profiles share the limit of rows, so no size is "
        "especially fast, and a preferred size would close batches early",
    }
    if serving.rate_limiter is not None:
        names = ", ".join(f"{each.name} x {each.count}" for each in serving.rate_limiter.resources)
        described["rate_limiter"] = f"priority {serving.rate_limiter.priority}, {names or 'no'} "
        described["rate_limiter"] += "resources: takes effect with --rate-limit=execution_count"
    if (limit := serving.max_inflight_requests) is not None:
        described["max_inflight_requests"] = (
            f"{limit} requests in each step{_newer(IN_FLIGHT, serving.triton)}"
        )
    if core.backend == "onnxruntime":
        described["accelerator"] = f"{core.accelerator}, of ONNX Runtime"
    if plan.engine is not None:
        described |= _describe_engine(plan, plan.engine)
    return described


def describe_placement(placement: MachinePlan) -> Described:
    """Return what was planned for the machine that serves, with reasons and costs."""
    costs, machine = placement.costs, placement.machine
    gpu = f"{machine.gpu}, {machine.memory_gib:g} GiB" if machine.gpu else "no GPU"
    steps = [
        f"{name} {cost.request_ms:.3g} core-ms a request and {cost.row_ms:.3g} a row"
        for name, cost in costs.steps.items()
    ]
    core = f"core {costs.batch_ms:.3g} ms a batch and {costs.row_ms:.3g} ms a row"
    rates = [f"{rate:,.0f} rows/s of {n} a request" for n, rate in placement.rates_per_s.items()]
    return {
        "name": f"{machine.name}: {gpu}, {amount(machine.cores, 'core')}",
        **{field: f"{one.value}: {one.reason}" for field, one in placement.values.items()},
        "costs": f"{costs.source}: {', '.join([*steps, core])}",
        "expected": ", ".join(rates),
    }


def describe_dry_run(plan: Plan, manifest: CompiledManifest | None) -> str:
    """Return the result of the dry-run build of this plan, as the active build manifest has it."""
    from triptych.core.engine.dry_run import describe

    built = None if manifest is None else manifest.plan.engine
    if manifest is None or manifest.dry_run is None or built is None or plan.engine is None:
        return "none yet: `triptych build`, or `triptych engine --dry-run`"
    same = replace(plan.engine, precision=built.precision) == built
    return ("" if same else "of another plan: ") + describe(manifest.dry_run)


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
        f"{_yes(plan.spec.serving.transfers.output_copy_stream)}: results are copied back during "
        "the next batch"
    )
    if plan.spec.core.engine.context_memory != "static":
        described["context_memory"] = (
            "allocated again when a batch needs another profile: less memory, slightly more time"
            + _newer(CONTEXT_MEMORY, plan.spec.serving.triton)
        )
    options = {
        key: value for key, value in engine.options.items() if value not in (None, False, "none")
    }
    settings = ", ".join(f"{key}={value}" for key, value in sorted(options.items()))
    described["engine"] = f"precision {engine.precision}, {settings or 'no options'}"
    if engine.precision == "fp32":
        described["engine"] += "; fp16 and int8 use tensor cores, and are checked by the same gate"
    return described


def _newer(name: str, triton: str) -> str:
    """Return a note if the pipeline's Triton release does not support a setting, or ""."""
    since = first_release(name)
    if parse_release(triton) >= since:
        return ""
    return f"; omitted, because serving.triton {triton} does not support it ({since} does)"


def _why_profiles(plan: Plan) -> str:
    if plan.packed:
        return (
            "one: with several profiles, Triton would choose by the first request, not by the "
            f"batch. Its maximum is {plan.max_batch_size} rows of {plan.max_length} tokens, the "
            "largest batch; kernels are chosen for a full batch of this traffic"
        )
    if plan.layout == "fixed":
        return "one: all rows have the same shape. Kernels are chosen for a full batch"
    return (
        "one for each padded length, so that kernels are chosen for exactly that length; all have "
        "the same maximum of rows, because the smallest maximum would apply to all"
    )


def _describe_graphs(plan: Plan, engine: EnginePlan) -> str:
    if plan.packed:
        return "none: packed batches rarely have the same number of tokens"
    if not engine.graph_specs:
        return "none: core.engine.cuda_graphs is off"
    sizes: dict[str, list[str]] = {}
    for spec in engine.graph_specs:
        of = f" of {spec.inputs[INPUT_IDS.name][0]}" if plan.bucket_edges else ""
        sizes.setdefault(of, []).append(str(spec.batch_size))
    captured = "; ".join(f"{', '.join(rows)} rows{of}" for of, rows in sizes.items())
    return (
        f"{len(engine.graph_specs)} ({captured}), {plan.reasons['cuda_graphs']}. A batch uses the "
        "next larger number of rows. Each instance captures all of them at load"
    )


def _range(shapes: ShapeRange) -> str:
    low, best, high = (
        "x".join(map(str, dims)) for dims in (shapes.minimum, shapes.optimum, shapes.maximum)
    )
    return f"{low}..{high}, best at {best}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def describe_pipeline(spec: AnySpec, repository: Path, progress: Progress) -> Described:
    """Return the plan of a pipeline as plain data; the repository may hold an earlier build."""
    match spec:
        case EncoderSpec() | ModelSpec():
            return describe_encoder(read_compiled(spec, progress), repository)
        case GenerationSpec():
            return describe_text_generation(read_generation(spec, progress))
        case Text2TextSpec():
            return describe_text2text(read_text2text(spec, progress))


def describe_encoder(inputs: PipelineInputs, repository: Path) -> Described:
    """Return the plan of an encoder, with the dry run that the active build made of its engine."""
    plan = inputs.plan
    described = describe_plan(plan)
    owner = plan.spec.core.shared_from or plan.spec.name
    manifest = find_manifest(repository, owner, CompiledManifest)
    if plan.builds_engine:
        described["gpu"]["dry_run"] = describe_dry_run(plan, manifest)
    reason = plain_reason(plan)
    if reason:
        described["gpu"]["attention"] = f"as on a CPU, because {reason}"
    elif reason is not None:
        built = "" if manifest is None else manifest.attention
        described["gpu"]["attention"] = built or "chosen by the next build"
    return described


def describe_plan(plan: Plan) -> Described:
    """Return the plan of an encoder as plain data."""
    core, serving, task = plan.spec.core, plan.spec.serving, plan.task
    rules = task.parameters(plan.info)
    return {
        "pipeline": plan.spec.name,
        "task": task.name,
        **({"tuned": dict(plan.spec.tuned)} if plan.spec.tuned else {}),
        "model": _describe_model(plan),
        **_draw(plan),
        "traffic": _describe_traffic(plan),
        "batching": {
            "layout": _describe_layout(plan),
            "precision": core.precision,
            "max_batch_size": f"{plan.max_batch_size}: {plan.reasons['max_batch_size']}",
            **_describe_memory(plan),
            "max_rows_per_request": f"{plan.request_rows}: {plan.reasons['request_rows']}",
            "bucket_edges": _describe_edges(plan),
            "padding": f"{plan.padding_share:.1%} of computed tokens on this traffic",
            "queue": f"{serving.queue.max_delay_us} us, {serving.queue.max_in_flight} requests: "
            f"{plan.reasons['queue']}",
            **_describe_serving(plan),
            "warm_ups": ", ".join(f"{w.rows}x{w.tokens}" for w in plan.warm_ups),
            **({} if plan.cost is None else {"expected_cost": describe_cost(plan)}),
        },
        **({"gpu": describe_gpu(plan)} if core.device == "gpu" else {}),
        **({} if plan.placement is None else {"machine": describe_placement(plan.placement)}),
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
            **_describe_steps(plan),
        },
    }


def _describe_steps(plan: Plan) -> Described:
    """Return the models of the ensemble, in its order."""

    def python(step: str) -> Described:
        return {
            "backend": "python",
            "instances": plan.instances(step),
            "inputs": _describe_tensors(steps[step].inputs),
            "outputs": _describe_tensors(steps[step].outputs),
        }

    steps, cores, described = python_steps(plan, None), iter(plan.cores), Described()
    for stage in stages_of(plan):
        described[plan.step(stage.function)] = python(stage.function)
        for _, core in zip(stage.models, cores, strict=False):
            settings = core.spec.core
            described[core.step("core")] = {
                "backend": settings.backend,
                "instances": core.spec.serving.instances.core,
                **(
                    {"precision": settings.precision, "max_batch_size": core.max_batch_size}
                    if plan.stages
                    else {}
                ),
                "inputs": _describe_tensors(core.core_inputs + made_by_server(core.core_inputs)),
                "outputs": _describe_tensors(core.core.outputs),
            }
    return described | {plan.step("postprocess"): python("postprocess")}


def _draw(plan: Plan) -> Described:
    """Return the graph of several models in a line; models that run beside each other in []."""
    if not plan.stages:
        return {}
    line = [", ".join(tensor.name for tensor in plan.task.inputs)]
    for stage in plan.stages:
        models = " | ".join(names.model for names in stage.models)
        line += [stage.function, models if len(stage.models) == 1 else f"[{models}]"]
    line += ["postprocess", ", ".join(tensor.name for tensor in plan.task.outputs)]
    return {"graph": " -> ".join(line)}


def describe_versions(versions: Sequence[int]) -> Described:
    """Return the versions of the ensemble, if they differ from the default."""
    if versions == [1]:
        return {}
    numbers = ", ".join(map(str, sorted(set(versions))))
    return {"versions": f"{numbers}: {max(versions)} answers requests that name none"}


def describe_priority(priority: PriorityLevels | None) -> Described:
    """Return the priority levels of requests, if there are any."""
    if priority is None:
        return {}
    default = priority.default or priority.levels
    order = "level 1 goes first among requests that wait for the core"
    return {"priority": f"{priority.levels} levels, {default} by default: {order}"}


def _describe_serving(plan: Plan) -> Described:
    """Return the flow control, and the settings of Triton that differ from the defaults."""
    serving, session = plan.spec.serving, plan.spec.core.session
    queue, has_limit = serving.queue, serving.queue.max_backlog_ms is not None
    limit_ms = queue.timeout_ms or round(serving.longest_wait_ms)
    effects = {
        "triptych": "triptych: requests that will most likely be answered in time go first"
        + f"; one that waits for {queue.max_backlog_ms} ms is rejected" * has_limit,
        "triton": f"triton: a request that waits for {limit_ms} ms in the core's queue is rejected"
        if serving.queue_policy_of_triton
        else TRITON_AS_NONE,
        "none": "none: requests are answered in the order of their arrival",
    }
    described: Described = {
        **describe_versions(serving.versions),
        "flow_control": effects[serving.flow_control],
    }
    if serving.response_cache:
        described["response_cache"] = (
            "repeated requests are answered by the server, without the steps; options are inputs"
        )
    if serving.class_scores:
        described["class_scores"] = f"{len(plan.info.labels)} scores a row, in {LABELS_FILE}"
    described |= describe_priority(serving.priority)
    if session != SessionOptions():
        described["session"] = (
            f"{amount(session.inter_threads, 'operator')} at a time, memory arena "
            f"{session.memory_arena}, memory pattern {_yes(session.memory_pattern)}"
        )
    return described


def _describe_model(plan: Plan) -> Described:
    info = plan.info
    described: Described = {
        "source": plan.sources,
        "architecture": info.architecture,
    }
    for name, settings in info.modules.items():
        described[name] = ", ".join(f"{key} {value}" for key, value in settings.items())
    if plan.core.returns == "vector" and not plan.task.modules:
        described |= {"pooling": "+".join(info.pooling), "vector": info.embedding_size}
    if info.labels:
        some = ", ".join(info.labels[:8]) + (", …" if len(info.labels) > 8 else "")
        described |= {"labels": f"{len(info.labels)}: {some}", "activation": info.activation}
    if info.image is not None:
        image = info.image
        described["pixels"] = f"{image.height} x {image.width} x {image.channels}"
    else:
        described["max_length"] = f"{plan.max_length} tokens: {plan.reasons['max_length']}"
    return described


def _describe_traffic(plan: Plan) -> Described:
    lengths = plan.lengths
    if lengths is None:
        return {"rows": "images, all of the same size for the core"}
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
        "max_batch_memory": f"{plan.batch_mib:.0f} MiB without the weights, estimated from shapes",
    }


def _describe_layout(plan: Plan) -> str:
    chosen = " (core.layout auto: lower estimated cost)" * (plan.spec.core.layout == "auto")
    if plan.packed:
        return f"packed{chosen}, if the results of the model stay the same, which the build checks"
    return plan.layout + chosen


def _describe_edges(plan: Plan) -> str:
    if not plan.bucket_edges:
        return "none: no row is padded"
    edges = ", ".join(map(str, plan.bucket_edges))
    return f"{edges}: {plan.reasons['bucket_edges']}"


def _describe_tensors(tensors: tuple[Tensor, ...]) -> str:
    return ", ".join(f"{t.name} {t.dtype}{t.config_dims}" for t in tensors)


def describe_text_generation(inputs: GenerationInputs) -> Described:
    """Return the plan of a pipeline that generates text, as plain data."""
    core = inputs.spec.core
    full_mib = inputs.kv_token_bytes * inputs.max_length / 2**20
    cache_mib = core.kv_cache.memory_mib
    limits = {
        "max_model_len": f"{inputs.max_length} tokens of a prompt with its answer",
        "kv_cache": f"{cache_mib} MiB: {amount(int(cache_mib // full_mib), 'request')} of "
        f"max_model_len, a MiB for {inputs.max_length / full_mib:.0f} tokens",
        "max_num_seqs": f"{core.max_num_seqs} in a batch; "
        f"{cache_mib / core.max_num_seqs * inputs.max_length / full_mib:.0f} tokens of KV cache "
        "each",
    }
    adapters = {
        one.name: f"LoRA of rank {one.rank}, from {inputs.spec.adapters[one.name].source}"
        for one in inputs.adapters
    }
    return _describe_generating(inputs, limits, adapters)


def describe_text2text(inputs: Text2TextInputs) -> Described:
    """Return the plan of a pipeline that summarizes or translates, as plain data."""
    begins, beams = inputs.answers.answer_begins, int(inputs.search["num_beams"])
    limits = {
        "max_length": f"{inputs.max_length} tokens of a text",
        "max_new_tokens": f"{inputs.spec.core.max_new_tokens} tokens of an answer",
        "answers": f"{amount(beams, 'beam')}; "
        + ("streamed token by token" if beams == 1 else "returned complete")
        + (f"; each starts with token IDs {list(begins)}" if begins else ""),
        "max_num_seqs": f"{inputs.spec.core.max_num_seqs} in a batch, which runs to its end",
    }
    if inputs.other_search:
        limits["search"] = inputs.other_search
    return _describe_generating(inputs, limits, {})


def _describe_generating(
    inputs: GeneratingInputs, limits: Described, adapters: Described
) -> Described:
    spec, info = inputs.spec, inputs.model.info
    core, step = spec.core, f"{spec.name}_{{}}".format
    lengths = [len(prompt.ids) for prompt in inputs.prompts]
    p99 = int(np.quantile(lengths, 0.99, method="higher"))
    return {
        "pipeline": spec.name,
        "task": spec.task,
        **({"tuned": dict(spec.tuned)} if spec.tuned else {}),
        "model": {
            "source": spec.model.source,
            "architecture": info.architecture,
            "own_limit": "none" if info.max_length == OUT_OF_REACH else f"{info.max_length} tokens",
            **({"suggests": dict(info.suggested)} if info.suggested else {}),
            **({"weights": info.quantization.words} if info.quantization else {}),
            "chat_template": "of the model" if inputs.model.chat_template else "none: no messages",
            **({"adapters": adapters} if adapters else {}),
        },
        "traffic": {
            "prompts": f"{len(lengths)}, {sum(one.messages is not None for one in inputs.prompts)}"
            " of them conversations",
            "tokens": f"{np.mean(lengths):.1f} on average, p99 {p99}, maximum {max(lengths)}",
        },
        "core": {
            "backend": core.backend,
            "precision": core.precision,
            **limits,
            "engine": inputs.engine_settings,
        },
        **describe_versions(spec.serving.versions),
        **describe_priority(spec.serving.priority),
        "stream_interval": f"{amount(spec.serving.stream_interval, 'token')} per streamed response",
        "queue": f"{spec.serving.queue.max_in_flight} requests in flight at most",
        "sampling_parameters": {
            name: value
            for name, value in {**DEFAULTS, **spec.own_parameters}.items()
            if core.backend != "ctranslate2" or name not in UNKNOWN
        },
        "models": {
            spec.name: _describe_step("ensemble", INPUTS, OUTPUTS),
            step("preprocess"): _describe_step("python", INPUTS, TO_CORE),
            step("core"): _describe_step("python, decoupled", TO_CORE, FROM_CORE),
            step("postprocess"): _describe_step("python, decoupled", FROM_CORE, OUTPUTS),
        },
    }


def _describe_step(
    backend: str, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]
) -> Described:
    return {
        "backend": backend,
        "inputs": ", ".join(tensor.name for tensor in inputs),
        "outputs": ", ".join(tensor.name for tensor in outputs),
    }
