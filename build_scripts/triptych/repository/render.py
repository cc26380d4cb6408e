"""Render a plan as the files of the model repository: configs and runtime code."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from triptych.base.releases import OLDEST, fields_newer_than, parse_release, without_newer_fields
from triptych.base.tensors import REQUEST_PAYLOAD, REQUEST_TICKET, ROW_SPAN, Tensor
from triptych.client.wire import SPACE
from triptych.container.health import QUESTION_FILE, WORK_FIELD
from triptych.container.serving_machine import choose, parse_machine
from triptych.models.info import ModelNames, OwnInterface, OwnStage
from triptych.repository.bundle import Link, StepCode, bundle
from triptych.repository.config import (
    CONFIG_FILE,
    core_config,
    declare,
    declare_input,
    describe_space,
    latency_buckets,
    new_config,
    print_config,
    space_of,
    version_policy,
    warm_up_file,
)
from triptych.repository.config_comments import explain
from triptych.repository.config_text import merge_config_text, own_parameters
from triptych.repository.manifest import SAMPLES_FILE
from triptych.repository.python_env import ENV_FILE, ENV_PARAMETER, ENV_PATH
from triptych.runtime.decode_embeddings import RANGES_FILE
from triptych.runtime.decode_queries import WEIGHTS_FILE
from triptych.runtime.hooking import FILES_FOLDER
from triptych.runtime.own_model import ROW_TYPES, make_array
from triptych.runtime.triton_io import SETTINGS_FILE, SETTINGS_PARAMETER
from triptych.spec.model_fields import files_of, is_own
from triptych.spec.own_task import step_settings
from triptych.spec.plan import Plan
from triptych.tasks.classes import CLASS_SCORES, LABELS_FILE
from triptych.tasks.task import Task

BATCH_TOKENS = {"cpu": 0, "gpu": 512}
"""Fixed cost of a batch of the core, as a number of tokens in another batch. It is almost nothing
on a processor. For BERT-base on an A100 it is 0.55 ms, compared with 0.95 us per token (NVIDIA's
TensorRT demo/BERT)."""
MIN_TOKEN_COST = 32
"""Tokens that cost about as much as what a lone row costs whatever its length."""
MIN_TOKEN_BOUND, TOKEN_BOUNDS_PER_OCTAVE = 4, 3
"""Buckets of the histogram of row lengths."""
BATCH_TOKENS_HIDDEN = 768
"""Hidden size that `BATCH_TOKENS` was measured with (BERT-base). The cost of a batch depends on the
number of layers, the cost of a token also on more than the width. In narrower models a batch costs
as much as more tokens (MiniLM with 384, by the rates of sbert.net: 1,460)."""
PARTS: Mapping[str, Mapping[str, str]] = {
    "free dimensions": dict.fromkeys(
        ("preprocess", "between", "postprocess"), "overflow.Surviving"
    ),
    "response cache": {"preprocess": "preprocess_cached.Cached"},
    "bucketed layout": {"preprocess": "preprocess_padded.Padded"},
    "tickets": {"postprocess": "postprocess_marked.Marked"},
    "hooks": {
        "preprocess": "preprocess_hooked.CallingBefore",
        "postprocess": "postprocess_hooked.CallingAfter",
    },
    "samples": {
        "preprocess": "preprocess_sampled.SamplingRows",
        "postprocess": "postprocess_sampled.WritingSamples",
    },
    "flow control": {
        "preprocess": "preprocess_admitting.Admitting",
        "between": "postprocess_marked.Marked",
    },
    "images": {"preprocess": "preprocess_images.Images"},
    "own inputs": {"preprocess": "preprocess_own.Own", "between": "postprocess_passing.Passing"},
    "row metadata": {"postprocess": "postprocess_tokens.Tokens"},
    "packed rows": {"preprocess": "packing"},
    "packed rows with spans": {"preprocess": "packing_spans"},
    "row lengths": {"preprocess": "counters"},
    "lists": {"preprocess": "option_lists", "postprocess": "option_lists"},
    "prompts": {"preprocess": "text_prompts"},
    "pairs": {"preprocess": "rows_pairs"},
}
"""Code of a part for each step of a pipeline that uses it: a base of the step's class, from the
first to the last, or a module that is loaded by its name. A step between two cores is ``between``.
"""
_SETTING = re.compile(r'settings(?:\.get\(|\[)"(\w+)"|"(\w+)" (?:not )?in (?:self\.)?settings')
Content = bytes | Path | Link
"""Content of a file: its bytes, the file to copy, or a link to another file of the repository."""


class Rendered(NamedTuple):
    """Files of a pipeline before they are written."""

    # Path relative to the repository to the content, with the build manifest.
    files: dict[str, Content]
    beside: Sequence[Path] = ()  # Folders of models in the repository that the files refer to


class CoreFiles(NamedTuple):
    """Files of a core."""

    plan: Plan  # Plan of the core
    file: Path  # Path of the ``model.onnx``
    # Folder with the data of the warm-ups; None if another pipeline owns the core.
    warm_ups: Path | None


class Ranges(NamedTuple):
    """File with the ranges of the vectors' elements, and the sizes of unit vectors in it."""

    file: Path
    sizes: tuple[int, ...]


def make_token_bounds(max_length: int, bucket_edges: Sequence[int] = ()) -> list[int]:
    """Return the upper bounds of the histogram of row lengths, in tokens, ascending.

    The bounds are 1.26 times apart and equal in all pipelines, except for the padded lengths of
    the pipeline and the last two, ``max_length - 1`` and `max_length`. Rows between these two are
    those that were truncated, and the few that have this length by themselves.
    """
    steps = range(TOKEN_BOUNDS_PER_OCTAVE * max_length.bit_length())
    common = (round(MIN_TOKEN_BOUND * 2 ** (step / TOKEN_BOUNDS_PER_OCTAVE)) for step in steps)
    bounds = {*common, *bucket_edges, max_length - 1, max_length}
    return sorted(bound for bound in bounds if 0 < bound <= max_length)


def batch_tokens(device: str, hidden_size: int) -> int:
    """Return the fixed cost of a batch as a number of tokens; see `runtime.row_types`."""
    return BATCH_TOKENS[device] * BATCH_TOKENS_HIDDEN // (hidden_size or BATCH_TOKENS_HIDDEN)


class StepFiles(NamedTuple):
    """Files of the Python steps."""

    tokenizer: Path | None = None  # The ``tokenizer.json``; None for images
    hooks: bytes | None = None  # Content of the pipeline's ``hooks.py``, if it has one
    # Archive of the steps' packages, if the spec has `serving.python_env`.
    python_env: Path | None = None
    ranges: Ranges | None = None  # Ranges of the vectors' elements, for text-embedding


def render(
    plan: Plan,
    cores: Sequence[CoreFiles],
    own: StepFiles,
    *,
    question: Mapping[str, object],
    samples: Path | None = None,
) -> dict[str, Content]:
    """Return every file of the pipeline except its manifest, by path relative to the repository.

    The function is pure: the same plan and artifacts give the same bytes.

    Args:
        plan: Plan of the pipeline.
        cores: Files of the cores, in the order in which they run.
        own: Files of the Python steps.
        question: One value per input, for the request of the health check.
        samples: Rows to check an engine with, if an engine will be built.
    """
    name = plan.spec.name
    files = _python_files(plan, own.tokenizer, own.hooks)
    steps = python_steps(plan, own.ranges)
    for step, (_, _, settings) in steps.items():
        folder = f"{plan.step(step)}/1"
        # The server's process reads the last one, too.
        names = _find_settings_read(files, folder) | {"encoded_inputs"}
        used = {
            name: value
            for name, value in settings.items()
            if name in names and value is not None and value is not False
        }
        files[f"{folder}/{SETTINGS_FILE}"] = print_settings(used)
    if own.python_env is not None:
        for step in steps:
            files[f"{plan.step(step)}/{ENV_FILE}"] = own.python_env
    owned = [core.plan for core in cores if core.warm_ups is not None]
    configs = _configs(plan, owned, has_env=own.python_env is not None)
    for model, config in configs.items():
        files |= _config_files(model, config)
    files |= _variant_files(plan, owned, configs, files)
    # Triton needs a version folder for an ensemble, too; git and archives drop empty folders.
    files |= {f"{name}/{version}/.keep": b"" for version in plan.spec.serving.versions}
    files[f"{name}/{QUESTION_FILE}"] = _question(plan, question)
    if plan.spec.serving.class_scores:
        lines = [" ".join(label.split()) for label in plan.info.labels]
        files[f"{name}/{LABELS_FILE}"] = ("\n".join(lines) + "\n").encode()
    if own.ranges is not None and own.ranges.sizes:
        files[f"{plan.step('postprocess')}/1/{RANGES_FILE}"] = own.ranges.file
    if samples is not None:
        files[f"{name}/{SAMPLES_FILE}"] = samples
    for core in cores:
        if core.warm_ups is not None:
            files |= _core_files(core.plan, core.file, core.warm_ups)
    return files


class PlannedConfig(NamedTuple):
    """Config of a model, with its plan and the step that it is in the pipeline."""

    plan: Plan
    step: str
    config: Any


Configs = dict[str, PlannedConfig]
"""Configs by the name of the model."""


def _configs(plan: Plan, cores: Sequence[Plan], *, has_env: bool) -> Configs:
    """Return the configs of a pipeline.

    Args:
        plan: Plan of the pipeline.
        cores: Plans of the cores that it owns.
        has_env: Whether the Python steps have an archive of packages.
    """
    configs = {plan.spec.name: PlannedConfig(plan, "ensemble", _ensemble(plan))}
    for step, (read, made, _) in python_steps(plan, None).items():
        config = _python_step(plan, step, read, made)
        if has_env:
            config.parameters[ENV_PARAMETER].string_value = ENV_PATH
        configs[plan.step(step)] = PlannedConfig(plan, step, config)
    for core in cores:
        configs[core.step("core")] = PlannedConfig(core, "core", core_config(core))
    texts = plan.spec.serving.config
    for name, each in configs.items():
        for key in own_parameters(texts, each.step) if plan.placement is not None else ():
            each.config.parameters.pop(key, None)  # planned, and replaced by the user's
        merged = merge_config_text(each.config, texts, each.step)
        configs[name] = each._replace(config=merged)
    return configs


def _variant_files(
    plan: Plan, cores: Sequence[Plan], configs: Configs, files: Mapping[str, Content]
) -> dict[str, Content]:
    """Return the configs that differ on other machines; see `container.serving_machine`.

    A plan that equals that of the machine which a server would use without it has no files. If the
    embedded server needs configs of its own, each variant has them, too.
    """
    has_env = any(ENV_PARAMETER in each.config.parameters for each in configs.values())
    has_oldest = any(f"{model}/configs/{OLDEST}.pbtxt" in files for model in configs)
    own, found = plan.spec.serving.served_by, dict[str, Content]()
    made = {"" if own is None else own.name: configs}
    for name, variant in plan.variants.items():
        changed = [core.on(parse_machine(name)) for core in cores]
        if None in changed:
            continue
        here = _configs(variant, [core for core in changed if core is not None], has_env=has_env)
        for model, each in here.items():
            if each.step not in ("ensemble", "core"):
                _set_settings(each, configs[model].plan)
        nearest = choose(filter(None, made), parse_machine(name)) or next(iter(made))
        same = {key for key, each in here.items() if each.config == made[nearest][key].config}
        if same == here.keys():
            continue
        made[name] = here
        changed_models = {key for key, each in here.items() if each.config != configs[key].config}
        for model, each in here.items():
            # One file is enough for the name to be known.
            differs = model in (changed_models or {plan.step("preprocess")})
            texts = _config_files(model, each)
            if differs:
                found[f"{model}/configs/{name}.pbtxt"] = texts[f"{model}/{CONFIG_FILE}"]
            if has_oldest and (differs or f"{model}/configs/{OLDEST}.pbtxt" in files):
                oldest = texts.get(
                    f"{model}/configs/{OLDEST}.pbtxt", texts[f"{model}/{CONFIG_FILE}"]
                )
                found[f"{model}/configs/{name}-{OLDEST}.pbtxt"] = oldest
    return found


def _set_settings(variant: PlannedConfig, built: Plan) -> None:
    """Write the settings that differ from those of the built plan into the config of a step."""
    before, after = (
        python_steps(plan, None)[variant.step].settings for plan in (built, variant.plan)
    )
    changed = {name: value for name, value in after.items() if value != before[name]}
    if changed and "core_rows" in after:  # else it has no use for them
        text = json.dumps(changed, sort_keys=True)
        variant.config.parameters[SETTINGS_PARAMETER].string_value = text


def stages_of(plan: Plan) -> tuple[OwnStage, ...]:
    """Return the functions of a pipeline and their models; one of each for most pipelines."""
    if plan.stages:
        return plan.stages
    inputs, outputs = (
        {t.name: t.name for t in each} for each in (plan.core_inputs, plan.core.outputs)
    )
    past_core = () if plan.info.own is None else plan.info.own.past_core
    own = OwnInterface(plan.core_inputs, plan.core.outputs, past_core)
    return (OwnStage("preprocess", own, (ModelNames("", inputs, outputs),)),)


def _past(plan: Plan, index: int) -> tuple[tuple[Tensor, ...], list[str]]:
    """Return the tensors that go past the models of a stage, and the names for the step behind.

    The names are those of the results that its function takes, without the ticket.
    """
    own = stages_of(plan)[index].own
    tickets = (REQUEST_TICKET, REQUEST_PAYLOAD)
    tensors = (*tickets, *own.past_core) if index else plan.past_core
    return tensors, [tensor.name for tensor in (*own.outputs, *own.past_core)]


class PythonStep(NamedTuple):
    """Tensors and settings of a Python step."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    settings: Mapping[str, object]


def python_steps(plan: Plan, ranges: Ranges | None) -> dict[str, PythonStep]:
    """Return the Python steps in the order of the ensemble."""
    steps: dict[str, PythonStep] = {}
    read, names, made = plan.request_inputs, list[str](), plan.preprocess_outputs
    common = _settings(plan)
    settings: dict[str, object] = {**common, **_row_settings(plan)}
    for index, stage in enumerate(stages_of(plan)):
        past, results = _past(plan, index)
        if index:
            made = (*stage.own.inputs, *past)
            # Only the last step writes samples.
            settings = {
                **{name: value for name, value in common.items() if name != "sample"},
                **_step_settings(plan, stage),
                "core_outputs": names,
                "outputs": [{"name": tensor.name, "optional": False} for tensor in made],
            }
        steps[stage.function] = PythonStep(read, made, settings)
        read, names = (*stage.own.outputs, *past), results
    answers: dict[str, object] = {
        **common,
        "core_outputs": names,
        "decoder": plan.task.decode,
        "outputs": plan.task.output_settings,
        "packed_tokens": [tensor.name for tensor in plan.core.token_outputs if plan.packed],
    }
    if ranges is not None:
        answers["range_sizes"] = list(ranges.sizes)
    return steps | {"postprocess": PythonStep(read, plan.task.outputs, answers)}


def _step_settings(plan: Plan, stage: OwnStage) -> dict[str, object]:
    """Return the settings of a step between models that do not depend on its place."""
    if not is_own(plan.spec):
        raise TypeError(f"{plan.spec.name} has one model")
    first = next(each for each in plan.cores if each.model == stage.models[0].model)
    return {
        **step_settings(plan.spec, plan.info, stage),
        "bucket_edges": list(first.bucket_edges),
        "decoder": "own_step.OwnStep",
        "packed_tokens": [],
        "rows_from": stage.own.inputs[0].name,
    }


def step_code(task: Task, parts: Iterable[str], between: Sequence[str] = ()) -> dict[str, StepCode]:
    """Return the code of the runtime that each Python step needs.

    Args:
        task: Task of the pipeline.
        parts: Parts of the runtime that it uses, of `PARTS`.
        between: Names of the steps between models.
    """
    of_task = {"pairs": task.pairs, "row metadata": task.has_row_metadata}
    used = {*parts, *(name for name, is_used in of_task.items() if is_used)}
    codes: dict[str, StepCode] = {}
    for step in ("preprocess", *between, "postprocess"):
        kind = "between" if step in between else step
        loaded = {"preprocess": task.rows, "between": "own_step", "postprocess": task.decode}
        found = [of[kind] for name, of in PARTS.items() if name in used and kind in of]
        main = "preprocess.Preprocess" if kind == "preprocess" else "postprocess.Postprocess"
        codes[step] = StepCode(
            [loaded[kind].partition(".")[0], *(each for each in found if "." not in each)],
            [*(each for each in found if "." in each), main],
        )
    return codes


def _python_files(
    plan: Plan, tokenizer_file: Path | None, hooks: bytes | None
) -> dict[str, Content]:
    """Return the code of the Python steps and the files beside it that they read."""
    samples = plan.spec.serving.sample is not None
    parts = {
        "hooks": hooks is not None and plan.info.own is None,
        "flow control": plan.spec.serving.flow_control == "triptych",
        "samples": samples,
        "tickets": samples or plan.spec.serving.flow_control == "triptych",
        "bucketed layout": plan.layout == "bucketed",
        "packed rows": plan.packed and ROW_SPAN not in plan.core_inputs,
        "packed rows with spans": ROW_SPAN in plan.core_inputs,
        "row lengths": plan.lengths is not None,
        "response cache": plan.spec.serving.response_cache,
        "prompts": bool(plan.info.prompts or plan.info.free_prompt),
        "free dimensions": _has_free_dimensions(plan),
        "lists": any(rule.type == "list" for rule in plan.task.parameters(plan.info).values()),
        "images": plan.info.own is None
        and any(tensor.content == "image" for tensor in plan.task.inputs),
        "own inputs": plan.info.own is not None,
    }
    used = [name for name, is_used in parts.items() if is_used]
    codes = step_code(plan.task, used, [stage.function for stage in plan.stages[1:]])
    files: dict[str, Content] = {
        **bundle({f"{plan.step(step)}/1": code for step, code in codes.items()})
    }
    for step in codes:
        folder = f"{plan.step(step)}/1"
        if hooks is not None:
            files[f"{folder}/hooks.py"] = hooks
        files |= {f"{folder}/{FILES_FOLDER}/{path}": file for path, file in files_of(plan.spec)}
        # `setup` of the user's functions may read the tokenizer in any step.
        needed = plan.task.decodes_tokens or (hooks is not None and b".tokenizer" in hooks)
        if tokenizer_file is not None and (step == "preprocess" or needed):
            files[f"{folder}/tokenizer.json"] = tokenizer_file
    if plan.info.has_query_weights and tokenizer_file is not None:
        weights = tokenizer_file.with_name(WEIGHTS_FILE)
        files[f"{plan.step('postprocess')}/1/{WEIGHTS_FILE}"] = weights
    return files


def _has_free_dimensions(plan: Plan) -> bool:
    """Return whether a Python step has an input whose rows may differ in shape."""
    tensors = (*plan.request_inputs, *plan.core.outputs, *plan.past_core)
    return len(plan.stages) > 1 or any(-1 in tensor.config_dims for tensor in tensors)


def _core_files(plan: Plan, core_file: Path, warm_ups: Path) -> dict[str, Content]:
    name, files = plan.step("core"), dict[str, Content]()
    for part in sorted(core_file.parent.glob(f"{core_file.name}*")):
        files[f"{name}/1/{part.name}"] = part
    for warm_up in plan.warm_ups:
        for tensor in plan.core_inputs:
            file = warm_up_file(tensor, warm_up.tokens)
            files[f"{name}/warmup/{file}"] = warm_ups / file
    return files


def _config_files(model: str, planned: PlannedConfig) -> dict[str, Content]:
    """Return the config of a model, and a second one if the embedded server lacks a field of it.

    A server started with ``--model-config-name=24.10`` uses ``configs/24.10.pbtxt`` of the models
    that have it, and ``config.pbtxt`` of the others.
    """
    plan, step, config = planned
    wanted = without_newer_fields(config, parse_release(plan.spec.serving.triton))
    comments = explain(plan, step)
    files: dict[str, Content] = {f"{model}/{CONFIG_FILE}": print_config(wanted, comments).encode()}
    if fields_newer_than(wanted, OLDEST) or ENV_PARAMETER in wanted.parameters:
        oldest = without_newer_fields(wanted, OLDEST)
        # The embedded server runs on this machine's Python, which has the packages.
        oldest.parameters.pop(ENV_PARAMETER, None)
        files[f"{model}/configs/{OLDEST}.pbtxt"] = print_config(oldest, comments).encode()
    return files


def _question(plan: Plan, values: Mapping[str, object]) -> bytes:
    tokens = 1.0
    if plan.lengths is not None:
        tokens = plan.max_length / max(min(plan.lengths.counts), MIN_TOKEN_COST)
    work = round(plan.max_batch_size * max(tokens, 1.0))
    return make_request(plan, values, {WORK_FIELD: work})


def make_request(
    plan: Plan, values: Mapping[str, object], parameters: Mapping[str, object]
) -> bytes:
    """Return one row as a Triton HTTP request: one line of JSON, then the values."""
    parts, inputs = [], []
    own = plan.spec.inputs if is_own(plan.spec) else {}
    for name, value in values.items():
        field = own[name].as_dict() if name in own else _TEXT_FIELD
        array = value[None] if isinstance(value, np.ndarray) else make_array(field, [value])
        data = array.tobytes()
        if array.dtype == object:
            data = b"".join(len(each).to_bytes(4, "little") + each for each in array.ravel())
        parts.append(data)
        size, datatype = {"binary_data_size": len(data)}, field["dtype"]
        shape = list(array.shape)
        inputs.append({"name": name, "shape": shape, "datatype": datatype, "parameters": size})
    head = json.dumps({"inputs": inputs, "parameters": dict(parameters)})
    return head.encode() + b"\n" + b"".join(parts)


CORE_TENSOR_PREFIX = "core."
"""Prefix of the names of an own graph's tensors between the steps of the ensemble."""


def _for_clients(plan: Plan) -> dict[str, Any] | None:
    """Return the parameter of the ensemble with its inputs or its vector space, for clients."""
    if not is_own(plan.spec):
        return {SPACE: {"string_value": describe_space(plan)}} if space_of(plan) else None
    types = {name: field.type for name, field in plan.spec.inputs.items()}
    return {ROW_TYPES: {"string_value": json.dumps(types)}}


_TEXT_FIELD = {"type": "text", "dtype": "BYTES", "shape": []}
"""Form of the inputs of other tasks, as `make_array` takes it."""


def _ensemble(plan: Plan) -> object:
    # Tensors of the user's own graph may have the names of the ensemble's inputs and outputs.
    inner = "" if plan.info.own is None else CORE_TENSOR_PREFIX

    def wire(tensors: Sequence[Tensor], prefix: str = "") -> dict[str, str]:
        return {tensor.name: prefix + tensor.name for tensor in tensors}

    labeled = CLASS_SCORES if plan.spec.serving.class_scores else None
    slo, read = plan.spec.serving.slo, wire(plan.request_inputs)
    steps, cores = [], iter(plan.cores)
    for index, stage in enumerate(stages_of(plan)):
        from_step = f"{stage.function}." if plan.stages else inner
        past = wire(_past(plan, index)[0], from_step if index else "")
        past |= wire(stage.own.past_core, from_step)
        steps.append((stage.function, read, {**wire(stage.own.inputs, from_step), **past}))
        read = past
        for model, inputs, outputs in stage.models:
            from_core = f"{model}." if plan.stages else inner
            made = {name: from_core + name for name in outputs}
            core = next(cores).step("core")
            steps.append((core, {n: from_step + array for n, array in inputs.items()}, made))
            read = {**{array: made[name] for name, array in outputs.items()}, **read}
    steps.append(("postprocess", read, wire(plan.task.outputs)))
    return new_config(
        name=plan.spec.name,
        platform="ensemble",
        version_policy=version_policy(plan.spec.serving.versions),
        max_batch_size=plan.request_rows,
        input=[declare_input(tensor) for tensor in plan.request_inputs],
        output=[
            {**declare(tensor), "label_filename": LABELS_FILE * (tensor.name == labeled)}
            for tensor in plan.task.outputs
        ],
        response_cache={"enable": True} if plan.spec.serving.response_cache else None,
        parameters=_for_clients(plan),
        model_metrics={"metric_control": [latency_buckets(slo)]} if slo.limits_ms else None,
        ensemble_scheduling={
            "max_inflight_requests": plan.spec.serving.max_inflight_requests or 0,
            "step": [
                {
                    "model_name": step if step.endswith("_core") else plan.step(step),
                    "model_version": -1,
                    "input_map": read,
                    "output_map": written,
                }
                for step, read, written in steps
            ],
        },
    )


def _find_settings_read(files: Mapping[str, Content], folder: str) -> set[str]:
    """Return the names of the settings that the Python files in a step's folder read."""
    found: set[str] = set()
    for path, content in files.items():
        if path.startswith(f"{folder}/") and path.endswith(".py"):
            code = files[content.path] if isinstance(content, Link) else content
            if isinstance(code, bytes):
                found.update(*_SETTING.findall(code.decode()))
    return found


def print_settings(settings: Mapping[str, object]) -> bytes:
    """Return the content of a step's ``settings.json``, with a line for each setting."""
    lines = [
        f"  {json.dumps(name)}: {json.dumps(value, sort_keys=True, ensure_ascii=False)}"
        for name, value in sorted(settings.items())
    ]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def _row_settings(plan: Plan) -> dict[str, object]:
    """Return the settings of preprocess alone."""
    rows: dict[str, object] = {
        "layout": plan.layout,
        "row_maker": plan.task.rows,
        **plan.row_settings,
    }
    if images := [tensor.name for tensor in plan.task.inputs if tensor.content == "image"]:
        rows["encoded_inputs"] = images
    if plan.spec.serving.flow_control == "triptych":
        rows |= {
            "core_rows": sum(core.rows_at_once for core in plan.cores),
            "max_requests": plan.spec.serving.queue.max_in_flight,
            "max_wait_ms": plan.spec.serving.queue.max_backlog_ms,
        }
    if ROW_SPAN in plan.core_inputs:
        rows["row_span"] = True
    if plan.layout == "bucketed":
        rows["bucket_edges"] = list(plan.bucket_edges)
        rows["batch_tokens"] = batch_tokens(plan.spec.core.device, plan.info.hidden_size)
    if plan.lengths is not None:
        rows["token_bounds"] = make_token_bounds(plan.max_length, plan.bucket_edges)
    return rows


def _settings(plan: Plan) -> dict[str, object]:
    """Return the settings that both steps have."""
    rules, sample = plan.task.parameters(plan.info), plan.spec.serving.sample
    given: dict[str, str] = {tensor.name: tensor.content for tensor in plan.task.inputs}
    if is_own(plan.spec):
        given = {name: field.content for name, field in plan.spec.inputs.items()}
    settings: dict[str, object] = {
        **plan.task.settings(plan.info),
        "parameters": dict(plan.parameters),
        "pipeline": plan.spec.name,
        "core_instances": max(core.rows_at_once // core.max_batch_size for core in plan.cores),
        "request_parameters": {name: rule.as_dict() for name, rule in rules.items()},
    }
    if plan.forwards_inputs:
        settings["forwarded_inputs"] = given
    if sample is not None:
        settings |= {"sample": sample.model_dump(mode="json"), "sample_inputs": given}
    return settings


def _python_step(
    plan: Plan, step: str, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]
) -> Any:
    return new_config(
        name=plan.step(step),
        backend="python",
        max_batch_size=max(core.max_batch_size for core in plan.cores),
        # A step handles each request separately, so requests of unequal shapes may share a batch.
        input=[
            {**declare_input(tensor), "allow_ragged_batch": -1 in tensor.config_dims}
            for tensor in inputs
        ],
        output=[declare(tensor) for tensor in outputs],
        # KIND_AUTO, the default, would put a Python step on the GPU in a GPU build.
        instance_group=[{"kind": "KIND_CPU", "count": plan.instances(step)}],
        # No queue policy nor delay here: see `runtime.flow_control`.
        dynamic_batching={},
    )
