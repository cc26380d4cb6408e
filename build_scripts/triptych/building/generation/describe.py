"""What a build of a pipeline that generates text would be, in words and numbers, for `inspect`."""

from __future__ import annotations

from typing import Any

import numpy as np

from triptych.base.formatting import amount
from triptych.base.tensors import Tensor
from triptych.building.generation.render import (
    FROM_CORE,
    INPUTS,
    OUTPUTS,
    TO_CORE,
    engine_settings,
    own_parameters,
)
from triptych.building.generation.text2text import AnyInputs, Text2TextInputs
from triptych.runtime.engine_ctranslate2 import UNKNOWN
from triptych.runtime.sampling_parameters import DEFAULTS
from triptych.spec.model_source import OUT_OF_REACH


def describe_inputs(inputs: AnyInputs) -> dict[str, Any]:
    """The pipeline as plain data."""
    spec, facts = inputs.spec, inputs.model.facts
    core, step = spec.core, f"{spec.name}_{{}}".format
    lengths = [len(prompt.ids) for prompt in inputs.prompts]
    p99 = int(np.quantile(lengths, 0.99, method="higher"))
    return {
        "pipeline": spec.name,
        "task": spec.task,
        **({"tuned": dict(spec.tuned)} if spec.tuned else {}),
        "model": {
            "source": spec.model.source,
            "architecture": facts.architecture,
            "own_limit": "none"
            if facts.max_length == OUT_OF_REACH
            else f"{facts.max_length} tokens",
            **({"suggests": dict(facts.suggested)} if facts.suggested else {}),
            **({"weights": facts.quantization.words} if facts.quantization else {}),
            "chat_template": "its own" if inputs.model.chat_template else "none: no messages",
            **({"adapters": _adapters(inputs)} if inputs.adapters else {}),
        },
        "traffic": {
            "prompts": f"{len(lengths)}, {sum(one.messages is not None for one in inputs.prompts)}"
            " of them conversations",
            "tokens": f"{np.mean(lengths):.1f} on average, p99 {p99}, most {max(lengths)}",
        },
        "core": {
            "backend": core.backend,
            "precision": core.precision,
            **_limits(inputs),
            **({} if core.backend == "scripted" else {"engine": engine_settings(inputs)}),
        },
        "stream_interval": f"{amount(spec.serving.stream_interval, 'token')} a streamed response",
        "queue": f"{spec.serving.queue.max_size} requests under way at most",
        "sampling_parameters": {
            name: value
            for name, value in {**DEFAULTS, **own_parameters(spec)}.items()
            if core.backend != "ctranslate2" or name not in UNKNOWN
        },
        "models": {
            spec.name: _model("ensemble", INPUTS, OUTPUTS),
            step("preprocess"): _model("python", INPUTS, TO_CORE),
            step("core"): _model("python, decoupled", TO_CORE, FROM_CORE),
            step("postprocess"): _model("python, decoupled", FROM_CORE, OUTPUTS),
        },
    }


def _limits(inputs: AnyInputs) -> dict[str, str]:
    """What bounds a request, and a batch."""
    if isinstance(inputs, Text2TextInputs):
        begins, beams = inputs.answers.answer_begins, int(inputs.search["beams"])
        return {
            "max_length": f"{inputs.max_length} tokens of a text",
            "max_answer": f"{inputs.spec.core.max_answer} tokens of an answer",
            "answers": f"{amount(beams, 'beam')}; "
            + ("token by token" if beams == 1 else "as a whole")
            + (f"; each begins with {list(begins)}" if begins else ""),
            "max_sequences": f"{inputs.spec.core.max_sequences} in a batch, which runs to its end",
        }
    core = inputs.spec.core
    full = inputs.kv_token_bytes * inputs.max_length / 2**20
    room = core.kv_cache.memory_mib
    return {
        "max_length": f"{inputs.max_length} tokens of a prompt and its answer",
        "kv_cache": f"{room} MiB: {amount(int(room // full), 'request')} of max_length, a MiB "
        f"for {inputs.max_length / full:.0f} tokens",
        "max_sequences": f"{core.max_sequences} in a batch; "
        f"{room / core.max_sequences * inputs.max_length / full:.0f} tokens of KV cache each",
    }


def _adapters(inputs: AnyInputs) -> dict[str, str]:
    if isinstance(inputs, Text2TextInputs):
        return {}
    return {
        one.name: f"LoRA of rank {one.rank}, from {inputs.spec.adapters[one.name].source}"
        for one in inputs.adapters
    }


def _model(backend: str, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> dict[str, str]:
    return {
        "backend": backend,
        "inputs": ", ".join(tensor.name for tensor in inputs),
        "outputs": ", ".join(tensor.name for tensor in outputs),
    }
