"""Files of a pipeline that generates text, and the engines that it may run on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from triptych.base.tensors import Tensor
from triptych.building.generation.inputs import GeneratingInputs
from triptych.building.generation.quantizing import engine_weights
from triptych.container.health import PROMPT_FILE
from triptych.repository.bundle import RUNTIME, StepCode, bundle
from triptych.repository.config import (
    CONFIG_FILE,
    declare,
    new_config,
    print_config,
    version_policy,
)
from triptych.repository.config_comments import own_comments, written_by
from triptych.repository.config_text import merge_config_text
from triptych.repository.render import Content, print_settings
from triptych.runtime.generation_messages import (
    ADAPTERS_FOLDER,
    HEALTH,
    MODEL_FOLDER,
    TOKENIZER_FILE,
)
from triptych.runtime.generation_metrics import make_time_bounds
from triptych.runtime.prompts import PIECES_FILE, TEMPLATE_FILE
from triptych.runtime.sampling_parameters import FIELD
from triptych.runtime.triton_io import SETTINGS_FILE

if TYPE_CHECKING:
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    from triptych.building.generation.inputs import Prompt
    from triptych.building.generation.reference import Reference


@dataclass(frozen=True)
class EngineModule:
    """Module of an engine that generates text."""

    file: str  # The module: a name in `runtime`, or an absolute path
    is_compared: bool = True  # Whether the gate can run the engine against transformers
    fake: FakeModel | None = None  # Answers of a fake engine of the tests; None for a real engine
    # Settings of the engine in addition to those of every engine.
    settings: Mapping[str, object] = field(default_factory=dict)
    # Whether the engine chooses the requests of a batch by their lengths.
    forms_batches: bool = False


class FakeModel(Protocol):
    """Answers of a fake engine, which reads no model."""

    def answer(self, inputs: GeneratingInputs, prompt: Prompt, max_tokens: int) -> Reference:
        """Return the expected answer to a prompt."""


ENGINES = {
    "vllm": EngineModule("engine_vllm.py"),
    "tensorrt_llm": EngineModule("engine_tensorrt_llm.py", is_compared=False),
    "ctranslate2": EngineModule("engine_ctranslate2.py", forms_batches=True),
}
"""Engines by the name that `core.backend` gives them. Tests add fake ones."""


INPUTS = (
    Tensor("text_input", "BYTES", (1,)),
    Tensor("messages", "BYTES", (1,), content="json"),
    Tensor("sampling_parameters", "BYTES", (1,), content="json"),
    Tensor("stream", "BOOL", (1,)),
    Tensor("cancel", "BYTES", (1,)),
)
OPENAI_INPUTS = tuple(
    Tensor(name, "BOOL", (1,))
    for name in (
        "exclude_input_in_output",
        "return_logprobs",
        "return_num_input_tokens",
        "return_num_output_tokens",
    )
)
"""Further inputs that Triton's OpenAI frontend sends (``--backend vllm``)."""

OUTPUTS = (
    Tensor("text_output", "BYTES", (1,)),
    Tensor("token_ids", "INT32", ("new_tokens",)),
    Tensor("index", "UINT32", (1,)),
    Tensor("finish_reason", "BYTES", (1,)),
    Tensor("usage", "BYTES", (1,), content="json"),
    Tensor("logprobs", "BYTES", (1,), content="json"),
    # Token counts of the prompt and of the response, for Triton's OpenAI frontend.
    Tensor("num_input_tokens", "UINT32", (1,)),
    Tensor("num_output_tokens", "UINT32", (1,)),
)
TO_CORE = (Tensor("prompt_ids", "INT32", ("tokens",)), Tensor("order", "BYTES", (1,)))
FROM_CORE = (Tensor("token_ids", "INT32", ("new_tokens",)), Tensor("chunk", "BYTES", (1,)))
_DECOUPLED = {"decoupled": True}
INSTANCES = {
    "preprocess": "serving.preprocess_instances. Each instance is a process.",
    "core": "One process, in which the engine batches all requests.",
    "postprocess": "One process, which keeps the parts of each answer in order.",
}
"""Comment on the instances of each step."""


def render_generation(inputs: GeneratingInputs) -> dict[str, Content]:
    """Return path to content of every file of the pipeline except its build manifest."""
    spec = inputs.spec
    name, step = spec.name, f"{spec.name}_{{}}".format
    configs = {
        "ensemble": _ensemble(name, spec.serving.versions),
        "preprocess": _python_step(
            step("preprocess"),
            [*INPUTS, *OPENAI_INPUTS],
            TO_CORE,
            optional=True,
            count=spec.serving.preprocess_instances,
        ),
        "core": _python_step(
            step("core"),
            TO_CORE,
            FROM_CORE,
            kind=inputs.instance_kind,
            model_transaction_policy=_DECOUPLED,
        ),
        "postprocess": _python_step(
            step("postprocess"),
            FROM_CORE,
            OUTPUTS,
            model_transaction_policy=_DECOUPLED,
        ),
    }
    settings: dict[str, Mapping[str, object]] = {
        "preprocess": {
            **inputs.prompt_settings,
            "pipeline": name,
            "parameters": spec.own_parameters,
            "max_text_bytes": spec.max_text_bytes,
            "adapters": spec.adapter_names,
            "priority_levels": spec.priority_levels,
        },
        "core": _core_settings(inputs),
        "postprocess": {"pipeline": name},
    }
    files: dict[str, Content] = {
        f"{step(which)}/1/{SETTINGS_FILE}": print_settings(own) for which, own in settings.items()
    }
    for which, config in configs.items():
        merged = merge_config_text(config, spec.serving.config, which)
        comments = own_comments(
            {"name": written_by(name), "instance_group": INSTANCES.get(which, "")},
            spec.serving.config.get(which, ""),
            which,
        )
        files[f"{config.name}/{CONFIG_FILE}"] = print_config(merged, comments).encode()
    # Triton requires a version folder for an ensemble, and git and archives drop empty folders.
    files |= {f"{name}/{version}/.keep": b"" for version in spec.serving.versions}
    files[f"{name}/{PROMPT_FILE}"] = _health_request(inputs)
    engine_module = ENGINES[spec.core.backend]
    files |= bundle(
        {
            f"{step(which)}/1": StepCode([f"generation_{which}", *["engine"] * (which == "core")])
            for which in settings
        },
        {"engine": RUNTIME / engine_module.file},
    )
    model = inputs.model
    files[f"{step('preprocess')}/1/{TOKENIZER_FILE}"] = model.tokenizer
    files[f"{step('postprocess')}/1/{TOKENIZER_FILE}"] = model.decoder or model.tokenizer
    for file, path in ((TEMPLATE_FILE, model.chat_template), (PIECES_FILE, model.pieces)):
        if path is not None:
            files[f"{step('preprocess')}/1/{file}"] = path
    if engine_module.fake is None:
        for path in engine_files(inputs):
            files[f"{step('core')}/1/{MODEL_FOLDER}/{path.name}"] = path
        files[f"{step('core')}/1/{MODEL_FOLDER}/{TOKENIZER_FILE}"] = inputs.model.tokenizer
        for adapter in inputs.adapters:
            for path in adapter.files:
                place = f"{MODEL_FOLDER}/{ADAPTERS_FOLDER}/{adapter.name}/{path.name}"
                files[f"{step('core')}/1/{place}"] = path
    return files


def _health_request(inputs: GeneratingInputs) -> bytes:
    """Return the request of the health check: one token for the shortest prompt of the traffic."""
    shortest = min(inputs.prompts, key=lambda prompt: len(prompt.ids))
    one_token = {FIELD: json.dumps({"max_tokens": 1, "min_tokens": 0}), "stream": False}
    return json.dumps({**shortest.sent, **one_token, HEALTH: True}).encode()


def engine_files(inputs: GeneratingInputs) -> list[Path]:
    """Return the files of the model that the engine reads."""
    folder = engine_weights(inputs)
    found = {path for pattern in inputs.model_patterns for path in folder.glob(pattern)}
    if any(path.suffix == ".safetensors" for path in found):  # avoids reading weights twice
        found = {path for path in found if path.suffix != ".bin"}
    return sorted(found)


def _core_settings(inputs: GeneratingInputs) -> dict[str, object]:
    spec = inputs.spec
    return {
        "pipeline": spec.name,
        "max_requests": spec.serving.queue.max_in_flight,
        "max_length": inputs.max_length,
        "max_sequences": spec.core.max_num_seqs,
        "context_tokens": inputs.context_tokens,
        "forms_batches": ENGINES[spec.core.backend].forms_batches,
        "stream_interval": spec.serving.stream_interval,
        "latency_bounds_ms": make_time_bounds(spec.serving.slo.limits_ms),
        **ENGINES[spec.core.backend].settings,
        **inputs.core_settings,
    }


def _ensemble(name: str, versions: Sequence[int]) -> ModelConfig:
    steps = [
        ("preprocess", [*INPUTS, *OPENAI_INPUTS], TO_CORE),
        ("core", TO_CORE, FROM_CORE),
        ("postprocess", FROM_CORE, OUTPUTS),
    ]
    # A tensor of the core is renamed if the ensemble has an output of the same name.
    inner = {tensor.name: f"core_{tensor.name}" for tensor in FROM_CORE}
    return new_config(
        name=name,
        platform="ensemble",
        version_policy=version_policy(versions),
        input=[{**declare(tensor), "optional": True} for tensor in (*INPUTS, *OPENAI_INPUTS)],
        output=[declare(tensor) for tensor in OUTPUTS],
        ensemble_scheduling={
            "step": [
                {
                    "model_name": f"{name}_{step}",
                    "model_version": -1,
                    "input_map": _wires(read, inner if step == "postprocess" else {}),
                    "output_map": _wires(written, inner if step == "core" else {}),
                }
                for step, read, written in steps
            ]
        },
    )


def _wires(tensors: Sequence[Tensor], renamed: Mapping[str, str]) -> dict[str, str]:
    return {tensor.name: renamed.get(tensor.name, tensor.name) for tensor in tensors}


def _python_step(
    name: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    *,
    optional: bool = False,
    count: int = 1,
    kind: str = "KIND_CPU",
    **fields: object,
) -> ModelConfig:
    return new_config(
        name=name,
        backend="python",
        input=[{**declare(tensor), "optional": optional} for tensor in inputs],
        output=[declare(tensor) for tensor in outputs],
        # KIND_AUTO, the default, would put a Python step on the GPU in a GPU build, although the
        # engine selects its devices.
        instance_group=[{"kind": kind, "count": count}],
        **fields,
    )
