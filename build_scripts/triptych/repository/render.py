"""Plan -> the files of the model repository: configs as messages, runtime code verbatim."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from triptych.plan import Plan
from triptych.repository.config import CONFIG_FILE, new_config, print_config
from triptych.repository.versions import without_newer_fields
from triptych.tensors import ROW_LENGTH, ROW_STRIDE, TICKET, Tensor

RUNTIME = Path(__file__).parents[1] / "runtime"
RAGGED = "input_ids"
Content = bytes | Path
"""What a file holds: its bytes, or the file they are copied from."""


def render(plan: Plan, *, core_file: Path, tokenizer_json: str) -> dict[str, Content]:
    """Every file of the pipeline but its lock: path relative to the repository -> content.

    A pure function: the same plan and artifacts give the same bytes.

    Args:
        plan: the derived numbers.
        core_file: the core's artifact, ``model.onnx``.
        tokenizer_json: text of the tokenizer.
    """
    name = plan.spec.name
    postprocess = RUNTIME / plan.task.postprocess
    configs = {
        name: _ensemble(plan),
        plan.step("preprocess"): _preprocess(plan),
        plan.step("core"): _core(plan),
        plan.step("postprocess"): _postprocess(plan),
    }
    files: dict[str, Content] = {
        f"{model}/{CONFIG_FILE}": print_config(
            without_newer_fields(config, plan.spec.serving.triton)
        ).encode()
        for model, config in configs.items()
    }
    # Triton wants a version folder for an ensemble, too, and git and archives drop empty ones.
    files[f"{name}/1/.keep"] = b""
    files[f"{plan.step('preprocess')}/1/model.py"] = (RUNTIME / "preprocess.py").read_bytes()
    files[f"{plan.step('preprocess')}/1/tokenizer.json"] = tokenizer_json.encode()
    files[f"{plan.step('postprocess')}/1/model.py"] = postprocess.read_bytes()
    for step in ("preprocess", "postprocess"):
        for module in ("admission.py", "stub_io.py"):
            files[f"{plan.step(step)}/1/{module}"] = (RUNTIME / module).read_bytes()
    for part in sorted(core_file.parent.glob(f"{core_file.name}*")):
        files[f"{plan.step('core')}/1/{part.name}"] = part
    return files


def _ensemble(plan: Plan) -> Any:
    def wire(tensors: tuple[Tensor, ...]) -> dict[str, str]:
        return {tensor.name: tensor.name for tensor in tensors}

    steps = [
        ("preprocess", plan.task.inputs, (*plan.core_inputs, TICKET)),
        ("core", plan.core_inputs, plan.core_outputs),
        ("postprocess", (*plan.core_outputs, TICKET), plan.outputs),
    ]
    return new_config(
        name=plan.spec.name,
        platform="ensemble",
        max_batch_size=plan.spec.core.max_batch_size,
        input=[_declare(tensor) for tensor in plan.task.inputs],
        output=[_declare(tensor) for tensor in plan.outputs],
        ensemble_scheduling={
            "step": [
                {
                    "model_name": plan.step(step),
                    "model_version": -1,
                    "input_map": wire(inputs),
                    "output_map": wire(outputs),
                }
                for step, inputs, outputs in steps
            ]
        },
    )


def _preprocess(plan: Plan) -> Any:
    tokenizer, facts = plan.spec.tokenizer, plan.facts
    return _python_step(
        plan,
        "preprocess",
        plan.task.inputs,
        (*plan.core_inputs, TICKET),
        {
            "bucket_edges": json.dumps(plan.bucket_edges),
            "default_prompt": facts.default_prompt or "",
            "lowercase": json.dumps(facts.lowercase),
            "max_length": str(plan.max_length),
            "max_requests": str(plan.spec.serving.queue.max_size),
            "max_text_bytes": str(tokenizer.max_text_bytes),
            "overflow": tokenizer.overflow,
            "pad_token_id": str(facts.pad_token_id),
            "prompts": json.dumps(dict(facts.prompts), sort_keys=True),
        },
    )


def _postprocess(plan: Plan) -> Any:
    return _python_step(plan, "postprocess", (*plan.core_outputs, TICKET), plan.outputs, {})


def _python_step(
    plan: Plan,
    step: str,
    inputs: tuple[Tensor, ...],
    outputs: tuple[Tensor, ...],
    parameters: dict[str, str],
) -> Any:
    rules = json.dumps(plan.request_parameters, sort_keys=True)
    texts = {**parameters, "pipeline": plan.spec.name, "request_parameters": rules}
    return new_config(
        name=plan.step(step),
        backend="python",
        max_batch_size=plan.spec.core.max_batch_size,
        input=[_declare(tensor) for tensor in inputs],
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
        output=[_declare(tensor) for tensor in plan.core_outputs],
        instance_group=[group],
        dynamic_batching={"max_queue_delay_microseconds": serving.queue.max_delay_us},
        model_warmup=[_warm_up(plan, rows=w.rows, tokens=w.tokens) for w in plan.warm_ups],
    )
    if plan.packed:
        next(i for i in config.input if i.name == RAGGED).allow_ragged_batch = True
        config.batch_input.add(
            kind="BATCH_ITEM_SHAPE_FLATTEN",
            target_name=[ROW_STRIDE.name],
            data_type=ROW_STRIDE.config_type,
            source_input=[RAGGED],
        )
    return config


def _warm_up(plan: Plan, *, rows: int, tokens: int) -> dict[str, Any]:
    # Zeros: any token id from 0 is valid, and a row of length 0 is all padding.
    dims = {RAGGED: [tokens], ROW_LENGTH.name: [1]}
    return {
        "name": f"{rows}x{tokens}",
        "batch_size": rows,
        "inputs": {
            tensor.name: {
                "data_type": tensor.config_type,
                "dims": dims[tensor.name],
                "zero_data": True,
            }
            for tensor in plan.core_inputs
        },
    }


def _declare(tensor: Tensor) -> dict[str, Any]:
    return {"name": tensor.name, "data_type": tensor.config_type, "dims": tensor.config_dims}
