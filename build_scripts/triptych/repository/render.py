"""Plan -> the files of the model repository: configs as messages, runtime code verbatim."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triptych.plan import Plan, row_settings
from triptych.repository.config import CONFIG_FILE, new_config, print_config
from triptych.tensors import ROW_STRIDE, Tensor
from triptych.versions import without_newer_fields

RUNTIME = Path(__file__).parents[1] / "runtime"
RAGGED = "input_ids"
Content = bytes | Path
"""What a file holds: its bytes, or the file they are copied from."""


def render(
    plan: Plan, *, core_file: Path, tokenizer_file: Path | None, hooks: bytes | None
) -> dict[str, Content]:
    """Every file of the pipeline but its lock: path relative to the repository -> content.

    A pure function: the same plan and artifacts give the same bytes.

    Args:
        plan: the derived numbers.
        core_file: the core's artifact, ``model.onnx``.
        tokenizer_file: the ``tokenizer.json``; None for images.
        hooks: the pipeline's ``hooks.py``, where it has one.
    """
    name, task = plan.spec.name, plan.task
    shared = plan.spec.core.share is not None
    configs = {
        name: _ensemble(plan),
        plan.step("preprocess"): _preprocess(plan),
        plan.step("postprocess"): _postprocess(plan),
    }
    if not shared:
        configs[plan.step("core")] = _core(plan)
    files: dict[str, Content] = {
        f"{model}/{CONFIG_FILE}": print_config(
            without_newer_fields(config, plan.spec.serving.triton)
        ).encode()
        for model, config in configs.items()
    }
    # Triton wants a version folder for an ensemble, too, and git and archives drop empty ones.
    files[f"{name}/1/.keep"] = b""
    pieces = {
        "preprocess": {"model.py": "preprocess.py", "rows.py": task.rows},
        "postprocess": {"model.py": "postprocess.py", "decode.py": task.decode},
    }
    with_tokenizer = {"preprocess": tokenizer_file is not None, "postprocess": task.decodes_tokens}
    for step, modules in pieces.items():
        folder = f"{plan.step(step)}/1"
        for target, source in _with_imports(modules).items():
            files[f"{folder}/{target}"] = (RUNTIME / source).read_bytes()
        if hooks is not None:
            files[f"{folder}/hooks.py"] = hooks
        if with_tokenizer[step] and tokenizer_file is not None:
            files[f"{folder}/tokenizer.json"] = tokenizer_file
    if not shared:
        for part in sorted(core_file.parent.glob(f"{core_file.name}*")):
            files[f"{plan.step('core')}/1/{part.name}"] = part
    return files


def _with_imports(modules: dict[str, str]) -> dict[str, str]:
    """`modules` (file in the repository -> file of the runtime) and all they import."""
    found, waiting = dict(modules), list(modules.values())
    while waiting:
        text = (RUNTIME / waiting.pop()).read_text(encoding="utf-8")
        for name in re.findall(r"^from \.(\w+) import", text, re.MULTILINE):
            file = f"{name}.py"
            if file not in found:
                found[file] = file
                waiting.append(file)
    return found


def _ensemble(plan: Plan) -> Any:
    def wire(tensors: tuple[Tensor, ...]) -> dict[str, str]:
        return {tensor.name: tensor.name for tensor in tensors}

    outputs = plan.core.outputs
    steps = [
        ("preprocess", plan.task.inputs, (*plan.core_inputs, *plan.past_core)),
        ("core", plan.core_inputs, outputs),
        ("postprocess", (*outputs, *plan.past_core), plan.task.outputs),
    ]
    return new_config(
        name=plan.spec.name,
        platform="ensemble",
        max_batch_size=plan.request_rows,
        input=[_declare(tensor) for tensor in plan.task.inputs],
        output=[_declare(tensor) for tensor in plan.task.outputs],
        ensemble_scheduling={
            "step": [
                {
                    "model_name": plan.step(step),
                    "model_version": -1,
                    "input_map": wire(read),
                    "output_map": wire(written),
                }
                for step, read, written in steps
            ]
        },
    )


def _preprocess(plan: Plan) -> Any:
    spec, facts, inputs = plan.spec, plan.facts, plan.task.inputs
    settings: dict[str, object] = {
        "encoded_inputs": [tensor.name for tensor in inputs if tensor.content == "image"],
        "layout": plan.layout,
        "max_requests": spec.serving.queue.max_size,
    }
    settings |= row_settings(spec, facts, plan.task)
    settings["bucket_edges"] = list(plan.bucket_edges)
    outputs = (*plan.core_inputs, *plan.past_core)
    return _python_step(plan, "preprocess", inputs, outputs, settings)


def _postprocess(plan: Plan) -> Any:
    settings = {
        "core_outputs": [tensor.name for tensor in plan.core.outputs],
        "outputs": plan.output_settings,
    }
    inputs = (*plan.core.outputs, *plan.past_core)
    return _python_step(plan, "postprocess", inputs, plan.task.outputs, settings)


def _python_step(
    plan: Plan,
    step: str,
    inputs: tuple[Tensor, ...],
    outputs: tuple[Tensor, ...],
    own: Mapping[str, object],
) -> Any:
    rules = plan.task.parameters(plan.facts)
    settings = {
        **plan.task.settings(plan.facts),
        **own,
        "carries": plan.task.carries,
        "parameters": dict(plan.parameters),
        "pipeline": plan.spec.name,
        "request_parameters": {name: rule.as_dict() for name, rule in rules.items()},
    }
    texts = {
        key: json.dumps(value, sort_keys=True, ensure_ascii=False)
        for key, value in settings.items()
    }
    return new_config(
        name=plan.step(step),
        backend="python",
        max_batch_size=plan.spec.core.max_batch_size,
        # A step handles each request by itself: unequal shapes need not keep them apart.
        input=[_declare(tensor) | _ragged(tensor) for tensor in inputs],
        output=[_declare(tensor) for tensor in outputs],
        # KIND_AUTO, the default, would put a Python step on the GPU in a GPU build.
        instance_group=[{"kind": "KIND_CPU", "count": getattr(plan.spec.serving.instances, step)}],
        # No queue policy anywhere, nor a delay here: see `runtime.admission`.
        dynamic_batching={},
        parameters={key: {"string_value": value} for key, value in texts.items()},
    )


def _core(plan: Plan) -> Any:
    core, serving = plan.spec.core, plan.spec.serving
    group: dict[str, Any] = {"kind": "KIND_CPU", "count": serving.instances.core}
    if core.device == "gpu":
        group.update(kind="KIND_GPU", gpus=serving.gpus)
    config = new_config(
        name=plan.step("core"),
        backend=core.backend,
        max_batch_size=core.max_batch_size,
        input=[_declare(tensor) for tensor in plan.core_inputs],
        output=[_declare(tensor) for tensor in plan.core.outputs],
        instance_group=[group],
        dynamic_batching={"max_queue_delay_microseconds": serving.queue.max_delay_us},
        model_warmup=[_warm_up(plan, rows=w.rows, tokens=w.tokens) for w in plan.warm_ups],
        parameters={
            key: {"string_value": str(value)}
            for key, value in (
                ("intra_op_thread_count", core.threads),
                ("token_budget", core.token_budget),
            )
            if value is not None
        },
    )
    if plan.packed:
        next(i for i in config.input if i.name == RAGGED).allow_ragged_batch = True
        config.batch_input.add(
            kind="BATCH_ITEM_SHAPE_FLATTEN",
            target_name=[ROW_STRIDE.name],
            data_type=ROW_STRIDE.config_type,
            source_input=[RAGGED],
        )
        if plan.core.per_token:
            config.batch_output.add(
                kind="BATCH_SCATTER_WITH_INPUT_SHAPE",
                target_name=[tensor.name for tensor in plan.core.outputs],
                source_input=[RAGGED],
            )
    return config


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


def _ragged(tensor: Tensor) -> dict[str, Any]:
    return {"allow_ragged_batch": True} if -1 in tensor.config_dims else {}


def _declare(tensor: Tensor) -> dict[str, Any]:
    return {"name": tensor.name, "data_type": tensor.config_type, "dims": tensor.config_dims}
